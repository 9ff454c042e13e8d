"""Everything a pre-training run can be told, in one tree that recipes and flags fill and config.toml keeps.

Defaults are the paper's where it gives a number (Devlin et al. 2018, appendix A.2). No torch here: `--help` reads it.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from bertsmith.corpus.masking import MaskingOptions
from bertsmith.errors import UserError, one_of
from bertsmith.training.schedule import Budget, LearningRateSchedule, LengthPhase


@dataclass(frozen=True)
class OptimizerSettings:
    """What the update rule needs to know beside the schedule."""

    name: Literal["adamw", "muon"] = field(
        default="adamw", metadata={"help": "adamw, or muon on the encoder's matrices with AdamW on everything else"}
    )
    learning_rate: float = field(
        default=1e-4, metadata={"help": "peak learning rate of AdamW", "flag": "--learning-rate"}
    )
    matrix_rate_factor: float = field(
        default=1.0, metadata={"help": "Muon's peak learning rate, as a multiple of AdamW's (updates have one size)"}
    )
    weight_decay: float = field(
        default=0.01, metadata={"help": "decoupled: a step takes learning rate × this share of a weight away"}
    )
    beta1: float = field(default=0.9, metadata={"help": "share of AdamW's mean gradient kept each step"})
    beta2: float = field(default=0.999, metadata={"help": "share of AdamW's mean squared gradient kept each step"})
    epsilon: float = field(default=1e-6, metadata={"help": "added to the root of the second moment (reference: 1e-6)"})
    bias_correction: bool = field(
        default=True, metadata={"help": "off: as the reference's AdamWeightDecayOptimizer, first steps are larger"}
    )
    momentum: float = field(default=0.95, metadata={"help": "Muon's (Nesterov) momentum"})

    def __post_init__(self) -> None:
        one_of("name", self.name, ("adamw", "muon"))
        if self.matrix_rate_factor != 1.0 and self.name != "muon":
            raise UserError("matrix_rate_factor: only the muon optimizer has one; leave it out or choose muon")
        for label, value in (
            ("learning_rate", self.learning_rate),
            ("matrix_rate_factor", self.matrix_rate_factor),
        ):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{label}: {value} is not a number above 0")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise UserError(f"weight_decay: {self.weight_decay} is not a number from 0 up")
        for label, value in (("beta1", self.beta1), ("beta2", self.beta2), ("momentum", self.momentum)):
            if not 0 <= value < 1:
                raise UserError(f"{label}: {value} is not in [0, 1)")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise UserError(f"epsilon: {self.epsilon} is not a number above 0")


@dataclass(frozen=True)
class ScheduleSettings:
    """How the learning rate falls after the warm-up."""

    decay: Literal["linear", "constant"] = field(
        default="linear", metadata={"help": "linear to the floor, or constant"}
    )
    floor: float = field(default=0.0, metadata={"help": "share of the peak that the decay ends at"})


@dataclass(frozen=True)
class SecondPhaseSettings:
    """The last part of the run on longer sequences, to learn the late positions (paper: 10 % at 512)."""

    share: float = field(default=0.0, metadata={"help": "share of the run spent on longer sequences; 0: none"})
    max_length: int = field(default=512, metadata={"help": "tokens a sequence in that part"})

    def problems(self) -> list[str]:
        """See PretrainSettings.problems."""
        return [] if 0 <= self.share < 1 else [f"share: {self.share} is not a share from 0 to below 1"]


@dataclass(frozen=True)
class ExampleSettings:
    """How examples are made from the corpus."""

    short_share: float = field(default=0.1, metadata={"help": "share of pairs filled to a random shorter length"})
    workers: int = field(default=0, metadata={"help": "processes that build batches; 0: a thread of this one"})

    def problems(self) -> list[str]:
        """See PretrainSettings.problems."""
        faults = [] if 0 <= self.short_share <= 1 else [f"short_share: {self.short_share} is not a share from 0 to 1"]
        return faults + ([] if self.workers >= 0 else [f"workers: {self.workers} is negative"])


@dataclass(frozen=True)
class CheckpointSettings:
    """When the complete training state is written."""

    every: int = field(default=1000, metadata={"help": "steps between checkpoints; 0: only at the end"})
    minutes: float = field(default=15.0, metadata={"help": "also this long after the last one; 0: never"})
    keep: int = field(default=2, metadata={"help": "how many of the newest stay on disk"})

    def problems(self) -> list[str]:
        """See PretrainSettings.problems."""
        faults = [] if self.every >= 0 else [f"every: {self.every} is negative"]
        faults += [] if self.minutes >= 0 else [f"minutes: {self.minutes} is negative"]
        return faults + ([] if self.keep >= 1 else [f"keep: {self.keep} would keep no checkpoint; use 1 or more"])


@dataclass(frozen=True)
class EvaluationSettings:
    """Loss and accuracy on the held-out documents, always the same examples and masks."""

    every: int = field(default=1000, metadata={"help": "steps between evaluations; 0: only at the end"})
    examples: int = field(default=1024, metadata={"help": "held-out examples an evaluation, at most"})

    def problems(self) -> list[str]:
        """See PretrainSettings.problems."""
        faults = [] if self.every >= 0 else [f"every: {self.every} is negative"]
        return faults + ([] if self.examples >= 1 else [f"examples: {self.examples} is not a number from 1 up"])


@dataclass(frozen=True)
class LogSettings:
    """What is shown and kept of the run."""

    every: int | None = field(
        default=None, metadata={"help": "steps between log lines; default 1 under 200 steps, else 10"}
    )
    examples: int = field(default=3, metadata={"help": "first training examples shown decoded"})

    def problems(self) -> list[str]:
        """See PretrainSettings.problems."""
        faults = [] if self.every is None or self.every >= 1 else [f"every: {self.every} is not a number from 1 up"]
        return faults + ([] if self.examples >= 0 else [f"examples: {self.examples} is negative"])


@dataclass(frozen=True)
class PretrainSettings:
    """A pre-training run. Sections are dataclasses; every key has a `--section.key` flag."""

    data: str = field(metadata={"help": "corpus folder that `bertsmith prepare` wrote", "flag": "--data"})
    model: str = field(
        default="base",
        metadata={"help": "tiny, mini, small, medium, base, large, or a model folder to go on from", "flag": "--model"},
    )
    objective: Literal["mlm+nsp", "mlm+sop", "mlm"] = field(
        default="mlm+nsp",
        metadata={
            "help": "masked words with next-sentence or sentence-order prediction, or alone",
            "flag": "--objective",
        },
    )
    steps: int | None = field(
        default=None, metadata={"help": "length of the run in optimizer steps", "flag": "--steps"}
    )
    minutes: float | None = field(default=None, metadata={"help": "length of the run in minutes", "flag": "--minutes"})
    epochs: float | None = field(
        default=None, metadata={"help": "length in passes over the corpus", "flag": "--epochs"}
    )
    batch_size: int = field(default=256, metadata={"help": "sequences an optimizer step", "flag": "--batch-size"})
    micro_batch_size: int | None = field(
        default=None,
        metadata={"help": "sequences at once; default: as many as suit the device", "flag": "--micro-batch-size"},
    )
    max_length: int = field(default=128, metadata={"help": "tokens a sequence at most", "flag": "--max-length"})
    warmup: float = field(
        default=0.01, metadata={"help": "steps of learning-rate warm-up, or a share of the run", "flag": "--warmup"}
    )
    dropout: float = field(
        default=0.1, metadata={"help": "on hidden states and attention probabilities", "flag": "--dropout"}
    )
    output_bias: Literal["zero", "unigram"] = field(
        default="zero",
        metadata={
            "help": "where the MLM head's bias starts: zero as published, or the corpus's word frequencies",
            "flag": "--output-bias",
        },
    )
    clip_norm: float = field(
        default=1.0, metadata={"help": "longest gradient; a longer one is scaled down", "flag": "--clip-norm"}
    )
    seed: int = field(
        default=0, metadata={"help": "decides weights, pairs, masks, order and dropout", "flag": "--seed"}
    )
    precision: Literal["auto", "bf16", "fp32"] = field(
        default="auto", metadata={"help": "arithmetic; auto measures which is faster here", "flag": "--precision"}
    )
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata={"help": "where", "flag": "--device"})
    compile: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "encoder through torch.compile, with other dropout draws; auto: on GPUs",
            "flag": "--compile",
        },
    )
    parallel: Literal["ddp", "fsdp"] = field(
        default="ddp",
        metadata={
            "help": "on torchrun's processes: a copy each, or (fsdp) a share each and activations computed again",
            "flag": "--parallel",
        },
    )
    second_phase: SecondPhaseSettings = field(default_factory=SecondPhaseSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    masking: MaskingOptions = field(default_factory=MaskingOptions)
    examples: ExampleSettings = field(default_factory=ExampleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    eval: EvaluationSettings = field(default_factory=EvaluationSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def problems(self) -> list[str]:
        """What is wrong, `key: sentence` each; empty when the run can be made."""
        faults = []
        given = [name for name in ("steps", "minutes", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            found = "several are" if given else "none is"
            faults.append(f"steps, minutes, epochs: give exactly one of the three ({found} given)")
        faults += [
            f"{name}: {getattr(self, name)} is not a length of training; give a number above 0"
            for name in given
            if not 0 < getattr(self, name) < math.inf
        ]
        if self.batch_size < 1:
            faults.append(f"batch_size: {self.batch_size} is not a number from 1 up")
        if self.micro_batch_size is not None and not self.micro_batch_size >= 1:
            faults.append(f"micro_batch_size: {self.micro_batch_size} is not a number from 1 up")
        if not 0 <= self.dropout < 1:
            faults.append(f"dropout: {self.dropout} is not in [0, 1)")
        if not self.clip_norm > 0:
            faults.append(f"clip_norm: {self.clip_norm} is not above 0")
        if not 0 <= self.warmup < math.inf or (self.warmup >= 1 and self.warmup != int(self.warmup)):
            faults.append(f"warmup: {self.warmup} is neither a whole number of steps nor a share below 1")
        elif self.steps is not None and self.warmup > max(self.steps, 1):
            faults.append(f"warmup, steps: a warm-up of {self.warmup:.0f} steps is longer than the run of {self.steps}")
        if not 0 <= self.seed < 2**63:
            faults.append(f"seed: {self.seed} is not a number from 0 to 2^63 - 1")
        if self.parallel == "fsdp" and self.optimizer.name == "muon":
            faults.append(
                "parallel, optimizer.name: fsdp divides every matrix among the processes and muon needs it whole; use "
                "ddp or adamw"
            )
        if not 0 <= self.schedule.floor < 1:
            faults.append(f"schedule.floor: {self.schedule.floor} is not a share from 0 to below 1")
        return faults

    @property
    def paired(self) -> bool:
        """Whether examples are pairs of segments, with a label for the second head."""
        return self.objective != "mlm"

    @property
    def budget(self) -> Budget:
        """How long the run is."""
        return Budget(self.steps, self.epochs, self.minutes)

    @property
    def learning_rate_schedule(self) -> LearningRateSchedule:
        """Warm-up and decay, of AdamW's peak (Muon's follows with the same factor)."""
        return LearningRateSchedule(
            self.optimizer.learning_rate, self.warmup, self.budget, self.schedule.decay, self.schedule.floor
        )

    @property
    def phases(self) -> tuple[LengthPhase, ...]:
        """Sequence lengths over the run."""
        if self.second_phase.share == 0:
            return (LengthPhase(1.0, self.max_length),)
        share = self.second_phase.share
        return (LengthPhase(1 - share, self.max_length), LengthPhase(share, self.second_phase.max_length))


# what may change between the parts of one run: how long it is, and how it is watched and carried out (`data` is where
# the corpus lies; that it is the same one is checked by its sha256)
FREE_TO_CHANGE = (
    "data",
    "micro_batch_size",
    "steps",
    "minutes",
    "epochs",
    "device",
    "compile",
    "parallel",
    "checkpoint.",
    "eval.",
    "log.",
    "examples.workers",
)
