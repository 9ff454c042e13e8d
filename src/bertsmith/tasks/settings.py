"""Everything a fine-tuning can be told, in one tree that flags fill and config.toml keeps.

Defaults are the paper's (Devlin et al. 2018, appendix A.3): 3 epochs of 32, 10 % warm-up, linear decay, dropout 0.1. No
torch here: `--help` reads it.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from bertsmith.training.settings import CheckpointSettings, OptimizerSettings

# appendix A.3: "the following range of possible values to work well across all tasks"
PAPER_GRID = {"batch_size": (16, 32), "learning_rate": (5e-5, 3e-5, 2e-5), "epochs": (2.0, 3.0, 4.0)}


@dataclass(frozen=True)
class FinetuneCheckpointSettings(CheckpointSettings):
    """When the complete training state is written, so that a killed run goes on."""

    every: int = field(default=0, metadata={"help": "steps between checkpoints; 0: by --checkpoint.minutes only"})
    minutes: float = field(default=5.0, metadata={"help": "minutes between checkpoints; 0: none but when interrupted"})
    keep: int = field(default=1, metadata={"help": "how many of the newest stay on disk while a run lasts"})


@dataclass(frozen=True)
class DevSettings:
    """Scores on the dev file while training."""

    every: int = field(default=0, metadata={"help": "steps between evaluations; 0: after each epoch"})

    def problems(self) -> list[str]:
        """See FinetuneSettings.problems."""
        return [] if self.every >= 0 else [f"every: {self.every} is negative"]


@dataclass(frozen=True)
class FinetuneLogSettings:
    """What is shown and kept of the run."""

    every: int | None = field(
        default=None, metadata={"help": "steps between log lines; default 1 under 200 steps, else 10"}
    )

    def problems(self) -> list[str]:
        """See FinetuneSettings.problems."""
        return [] if self.every is None or self.every >= 1 else [f"every: {self.every} is not a number from 1 up"]


@dataclass(frozen=True)
class SquadSettings:
    """Windows and answers (squad1, squad2)."""

    stride: int = field(default=128, metadata={"help": "tokens from one window's start to the next"})
    max_question: int = field(default=64, metadata={"help": "tokens of a question; what is longer is cut and counted"})
    n_best: int = field(default=20, metadata={"help": "answers kept for each question"})
    max_answer: int = field(default=30, metadata={"help": "tokens of an answer at most"})

    def problems(self) -> list[str]:
        """See FinetuneSettings.problems."""
        values = {name: getattr(self, name) for name in ("stride", "max_question", "n_best", "max_answer")}
        return [f"{name}: {value} is not a number from 1 up" for name, value in values.items() if value < 1]


@dataclass(frozen=True)
class NerSettings:
    """How CoNLL files are laid out (ner)."""

    token_column: int = field(default=0, metadata={"help": "column of the token, from 0"})
    tag_column: int = field(default=-1, metadata={"help": "column of the tag; -1: the last"})
    separator: Literal["auto", "tab", "blank"] = field(
        default="auto", metadata={"help": "between columns; auto: a tab where a line has one, else blanks"}
    )
    strip_digit: bool = field(default=False, metadata={"help": "drop a digit after a one-character token (Weibo NER)"})


@dataclass(frozen=True)
class FinetuneSettings:
    """A fine-tuning. Sections are dataclasses; every key has a flag."""

    task: str = field(metadata={"help": "what to learn", "flag": "TASK"})
    model: str = field(metadata={"help": "model folder to start from", "flag": "--model"})
    data: str | None = field(default=None, metadata={"help": "folder with train, dev and test files", "flag": "--data"})
    train: str | None = field(default=None, metadata={"help": "training file", "flag": "--train"})
    dev: str | None = field(default=None, metadata={"help": "file to score on and to choose by", "flag": "--dev"})
    dev_share: float | None = field(
        default=None,
        metadata={
            "help": "instead of --dev: this share of the training file's examples is scored on and not learnt from; "
            "drawn at random, the same for every seed, equal texts on one side",
            "flag": "--dev-share",
        },
    )
    test: str | None = field(
        default=None, metadata={"help": "file to predict at the end (scored where it is labelled)", "flag": "--test"}
    )
    epochs: float = field(default=3.0, metadata={"help": "passes over the training file", "flag": "--epochs"})
    batch_size: int = field(default=32, metadata={"help": "examples an optimizer step", "flag": "--batch-size"})
    learning_rate: float = field(
        default=3e-5,
        metadata={
            "help": "peak learning rate (paper: 2e-5 … 5e-5; small models and small files: 1e-4 … 3e-4)",
            "flag": "--learning-rate",
        },
    )
    warmup: float = field(
        default=0.1, metadata={"help": "steps of learning-rate warm-up, or a share of the run", "flag": "--warmup"}
    )
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "tokens a sequence at most (default 128, squad 384, or the model's if that is less)",
            "flag": "--max-length",
        },
    )
    long: Literal["cut", "window"] = field(
        default="cut",
        metadata={"help": "texts past --max-length: cut and counted, or overlapping windows pooled", "flag": "--long"},
    )
    class_weights: Literal["none", "balanced"] = field(
        default="none",
        metadata={"help": "balanced: a class counts the more the rarer it is", "flag": "--class-weights"},
    )
    seed: int = field(default=0, metadata={"help": "decides the new layer, order and dropout", "flag": "--seed"})
    seeds: int = field(
        default=1, metadata={"help": "runs with seed, seed + 1, …; mean and spread are reported", "flag": "--seeds"}
    )
    grid: Literal["none", "paper"] = field(
        default="none",
        metadata={"help": "paper: batch 16, 32 × rate 5e-5, 3e-5, 2e-5 × epochs 2, 3, 4; best kept", "flag": "--grid"},
    )
    keep: Literal["best", "last"] = field(
        default="best", metadata={"help": "weights kept of a run: best on dev, or the last", "flag": "--keep"}
    )
    train_rows: int | None = field(
        default=None, metadata={"help": "train on this many rows, drawn at random", "flag": "--train-rows"}
    )
    random_init: bool = field(
        default=False,
        metadata={"help": "true: the model's shape but random weights (what is pre-training worth?)"},
    )
    text_column: str | None = field(
        default=None, metadata={"help": "column of the text (default text or sentence)", "flag": "--text-column"}
    )
    text_pair_column: str | None = field(
        default=None,
        metadata={"help": "column of the second text (default sentence2)", "flag": "--text-pair-column"},
    )
    label_column: str | None = field(
        default=None, metadata={"help": "column of the label (default label, labels)", "flag": "--label-column"}
    )
    label_separator: str = field(
        default=";", metadata={"help": "between the labels of a cell (multilabel)", "flag": "--label-separator"}
    )
    encoding: str = field(
        default="utf-8", metadata={"help": "of text files; a byte-order mark wins", "flag": "--encoding"}
    )
    dropout: float | None = field(
        default=None, metadata={"help": "on hidden states and attention; default: the model's", "flag": "--dropout"}
    )
    weight_decay: float = field(
        default=0.01, metadata={"help": "decoupled, not on biases and norms", "flag": "--weight-decay"}
    )
    layer_decay: float = field(
        default=1.0,
        metadata={"help": "learning rate of each layer as a share of the one above", "flag": "--layer-decay"},
    )
    bias_correction: bool = field(
        default=True,
        metadata={"help": "false: as in the reference's optimizer; small sets then fail more often"},
    )
    clip_norm: float = field(
        default=1.0, metadata={"help": "longest gradient; a longer one is scaled down", "flag": "--clip-norm"}
    )
    micro_tokens: int | None = field(
        default=None,
        metadata={"help": "tokens at once; default: as many as suit the device", "flag": "--micro-tokens"},
    )
    precision: Literal["auto", "bf16", "fp32"] = field(
        default="auto", metadata={"help": "arithmetic; auto measures which is faster here", "flag": "--precision"}
    )
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata={"help": "where", "flag": "--device"})
    squad: SquadSettings = field(default_factory=SquadSettings)
    ner: NerSettings = field(default_factory=NerSettings)
    eval: DevSettings = field(default_factory=DevSettings)
    checkpoint: FinetuneCheckpointSettings = field(default_factory=FinetuneCheckpointSettings)
    log: FinetuneLogSettings = field(default_factory=FinetuneLogSettings)

    def problems(self) -> list[str]:
        """What is wrong, `key: sentence` each; empty when the run can be made."""
        faults = []
        if (self.data is None) == (self.train is None):
            faults.append("data, train: give either --data FOLDER or --train FILE with --dev FILE")
        elif self.data is None and self.dev is None and self.dev_share is None:
            faults.append(
                "dev, dev_share: a file to score on is needed beside --train: name one with --dev, or hold out a share "
                "of the training file with --dev-share 0.1"
            )
        if self.dev_share is not None and not 0 < self.dev_share < 1:
            percent = self.dev_share if 1 < self.dev_share < 100 else 10
            faults.append(
                f"dev_share: {self.dev_share} is not a share above 0 and below 1; {percent:g} % is --dev-share "
                f"{percent / 100:g}"
            )
        if self.dev_share is not None and self.dev is not None:
            faults.append("dev_share: means nothing beside --dev, which names the file to score on; give one of them")
        if self.grid != "none":
            plain = {each.name: each.default for each in fields(self)}
            faults += [
                f"{name}: --grid {self.grid} tries values of its own; leave {name} out, or the grid"
                for name in ("batch_size", "learning_rate", "epochs")
                if getattr(self, name) != plain[name]
            ]
        faults += [
            f"{name}: {value} is not a number from 1 up"
            for name, value in (
                ("batch_size", self.batch_size),
                ("seeds", self.seeds),
                ("max_length", self.max_length),
                ("train_rows", self.train_rows),
                ("micro_tokens", self.micro_tokens),
            )
            if value is not None and value < 1
        ]
        faults += [
            f"{name}: {value} is not a number above 0"
            for name, value in (
                ("epochs", self.epochs),
                ("learning_rate", self.learning_rate),
                ("clip_norm", self.clip_norm),
            )
            if not (value > 0 and math.isfinite(value))
        ]
        if not 0 <= self.warmup < math.inf or (self.warmup >= 1 and self.warmup != int(self.warmup)):
            faults.append(f"warmup: {self.warmup} is neither a whole number of steps nor a share below 1")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            faults.append(f"dropout: {self.dropout} is not in [0, 1)")
        if not 0 < self.layer_decay <= 1:
            faults.append(f"layer_decay: {self.layer_decay} is not a share above 0 and up to 1")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            faults.append(f"weight_decay: {self.weight_decay} is not a number from 0 up")
        if not 0 <= self.seed < 2**62:
            faults.append(f"seed: {self.seed} is not a number from 0 to 2^62 - 1")
        if not self.label_separator:
            faults.append("label_separator: empty; give the character between labels")
        return faults

    def optimizer(self, learning_rate: float) -> OptimizerSettings:
        """AdamW as the paper fine-tunes with."""
        return OptimizerSettings(
            learning_rate=learning_rate, weight_decay=self.weight_decay, bias_correction=self.bias_correction
        )


# what may change between the parts of one run: where files lie (not what is in them), how many runs there are to be
FREE_TO_CHANGE = ("data", "train", "dev", "test", "seeds", "device", "checkpoint.", "log.")
