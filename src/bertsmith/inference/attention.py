"""Self-attention of one packed batch where nothing is trained: which kernel, for which stretch of the batch.

In: query, key and value of all tokens side by side, (T, 3H). Out: context, (T, H). On the CPU one of two ways by
`fused_multiplies_slowly`; elsewhere as in training (model/attention.py).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.model.attention import attend, plan_attention

# float32 numbers in the widest vector registers there are (AVX-512)
KEYS_AT_ONCE = 16
# attention weights written out in one piece: 2 MB of them in 16 bits, which the caches hold
WEIGHTS_AT_ONCE = 1 << 20
# sums of exponentials from the first on lost nothing: every number that matters in them is a normal one of bfloat16;
# up to the second no product with values overflows either, however large those are in a model that is not broken
LEAST_SUM, SAFE_SUM = 2.0**-100, 2.0**100

Ints = npt.NDArray[np.int64]


def fused_multiplies_slowly(dtype: torch.dtype) -> bool:
    """Whether PyTorch's fused kernel lags behind single products in `dtype`.

    It does in bf16 on a CPU with instructions for it, but no tiles (AMX). Its own products are then made pair by pair,
    at a quarter of the speed of oneDNN's.
    """
    cpu = torch.cpu
    return dtype == torch.bfloat16 and cpu._is_avx512_bf16_supported() and not cpu._is_amx_tile_supported()


def split_runs(starts: Ints) -> list[tuple[int, int, int]]:
    """Neighbours of one length, of sequences that begin at `starts` (N+1,).

    → (first sequence, sequence after the last, length of each) of every run.
    """
    lengths = np.diff(starts)
    borders = [*np.flatnonzero(np.diff(lengths, prepend=-1)).tolist(), len(lengths)]
    return [(first, last, int(lengths[first])) for first, last in itertools.pairwise(borders)]


class FusedAttention:
    """PyTorch's fused kernel, run by run of neighbours of one length, which lie in the batch as they are needed.

    It keeps no weights: two thirds of the time that training's products take at 84 tokens, a third at 510. Filling up
    shorter neighbours as training does saves calls, but copies and masks cost more: 2 to 3 % of the whole encoder's
    time. The kernel takes keys a vector at a time and what is left of them one by one, which more than doubles its time
    at 93 tokens. So it is given keys up to a whole number of vectors: what lies behind the sequence, under a mask.
    """

    def __init__(self, starts: Ints, heads: int) -> None:
        self.heads = heads
        self.masks: dict[int, Tensor] = {}
        self.runs = [(int(starts[first]), int(starts[last]), length) for first, last, length in split_runs(starts)]

    @property
    def rows(self) -> int:
        """How many rows of `qkv` it reaches into."""
        return max((end + -length % KEYS_AT_ONCE for _, end, length in self.runs), default=0)

    def __call__(self, qkv: Tensor, out: Tensor) -> None:
        """`qkv` (T or more, 3H) → the first T of `out` (…, H)."""
        row, width = qkv.stride(0), qkv.shape[1] // (3 * self.heads)
        for begin, end, length in self.runs:
            keys = length + -length % KEYS_AT_ONCE
            shape = (3, (end - begin) // length, self.heads, keys, width)
            query, key, value = qkv[begin:].as_strided(shape, (self.heads * width, length * row, width, row, 1))
            mask = self._mask(length, keys, qkv)
            context = F.scaled_dot_product_attention(query[:, :, :length], key, value, attn_mask=mask)
            out[begin:end] = context.transpose(1, 2).reshape(end - begin, -1)

    def _mask(self, length: int, keys: int, like: Tensor) -> Tensor | None:
        """(1, 1, 1, keys): -inf on what lies behind a sequence of `length`; made once for all layers."""
        if length == keys:
            return None
        if length not in self.masks:
            self.masks[length] = F.pad(like.new_zeros(1, 1, 1, length), (0, keys - length), value=float("-inf"))
        return self.masks[length]


@dataclass(frozen=True)
class _Block:
    """Some neighbours whose products are made at once, each filled up to `keys` rows."""

    sequences: int
    keys: int
    runs: list[tuple[int, int, int, int]]
    """(first sequence, sequence after the last, length, first token in the batch) of neighbours of one length."""


class _Workplace:
    """Where a block's numbers stand, the same memory for all blocks and layers, and the views of it that are needed.

    A view is made in a microsecond or two, which is what a sequence's products take: so each is made once a batch.
    """

    def __init__(self, block: _Block, heads: int, memory: tuple[Tensor, Tensor, Tensor], row: int, out: Tensor) -> None:
        count, keys, width = block.sequences, block.keys, out.shape[1] // heads
        packed = memory[0][: 3 * count * heads * keys * width].view(3, count, heads, keys, width)
        self.weights = memory[1][: count * heads * keys * keys].view(-1, keys, keys)
        self.context = memory[2][: count * heads * keys * width].view(-1, keys, width)
        # each (n · heads, keys, d)
        self.query, key, self.value = packed.view(3, -1, keys, width)
        self.key = key.transpose(1, 2)
        contexts = self.context.view(-1, heads, keys, width).transpose(1, 2)  # (n, keys, heads, d)
        strides = [(heads * width, length * row, width, row, 1) for _, _, length, _ in block.runs]
        self.sources = [(stride, begin * row) for stride, (_, _, _, begin) in zip(strides, block.runs, strict=True)]
        self.parts = [packed[:, first:last] for first, last, _, _ in block.runs]
        self.behind = [
            self.weights[first * heads : last * heads, :, length:]
            for first, last, length, _ in block.runs
            if length < keys
        ]
        self.results = [contexts[first:last, :length] for first, last, length, _ in block.runs]
        self.rows = [
            out[begin : begin + (last - first) * length].view(last - first, length, heads, width)
            for first, last, length, begin in block.runs
        ]


class WrittenOutAttention:
    """The weights written out, where the fused kernel's products are slow: half its time at 84 tokens.

    Softmax as powers of two without the maximum taken off first: one pass and a sum instead of four passes. Nothing
    is lost by that as long as the sums say that nothing was too large or too small; else PyTorch's softmax does it.
    Products have few shapes (multiples of KEYS_AT_ONCE keys, powers of two of sequences), as oneDNN compiles and keeps
    a kernel for each.
    """

    def __init__(self, starts: Ints, heads: int) -> None:
        self.heads = heads
        self.blocks = list(_split_blocks(starts, heads))
        self.rows = int(starts[-1]) + KEYS_AT_ONCE
        """How many rows of `qkv` it may reach into."""
        self._out: Tensor | None = None
        self._workplaces: list[_Workplace] = []

    def __call__(self, qkv: Tensor, out: Tensor) -> None:
        """`qkv` (T or more, 3H) → the first T of `out` (…, H). Fastest where `out` is the same for all layers."""
        if out is not self._out:
            self._out, self._workplaces = out, self._lay_out(qkv, out)
        begin, width = qkv.storage_offset(), out.shape[1] // self.heads
        for work in self._workplaces:
            # what lies behind a sequence are rows of others: of no weight, but numbers
            for part, (strides, offset) in zip(work.parts, work.sources, strict=True):
                part.copy_(qkv.as_strided(part.shape, strides, begin + offset))
            # log2(e) not as alpha of baddbmm, whose oneDNN branch adds 0 times what it finds in the result, NaN or not
            work.query.mul_(math.log2(math.e) / math.sqrt(width))
            _attend(work)
            for rows, result in zip(work.rows, work.results, strict=True):
                rows.copy_(result)

    def _lay_out(self, qkv: Tensor, out: Tensor) -> list[_Workplace]:
        """For each block; there is memory for the largest."""
        tokens = max((block.sequences * block.keys for block in self.blocks), default=0)
        weights = max((block.sequences * block.keys**2 for block in self.blocks), default=0)
        sizes = 3 * tokens * out.shape[1], weights * self.heads, tokens * out.shape[1]
        memory = (qkv.new_empty(sizes[0]), qkv.new_empty(sizes[1]), qkv.new_empty(sizes[2]))
        return [_Workplace(block, self.heads, memory, qkv.stride(0), out) for block in self.blocks]


def _attend(work: _Workplace) -> None:
    """Query, key and value of a block → its context."""
    weights = torch.bmm(work.query, work.key, out=work.weights).exp2_()
    for part in work.behind:  # which belongs to no key of a sequence
        part.zero_()
    sums = weights.sum(-1, keepdim=True)
    least, most = torch.aminmax(sums)
    if float(least) >= LEAST_SUM and math.isfinite(float(most)):
        torch.bmm(weights, work.value, out=work.context).div_(sums)
        # what overflowed on the way stays infinite or no number
        if float(most) <= SAFE_SUM or work.context.isfinite().all():
            return
    scores = torch.bmm(work.query, work.key, out=work.weights).mul_(math.log(2))
    for part in work.behind:
        part.fill_(float("-inf"))
    torch.bmm(scores.softmax(-1), work.value, out=work.context)


def _split_blocks(starts: Ints, heads: int) -> Iterator[_Block]:
    """All sequences in order, in blocks of equal keys and a power of two of sequences."""
    lengths = np.diff(starts)
    filled = np.concatenate([[0], np.cumsum(lengths + -lengths % KEYS_AT_ONCE)])
    for first, last, keys in split_runs(filled):
        most = max(1, WEIGHTS_AT_ONCE // (heads * keys**2))
        while first < last:
            count = 1 << (min(last - first, most).bit_length() - 1)
            mine = starts[first : first + count + 1]
            yield _Block(count, keys, [(*run, int(mine[run[0]])) for run in split_runs(mine)])
            first += count


class InferenceAttention:
    """Self-attention of one batch, for all layers."""

    def __init__(self, sequence_starts: Tensor, heads: int, tokens: int, dtype: torch.dtype) -> None:
        self.heads = heads
        self.tokens = tokens
        self.spare = 0
        """Rows that must follow the T tokens."""
        self.plan = None
        if sequence_starts.device.type != "cpu":
            self.plan = plan_attention(sequence_starts)
            return
        kernel = WrittenOutAttention if fused_multiplies_slowly(dtype) else FusedAttention
        self.kernel = kernel(sequence_starts.numpy(), heads)
        self.spare = max(0, self.kernel.rows - tokens)
        self.out: Tensor | None = None

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T or more, 3H) → context (as many, H), 0 after the T tokens; on a CPU good until the next call."""
        out = self.out if self.plan is None else None
        if out is None:
            out = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
        if self.plan is None:
            self.out = out
            self.kernel(qkv, out)
        else:
            out[: self.tokens] = attend(qkv[: self.tokens], self.plan, self.heads, 0.0, None)
        return out
