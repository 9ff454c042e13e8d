"""Self-attention within each sequence of a packed batch, over groups of sequences of like length.

The kernel of CPUs, and of float32 on GPUs; the other one: varlen.py.

In: query, key and value of all tokens side by side, (T, 3H). Out: context, (T, H). Sequences are grouped by length so
that a group is one dense (n, heads, L, K) product: L places for its queries, K ≥ L for its keys. A shorter sequence is
padded for this product only and its padding is masked, never seen by another layer. Scaled dot-product attention:
Vaswani et al. 2017, section 3.2.1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertsmith.model.dropout import BITS, DropoutMasks

# a sequence joins a group when padding it to the group's longest wastes at most this share, or so many tokens: one more
# group costs more than a few
MAXIMUM_PADDING = 0.12
FREE_PADDING = 16
# a group's places are filled up to a multiple of this: a few shapes, which oneDNN has kernels for already
LENGTH_STEP = 16
# and the places of its keys to a whole number of the widest vector registers there are: PyTorch's softmax takes what is
# left of a row number by number, which doubles its time at 48 keys in bfloat16
REGISTER_BYTES = 64


@dataclass(frozen=True)
class LengthGroup:
    """`count` sequences attended together."""

    count: int
    length: int  # L
    keys: int  # K
    mask: Tensor | None  # (count * heads, 1, K), 0 on a sequence's keys and -inf behind; None: all are a sequence's


@dataclass(frozen=True)
class GroupedPlan:
    """Which rows of d numbers (a token's query, key or value for one head) lie where; made once a batch for all layers.

    In the batch they lie token by token, `parts`: (T, 3, heads, d), `context`: (T, heads, d). Where they are
    multiplied, R rows of `parts` lie group by group: the queries (n, heads, L, d), the keys and the values, each (n,
    heads, K, d); and Q rows of `context`, (n, heads, L, d).
    """

    heads: int
    groups: tuple[LengthGroup, ...]
    tokens: int
    """T of the sequences; rows past them are none's (see `fill_up`)."""
    to_parts: Tensor  # (R,) row in the batch of each row in the groups; of padding, any
    from_parts: Tensor  # (T * 3 * heads,) and back
    to_context: Tensor  # (Q,)
    from_context: Tensor  # (T * heads,)
    padded: Tensor | None  # those of the Q rows that are padding; None: none are


def plan_groups(starts: npt.NDArray[np.int64], heads: int, dtype: torch.dtype, device: torch.device) -> GroupedPlan:
    """Group sequences by length. `starts` (N+1,): sequence n is tokens [starts[n], starts[n+1]).

    `dtype`: what attention is computed in.
    """
    lengths = np.diff(starts)
    order = np.argsort(-lengths, kind="stable")
    numbers_a_register = REGISTER_BYTES // dtype.itemsize
    head = np.arange(heads)[:, None]
    groups: list[LengthGroup] = []
    parts: list[npt.NDArray[np.int64]] = []  # rows in the batch, -1 for padding, group by group
    contexts: list[npt.NDArray[np.int64]] = []
    first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        shortest = max(1, min(int(longest * (1 - MAXIMUM_PADDING)), longest - FREE_PADDING))
        members = order[first:]
        members = members[lengths[members] >= shortest]
        first += len(members)
        length = longest + -longest % LENGTH_STEP
        keys = longest + -longest % max(LENGTH_STEP, numbers_a_register)
        place = np.arange(keys)
        outside = place >= lengths[members, None]  # (n, K)
        token = np.where(outside, -1, starts[members, None] + place)[:, None, :]  # (n, 1, K)
        queries = token[:, :, :length]
        contexts.append(np.where(queries < 0, -1, queries * heads + head).reshape(-1))
        for part, tokens in enumerate((queries, token, token)):
            parts.append(np.where(tokens < 0, -1, (tokens * 3 + part) * heads + head).reshape(-1))
        mask = None
        if outside.any():
            behind = torch.from_numpy(outside).to(device).repeat_interleave(heads, 0)[:, None, :]
            mask = torch.zeros(behind.shape, dtype=dtype, device=device).masked_fill_(behind, float("-inf"))
        groups.append(LengthGroup(len(members), length, keys, mask))
    tokens_in_all = int(starts[-1])
    to_parts, from_parts, _ = _rows(parts, tokens_in_all * 3 * heads, device)
    to_context, from_context, padded = _rows(contexts, tokens_in_all * heads, device)
    return GroupedPlan(heads, tuple(groups), tokens_in_all, to_parts, from_parts, to_context, from_context, padded)


def _rows(pieces: list[npt.NDArray[np.int64]], rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Row in the batch of each place → the same for padding too, the place of each row, the places of padding."""
    there = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
    padded = np.flatnonzero(there < 0)
    back = np.empty(rows + 1, dtype=np.int64)
    back[there] = np.arange(len(there))  # padding's goes to the last one
    there[padded] = 0
    on_device = [torch.from_numpy(array).to(device) for array in (there.astype(np.int32), back[:-1].astype(np.int32))]
    return on_device[0], on_device[1], torch.from_numpy(padded).to(device) if len(padded) else None


def _part_views(plan: GroupedPlan, rows: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(R, d) → of each group query (n * heads, L, d), key and value (n * heads, K, d), as views."""
    sizes = [group.count * plan.heads * places for group in plan.groups for places in _places(group)]
    pieces = iter(rows.split(sizes))
    views = []
    for group in plan.groups:
        query, key, value = (next(pieces).view(group.count * plan.heads, places, -1) for places in _places(group))
        views.append((query, key, value))
    return views


def _places(group: LengthGroup) -> tuple[int, int, int]:
    return group.length, group.keys, group.keys


def _context_views(plan: GroupedPlan, rows: Tensor) -> list[Tensor]:
    """(Q, d) → of each group (n * heads, L, d), as views."""
    pieces = rows.split([group.count * plan.heads * group.length for group in plan.groups])
    return [
        piece.view(group.count * plan.heads, group.length, -1) for group, piece in zip(plan.groups, pieces, strict=True)
    ]


class _GroupedAttention(torch.autograd.Function):
    """softmax(QKᵀ/√d) with dropout, times V, group by group.

    Kept for the backward pass: the heads of Q, K and V, and the probabilities, those that dropout let through with
    their sign turned. So a mask costs no memory and is not drawn again.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, plan: GroupedPlan, probability: float, masks: DropoutMasks | None) -> Tensor:
        hidden_size = qkv.shape[1] // 3
        size = hidden_size // plan.heads
        parts = qkv[: plan.tokens].reshape(-1, size).index_select(0, plan.to_parts)
        rows = qkv.new_empty(len(plan.to_context), size)
        saved = []
        for group, (query, key, value), out in zip(
            plan.groups, _part_views(plan, parts), _context_views(plan, rows), strict=True
        ):
            probabilities = _attention_probabilities(group, query, key)  # (n * heads, L, K)
            if masks is None:
                torch.bmm(probabilities, value, out=out)
            else:
                masks.turn_signs(masks.next_key(), probability, probabilities)
                kept = probabilities.clamp(max=0)
                torch.baddbmm(out, kept, value, beta=0, alpha=-1 / (1 - probability), out=out)
            saved.append(probabilities)
        ctx.save_for_backward(parts, *saved)
        ctx.plan, ctx.scale = plan, None if masks is None else 1 / (1 - probability)
        context = qkv.new_empty(qkv.shape[0], hidden_size)
        context[plan.tokens :] = 0
        torch.index_select(rows, 0, plan.from_context, out=context[: plan.tokens].view(-1, size))
        return context

    @staticmethod
    def backward(ctx: Any, grad_context: Tensor) -> tuple[Tensor | None, ...]:
        parts, *saved = ctx.saved_tensors
        plan: GroupedPlan = ctx.plan
        size = parts.shape[1]
        grad_rows = grad_context[: plan.tokens].reshape(-1, size).index_select(0, plan.to_context)
        if plan.padded is not None:
            grad_rows.index_fill_(0, plan.padded, 0)
        grads = torch.empty_like(parts)
        root = size**-0.5
        for probabilities, (query, key, value), (grad_query, grad_key, grad_value), grad_out in zip(
            saved, _part_views(plan, parts), _part_views(plan, grads), _context_views(plan, grad_rows), strict=True
        ):
            grad = torch.bmm(grad_out, value.mT)  # of what dropout let through, then of the scores, (n * heads, L, K)
            scale = root
            if ctx.scale is None:
                torch.bmm(probabilities.mT, grad_out, out=grad_value)
            else:
                kept = probabilities.clamp(max=0)
                torch.baddbmm(grad_value, kept.mT, grad_out, beta=0, alpha=-ctx.scale, out=grad_value)
                _keep_where_negative(grad, probabilities)
                scale *= ctx.scale
                probabilities = torch.abs(probabilities, out=kept)
            grad = torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)
            torch.baddbmm(grad_query, grad, key, beta=0, alpha=scale, out=grad_query)
            torch.baddbmm(grad_key, grad.mT, query, beta=0, alpha=scale, out=grad_key)
        grad_qkv = grad_context.new_empty(grad_context.shape[0], 3 * grad_context.shape[1])
        grad_qkv[plan.tokens :] = 0
        torch.index_select(grads, 0, plan.from_parts, out=grad_qkv[: plan.tokens].view(-1, size))
        return grad_qkv, None, None, None


def _keep_where_negative(values: Tensor, signs: Tensor) -> None:
    """Set `values` to 0 where `signs` are not negative, by their bits: a third of the time that a fill takes."""
    bits = BITS[values.dtype]
    values.view(bits).bitwise_and_(signs.view(bits) >> (8 * bits.itemsize - 1))


def _attention_probabilities(group: LengthGroup, query: Tensor, key: Tensor) -> Tensor:
    """softmax(QKᵀ/√d) of one group, (n * heads, L, K); probability 0 on padded keys."""
    rows, length, size = query.shape
    if group.mask is None:
        scores = torch.baddbmm(query.new_empty(rows, length, group.keys), query, key.mT, beta=0, alpha=size**-0.5)
    else:
        scores = torch.baddbmm(group.mask, query, key.mT, alpha=size**-0.5)
    return torch.softmax(scores, -1)


def grouped_attention(qkv: Tensor, plan: GroupedPlan, probability: float, masks: DropoutMasks | None) -> Tensor:
    """Context (T, H) of `qkv` (T, 3H) laid out query, key, value; 0 in the rows past those that `plan` is of.

    `probability`: dropout on the attention probabilities, applied when `masks` is given.
    """
    return _GroupedAttention.apply(qkv, plan, probability, masks)
