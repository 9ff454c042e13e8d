"""What a fine-tuned model folder says of its task: enough to read a file, encode it, predict and score it again.

It stands in config.json under `bertsmith_task`, beside the keys that transformers reads (id2label, problem_type), so
that labels, lengths and columns travel with the weights.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from bertsmith.errors import UserError
from bertsmith.tasks.conll import SCHEMES, SEPARATORS
from bertsmith.tasks.glue_files import GLUE_TASKS
from bertsmith.tasks.long_texts import LONG

TASK_KEY = "bertsmith_task"
# tasks for the user's own files; GLUE's names are those of glue_files.GLUE_TASKS
OWN_TASKS = ("classify", "pairs", "regress", "multilabel", "choice", "ner", "squad1", "squad2", "swag")
_ALLOWED = {
    "name": (*GLUE_TASKS, *OWN_TASKS),
    "long": LONG,
    "scheme": SCHEMES,
    "separator": SEPARATORS,
}
_COLUMNS = ("text_column", "text_pair_column", "label_column")


@dataclass(frozen=True)
class TaskSpec:
    """A task as a model has learnt it."""

    name: str
    """`cola`, `classify`, `squad2`, …"""
    max_length: int
    """Tokens of a sequence, [CLS] and [SEP] among them."""
    labels: tuple[str, ...] = ()
    """Class names in the order of the outputs (ner: tags in IOB2); empty where outputs have no names."""
    long: str = "cut"
    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str | None = None
    label_separator: str = ";"
    encoding: str = "utf-8"
    stride: int = 128
    max_question: int = 64
    n_best: int = 20
    max_answer: int = 30
    null_threshold: float | None = None
    """squad2: no answer is given where its score exceeds the best answer's by more than this; None: not tuned yet."""
    scheme: str = "IOB2"
    """ner: how the training file wrote its tags."""
    token_column: int = 0
    tag_column: int = -1
    separator: str = "auto"
    strip_digit: bool = False

    @property
    def two_texts(self) -> bool:
        """Of tasks on texts: whether an example is two of them (MRPC, `pairs`, a named second column)."""
        if self.name in GLUE_TASKS:
            return GLUE_TASKS[self.name].pair is not None
        return self.name == "pairs" or self.text_pair_column is not None

    def as_dict(self) -> dict[str, Any]:
        """For config.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any, place: str) -> "TaskSpec":
        """What `as_dict` gave, read back from JSON; `place` names the file in messages.

        Raises UserError for unknown keys and values that are not allowed: another version's folder, or a damaged one.
        """
        known = {entry.name: entry for entry in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= set(known) or not {"name", "max_length"} <= set(values):
            raise UserError(f"{place}: {TASK_KEY} is not what this version of bertsmith writes; fine-tune again")
        default = cls("", 1)
        for key, value in values.items():
            if key == "labels":
                good = isinstance(value, list) and all(isinstance(label, str) for label in value)
                good = good and len(set(value)) == len(value)
            elif key in _COLUMNS:
                good = value is None or isinstance(value, str)
            elif key == "null_threshold":
                good = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            else:  # type(True) is not int
                good = type(value) is type(getattr(default, key)) and value in _ALLOWED.get(key, (value,))
            if not good:
                raise UserError(f"{place}: {TASK_KEY}.{key} = {value!r} is not what bertsmith writes; fine-tune again")
        return cls(**values | {"labels": tuple(values.get("labels", ()))})

    def with_columns(self, **columns: str | None) -> "TaskSpec":
        """The same with other columns or encoding to read (None: as it is).

        Raises UserError for a column that the task's files do not have.
        """
        changes: dict[str, Any] = {name: value for name, value in columns.items() if value is not None}
        fixed = self.name in GLUE_TASKS or self.name.startswith("squad")
        paired = not fixed and self.name not in ("ner", "choice", "swag")
        for name in _COLUMNS:
            if name in changes and (fixed or (name == "text_pair_column" and not paired)):
                what = "columns whose names are fixed" if fixed else "no second text"
                raise UserError(f"--{name.replace('_', '-')}: the files of {self.name} have {what}; leave it out")
        return replace(self, **changes)
