"""From settings to what the loop needs: corpus and tokenizer, model, batch streams. Every mistake is found here.

Nothing is written and nothing is trained in this file; what contradicts (a corpus of another tokenizer, a length past
the model's positions, other settings than the run began with) is refused before the first step.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bertsmith.corpus.batches import BatchStream
from bertsmith.corpus.masking import TokenizerInfo
from bertsmith.corpus.shards import TokenCorpus, open_corpus
from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import SIZES, BertConfig
from bertsmith.model.weights import CONFIG, load_model, read_config
from bertsmith.options import list_settings, load_recipe, load_settings
from bertsmith.progress import say
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer
from bertsmith.training.settings import FREE_TO_CHANGE, PretrainSettings

CONFIG_FILE = "config.toml"
# tokens of a micro-batch when the user names none: on the CPU what stays near the caches, on CUDA what fills the chip
_MICRO_TOKENS = {"cpu": 8192, "cuda": 65536}


@dataclass
class TrainingData:
    """An opened corpus with the tokenizer that made it."""

    corpus: TokenCorpus
    tokenizer: BertTokenizer
    info: TokenizerInfo

    @property
    def ln_vocab(self) -> float:
        """The loss of a guess at random, in nats."""
        return math.log(self.corpus.vocab_size)


def open_data(settings: PretrainSettings) -> TrainingData:
    """Open the corpus. Raises UserError when it is none, is damaged, or its tokenizer is not the one that made it."""
    corpus = open_corpus(settings.data)
    tokenizer = load_tokenizer(corpus.tokenizer)
    corpus.check_tokenizer(tokenizer.fingerprint, str(corpus.tokenizer))
    return TrainingData(corpus, tokenizer, TokenizerInfo.of(tokenizer))


def run_settings(out: Path, recipe: dict[str, Any] | None, overrides: list[tuple[str, str]]) -> PretrainSettings:
    """The settings of the run in `out`: its own config.toml when it has one and no other recipe is named.

    Raises UserError for settings that are wrong, for a run that was started with others (see FREE_TO_CHANGE), and for a
    folder that holds something else.
    """
    started = out / CONFIG_FILE
    if not started.is_file():
        if out.is_dir() and any(not entry.name.startswith(".") for entry in out.iterdir()):
            raise UserError(f"{out}: holds something else than a run (no {CONFIG_FILE}); choose another --out")
        return load_settings(PretrainSettings, recipe, overrides)
    before = load_settings(PretrainSettings, load_recipe(started))
    settings = load_settings(PretrainSettings, load_recipe(started) if recipe is None else recipe, overrides)
    changed = [
        f"{key} was {_value(before, key)} and is now {_value(settings, key)}"
        for key in (setting.key for setting in list_settings(PretrainSettings))
        if _value(before, key) != _value(settings, key)
        and not any(key == free or (free.endswith(".") and key.startswith(free)) for free in FREE_TO_CHANGE)
    ]
    if changed:
        raise UserError(
            f"{out}: this run was started with other settings ({'; '.join(changed)}); give the same ones to resume it, "
            "or another --out"
        )
    return settings


def _value(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


def model_config(settings: PretrainSettings, data: TrainingData) -> BertConfig:
    """The architecture: a published size over the corpus's vocabulary, or that of the model folder to go on from.

    Raises UserError when the folder's tokenizer is not the corpus's, or sequences are longer than its positions.
    """
    dropout = {"hidden_dropout_prob": settings.dropout, "attention_probs_dropout_prob": settings.dropout}
    folder = Path(settings.model)
    if settings.model in SIZES:
        config = BertConfig.of_size(settings.model, data.corpus.vocab_size, **dropout)
    elif not (folder / CONFIG).is_file():
        raise UserError(
            f"model: {settings.model!r} is neither a published size ({', '.join(SIZES)}) nor a folder with a {CONFIG}"
        )
    else:
        data.corpus.check_tokenizer(load_tokenizer(folder).fingerprint, str(folder))
        config = BertConfig.from_dict(read_config(folder)[0].to_dict() | dropout)
        if config.vocab_size < data.corpus.vocab_size:
            raise UserError(
                f"{folder}: its word table has {config.vocab_size} rows, the corpus's vocabulary "
                f"{data.corpus.vocab_size} entries; the folder's tokenizer and weights do not belong together"
            )
    longest = max(phase.max_length for phase in settings.phases)
    if longest > config.max_position_embeddings:
        raise UserError(
            f"max_length: sequences of {longest} tokens are longer than the model's {config.max_position_embeddings} "
            "positions"
        )
    return config


def build_model(settings: PretrainSettings, data: TrainingData) -> BertForPreTraining:
    """A freshly initialized model, or the one in the folder `settings.model` names; float32 masters on the CPU."""
    config = model_config(settings, data)
    paired = settings.objective != "mlm"
    model = BertForPreTraining(config, next_sentence=paired).initialize(settings.seed)
    if settings.model not in SIZES:
        source, report, _ = load_model(settings.model)
        model.load_state_dict(source.state_dict())
        absent = report.missing_from("mlm", *(("pooler", "nsp") if paired else ()))
        if absent:
            say(f"{settings.model}: {len(absent)} tensors of the heads are not in it and start afresh: {absent[0]} …")
    elif settings.output_bias == "unigram":
        counts = torch.from_numpy(data.corpus.token_counts).double()
        counts[list(data.corpus.special_ids)] = 0
        # half a count for what never occurred: rare, not impossible
        shares = counts.clamp(min=0.5) / counts.sum().clamp(min=1)
        with torch.no_grad():
            model.mlm_head.bias.copy_(shares.log())
    return model


def training_stream(settings: PretrainSettings, data: TrainingData, max_length: int) -> BatchStream:
    """Batches of the training documents. Raises UserError when the objective cannot be built from them."""
    return BatchStream(
        data.corpus.split("train"),
        data.info,
        objective=settings.objective,
        max_length=max_length,
        batch_size=settings.batch_size,
        seed=settings.seed,
        masking=settings.masking,
        short_share=settings.examples.short_share,
    )


def evaluation_stream(settings: PretrainSettings, data: TrainingData) -> BatchStream | None:
    """Batches of the held-out documents, None when nothing was held out.

    Where they are too few to offer random next segments, these come from the training documents.
    """
    held_out, train = data.corpus.split("held-out"), data.corpus.split("train")
    if not held_out.tokens:
        return None
    options: dict[str, Any] = {
        "objective": settings.objective,
        "max_length": settings.max_length,
        "batch_size": max(1, 8192 // settings.max_length),
        "masking": settings.masking,
        "short_share": settings.examples.short_share,
    }
    try:
        return BatchStream(held_out, data.info, **options)
    except UserError:
        if settings.objective != "mlm+nsp":
            return None
    try:
        return BatchStream(held_out, data.info, random_split=train, **options)
    except UserError:
        return None


def micro_batch_size(settings: PretrainSettings, max_length: int, device: torch.device) -> int:
    """Sequences that go through the model at once."""
    if settings.micro_batch_size is not None:
        return min(settings.micro_batch_size, settings.batch_size)
    return min(settings.batch_size, max(1, _MICRO_TOKENS[device.type] // max_length))
