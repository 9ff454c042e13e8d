"""PyTorch's flash-attention kernels in plain PyTorch, registered for CPU tensors under the kernels' own names.

The code that calls them on a GPU then runs here as it is, through the real dispatcher, which checks every argument
against the kernel's signature. Dropout is drawn from the CPU's default generator and kept in the state returned.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bertsmith.model import varlen


def _probabilities(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    scores = query.transpose(0, 1) @ key.permute(1, 2, 0) * (scale or query.shape[-1] ** -0.5)
    return torch.softmax(scores, -1)  # (heads, L, L)


def _sequences(starts: Tensor, rows: int, longest: int) -> list[tuple[int, int, int]]:
    """(number, first row, end) of those that are not empty; what the kernel asks for is asserted."""
    assert starts.dtype == torch.int32
    borders = starts.tolist()
    assert borders == sorted(borders)
    assert borders[0] == 0
    assert borders[-1] <= rows
    assert max(b - a for a, b in itertools.pairwise(borders)) <= longest
    return [(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(borders)) if b > a]


def _kept(state: Tensor, number: int, like: Tensor, probability: float) -> Tensor:
    source = torch.Generator().manual_seed(int(state[0].view(torch.int64)) + number)
    return (torch.rand(like.shape, generator=source) >= probability).to(like.dtype) / (1 - probability)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, starts_k: Tensor, longest: int, longest_k: int,
    probability: float, is_causal: bool, debug: bool, *, scale: float | None = None, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_forward; rows outside all sequences are left as NaN, for the real kernel leaves them."""
    assert not is_causal
    assert query.stride(-1) == 1
    assert torch.equal(starts, starts_k)
    state = torch.randint(2**62, (2,)).view(torch.uint64)
    context = torch.full(query.shape, float("nan"), dtype=query.dtype)
    denominator = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
    for number, a, b in _sequences(starts, len(query), longest):
        probabilities = _probabilities(query[a:b], key[a:b], scale)
        if probability:
            probabilities = probabilities * _kept(state, number, probabilities, probability)
        context[a:b] = (probabilities @ value[a:b].transpose(0, 1)).transpose(0, 1)
    return context, denominator, state, torch.empty((), dtype=torch.uint64), query.new_empty(0)


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Tensor, denominator: Tensor, starts: Tensor,
    starts_k: Tensor, longest: int, longest_k: int, probability: float, is_causal: bool, state: Tensor, unused: Tensor,
    *, scale: float | None = None, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_backward."""
    assert grad.shape == query.shape == context.shape
    grads = [torch.full(query.shape, float("nan"), dtype=query.dtype) for _ in range(3)]
    for number, a, b in _sequences(starts, len(query), longest):
        # written out: below an operator nothing is recorded for autograd
        probabilities = _probabilities(query[a:b], key[a:b], scale)
        kept = _kept(state, number, probabilities, probability) if probability else torch.ones_like(probabilities)
        q, k, v, out = (part[a:b].transpose(0, 1) for part in (query, key, value, grad))  # (heads, L, d)
        wrong = (out @ v.mT) * kept
        scores = probabilities * (wrong - (wrong * probabilities).sum(-1, keepdim=True))
        scores = scores * (scale or query.shape[-1] ** -0.5)
        for total, part in zip(grads, (scores @ k, scores.mT @ q, (probabilities * kept).mT @ out), strict=True):
            total[a:b] = part.transpose(0, 1)
    return tuple(grads)


@contextlib.contextmanager
def flash_on_cpu(patch: Any) -> Iterator[None]:
    """`with flash_on_cpu(monkeypatch):` attention on the CPU goes the way it goes on a GPU."""
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_flash_attention_forward", flash_forward, "CPU")
    kernels.impl("_flash_attention_backward", flash_backward, "CPU")
    forward, backward = varlen._forward, varlen._backward
    try:
        with patch.context() as inside:
            inside.setattr(varlen, "fits", lambda device, dtype, head_size: True)
            inside.setattr(varlen, "has_kernel", lambda device: True)
            inside.setattr(varlen, "seed_kernel", lambda device, seed: torch.manual_seed(int(seed)))
            with forward.set_kernel_enabled("cpu", False), backward.set_kernel_enabled("cpu", False):
                yield
    finally:
        kernels._destroy()
