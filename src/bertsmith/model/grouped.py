"""Self-attention within each sequence of a packed batch, over groups of sequences of like length.

In: query, key and value of all tokens side by side, (T, 3H). Out: context, (T, H). Sequences are grouped by length so
that a group is one dense (n, heads, L, L) product; a shorter sequence in a group is padded for this product only and
its padding is masked, never seen by another layer. Scaled dot-product attention: Vaswani et al. 2017, section 3.2.1.
The kernel of CPUs, and of float32 on GPUs; the other one: varlen.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertsmith.model.dropout import DropoutMasks

# a sequence joins a group when padding it to the group's longest wastes at most this share, or so many tokens: one more
# group costs more than a few
MAXIMUM_PADDING = 0.12
FREE_PADDING = 16
# a group's length is filled up to a multiple of this: a few shapes, which oneDNN has kernels for already
LENGTH_STEP = 16


@dataclass(frozen=True)
class LengthGroup:
    """`count` sequences attended together at `length`."""

    count: int
    length: int
    rows: Tensor | None  # (count * length,) token of each padded place, 0 for padding; None: the batch as it lies
    padding: Tensor | None  # (count, 1, 1, length) True on padding; None: no padding
    real_rows: Tensor | None = None  # (t,) the tokens of the group; None with `rows`
    real_places: Tensor | None = None  # (t,) the padded place of each


def group_by_length(starts: npt.NDArray[np.int64], device: torch.device) -> tuple[LengthGroup, ...]:
    """Group sequences by length. `starts` (N+1,): sequence n is tokens [starts[n], starts[n+1])."""
    lengths = np.diff(starts)
    if len(lengths) and (lengths == lengths[0]).all():
        return (LengthGroup(len(lengths), int(lengths[0]), None, None),)
    order = np.argsort(-lengths, kind="stable")
    groups = []
    first = 0
    while first < len(order):
        length = int(lengths[order[first]])
        shortest = max(1, min(int(length * (1 - MAXIMUM_PADDING)), length - FREE_PADDING))
        members = order[first:]
        members = members[lengths[members] >= shortest]
        length += -length % LENGTH_STEP
        place = np.arange(length)
        outside = place >= lengths[members, None]  # (count, length)
        rows = np.where(outside, 0, starts[members, None] + place).reshape(-1)
        real = np.flatnonzero(~outside)
        padding = torch.from_numpy(outside).to(device)[:, None, None, :] if outside.any() else None
        on_device = (torch.from_numpy(array).to(device) for array in (rows[real], real))
        groups.append(LengthGroup(len(members), length, torch.from_numpy(rows).to(device), padding, *on_device))
        first += len(members)
    return tuple(groups)


def _split_heads(group: LengthGroup, packed: Tensor, parts: int, heads: int) -> Tensor:
    """(T, parts * H) → (parts, n * heads, L, d), contiguous; padding holds copies of token 0 and must be masked."""
    rows = packed if group.rows is None else packed.index_select(0, group.rows)
    split = rows.view(group.count, group.length, parts, heads, -1).permute(2, 0, 3, 1, 4)
    return split.contiguous().view(parts, group.count * heads, group.length, -1)


def _join_heads(group: LengthGroup, split: Tensor, heads: int, out: Tensor) -> None:
    """(parts, n * heads, L, d) → its rows of `out` (T, parts * H); padding is dropped."""
    parts = split.shape[0]
    joined = split.view(parts, group.count, heads, group.length, -1).permute(1, 3, 0, 2, 4)
    if group.rows is None:
        out.view(joined.shape).copy_(joined)
        return
    joined = joined.reshape(group.count * group.length, -1)
    assert group.real_rows is not None
    assert group.real_places is not None
    if group.padding is not None:
        joined = joined.index_select(0, group.real_places)
    out.index_copy_(0, group.real_rows, joined)


class _GroupedAttention(torch.autograd.Function):
    """softmax(QKᵀ/√d) with dropout, times V, group by group.

    Kept for the backward pass: the heads of Q, K and V and the probabilities. Dropout masks are drawn again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        groups: tuple[LengthGroup, ...],
        tokens: int,
        heads: int,
        probability: float,
        masks: DropoutMasks | None,
    ) -> Tensor:
        hidden_size = qkv.shape[1] // 3
        context = qkv.new_empty(qkv.shape[0], hidden_size)
        context[tokens:] = 0
        qkv, out = qkv[:tokens], context[:tokens]
        saved, keys = [], []
        for group in groups:
            split = _split_heads(group, qkv, 3, heads)
            query, key, value = split  # each (n * heads, L, d)
            probabilities = _attention_probabilities(group, query, key, heads)  # (n * heads, L, L)
            kept = probabilities
            if masks is not None:
                keys.append(masks.next_key())
                kept = probabilities * masks.draw(keys[-1], probability, probabilities.shape, probabilities)
            _join_heads(group, torch.bmm(kept, value)[None], heads, out)
            saved += [split, probabilities]
        ctx.save_for_backward(*saved)
        ctx.groups, ctx.tokens, ctx.heads = groups, tokens, heads
        ctx.probability, ctx.masks, ctx.keys = probability, masks, keys
        return context

    @staticmethod
    def backward(ctx: Any, grad_context: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tokens = ctx.tokens
        grad_context = grad_context.contiguous()
        grad_qkv = grad_context.new_empty(grad_context.shape[0], 3 * grad_context.shape[1])
        grad_qkv[tokens:] = 0
        grad_context, out = grad_context[:tokens], grad_qkv[:tokens]
        for index, group in enumerate(ctx.groups):
            split, probabilities = saved[2 * index : 2 * index + 2]
            query, key, value = split
            grad_out = _split_heads(group, grad_context, 1, ctx.heads)[0]  # (n * heads, L, d)
            if group.padding is not None:  # padded queries hold a copy of token 0's gradient
                grad_out.view(group.count, ctx.heads, group.length, -1).masked_fill_(group.padding.mT, 0)
            grads = torch.empty_like(split)
            scale = query.shape[-1] ** -0.5
            grad_kept = torch.bmm(grad_out, value.mT)
            if ctx.masks is None:
                torch.bmm(probabilities.mT, grad_out, out=grads[2])
            else:
                mask = ctx.masks.draw(ctx.keys[index], ctx.probability, probabilities.shape, probabilities)
                torch.bmm((probabilities * mask).mT, grad_out, out=grads[2])
                grad_kept.mul_(mask)
            grad_scores = torch._softmax_backward_data(grad_kept, probabilities, -1, probabilities.dtype)
            torch.baddbmm(grads[0], grad_scores, key, beta=0, alpha=scale, out=grads[0])
            torch.baddbmm(grads[1], grad_scores.mT, query, beta=0, alpha=scale, out=grads[1])
            _join_heads(group, grads, ctx.heads, out)
        return grad_qkv, None, None, None, None, None


def _attention_probabilities(group: LengthGroup, query: Tensor, key: Tensor, heads: int) -> Tensor:
    """softmax(QKᵀ/√d) of one group, (n * heads, L, L); probability 0 on padded keys."""
    rows, length, size = query.shape
    scores = torch.baddbmm(query.new_empty(rows, length, length), query, key.mT, beta=0, alpha=size**-0.5)
    if group.padding is not None:
        scores.view(group.count, heads, length, length).masked_fill_(group.padding, float("-inf"))
    return torch.softmax(scores, -1)


def grouped_attention(
    qkv: Tensor,
    groups: tuple[LengthGroup, ...],
    tokens: int,
    heads: int,
    probability: float,
    masks: DropoutMasks | None,
) -> Tensor:
    """Context (T, H) of the `tokens` first rows of `qkv` (T, 3H), which `groups` are of; 0 in the rows past them.

    `probability`: dropout on the attention probabilities, applied when `masks` is given.
    """
    return _GroupedAttention.apply(qkv, groups, tokens, heads, probability, masks)
