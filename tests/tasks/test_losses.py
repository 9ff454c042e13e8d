"""Losses by hand, where it is easy to be wrong: sums not means, broadcasting, windows pooled, ragged choices."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bertsmith.tasks import losses
from bertsmith.tasks.batches import PackedBatch, pack_examples
from bertsmith.tasks.examples import EncodedSequence
from bertsmith.tasks.long_texts import pool_windows


def batch_of(*examples: tuple[int, list[float]], whole: bool = False) -> PackedBatch:
    """Examples of so many sequences, with the targets given; a position a sequence, or all where `whole`."""
    made = []
    for count, targets in examples:
        kind = np.float32 if any(isinstance(target, float) for target in targets) else np.int64
        parts = [np.array(targets if part == 0 else [], dtype=kind) for part in range(count)]
        made.append(
            [
                EncodedSequence(np.arange(3, dtype=np.int32), 3, np.arange(3 if whole else 1, dtype=np.int32), part)
                for part in parts
            ]
        )
    return pack_examples(made, torch.device("cpu"))


def test_regression_is_per_example() -> None:
    """(p - y)² of each pair and nothing else: hf#11583's broadcasting gives the mean over all pairs."""
    predicted = torch.tensor([[0.5], [-1.0], [7.0], [5.0]])
    batch = batch_of((1, [0.0]), (1, [1.0]), (1, [2.0]), (1, [5.0]))
    assert float(losses.number_loss(predicted, batch)) == 0.25 + 4 + 25 + 0


def test_windows_are_averaged_before_the_loss() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 4.0], [2.0, 2.0], [3.0, 1.0]])
    batch = batch_of((3, [1]), (1, [0]))
    pooled = losses.pool_windows(logits, batch)
    assert pooled.tolist() == [[1.0, 2.0], [3.0, 1.0]]
    np.testing.assert_array_equal(pooled[0], pool_windows(logits[:3].numpy()), "as in prediction")
    expected = -math.log(math.e / (1 + math.e)) - math.log(math.e**2 / (1 + math.e**2))
    assert float(losses.class_loss(logits, batch, None)) == pytest.approx(expected, abs=1e-6)
    weights = torch.tensor([0.5, 3.0])
    weighted = losses.class_loss(logits, batch, weights)
    assert float(weighted) == pytest.approx(
        3 * -math.log(math.e / (1 + math.e)) - 0.5 * math.log(math.e**2 / (1 + math.e**2)), abs=1e-6
    )


def test_windows_side_by_side_with_single_sequences() -> None:
    """As many sequences as examples does not mean that each example has one."""
    logits = torch.tensor([[1.0], [3.0], [5.0]])
    batch = batch_of((2, [0.0]), (1, [1.0]))
    assert losses.pool_windows(logits, batch).tolist() == [[2.0], [5.0]]


def test_labels_are_judged_one_by_one() -> None:
    logits = torch.tensor([[2.0, -1.0], [0.0, 0.5]])
    batch = batch_of((1, [1.0, 0.0]), (1, [1.0, 1.0]))
    by_hand = [
        -math.log(1 / (1 + math.exp(-score))) if target else -math.log(1 - 1 / (1 + math.exp(-score)))
        for score, target in ((2.0, 1), (-1.0, 0), (0.0, 1), (0.5, 1))
    ]
    assert float(losses.labels_loss(logits, batch, None)) == pytest.approx(sum(by_hand) / 2, abs=1e-6)
    weighted = losses.labels_loss(logits, batch, torch.tensor([4.0, 1.0]))
    assert float(weighted) == pytest.approx((4 * by_hand[0] + by_hand[1] + 4 * by_hand[2] + by_hand[3]) / 2, abs=1e-5)


def test_choices_of_different_number() -> None:
    scores = torch.tensor([[1.0], [2.0], [0.0], [3.0], [1.0]], requires_grad=True)
    batch = batch_of((2, [1]), (3, [0]))
    table = losses.choice_table(scores[:, 0], batch)
    assert table.tolist() == [[1.0, 2.0, -math.inf], [0.0, 3.0, 1.0]]
    loss = losses.choice_loss(scores, batch)
    expected = -F.log_softmax(torch.tensor([1.0, 2.0]), 0)[1] - F.log_softmax(torch.tensor([0.0, 3.0, 1.0]), 0)[0]
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    loss.backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_tags_are_summed_over_words() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    batch = batch_of((1, [0, 0, 1]), whole=True)
    expected = F.cross_entropy(logits, torch.tensor([0, 0, 1]), reduction="sum")
    assert torch.equal(losses.tag_loss(logits, batch, None), expected)
    weighted = losses.tag_loss(logits, batch, torch.tensor([1.0, 5.0]))
    assert weighted.item() == pytest.approx(
        F.cross_entropy(logits, torch.tensor([0, 0, 1]), torch.tensor([1.0, 5.0]), reduction="sum").item()
    )


def test_spans_are_the_mean_of_start_and_end() -> None:
    logits = torch.arange(12, dtype=torch.float32).view(6, 2) % 5
    examples = [
        [EncodedSequence(np.arange(n, dtype=np.int32), n, np.arange(n, dtype=np.int32), np.array(target))]
        for n, target in ((2, [0, 1]), (4, [3, 0]))
    ]
    batch = pack_examples(examples, torch.device("cpu"))
    expected = 0.0
    for rows, (start, end) in ((logits[:2], (0, 1)), (logits[2:], (3, 0))):
        expected -= (F.log_softmax(rows[:, 0], 0)[start] + F.log_softmax(rows[:, 1], 0)[end]).item() / 2
    assert losses.span_loss(logits, batch).item() == pytest.approx(expected, abs=1e-6)
