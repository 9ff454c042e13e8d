"""A tiny model folder and small files of every task, for the tests of fine-tuning; and what is compared afterwards."""

import csv
import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith import hardware
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.weights import save_model
from bertsmith.options import load_settings
from bertsmith.tasks import finetune as loop
from bertsmith.tasks import runs
from bertsmith.tasks.settings import FinetuneSettings
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer
from bertsmith.training.metrics_log import read_metrics

GOOD, BAD = ("good", "great", "fine"), ("bad", "poor", "dull")
FILLERS = (
    "the", "a", "film", "story", "cat", "dog", "house", "river", "tree", "day", "night", "man", "woman", "we", "it",
    "was", "is", "very", "and", "of", "in",
)  # fmt: skip
NAMES, PLACES = ("anna", "ben", "carla"), ("paris", "rome", "oslo")
MORE = ("who", "where", "lives", "works", "lock", "rain", "sun", "theft", "same", "other", ".", "?", ",")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *FILLERS[:1], *FILLERS[2:], *NAMES, *PLACES, *MORE,
    *LETTERS, *(f"##{letter}" for letter in LETTERS),
)  # fmt: skip
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "precision": "fp32", "device": "cpu", "learning_rate": 5e-3, "batch_size": 8, "max_length": 32, "epochs": 2,
    "checkpoint.minutes": 0, "log.every": 1,
}  # fmt: skip
# what differs from run to run though the training is the same
TIMES = ("seconds", "train_seconds", "tokens_per_second", "examples_per_second", "utilization")
PLACES_IN_SUMMARY = ("model_dir", "path", "output", "held_out_predictions")


# --- the model


def make_tokenizer(folder: Path) -> BertTokenizer:
    """VOCABULARY, uncased."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return load_tokenizer(folder, lowercase=True)


def make_config(**changes: Any) -> BertConfig:
    return BertConfig(**{"vocab_size": len(VOCABULARY), **SHAPE, **changes})


def make_model(folder: Path, seed: int = 1, **changes: Any) -> Path:
    """A pre-trained folder: random weights, but for what pre-training might have found out of good and bad words."""
    tokenizer = make_tokenizer(folder)
    made = BertForPreTraining(make_config(**changes)).initialize(seed)
    meaning = torch.randn(made.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    for words, sign in ((GOOD, 1), (BAD, -1)):
        made.bert.embeddings.word.data[[VOCABULARY.index(word) for word in words]] += sign * meaning
    save_model(folder, made, "mlm+nsp")
    tokenizer.save(folder)
    return folder


# --- files


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    """A table, by the file's ending: .csv, .tsv, .jsonl, .parquet, and .gz after the first three."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows]), path)
        return path
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        if name.endswith(".jsonl"):
            file.writelines(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
        elif name.endswith(".csv"):
            csv.writer(file, lineterminator="\n").writerows([columns, *rows])
        else:
            file.writelines("\t".join(map(str, row)) + "\n" for row in [columns, *rows])
    return path


def phrase(source: random.Random, words: int) -> str:
    return " ".join(source.choice(FILLERS) for _ in range(words))


def reviews(count: int, seed: int = 0, labels: Sequence[str] = ("neg", "pos")) -> list[tuple[str, str]]:
    """(text, label) rows: one word of the text decides."""
    source, rows = random.Random(seed), []
    for number in range(count):
        word = source.choice((BAD, GOOD)[number % 2])
        rows.append(
            (f"{phrase(source, 2 + number % 5)} {word} {phrase(source, number % 3)}".strip(), labels[number % 2])
        )
    return rows


def sentences(count: int, seed: int = 0) -> list[list[tuple[str, str]]]:
    """(word, IOB2 tag) sentences; sometimes two persons stand side by side, and names have two words."""
    source, made = random.Random(seed), []
    for number in range(count):
        name, place = [(source.choice(NAMES), "B-PER")], [(source.choice(PLACES), "B-LOC")]
        if number % 3 == 0:
            name.append((source.choice(NAMES), "I-PER"))
        if number % 4 == 1:
            name.append((source.choice(NAMES), "B-PER"))
        made.append([*name, ("lives", "O"), ("in", "O"), *place, (source.choice(FILLERS), "O"), (".", "O")])
    return made


def write_conll(path: Path, made: Sequence[Sequence[Sequence[str]]], tagged: bool = True) -> Path:
    lines = ("".join("\t".join(word if tagged else word[:1]) + "\n" for word in sentence) for sentence in made)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def questions(count: int, unanswerable: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """Paragraphs of SQuAD's layout, two questions each; with `unanswerable`, a third one that has no answer."""
    source, paragraphs = random.Random(seed), []
    for number in range(count):
        name, place = source.choice(NAMES), source.choice(PLACES)
        context = f"{phrase(source, number % 4)} {name} lives in {place} and {phrase(source, 2)} .".strip()
        qas: list[dict[str, Any]] = []
        for word, text in (("who", name), ("where", place)):
            answers = [{"text": text, "answer_start": context.index(text)}]
            qas.append({"id": f"{number}-{word}", "question": f"{word} lives ?", "answers": answers})
        if unanswerable:
            qas.append({"id": f"{number}-none", "question": "who works ?", "answers": [], "is_impossible": True})
        paragraphs.append({"context": context, "qas": qas})
    return paragraphs


def write_squad(path: Path, paragraphs: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text(json.dumps({"version": "x", "data": [{"title": "t", "paragraphs": paragraphs}]}), encoding="utf-8")
    return path


def write_task(folder: Path, task: str, count: int = 24) -> tuple[Path, Path]:
    """Training and dev file of a task for one's own files."""
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(5)
    columns: tuple[str, ...] = ("text", "label")
    rows: list[tuple[Any, ...]] = []
    if task == "classify":
        rows = list(reviews(2 * count))
    elif task == "ner":
        made = sentences(2 * count)
        return write_conll(folder / "train.conll", made[:count]), write_conll(folder / "dev.conll", made[count:])
    elif task.startswith("squad"):
        files = folder / "train.json", folder / "dev.json"
        for seed, file in enumerate(files):
            write_squad(file, questions(count // 2, task == "squad2", seed))
        return files
    for number in range(0 if rows else 2 * count):
        words = [source.choice(GOOD) for _ in range(number % 6)]
        if task == "pairs":
            first, second = source.sample(NAMES, 2)
            columns = ("sentence1", "sentence2", "label")
            rows.append((f"{first} lives", f"{(first, second)[number % 2]} works", ("same", "other")[number % 2]))
        elif task == "regress":
            rows.append((" ".join(["it was", *words]), number % 6))
        elif task == "multilabel":
            columns = ("text", "labels")
            found = [word for bit, word in enumerate(("rain", "lock")) if number >> bit & 1]
            names = {"rain": "weather", "lock": "safety"}
            rows.append((" ".join(["the day", *found, "was"]), ";".join(names[word] for word in found)))
        else:
            assert task in ("choice", "swag")
            columns = ("context", "choice0", "choice1", "choice2", "label")
            endings = [f"it was {source.choice(BAD)}" for _ in range(3 if number % 4 else 2)]
            right = source.randrange(len(endings))
            endings[right] = f"it was {source.choice(GOOD)}"
            rows.append((phrase(source, 2), *[*endings, ""][:3], right))
    return (
        write_rows(folder / "train.csv", columns, rows[:count]),
        write_rows(folder / "dev.csv", columns, rows[count:]),
    )


KINDS = ("classify", "pairs", "regress", "multilabel", "choice", "ner", "squad1", "squad2")


def write_glue(folder: Path, count: int = 8, tests: int = 5) -> Path:
    """All ten tasks in their official layout, in the spelling of their folders."""
    source = random.Random(3)
    for name, (title, header, labels) in GLUE.items():
        home = folder / title
        home.mkdir(parents=True)
        files: dict[str, tuple[str, int]] = {"train": ("train", count), "dev": ("dev", count), "test": ("test", tests)}
        if name == "mnli":
            files = {"train": ("train", count)}
            files |= {f"{part}_{half}": (part, tests) for part in ("dev", "test") for half in ("matched", "mismatched")}
        elif name == "ax":
            files = {"diagnostic": ("test", tests)}
        for file, (part, rows) in files.items():
            columns = [column for column in header if part != "test" or column not in ("label", *LABELS)]
            if part == "test" and "index" not in columns:
                columns.insert(0, "index")
            if name == "cola":
                columns = ["source", "label", "mark", "sentence"] if part != "test" else ["index", "sentence"]
            lines = [] if name == "cola" and part != "test" else [columns]
            for number in range(rows):
                cells = {column: phrase(source, 3) for column in columns} | {"index": str(number), "mark": ""}
                lines.append([labels[number % len(labels)] if c in LABELS else cells[c] for c in columns])
            (home / f"{file}.tsv").write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    return folder


LABELS = ("label", "Quality", "score", "is_duplicate", "gold_label")
_BINARY, _NLI = ("0", "1"), ("neutral", "entailment", "contradiction")
GLUE: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "cola": ("CoLA", (), _BINARY),
    "sst-2": ("SST-2", ("sentence", "label"), _BINARY),
    "mrpc": ("MRPC", ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"), _BINARY),
    "sts-b": ("STS-B", ("index", "genre", "sentence1", "sentence2", "score"), ("0.5", "3", "5.000")),
    "qqp": ("QQP", ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"), _BINARY),
    "mnli": ("MNLI", ("index", "promptID", "sentence1", "sentence2", "gold_label"), _NLI),
    "qnli": ("QNLI", ("index", "question", "sentence", "label"), ("entailment", "not_entailment")),
    "rte": ("RTE", ("index", "sentence1", "sentence2", "label"), ("entailment", "not_entailment")),
    "wnli": ("WNLI", ("index", "sentence1", "sentence2", "label"), _BINARY),
    "ax": ("AX", ("index", "sentence1", "sentence2"), _NLI),
}


# --- runs


def make_settings(
    task: str, model: Path, train: Path | None = None, dev: Path | None = None, **changes: Any
) -> FinetuneSettings:
    """SETTINGS with `changes` (`section__key` for dotted keys), by the way the command line takes."""
    named: dict[str, Any] = {"task": task, "model": model, "train": train, "dev": dev}
    values = SETTINGS | {key.replace("__", "."): value for key, value in {**named, **changes}.items()}
    return load_settings(FinetuneSettings, None, [(k, str(v)) for k, v in values.items() if v is not None])


def tune(
    out: Path, task: str, model: Path, train: Path | None = None, dev: Path | None = None, **changes: Any
) -> dict[str, Any]:
    """Fine-tune or resume; the summary."""
    return runs.finetune(make_settings(task, model, train, dev, **changes), out)


class Crash(BaseException):
    """What a test raises where it wants a run to end as if it had been killed: nothing catches it."""


class StepProbe:
    """Counts the steps of runs; `at` does something after the backward pass of a step still to come."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.actions: dict[int, Callable[[], None]] = {}
        clip_gradients = loop.clip_gradients

        def clip(parameters: Any, max_norm: float | None) -> torch.Tensor:
            self.steps += 1
            if action := self.actions.pop(self.steps, None):
                action()
            return clip_gradients(parameters, max_norm)

        patch.setattr(loop, "clip_gradients", clip)

    def at(self, number: int, action: Callable[[], None]) -> None:
        """Do `action` at the `number`-th step (from 1) from here on."""
        self.actions[self.steps + number] = action

    def crash_at(self, number: int) -> None:
        """End the run at that step as a kill would."""

        def crash() -> None:
            raise Crash

        self.at(number, crash)


def timeless(value: Any) -> Any:
    """A summary or result without times and places."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES and k not in PLACES_IN_SUMMARY}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def log_lines(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times."""
    return [timeless(line) for line in read_metrics(out)]


def weights_of(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def leftovers(out: Path) -> list[str]:
    """Checkpoints and weights that a finished run should not keep."""
    return sorted(str(path.relative_to(out)) for name in ("checkpoints", "best-*") for path in out.rglob(name))


# --- fixtures, to be imported by the conftest of a folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pre-trained model folder. Tests must not change it."""
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> BertTokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Kind of task → training and dev file."""
    folder = tmp_path_factory.mktemp("files")
    return {kind: write_task(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def tuned(
    model: Path, files: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Kind of task → the run folder of a short fine-tuning, made when first asked for. Tests must not change it."""
    folder = tmp_path_factory.mktemp("tuned")

    def make(kind: str) -> Path:
        if not (folder / kind).exists():
            with pytest.MonkeyPatch.context() as patch:
                quicken(patch)
                tune(folder / kind, kind, model, *files[kind], epochs=1, squad__stride=8)
        return folder / kind

    return make


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> StepProbe:
    """See StepProbe."""
    return StepProbe(monkeypatch)


def quicken(patch: pytest.MonkeyPatch) -> None:
    """No measurement of the machine, no pictures, no TensorBoard: seconds a run, and tested elsewhere."""
    patch.setattr(hardware, "measure_matmul", lambda device, dtype: 1e11)
    patch.setattr(runs, "plot_loss", lambda run, title: None)
    patch.setattr(runs, "plot_confusion", lambda path, matrix, labels: None)
    patch.setattr(loop, "MetricsLog", lambda run, step: METRICS_LOG(run, step, tensorboard=False))


METRICS_LOG = loop.MetricsLog


@pytest.fixture(autouse=True)
def quick_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`quicken`, except where the test asks for `whole_runs`."""
    if "whole_runs" not in request.fixturenames:
        quicken(monkeypatch)


@pytest.fixture
def whole_runs() -> None:
    """Runs with everything they leave for the eye."""


@pytest.fixture(scope="session")
def knowing(model: Path, files: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was long enough to find entities."""
    folder = tmp_path_factory.mktemp("knowing") / "run"
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        tune(folder, "ner", model, *files["ner"], epochs=8)
    return folder
