"""Attention for use: both ways give what is written out in float64, for any lengths, and however large scores are."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bertsmith.inference.attention import (
    KEYS_AT_ONCE,
    WEIGHTS_AT_ONCE,
    FusedAttention,
    InferenceAttention,
    WrittenOutAttention,
    split_runs,
)

HEADS, WIDTH = 3, 16
LENGTHS = [[7], [12, 12, 12], [1, 1], [40, 17, 16, 2], [90, 85, 84, 84, 84, 81, 33, 32, 32, 5], [300, 290, 1]]


def make_qkv(lengths: list[int], scale: float, dtype: torch.dtype, rows: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(sum(lengths))
    qkv = torch.randn(sum(lengths) + rows, 3 * HEADS * WIDTH, generator=source)
    qkv[:, : HEADS * WIDTH] *= scale
    return qkv.to(dtype)


def write_out(qkv: Tensor, lengths: list[int]) -> Tensor:
    """Every sequence on its own, as in the paper that attention is from, in float64."""
    parts = []
    for part in qkv[: sum(lengths)].double().split(lengths):
        query, key, value = part.view(len(part), 3, HEADS, WIDTH).permute(1, 2, 0, 3)
        weights = torch.softmax(query @ key.transpose(1, 2) / math.sqrt(WIDTH), dim=-1)
        parts.append((weights @ value).transpose(0, 1).reshape(len(part), -1))
    return torch.cat(parts)


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kernel", [FusedAttention, WrittenOutAttention])
def test_it_is_attention(kernel: type[FusedAttention] | type[WrittenOutAttention], lengths: list[int]) -> None:
    attention = kernel(starts_of(lengths), HEADS)
    qkv = make_qkv(lengths, 1.0, torch.float32, attention.rows - sum(lengths))
    out = torch.zeros(sum(lengths) + 3, HEADS * WIDTH)
    attention(qkv, out)
    torch.testing.assert_close(out[:-3].double(), write_out(qkv, lengths), rtol=0, atol=2e-6)
    assert not out[-3:].any()


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    scale=st.sampled_from([0.0, 0.1, 1.0, -10.0, 1000.0, -1000.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60)
def test_however_large_scores_are(lengths: list[int], scale: float, dtype: torch.dtype) -> None:
    attention = WrittenOutAttention(starts_of(lengths), HEADS)
    qkv = make_qkv(lengths, scale, dtype, KEYS_AT_ONCE)
    out = torch.empty(sum(lengths), HEADS * WIDTH, dtype=dtype)
    attention(qkv, out)
    assert out.isfinite().all()
    if dtype == torch.float32 and abs(scale) <= 10:
        torch.testing.assert_close(out.double(), write_out(qkv, lengths), rtol=0, atol=2e-5)
    elif dtype == torch.bfloat16 and abs(scale) <= 1:
        torch.testing.assert_close(out.double(), write_out(qkv, lengths), rtol=0, atol=0.06)


@pytest.mark.parametrize("scale", [400.0, -400.0])
def test_scores_beyond_the_range_of_powers_of_two(scale: float) -> None:
    """All of one sign: their powers overflow, or vanish and leave nothing to divide by."""
    lengths = [20, 20, 9]
    qkv = make_qkv(lengths, 1.0, torch.float32, KEYS_AT_ONCE)
    qkv[:, : 2 * HEADS * WIDTH] = qkv[:, : 2 * HEADS * WIDTH].abs() + 1
    qkv[:, : HEADS * WIDTH] *= scale
    assert not torch.isfinite((qkv[:20, :WIDTH] @ qkv[:20, 48 : 48 + WIDTH].T / 4).exp2()).all() or scale < 0
    out = torch.empty(sum(lengths), HEADS * WIDTH)
    WrittenOutAttention(starts_of(lengths), HEADS)(qkv, out)
    torch.testing.assert_close(out.double(), write_out(qkv, lengths), rtol=0, atol=2e-3)


@pytest.mark.parametrize("size", [1.0, 2.0**24])
def test_sums_whose_products_with_values_are_just_in_range_or_just_not(size: float) -> None:
    lengths = [20, 20, 9]
    qkv = make_qkv(lengths, 1.0, torch.float32, KEYS_AT_ONCE)
    query, key = qkv[:, : HEADS * WIDTH], qkv[:, HEADS * WIDTH : 2 * HEADS * WIDTH]
    query[:], key[:] = 1.0, key.abs() / key.abs().max() * 0.01 + 1
    query *= 110 / math.log2(math.e) * math.sqrt(WIDTH) / WIDTH  # powers of two of 110 and a little
    qkv[:, 2 * HEADS * WIDTH :] *= size
    out = torch.empty(sum(lengths), HEADS * WIDTH)
    WrittenOutAttention(starts_of(lengths), HEADS)(qkv, out)
    torch.testing.assert_close(out.double() / size, write_out(qkv, lengths) / size, rtol=0, atol=1e-4)


def test_a_sequence_is_the_same_in_any_batch() -> None:
    lengths = [60, 60, 58, 58, 58, 33]
    qkv = make_qkv(lengths, 1.0, torch.bfloat16, KEYS_AT_ONCE)
    out = torch.empty(sum(lengths), HEADS * WIDTH, dtype=torch.bfloat16)
    WrittenOutAttention(starts_of(lengths), HEADS)(qkv, out)
    for begin, length in zip(starts_of(lengths).tolist(), lengths, strict=False):
        alone = torch.empty(length, HEADS * WIDTH, dtype=torch.bfloat16)
        # others behind it
        rows = torch.cat([qkv[begin : begin + length], make_qkv([KEYS_AT_ONCE], 5.0, torch.bfloat16)])
        WrittenOutAttention(np.array([0, length]), HEADS)(rows, alone)
        torch.testing.assert_close(alone, out[begin : begin + length], rtol=0, atol=0.008)


def test_products_have_few_shapes_and_a_bound() -> None:
    lengths = sorted(np.random.default_rng(0).integers(1, 500, 400).tolist(), reverse=True)
    blocks = WrittenOutAttention(starts_of(lengths), 12).blocks
    assert all(block.keys % KEYS_AT_ONCE == 0 for block in blocks)
    assert all(block.sequences & (block.sequences - 1) == 0 for block in blocks)
    assert all(block.sequences == 1 or block.sequences * 12 * block.keys**2 <= WEIGHTS_AT_ONCE for block in blocks)
    assert len({(block.keys, block.sequences) for block in blocks}) < 80
    again = [(length, begin) for block in blocks for first, last, length, begin0 in block.runs
             for begin in range(begin0, begin0 + (last - first) * length, length)]  # fmt: skip
    assert again == list(zip(lengths, starts_of(lengths)[:-1].tolist(), strict=True))


def test_runs() -> None:
    assert split_runs(np.array([0, 3, 6, 8, 11])) == [(0, 2, 3), (2, 3, 2), (3, 4, 3)]
    assert split_runs(np.array([0])) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rows_it_reaches_into_are_asked_for(dtype: torch.dtype) -> None:
    lengths = [33, 20]
    attention = InferenceAttention(torch.from_numpy(starts_of(lengths)), HEADS, sum(lengths), dtype)
    qkv = make_qkv(lengths, 1.0, dtype, attention.spare)
    qkv[sum(lengths) :] = 7.0
    context = attention(qkv)
    assert context.shape == (len(qkv), HEADS * WIDTH)
    assert not context[sum(lengths) :].any()
    torch.testing.assert_close(
        context[: sum(lengths)].double(), write_out(qkv, lengths), rtol=0, atol=2e-6 if dtype == torch.float32 else 0.06
    )
