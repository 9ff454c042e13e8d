"""Dropout by a hash: as often as asked, a function of the step's key, without patterns one could see."""

import itertools
import math

import pytest
import torch

from bertsmith.model.dropout import HashedMasks

CPU = torch.device("cpu")
SHAPE = (1024, 768)


def dropped(masks: HashedMasks, key: int, probability: float = 0.1) -> torch.Tensor:
    """Deviations from the expected share, by element, flat."""
    return (masks.draw(key, probability, SHAPE, torch.empty(0)) == 0).double().flatten() - probability


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.5])
def test_the_share_that_is_dropped_and_what_is_kept(probability: float) -> None:
    mask = HashedMasks.of((7, 1), 3, CPU).draw(2, probability, SHAPE, torch.empty(0))
    assert mask.shape == SHAPE
    assert sorted(mask.unique().tolist()) == [0.0, pytest.approx(1 / (1 - probability))]
    share = float((mask == 0).double().mean())
    assert abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / mask.numel())
    assert HashedMasks.of((7, 1), 3, CPU).draw(2, probability, SHAPE, torch.empty(0, dtype=torch.bfloat16)).dtype is (
        torch.bfloat16
    )


def test_masks_are_a_function_of_the_step_s_key_and_of_their_number() -> None:
    masks = HashedMasks.of((7, 1), 8, CPU)
    keys = [masks.next_key() for _ in range(3)]
    assert keys == [1, 2, 3]
    again = HashedMasks.of((7, 1), 8, CPU)
    part = again.part(2), again.part(1)
    assert torch.equal(dropped(masks, 2), dropped(part[0], 2))
    assert torch.equal(dropped(masks, 3), dropped(part[1], 1))
    assert masks.host_seed(3) == part[1].host_seed(1)
    assert not torch.equal(dropped(masks, 2), dropped(masks, 3))
    assert not torch.equal(dropped(masks, 2), dropped(HashedMasks.of((7, 2), 8, CPU), 2))


def test_neighbours_rows_columns_and_masks_are_independent() -> None:
    """Correlations in standard deviations; 60 of them, so that 5 is far out."""
    masks, variance, count = HashedMasks.of((3, 1), 4, CPU), 0.09, math.prod(SHAPE)
    found = [dropped(masks, key) for key in (1, 2, 3)]
    scores = [float((a * b).mean()) / variance * math.sqrt(count) for a, b in itertools.pairwise(found)]
    for one in found:
        for lag in (1, 2, 4, 16, 32, 64, 256, 512, 768, 1024, 1536, 3072):
            scores.append(float((one[lag:] * one[:-lag]).mean()) / variance * math.sqrt(count))
        for axis, size in ((0, SHAPE[0]), (1, SHAPE[1])):
            squares = one.view(SHAPE).sum(axis).square() / (size * variance)
            scores.append(float((squares.sum() - len(squares)) / math.sqrt(2 * len(squares))))
    assert max(map(abs, scores)) < 5
