"""From settings to what the loop needs: corpus and tokenizer, model, batch streams. Every mistake is found here.

Nothing is written and nothing is trained in this file; what contradicts (a corpus of another tokenizer, a length past
the model's positions, other settings than the run began with) is refused before the first step.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from bertsmith.corpus.batches import BatchStream
from bertsmith.corpus.masking import MaskingOptions, TokenizerInfo
from bertsmith.corpus.shards import TokenCorpus, open_corpus
from bertsmith.errors import UserError, one_of
from bertsmith.hardware import Machine, prepare_machine
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.compiled import compiler_problem
from bertsmith.model.config import SIZES, BertConfig
from bertsmith.model.weights import CONFIG, hugging_face_names, load_model, read_config
from bertsmith.options import list_settings, load_recipe, load_settings
from bertsmith.progress import say
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer
from bertsmith.training.checkpoint import Checkpoint, find_newest_checkpoint
from bertsmith.training.ranks import ALONE, Ranks
from bertsmith.training.settings import FREE_TO_CHANGE, PretrainSettings
from bertsmith.training.state import Arithmetic, RunState, warn_of_changes

CONFIG_FILE = "config.toml"
# what says that a run has done something; a fine-tuning has several runs in one folder
_KEPT = ("checkpoints/step-*", "result.json", "runs/*/checkpoints/step-*", "runs/*/result.json")
# tokens of a micro-batch when the user names none: on the CPU what stays near the caches, on CUDA what fills the chip
_MICRO_TOKENS = {"cpu": 8192, "cuda": 65536}
# fewer held-out examples than this make a loss that chance moves by a hundredth or more
FEW_HELD_OUT_ROWS = 1000
_EVALUATION_TOKENS = 8192
Settings = TypeVar("Settings")


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
    """See `settings_of_run`."""
    return settings_of_run(PretrainSettings, FREE_TO_CHANGE, out, recipe, overrides)


def settings_of_run(
    kind: type[Settings],
    free: tuple[str, ...],
    out: Path,
    recipe: dict[str, Any] | None,
    overrides: list[tuple[str, str]],
) -> Settings:
    """The settings of the run in `out`: its own config.toml when it has one and no other recipe is named.

    `kind`: their dataclass, with a field `precision`; "auto" is what it was found to be when the run began. `free`: the
    keys that may change between the parts of a run. Raises UserError for settings that are wrong, for a run that has
    results or a checkpoint made with others, and for a folder that holds something else.
    """
    started = out / CONFIG_FILE
    if not started.is_file():
        if out.is_dir() and any(not entry.name.startswith(".") for entry in out.iterdir()):
            raise UserError(f"{out}: holds something else than a run (no {CONFIG_FILE}); choose another --out")
        return load_settings(kind, recipe, overrides)
    _refuse_other_kind(kind, out)
    try:
        before: Any = load_settings(kind, load_recipe(started))
    except UserError as error:
        raise UserError(f"{started}: holds no settings of a run ({error}); mend it or choose another --out") from error
    settings: Any = load_settings(kind, load_recipe(started) if recipe is None else recipe, overrides)
    if not any(any(out.glob(kept)) for kept in _KEPT):
        return settings  # nothing is kept of that start
    if settings.precision == "auto":
        settings = replace(settings, precision=before.precision)
    _refuse_changes(out, fixed_settings(before, free), fixed_settings(settings, free))
    return settings


def _refuse_other_kind(kind: type[Any], out: Path) -> None:
    """Raise UserError where `out` holds a pre-training and `kind` is of fine-tunings, or the other way round."""
    known = {setting.key for setting in list_settings(kind)}
    try:
        kept = set(load_recipe(out / CONFIG_FILE))
    except UserError:
        return  # what is wrong with the file is said when it is read as this kind's
    for key, what in (("task", "fine-tuning"), ("objective", "pre-training")):
        if key in kept and key not in known:
            raise UserError(f"{out}: holds a {what} run; choose another --out")


def fixed_settings(settings: Any, free: tuple[str, ...] = FREE_TO_CHANGE) -> dict[str, Any]:
    """Key → value of every setting that must stay what it is for as long as a run lasts."""
    return {
        key: _value(settings, key)
        for key in (setting.key for setting in list_settings(type(settings)))
        if not any(key == name or (name.endswith(".") and key.startswith(name)) for name in free)
    }


def _value(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


def _refuse_changes(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{key} was {before[key]} and is now {now[key]}" for key in now if before.get(key, now[key]) != now[key]]
    if changed:
        raise UserError(
            f"{out}: this run was started with other settings ({'; '.join(changed)}); give the same ones to resume it, "
            "or another --out"
        )


def check_continuation(out: Path, settings: PretrainSettings, state: RunState) -> None:
    """Raise UserError when `settings` are not those that the checkpoint was made with (config.toml may have been
    edited since), or ask for a shorter run than the one already done."""
    _refuse_changes(out, state.settings, fixed_settings(settings) | {"precision": state.settings.get("precision")})
    asked = {name: getattr(settings, name) for name in ("steps", "minutes", "epochs")}
    if asked != state.budget and settings.budget.done(state.step, state.epochs, state.seconds):
        raise UserError(
            f"{out}: the run is at step {state.step:,} already, past the {settings.budget.describe()} asked for; ask "
            "for more to extend it"
        )


def model_config(settings: PretrainSettings, data: TrainingData) -> BertConfig:
    """The architecture: a published size over the corpus's vocabulary, or that of the model folder to go on from.

    Raises UserError when the folder's tokenizer is not the corpus's, or sequences are longer than its positions.
    """
    dropout = {"hidden_dropout_prob": settings.dropout, "attention_probs_dropout_prob": settings.dropout}
    folder = Path(settings.model)
    if settings.model in SIZES:
        config = BertConfig.of_size(settings.model, data.corpus.vocab_size, **dropout)
    elif not (folder / CONFIG).is_file():
        near = f"; did you mean {folder / 'model'}?" if (folder / "model" / CONFIG).is_file() else ""
        sizes = ", ".join(SIZES)
        raise UserError(
            f"model: {settings.model!r} is neither a published size ({sizes}) nor a folder with a {CONFIG}{near}"
        )
    else:
        data.corpus.check_tokenizer(load_tokenizer(folder).fingerprint, str(folder))
        config = BertConfig.from_dict(read_config(folder)[0].to_dict() | dropout)
        if config.vocab_size < data.corpus.vocab_size:
            raise UserError(
                f"{folder}: its word table has {config.vocab_size} rows, the corpus's vocabulary "
                f"{data.corpus.vocab_size} entries; the folder's tokenizer and weights do not belong together"
            )
        if settings.paired and config.type_vocab_size < 2:
            raise UserError(
                f"{folder}: has no embedding for a second segment (type_vocab_size {config.type_vocab_size}); use "
                "--objective mlm"
            )
    longest = max(phase.max_length for phase in settings.phases)
    if longest > config.max_position_embeddings:
        raise UserError(
            f"max_length: sequences of {longest} tokens are longer than the model's {config.max_position_embeddings} "
            "positions"
        )
    return note_trained_positions(settings, config)


def note_trained_positions(settings: PretrainSettings, config: BertConfig) -> BertConfig:
    """`config` with the positions that are trained once the run is over: by it, and in the folder it goes on from."""
    before = 0 if settings.model in SIZES else config.trained_positions
    trained = max(before, *(phase.max_length for phase in settings.phases))
    return replace(config, bertsmith_trained_positions=trained if trained < config.max_position_embeddings else None)


def build_model(settings: PretrainSettings, data: TrainingData) -> BertForPreTraining:
    """A freshly initialized model, or the one in the folder `settings.model` names; float32 masters on the CPU."""
    config = model_config(settings, data)
    model = BertForPreTraining(config, next_sentence=settings.paired).initialize(settings.seed)
    if settings.model not in SIZES:
        source, report, _ = load_model(settings.model)
        absent = set(report.missing)
        # what the file lacks starts from this run's seed
        found = {n: t for n, t in source.state_dict().items() if absent.isdisjoint(hugging_face_names(n))}
        model.load_state_dict(found, strict=False)
        wanted = report.missing_from("mlm", *(("pooler", "nsp") if settings.paired else ()))
        if wanted:
            say(f"warning: {settings.model}: these are not in it and start from random values: {', '.join(wanted)}")
    elif settings.output_bias == "unigram":
        counts = torch.from_numpy(data.corpus.token_counts).double()
        counts[list(data.corpus.special_ids)] = 0
        # half a count for what never occurred: rare, not impossible
        shares = counts.clamp(min=0.5) / counts.sum().clamp(min=1)
        with torch.no_grad():
            model.mlm_head.bias.copy_(shares.log())
    return model


def resume_model(
    settings: PretrainSettings, data: TrainingData, checkpoint: Checkpoint
) -> tuple[BertForPreTraining, RunState]:
    """A model of the checkpoint's architecture, not initialized (its weights are to be loaded), and the run's state.

    Raises UserError when the corpus is another one than the run began with: its position in the text and its schedule
    would be of another text.
    """
    state = RunState.from_dict(checkpoint.state)
    if state.corpus_sha256 != data.corpus.sha256:
        raise UserError(
            f"data: {settings.data} is not the corpus that the run in {checkpoint.folder.parent.parent} began with; "
            "name that one to resume it, or go on from its finished model on this text with --model RUN/model and "
            "another --out"
        )
    # noted again for the runs of versions that did not note it
    config = note_trained_positions(settings, BertConfig.from_dict(state.architecture))
    return BertForPreTraining(config, next_sentence=settings.paired), state


@dataclass
class Start:
    """What a run starts from. On ranks but the first, `model` has no weights yet and `checkpoint` is None."""

    model: BertForPreTraining
    state: RunState
    machine: Machine
    checkpoint: Checkpoint | None
    """Where weights and optimizer state are to be loaded from."""
    resumed: bool


def find_start(settings: PretrainSettings, data: TrainingData, out: Path, ranks: Ranks = ALONE) -> Start:
    """A new run, or the newest complete checkpoint of the one in `out`, as the first rank finds it.

    Raises UserError for checkpoints or settings that do not fit, and for ranks with different corpora.
    """
    start = None
    with ranks.alike():
        if ranks.is_first:
            start = _find_start(settings, data, out)
    if ranks.size == 1:
        assert start is not None
        return start
    found = ranks.share(
        None if start is None else (start.state.as_dict(), start.machine.precision, start.checkpoint is not None)
    )
    with ranks.alike():
        if start is None:
            values, precision, resumed = found
            state = RunState.from_dict(values)
            if state.corpus_sha256 != data.corpus.sha256:
                raise UserError(f"data: {settings.data} is not the same corpus here as on the first rank's machine")
            model = BertForPreTraining(BertConfig.from_dict(state.architecture), next_sentence=settings.paired)
            start = Start(model, state, prepare_machine(settings.device, precision), None, resumed)
    return start


def _find_start(settings: PretrainSettings, data: TrainingData, out: Path) -> Start:
    checkpoint, broken = find_newest_checkpoint(out)
    for message in broken:
        say(f"warning: {message}")
    if checkpoint is None:
        model, state = build_model(settings, data), RunState(corpus_sha256=data.corpus.sha256)
        state.architecture = model.config.to_dict()
        say_untrained_positions(settings, model.config)
        return Start(model, state, prepare_machine(settings.device, settings.precision), None, False)
    model, state = resume_model(settings, data, checkpoint)
    machine = prepare_machine(settings.device, state.arithmetic.precision if state.arithmetic else "auto")
    say(f"resuming from {checkpoint.folder} (step {state.step:,}), in {machine.precision} as the run began")
    check_continuation(out, settings, state)
    return Start(model, state, machine, checkpoint, True)


def say_untrained_positions(settings: PretrainSettings, config: BertConfig) -> None:
    """Say from which position on none was trained before and the run trains none."""
    longest, positions = max(phase.max_length for phase in settings.phases), config.max_position_embeddings
    if config.trained_positions < positions:
        say(
            f"sequences of {longest} tokens: of the model's {positions} positions, those from "
            f"{config.trained_positions} on learn nothing and stay random; longer sequences train them (--max-length "
            "or a second phase, see `bertsmith pretrain --help`)"
        )


def training_streams(settings: PretrainSettings, data: TrainingData) -> dict[int, BatchStream]:
    """Batches of the training documents by sequence length, for each length the run will come to.

    Raises UserError when the objective cannot be built from them.
    """
    return {
        length: BatchStream(
            data.corpus.split("train"),
            data.info,
            objective=settings.objective,
            max_length=length,
            batch_size=settings.batch_size,
            seed=settings.seed,
            masking=settings.masking,
            short_share=settings.examples.short_share,
        )
        for length in {phase.max_length: None for phase in settings.phases}
    }


def evaluation_stream(settings: PretrainSettings, data: TrainingData) -> BatchStream | None:
    """Batches of the held-out documents, of the run's first sequence length; None, and the reason said, without any.

    Where they are too few to offer random next segments, these come from the training documents.
    """
    held_out, train = data.corpus.split("held-out"), data.corpus.split("train")
    if not held_out.tokens:
        say("warning: no held-out documents to evaluate on; prepare the corpus with a larger --held-out share")
        return None
    options: dict[str, Any] = {
        "objective": settings.objective,
        "max_length": settings.max_length,
        "batch_size": max(1, _EVALUATION_TOKENS // settings.max_length),
        # the paper's masking whatever the training's is: losses of runs with other rates and units can be compared
        "masking": MaskingOptions(),
        "short_share": settings.examples.short_share,
    }
    if settings.objective == "mlm+nsp" and held_out.documents < 2:
        options["random_split"] = train
    rows = held_out.tokens // settings.max_length
    if rows < FEW_HELD_OUT_ROWS:
        say(
            f"warning: {held_out.documents:,} documents, about {rows:,} examples, are held out: so few that the "
            "held-out loss and accuracies are noisy; prepare the corpus with a larger --held-out share"
        )
    try:
        return BatchStream(held_out, data.info, **options)
    except UserError as error:
        say(f"warning: the held-out documents cannot be evaluated on: {error}")
        return None


def micro_batch_size(settings: PretrainSettings, max_length: int, device: torch.device, ranks: int = 1) -> int:
    """Sequences that go through the model at once; no more than leave something for every rank."""
    share = math.ceil(settings.batch_size / ranks)
    if settings.micro_batch_size is not None:
        return min(settings.micro_batch_size, share)
    most = max(1, _MICRO_TOKENS[device.type] // max_length)
    if ranks == 1:
        return min(share, most)
    return math.ceil(share / math.ceil(share / most))  # all ranks get as many, of about the same size


def choose_compiled(how: str, machine: Machine, config: BertConfig) -> bool:
    """Whether the encoder runs as compiled code. `how`: auto, on or off.

    Raises UserError where it was asked for and cannot be.
    """
    one_of("compile", how, ("auto", "on", "off"))
    if how == "off" or (how == "auto" and machine.device.type == "cpu"):
        return False
    problem = compiler_problem(machine.device, machine.dtype, config)
    if problem is None:
        return True
    if how == "on":
        raise UserError(f"compile: on was asked for, but {problem}; use --compile off")
    say(f"warning: the encoder is not compiled, which costs speed: {problem}")
    return False


def take_machine(
    state: RunState, settings: PretrainSettings, machine: Machine, ranks: int = 1, compiled: bool = False
) -> None:
    """Note in `state` what rounding depends on here, and say so if the run began with something else."""
    now = Arithmetic.of(machine, ranks, compiled)
    before, state.arithmetic = state.arithmetic, now
    warn_of_changes(before, now)
    if settings.micro_batch_size is not None or (before is not None and before.device != now.device):
        state.micro_batch_size = 0  # to be chosen anew
    if ranks > 1 and state.micro_batch_size > math.ceil(settings.batch_size / ranks):
        state.micro_batch_size = 0  # would leave a rank without work
