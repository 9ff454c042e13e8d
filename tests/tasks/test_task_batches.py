"""Packing: nothing lost, nothing padded, examples whole; and any split into micro-batches is the one big batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.model.task_model import BertForTask
from bertsmith.tasks.batches import (
    LEAST_A_THREAD,
    group_by_tokens,
    group_for_threads,
    pack_examples,
    split_by_tokens,
)
from bertsmith.tasks.examples import EncodedSequence, EncodingReport
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.spec import TaskSpec
from bertsmith.tasks.task import Task, to_weights
from bertsmith.text.tokenizer import BertTokenizer
from made_tasks import make_config

CPU = torch.device("cpu")


def sequence(length: int, first: int = 5, positions: Sequence[int] = (0,), targets: Sequence[int] = ()) -> Any:
    return EncodedSequence(
        np.arange(first, first + length, dtype=np.int32),
        min(length, 3),
        np.array(positions, dtype=np.int32),
        np.array(targets, dtype=np.int64),
    )


def test_packing() -> None:
    examples = [[sequence(4, 10, (0, 2), (7,))], [sequence(2, 20), sequence(5, 30, (1, 4), (8, 9))]]
    batch = pack_examples(examples, CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 20, 21, 30, 31, 32, 33, 34]
    assert batch.segment_ids.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4]
    assert batch.sequence_starts.tolist() == [0, 4, 6, 11]
    assert batch.rows.tolist() == [0, 2, 4, 7, 10]
    assert batch.row_counts == [2, 1, 2]
    assert batch.sequence_examples.tolist() == [0, 1, 1]
    assert batch.examples == 2
    assert batch.targets.tolist() == [7, 8, 9]
    assert batch.squared_lengths == 16 + 4 + 25


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_groups_hold_every_item_once(lengths: list[int], most: int) -> None:
    groups = list(group_by_tokens(lengths, most))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    flat = [lengths[index] for group in groups for index in group]
    assert flat == sorted(flat, reverse=True), "like lengths side by side"
    for number, group in enumerate(groups):
        tokens = sum(lengths[index] for index in group)
        assert tokens <= most or len(group) == 1
        if number + 1 < len(groups):
            assert tokens + lengths[groups[number + 1][0]] > most, "no group is smaller than it need be"


def test_an_example_is_never_split() -> None:
    examples = [[sequence(6), sequence(6)], [sequence(3)], [sequence(20)]]
    groups = list(split_by_tokens(examples, 8))
    assert [[len(example) for example in group] for group in groups] == [[1], [2], [1]]


# --- accumulation


def texts(task: str) -> list[list[EncodedSequence]]:
    """Examples with uneven numbers of targets, windows and choices."""
    random = np.random.default_rng(2)
    made = []
    for number in range(9):
        counts = {"choice": 2 + number % 3, "windows": 1 + number % 3, "squad1": 1 + number % 2}.get(task, 1)
        example = []
        for part in range(counts):
            length = int(random.integers(3, 25))
            positions = {"ner": np.arange(1, 1 + number % (length - 1)), "squad1": np.arange(length)}.get(task, [0])
            targets: Any = {"ner": random.integers(3, size=len(positions)), "squad1": random.integers(length, size=2)}
            targets = targets.get(task, np.array([number % 2]) if part == 0 else np.zeros(0, dtype=np.int64))
            if task == "regress":
                targets = targets.astype(np.float32)
            if task == "multilabel":
                targets = random.integers(2, size=3).astype(np.float32)
            tokens = random.integers(5, 100, length).astype(np.int32)
            example.append(EncodedSequence(tokens, 2, np.array(positions, dtype=np.int32), targets))
        made.append(example)
    return made


def gradients(task: Task, model: BertForTask, examples: Any, most_tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
    """As the loop computes them (finetune.py)."""
    model.zero_grad()
    batches = [pack_examples(part, CPU) for part in split_by_tokens(examples, most_tokens)]
    assert most_tokens > 500 or len(batches) > 1
    scale = 1 / sum(task.weight(batch) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = task.loss(model(*batch.inputs()), batch) * scale
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


WEIGHABLE = ("classify", "windows", "multilabel", "ner")


@pytest.mark.parametrize(
    ("kind", "weighted"),
    [
        *((kind, False) for kind in (*WEIGHABLE, "regress", "choice", "squad1")),
        *((kind, True) for kind in WEIGHABLE),
    ],
)
def test_accumulation_is_the_big_batch(tokenizer: BertTokenizer, kind: str, weighted: bool) -> None:
    labels = {"ner": ("O", "B-x", "I-x"), "classify": ("a", "b"), "windows": ("a", "b"), "multilabel": ("a", "b", "c")}
    name = "classify" if kind == "windows" else kind
    task = make_task(TaskSpec(name, 32, labels.get(kind, ()), stride=8), tokenizer)
    model = BertForTask(make_config(), task.head, task.outputs).initialize(4)
    if weighted:
        task.weights = torch.tensor([0.3, 2.0, 1.1][: task.outputs])
    examples = texts(kind)
    loss, expected = gradients(task, model, examples, 10_000)
    assert sum(float(gradient.abs().sum()) for gradient in expected.values()) > 0.1
    for most_tokens in (1, 30, 90):
        found, parts = gradients(task, model, examples, most_tokens)
        assert found == pytest.approx(loss, abs=1e-6)
        for key, gradient in expected.items():
            torch.testing.assert_close(parts[key], gradient, rtol=1e-5, atol=1e-6, msg=key)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_balanced_weights(classes: list[int]) -> None:
    """Every class that occurs has the same share of the loss, and the weights of all examples sum to their number."""
    counts = np.bincount(classes, minlength=4)
    weights = to_weights(counts).numpy()
    assert (weights * counts).sum() == pytest.approx(len(classes), rel=1e-5)
    present = counts > 0
    np.testing.assert_allclose((weights * counts)[present], len(classes) / present.sum(), rtol=1e-5)
    assert not weights[~present].any()


def test_windows_of_any_kind_of_target(tokenizer: BertTokenizer) -> None:
    """The windows of a long text carry one target, of the type the loss takes."""
    from bertsmith.tasks.examples import TextExample

    text = " ".join(["cat"] * 60)
    for name, label in (("regress", 2.5), ("multilabel", ("a",)), ("classify", "a")):
        labels = () if name == "regress" else ("a", "b")
        task = make_task(TaskSpec(name, 16, labels, long="window"), tokenizer)
        model = BertForTask(make_config(), task.head, task.outputs).initialize(4)
        examples = [TextExample("f:1", "0", text, None, label), TextExample("f:2", "1", "cat", None, label)]
        batch = pack_examples(task.encode(examples, EncodingReport(), True), CPU)
        assert len(batch.row_counts) > 3
        assert batch.examples == 2
        loss = task.loss(model(*batch.inputs()), batch)
        assert loss.dtype == torch.float32
        loss.backward()


@given(
    lengths=st.lists(st.integers(1, 90), max_size=200),
    most=st.integers(60, 3000),
    threads=st.integers(1, 5),
)
def test_groups_for_threads_hold_every_item_once_and_no_more_than_asked(
    lengths: list[int], most: int, threads: int
) -> None:
    groups = list(group_for_threads(lengths, most, threads))
    numbers = [number for group in groups for number in group]
    assert sorted(numbers) == list(range(len(lengths)))
    ordered = [lengths[number] for number in numbers]
    assert ordered == sorted(ordered, reverse=True)
    tokens = [sum(lengths[number] for number in group) for group in groups]
    assert all(size <= most or len(group) == 1 for size, group in zip(tokens, groups, strict=True))
    if sum(lengths) < threads * LEAST_A_THREAD:
        assert groups == list(group_by_tokens(lengths, most))
