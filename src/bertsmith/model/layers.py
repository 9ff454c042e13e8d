"""The parts every layer is made of. Masters are float32; each part computes in the type of its input.

This is the one place where precision is decided: the embeddings give hidden states in the chosen type and everything
after follows, casting its float32 parameters as it uses them (gradients come back to the masters as float32).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """x Wᵀ + b with float32 masters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al. 2016) over the last axis; statistics in float32 whatever the input's type."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(…, size) → the same shape and type."""
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.epsilon)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation a config.json names; `gelu` is the exact one (erf) that BERT was published with."""
    if name == "gelu":
        return F.gelu
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return partial(F.gelu, approximate="tanh")
    return F.relu


class TiedGradient:
    """Carries the MLM head's gradient of the word table to the word look-up, whose backward pass always runs later.

    The table is used twice, and autograd would add the two gradients by copying the whole table; here the look-up adds
    its few rows to the head's gradient in place. One object serves one forward pass.
    """

    def __init__(self) -> None:
        self._gradient: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """The head's gradient (V, H), float32; the receiver may change it."""
        self._gradient = gradient

    def take(self) -> Tensor | None:
        """What was put, once."""
        gradient, self._gradient = self._gradient, None
        return gradient


class _TiedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, token_ids: Tensor, tied: TiedGradient) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.shape, ctx.tied = table.shape, tied
        return table.index_select(0, token_ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token_ids,) = ctx.saved_tensors
        total = ctx.tied.take()
        if total is None:
            total = grad.new_zeros(ctx.shape)
        return total.index_add_(0, token_ids, grad), None, None


def look_up_words(table: Tensor, token_ids: Tensor, tied: TiedGradient | None) -> Tensor:
    """Rows `token_ids` (T,) of `table` (V, H) → (T, H)."""
    if tied is None:
        return F.embedding(token_ids, table)
    return _TiedLookup.apply(table, token_ids, tied)


def fill_up(ids: Tensor, spare: int = 0) -> Tensor:
    """`ids` (T,) with `spare` zeros and more after them up to one of a few lengths: at most 3 % more, or 7.

    oneDNN compiles and keeps a kernel for every shape it meets: gigabytes, and a quarter of a training step's time,
    where every batch has another number of tokens. What stands in the places filled up takes part in products and in
    nothing else.
    """
    return F.pad(ids, (0, filled_length(len(ids) + spare) - len(ids)))


def filled_length(length: int) -> int:
    """The length that `fill_up` fills up to, never 0, of which not every kernel takes a batch; one it gave stays."""
    step = max(8, 1 << max(0, length.bit_length() - 6))
    return max(step, length + -length % step)
