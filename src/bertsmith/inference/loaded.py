"""A model folder, loaded once and used any number of times: `bertsmith.load(folder)`.

What the folder holds decides what the object can do: every folder embeds, one with a masked-LM head fills and scores,
a fine-tuned one predicts. Lists of any length go through in batches by length; results come in input order and are the
same alone or in a batch (up to rounding, 1e-5 in fp32).
"""

import copy
import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bertsmith.errors import UserError, one_of, whole_number
from bertsmith.hardware import (
    PRECISIONS,
    bound_kernel_caches,
    check_threads,
    choose_device,
    emulates_bf16,
    keep_freed_memory,
    prepare_machine,
)
from bertsmith.inference.embed import say_cut
from bertsmith.inference.encoder import Encoder, InferenceBert
from bertsmith.inference.exported_task import ExportedTask, is_exported, load_exported_task
from bertsmith.inference.features import FeatureExtractor, FeatureOptions, Text
from bertsmith.inference.fill import encode_all, guess_masks, split_rows
from bertsmith.inference.given_rows import listed, make_examples, only_texts
from bertsmith.inference.int8 import INT8, choose_int8
from bertsmith.inference.predictor import predict_examples
from bertsmith.inference.scoring import SentenceScorer
from bertsmith.inference.sentence_settings import other_settings
from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.task_model import BertForTask
from bertsmith.model.weights import OBJECTIVE_KEY, LoadReport, find_model, load_model, read_config
from bertsmith.options import did_you_mean
from bertsmith.progress import say, say_once
from bertsmith.tasks.examples import EncodingReport, Example
from bertsmith.tasks.model_folder import load_task_model, open_tokenizer, say_random_positions, why_no_task
from bertsmith.tasks.running_text import make_running
from bertsmith.tasks.spec import TASK_KEY
from bertsmith.tasks.task import Row, Task
from bertsmith.text.tokenizer import BertTokenizer

OWN, OWN_WORDS = 5, 20
# Below this least cosine between their vectors, bf16 is not chosen although it is faster.
LEAST_COSINE = 0.999
_SAMPLE = (
    "The old man the boats.",
    "In 1998, 3.5 % of all trains between Vienna and Graz were late by more than ten minutes!",
    "Das hätte niemand gedacht, am wenigsten die Köchin.",
    "Elle ne savait pas encore que la lettre était arrivée la veille.",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "what is the capital of the state where the longest river of the country begins and who founded it " * 4,
)
_HEADS = {
    "sequence": "is for texts",
    "choice": "chooses between endings",
    "token": "tags words",
    "span": "finds answers in contexts",
}


def load(
    folder: str | Path, device: str = "auto", precision: str = "auto", threads: int | None = None
) -> "LoadedModel":
    """Open a model folder (ours or any BERT of transformers'), or a run whose model is finished.

    An export of a fine-tuned model predicts as the model does, by the exported file, which has a precision of its own.

    `precision` auto: fp32, or bf16 where the machine multiplies it faster and vectors of a few sentences measure alike
    (LEAST_COSINE); which, is said. int8: the faster of those (int8+fp32 and int8+bf16 choose), but half of the products
    in 8 bits (int8.py); how alike that measures, is said. Deep copies and what is unpickled do without the 8 bits.
    `threads`: PyTorch's threads on the CPU, for the whole process (None: as they are, by default one a core, or
    OMP_NUM_THREADS).

    Raises UserError for a folder that cannot be opened and for options that are not known.
    """
    one_of("precision", precision, ("auto", *PRECISIONS, *INT8))
    if threads is not None:
        torch.set_num_threads(check_threads("threads", threads))
    bound_kernel_caches()
    where = choose_device(device)
    path = find_model(folder)
    if is_exported(path):
        return _load_exported(path, device, precision, threads)
    config, values = read_config(path)
    task: Task | None = None
    model: BertForPreTraining | BertForTask
    if TASK_KEY in values:
        task, model = load_task_model(path)
        tokenizer, report = task.tokenizer, LoadReport([], [], [])
    else:
        tokenizer = open_tokenizer(path, config)
        model, report, _ = load_model(path)
    model.to(where).eval()
    if where.type == "cpu":
        keep_freed_memory()
    model.bert, precision = use_bert(path, model.bert, tokenizer, where, precision)
    encoder = Encoder(model.bert, tokenizer, where)
    return LoadedModel(path, model, encoder, precision, task, _missing_parts(path, report, values, task, model))


def _load_exported(path: Path, device: str, precision: str, threads: int | None) -> "LoadedModel":
    """What `load` gives for an exported folder."""
    if TASK_KEY not in read_config(path)[1]:
        raise UserError(
            f"{path}: is an export of a model without a task, which takes batches of ids; open it by `load_exported`, "
            "or name the model folder that it was exported from"
        )
    task, model = load_exported_task(path, device, precision, threads)
    whole = f"{path}: is an export, which predicts only; name the model folder that it was exported from"
    why_not = dict.fromkeys(("embed", "mlm", "pooler"), whole)
    return LoadedModel(path, model, None, model.exported.precision, task, why_not)


class UsedBert(NamedTuple):
    """An encoder that is only used, and the arithmetic it was made for: fp32, bf16, int8+fp32 or int8+bf16."""

    bert: InferenceBert
    precision: str


def use_bert(path: Path, bert: BertModel, tokenizer: BertTokenizer, device: torch.device, precision: str) -> UsedBert:
    """The encoder of `path`, float32 and on its device, for the arithmetic asked for (see `load`), or found best.

    What was found or lost is said. Raises UserError where 8-bit products are not to be had or the model diverged.
    """
    if precision == "auto":
        precision = "fp32"
        if _faster_precision(device.type) == "bf16":
            used = InferenceBert(copy.deepcopy(bert), torch.bfloat16)
            cosine = _measure_cosine(path, bert, used, tokenizer, device)
            precision = "bf16" if cosine >= LEAST_COSINE else "fp32"
            say(
                f"{path}: computes in {precision}; bf16 is faster here, and the least cosine between its vectors and "
                f"those of fp32 is {cosine:.5f} on a few texts"
            )
    if precision in ("bf16", "int8+bf16") and emulates_bf16(device):
        say("warning: this CPU has no instructions for bf16, which takes several times as long as fp32; auto is faster")
    if precision not in INT8:
        return UsedBert(InferenceBert(bert, PRECISIONS[precision]), precision)
    int8 = choose_int8(bert, tokenizer, _SAMPLE)
    rest = INT8[precision] or _faster_precision(device.type)
    used = InferenceBert(copy.deepcopy(bert), PRECISIONS[rest], int8)
    cosine = _measure_cosine(path, bert, used, tokenizer, device)
    say(
        f"{path}: computes in int8 and {rest}; the least cosine between its vectors and those of fp32 is "
        f"{cosine:.5f} on a few texts"
    )
    return UsedBert(used, f"int8+{rest}")


@functools.cache
def _faster_precision(device: str) -> str:
    """fp32 or bf16, measured once a process."""
    return prepare_machine(device).precision


def _measure_cosine(
    path: Path, exact: BertModel, used: InferenceBert, tokenizer: BertTokenizer, device: torch.device
) -> float:
    """The least cosine between the vectors that `exact` makes in fp32 and those of `used`: of _SAMPLE and of OWN texts.

    The latter are of words that the vocabulary has: one of another language knows none of _SAMPLE's.
    """
    own = [token for token in tokenizer.tokens if token.isalpha()]
    drawn = random.Random(0).sample(own, min(len(own), OWN * OWN_WORDS))
    texts = [*_SAMPLE, *(" ".join(drawn[first : first + OWN_WORDS]) for first in range(0, len(drawn), OWN_WORDS))]
    both = []
    for bert in (InferenceBert(exact, torch.float32), used):
        extractor = FeatureExtractor(Encoder(bert, tokenizer, device), FeatureOptions(normalize=True))
        both.append(extractor.extract(texts, [str(path)] * len(texts)).rows.astype(np.float64))
    return float((both[0] * both[1]).sum(1).min())


def _missing_parts(
    path: Path, report: LoadReport, values: dict[str, Any], task: Task | None, model: BertForPreTraining | BertForTask
) -> dict[str, str]:
    """For each part that was never trained, what is to be said where it is asked for."""
    if task is not None:
        missing = {
            "mlm": f"{path}: was fine-tuned for {task.spec.name} and has no masked-LM head; use a pre-trained model"
        }
        if isinstance(model.bert.pooler, torch.nn.Identity):
            missing["pooler"] = f"{path}: was fine-tuned for {task.spec.name} and has no pooler; use pool mean or cls"
        return missing
    missing = {"task": why_no_task(path, values)}
    if absent := report.missing_from("mlm"):
        missing["mlm"] = f"{path}: has no masked-LM head ({absent[0]} is missing); use a pre-trained model"
    objective = str(values.get(OBJECTIVE_KEY, ""))
    if absent := report.missing_from("pooler"):
        missing["pooler"] = f"{path}: has no pooler ({absent[0]} is missing); use pool mean or cls"
    elif objective and "+" not in objective:  # mlm+nsp and mlm+sop are what trains it
        missing["pooler"] = f"{path}: its pooler was not trained (objective {objective}); use pool mean or cls"
    return missing


class LoadedModel:
    """What `load` returns. Methods that need a part the folder lacks raise UserError naming it.

    `folder`, `precision` (fp32, bf16, int8+fp32 or int8+bf16; of an export fp32 or int8), `encoder` (with `tokenizer`,
    `config`, `device`), `task` (None where it was not fine-tuned), `why_not`: what is said where a part is missing.
    """

    def __init__(
        self,
        folder: Path,
        model: BertForPreTraining | BertForTask | ExportedTask,
        encoder: Encoder | None,
        precision: str,
        task: Task | None,
        why_not: dict[str, str],
    ) -> None:
        self.folder = folder
        self.model = model
        self._encoder = encoder
        self.device = torch.device("cpu") if encoder is None else encoder.device
        self.precision = precision
        self.task = task
        self.why_not = why_not

    def __repr__(self) -> str:
        return f"<{self.folder}: {', '.join(self.abilities)}; {self.describe()}>"

    @property
    def encoder(self) -> Encoder:
        """What makes hidden states. Raises UserError for an export, which keeps them to itself."""
        if self._encoder is None:
            raise UserError(self.why_not["embed"])
        return self._encoder

    @property
    def abilities(self) -> tuple[str, ...]:
        """The methods that work: embed; fill and score; predict, and answer, or tag and entities."""
        names = ["embed"] if self._encoder is not None else []
        if "mlm" not in self.why_not:
            names += ["fill", "score"]
        if self.task is not None:
            names += ["predict", *{"span": ["answer"], "token": ["tag", "entities"]}.get(self.task.head, [])]
        return tuple(names)

    def describe(self) -> str:
        """Device, arithmetic and threads, for the log."""
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return f"{self.device.type}, {self.precision}{threads}"

    def features(self, options: FeatureOptions) -> FeatureExtractor:
        """What makes vectors of the kind that `options` say, for as many texts as one likes."""
        extractor = FeatureExtractor(self.encoder, options, self.why_not.get("pooler"))
        say_random_positions(self.folder, self.encoder.config, options.max_length, self.encoder.max_length)
        if others := other_settings(self.folder, options, extractor.max_length):
            note = (
                f"note: {self.folder}: sentence-transformers {', '.join(others)}; these vectors are made without that"
            )
            say_once(note, (self.folder, options))
        return extractor

    def embed(
        self, texts: Sequence[Text], layers: str | int | Sequence[int] = -1, pool: str = "mean", **options: Any
    ) -> npt.NDArray[np.float32] | list[npt.NDArray[np.float32]]:
        """Vectors of `texts`: (n, d), or for `pool="none"` and `words=True` a list of (tokens or words, d).

        `layers`: a level, several, or a text such as "-4:"; more `options`: see FeatureOptions. For words a text may be
        a list of them.
        """
        known = [field.name for field in fields(FeatureOptions)]
        for name in options:
            if name not in known:
                near = did_you_mean(name, known)
                raise UserError(f"{name}: embed has no such option{near}; there are {', '.join(known)}")
        if not isinstance(layers, str):
            several = layers if isinstance(layers, Iterable) else [layers]
            layers = ",".join(str(whole_number("layers", layer)) for layer in several)
        extractor = self.features(FeatureOptions(layers=layers, pool=pool, **options))
        named = ((f"text {number}", text) for number, text in enumerate(listed(texts), 1))
        rows: list[npt.NDArray[np.float32]] = [np.zeros((0, extractor.dimension), dtype=np.float32)]
        ragged = []
        for chunk in extractor.chunks(named):
            if chunk.counts is None:
                rows.append(chunk.rows)
            else:
                ragged += np.split(chunk.rows, np.cumsum(chunk.counts)[:-1])
        say_cut(extractor.report, extractor.max_length)
        return ragged if extractor.options.several else np.concatenate(rows)

    def fill(self, texts: Sequence[str], top: int = 5) -> list[list[list[dict[str, Any]]]]:
        """For each text, for each of its [MASK]: the `top` tokens with their `probability`, the likeliest first.

        Raises UserError naming every text that holds no [MASK] or is too long.
        """
        model = self._masked_model()
        top = whole_number("top", top, 1)
        tokenizer = self.encoder.tokenizer
        rows = encode_all(only_texts(texts), None, tokenizer, self.encoder.config.max_position_embeddings)
        return [
            masks for first, last in split_rows(rows) for masks in guess_masks(model, tokenizer, rows[first:last], top)
        ]

    def score(self, texts: Sequence[str], within_word: str = "visible") -> list[Row]:
        """For each text its pseudo-log-likelihood `pll`, `tokens` and pseudo-perplexity `pppl` (see scoring.py)."""
        scorer = self.scorer(within_word)
        rows = scorer.score(only_texts(texts))
        say_cut(scorer.report, self.encoder.max_length)
        return rows

    def scorer(self, within_word: str = "visible") -> SentenceScorer:
        """What scores sentences, counting what it cuts."""
        scorer = SentenceScorer(self._masked_model(), self.encoder, within_word)
        say_random_positions(self.folder, self.encoder.config, None, self.encoder.max_length)
        return scorer

    def predict(self, rows: Sequence[Any]) -> list[Row]:
        """A prediction for each row, as `bertsmith predict` writes them.

        A row is what the task is about: a text, or (text, text) where it learnt from two; (context, [endings]) for
        choices; a list of words, or a text to be split at blanks, for tags; (question, context) for answers. Raises
        UserError for rows of another kind, naming the first.
        """
        return self._predict(make_examples(self._task_model()[0], rows))

    def _predict(self, examples: Sequence[Example]) -> list[Row]:
        task, model = self._task_model()
        report = EncodingReport()
        predicted = predict_examples(task, model, examples, self.device, report)
        results = [row for _, predictions in predicted for row in predictions]
        if report.truncated:
            say(f"warning: {report.truncated:,} of {len(results):,} rows, longer than {task.spec.max_length} tokens, "
                "were cut")  # fmt: skip
        return results

    def answer(self, question: str, context: str) -> Row:
        """The answer to one question, with where it stands in `context` (`start`, `end`) and the n best."""
        self._task_model("span")
        return self.predict([(question, context)])[0]

    def entities(self, texts: Sequence[str]) -> list[list[Row]]:
        """The entities in running text: `type`, `text`, and where it stands, `start` to `end` (see running_text.py)."""
        self._task_model("token")
        named = enumerate(only_texts(texts), 1)
        rows = self._predict([make_running(f"text {number}", str(number), text) for number, text in named])
        return [row["entities"] for row in rows]

    def tag(self, sentences: Sequence[Text]) -> list[list[str]]:
        """A tag for every word of each sentence: a list of words, or a text to be split at blanks."""
        self._task_model("token")
        return [row["tags"] for row in self.predict(sentences)]

    def _masked_model(self) -> BertForPreTraining:
        if "mlm" in self.why_not:
            raise UserError(self.why_not["mlm"])
        assert isinstance(self.model, BertForPreTraining)
        return self.model

    def _task_model(self, head: str | None = None) -> tuple[Task, BertForTask | ExportedTask]:
        if self.task is None:
            raise UserError(self.why_not["task"])
        if head is not None and self.task.head != head:
            raise UserError(
                f"{self.folder}: was fine-tuned for {self.task.spec.name}, which {_HEADS[self.task.head]}; a model "
                f"that {_HEADS[head]} is needed"
            )
        assert isinstance(self.model, BertForTask | ExportedTask)
        return self.task, self.model
