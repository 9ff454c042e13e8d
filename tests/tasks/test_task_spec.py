"""What a model folder says of its task: there and back, hostile values refused; names of tasks; columns that differ."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from bertsmith.errors import UserError
from bertsmith.tasks.glue_files import GLUE_TASKS
from bertsmith.tasks.registry import make_task, task_name, task_names
from bertsmith.tasks.spec import OWN_TASKS, TaskSpec
from bertsmith.text.tokenizer import BertTokenizer

WHOLE = TaskSpec(
    name="ner", max_length=99, labels=("O", "B-é", "I-é"), long="window", text_column="t", text_pair_column="u",
    label_column="v", label_separator="|", encoding="latin-1", stride=7, max_question=5, n_best=3, max_answer=4,
    null_threshold=-1.5, scheme="BIOES", token_column=1, tag_column=3, separator="tab", strip_digit=True,
)  # fmt: skip


def test_there_and_back() -> None:
    plain = TaskSpec("classify", 128, ("b", "a"))
    for entry in fields(TaskSpec):
        assert getattr(WHOLE, entry.name) != getattr(plain, entry.name), f"{entry.name} is not tried"
    for spec in (WHOLE, plain):
        assert TaskSpec.from_dict(json.loads(json.dumps(spec.as_dict())), "x") == spec
    assert TaskSpec.from_dict({"name": "cola", "max_length": 5}, "x") == TaskSpec("cola", 5)


@pytest.mark.parametrize("key", [entry.name for entry in fields(TaskSpec)])
@pytest.mark.parametrize("value", [{"a": 1}, [[1]], 1.5, True, 10**400, "\0", None])
def test_values_of_any_kind(key: str, value: Any) -> None:
    """Taken or refused in a sentence that names file and key: never a fault of ours."""
    values = {"name": "classify", "max_length": 32} | {key: value}
    message = ""
    try:
        spec = TaskSpec.from_dict(values, "here/config.json")
    except UserError as error:
        message = str(error)
    if message:
        assert message.startswith(f"here/config.json: bertsmith_task.{key} = ")
        assert message.endswith("fine-tune again")
    else:
        kept = getattr(spec, key)
        assert kept == value
        assert isinstance(kept, type(value))
        assert key in ("text_column", "text_pair_column", "label_column", "label_separator", "encoding",
                       "null_threshold", "strip_digit") or value == 10**400  # fmt: skip


def test_names() -> None:
    assert [task_name(name) for name in ("MRPC", "sst2", "SST-2", "sts_b", "NER", "squad2")] == [
        "mrpc", "sst-2", "sst-2", "sts-b", "ner", "squad2"
    ]  # fmt: skip
    assert set(task_names()) == (set(GLUE_TASKS) | set(OWN_TASKS)) - {"ax"}
    with pytest.raises(UserError, match="AX has no training file; it is predicted with a model fine-tuned on mnli"):
        task_name("AX")


def test_unknown_names() -> None:
    with pytest.raises(UserError, match=r"'clasify' is not known; did you mean classify\?; use one of cola, .*squad2"):
        task_name("clasify")


def test_every_task_can_be_made(tokenizer: BertTokenizer) -> None:
    heads = {}
    for name in (*GLUE_TASKS, *OWN_TASKS):
        labels = () if name in ("sts-b", "regress") else ("a", "b")
        task = make_task(TaskSpec(name, 32, labels, stride=8), tokenizer)
        heads.setdefault(task.head, set()).add(name)
        assert task.outputs in (1, 2)
    assert heads["span"] == {"squad1", "squad2"}
    assert heads["choice"] == {"choice", "swag"}
    assert heads["token"] == {"ner"}


def test_which_tasks_take_two_texts() -> None:
    names = ["mrpc", "sts-b", "qqp", "mnli", "qnli", "rte", "wnli", "ax", "pairs"]
    assert [name for name in (*GLUE_TASKS, *OWN_TASKS) if TaskSpec(name, 32).two_texts] == names
    assert all(TaskSpec(name, 32, text_pair_column="p").two_texts for name in ("classify", "regress", "multilabel"))


def test_columns() -> None:
    spec = TaskSpec("classify", 32)
    assert spec.with_columns(text_column="t", text_pair_column="p", label_column=None, encoding="cp1252") == replace(
        spec, text_column="t", text_pair_column="p", encoding="cp1252"
    )
    assert TaskSpec("mnli", 32).with_columns(text_column=None, encoding="utf-16").encoding == "utf-16"
    for name, column, message in (
        ("mnli", "text_column", "--text-column: the files of mnli have columns whose names are fixed; leave it out"),
        ("squad2", "label_column", "--label-column: the files of squad2 have columns whose names are fixed"),
        ("ner", "text_pair_column", "--text-pair-column: the files of ner have no second text"),
        ("choice", "text_pair_column", "--text-pair-column: the files of choice have no second text"),
    ):
        with pytest.raises(UserError, match=message):
            TaskSpec(name, 32).with_columns(**{column: "x"})
