"""Task names → tasks: the GLUE tasks, SQuAD, SWAG, NER, and the kinds of the user's own files."""

from bertsmith.errors import UserError
from bertsmith.options import did_you_mean
from bertsmith.tasks.choice import ChoiceTask
from bertsmith.tasks.classification import ClassifyTask, MultilabelTask, RegressTask
from bertsmith.tasks.glue_files import GLUE_TASKS, glue_name
from bertsmith.tasks.ner import TaggingTask
from bertsmith.tasks.spec import OWN_TASKS, TaskSpec
from bertsmith.tasks.squad import SpanTask
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer import BertTokenizer

_KINDS: dict[str, type[Task]] = {
    "classify": ClassifyTask,
    "pairs": ClassifyTask,
    "regress": RegressTask,
    "multilabel": MultilabelTask,
    "choice": ChoiceTask,
    "swag": ChoiceTask,
    "ner": TaggingTask,
    "squad1": SpanTask,
    "squad2": SpanTask,
}


def task_names() -> list[str]:
    """Every name that `finetune` takes."""
    return [*(name for name in GLUE_TASKS if name != "ax"), *OWN_TASKS]


def task_name(given: str) -> str:
    """The name as bertsmith spells it. Raises UserError for one that is not known."""
    lowered = given.lower()
    if lowered in _KINDS:
        return lowered
    try:
        name = glue_name(given)
    except UserError:
        known = task_names()
        hint = did_you_mean(lowered, known)
        raise UserError(f"task: {given!r} is not known{hint}; use one of {', '.join(known)}") from None
    if name == "ax":
        raise UserError("task: AX has no training file; it is predicted with a model fine-tuned on mnli")
    return name


def make_task(spec: TaskSpec, tokenizer: BertTokenizer) -> Task:
    """The task a spec describes."""
    if spec.name in GLUE_TASKS:
        return (ClassifyTask if GLUE_TASKS[spec.name].labels else RegressTask)(spec, tokenizer)
    return _KINDS[task_name(spec.name)](spec, tokenizer)
