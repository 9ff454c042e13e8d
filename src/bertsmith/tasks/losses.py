"""Loss of a packed batch by kind of head, as a sum: the caller divides by the targets of the whole optimizer step.

So accumulation over micro-batches is the big batch exactly. Scores come as (R, outputs) float32, one row for each
position that the head looked at; what an example's several windows say is averaged first, in training as in prediction.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.tasks.batches import PackedBatch


def pool_windows(logits: Tensor, batch: PackedBatch) -> Tensor:
    """(N, outputs), a row a sequence → (E, outputs): the mean over each example's windows."""
    if len(logits) == batch.examples:
        return logits
    totals = logits.new_zeros(batch.examples, logits.shape[1]).index_add(0, batch.sequence_examples, logits)
    counts = torch.bincount(batch.sequence_examples, minlength=batch.examples)
    return totals / counts[:, None]


def _beside(weights: Tensor | None, logits: Tensor) -> Tensor | None:
    return None if weights is None else weights.to(logits.device)


def class_loss(logits: Tensor, batch: PackedBatch, weights: Tensor | None) -> Tensor:
    """Σ weight of the class · cross-entropy; `batch.targets` (E,)."""
    return F.cross_entropy(pool_windows(logits, batch), batch.targets, _beside(weights, logits), reduction="sum")


def number_loss(logits: Tensor, batch: PackedBatch) -> Tensor:
    """Σ (p - y)²; one output an example, `batch.targets` (E,): flat on both sides, so that nothing is broadcast."""
    return F.mse_loss(pool_windows(logits, batch)[:, 0], batch.targets, reduction="sum")


def labels_loss(logits: Tensor, batch: PackedBatch, weights: Tensor | None) -> Tensor:
    """Σ over examples of the mean binary cross-entropy over labels; `batch.targets` (E · labels,) of 0 and 1.

    `weights` (labels,): how much more a label counts where it applies.
    """
    pooled = pool_windows(logits, batch)
    targets = batch.targets.view_as(pooled)
    return (
        F.binary_cross_entropy_with_logits(pooled, targets, pos_weight=_beside(weights, logits), reduction="sum")
        / pooled.shape[1]
    )


def choice_loss(logits: Tensor, batch: PackedBatch) -> Tensor:
    """Σ cross-entropy of the right choice among each example's; one score a sequence, `batch.targets` (E,)."""
    return F.cross_entropy(choice_table(logits[:, 0], batch), batch.targets, reduction="sum")


def choice_table(scores: Tensor, batch: PackedBatch) -> Tensor:
    """Scores (N,) → (E, most choices), -inf where an example has fewer."""
    counts = torch.bincount(batch.sequence_examples, minlength=batch.examples)
    first = torch.cumsum(counts, 0) - counts
    column = torch.arange(len(scores), device=scores.device) - first[batch.sequence_examples]
    table = scores.new_full((batch.examples, int(counts.max())), float("-inf"))
    return table.index_put((batch.sequence_examples, column), scores)


def tag_loss(logits: Tensor, batch: PackedBatch, weights: Tensor | None) -> Tensor:
    """Σ cross-entropy over words; `batch.targets` (R,)."""
    return F.cross_entropy(logits, batch.targets, _beside(weights, logits), reduction="sum")


def span_loss(logits: Tensor, batch: PackedBatch) -> Tensor:
    """Σ over windows of the mean of the start's and the end's cross-entropy; `batch.targets` (2N,): start, end, … ."""
    counts = torch.tensor(batch.row_counts, device=logits.device)
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=logits.device), counts)
    place = torch.arange(len(logits), device=logits.device) - (torch.cumsum(counts, 0) - counts)[sequence]
    table = logits.new_full((len(counts), max(batch.row_counts), 2), float("-inf"))
    table = table.index_put((sequence, place), logits)  # (N, longest, 2)
    starts, ends = batch.targets.view(-1, 2).unbind(1)
    both = F.cross_entropy(table[..., 0], starts, reduction="sum") + F.cross_entropy(
        table[..., 1], ends, reduction="sum"
    )
    return both / 2
