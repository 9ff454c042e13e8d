"""The linear layers of an encoder that is only used: weights laid out once, as the CPU's products want them.

The operators are those that torch.compile uses, which PyTorch doesn't promise to keep: `can_pack` and
`can_multiply_int8` ask for them.
"""

import abc
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.hardware import mkl_multiplies_slowly
from bertsmith.model.layers import Linear

# rows that products are laid out for: the tokens of a batch on a CPU, see encoder.py
ROWS = 4096
MIDDLE = 128  # the code of an input in the middle of its range


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PackedLinear works there and gains: on a CPU in bf16 that oneDNN multiplies, or in fp32 on AMD's.

    PyTorch multiplies fp32 by MKL, which is slower on CPUs that aren't Intel's.
    """
    ops = torch.ops.mkldnn
    there = all(hasattr(ops, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    if device.type != "cpu" or not there or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return hasattr(ops, "_is_mkldnn_bf16_supported") and bool(ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and mkl_multiplies_slowly()


def can_multiply_int8() -> bool:
    """Whether Int8Linear works here."""
    there = all(hasattr(torch.ops.onednn, name) for name in ("qlinear_prepack", "qlinear_pointwise"))
    if not there or not torch.backends.mkldnn.is_available():
        return False
    with warnings.catch_warnings():
        # said once a process: that PyTorch's types of quantized tensors will go (none leaves `_codes`)
        warnings.simplefilter("ignore")
        try:
            return _codes(torch.tensor([-1.0, 2.4, 300.0])).tolist() == [0, 2, 255]
        except (AttributeError, RuntimeError):
            return False


class UsedLinear(Linear, abc.ABC):
    """A Linear's weights, and a second form of them laid out for use.

    That form goes nowhere with the weights: what is copied, moved or saved is Linear's, and so is the product then.
    """

    def __init__(self, linear: Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        if self._packed is None or x.dtype != self.weight.dtype:
            return super().forward(x)
        return self._product(x, self._packed, "none")

    def gelu(self, x: Tensor) -> Tensor:
        """GELU of the product, from sums that were not rounded first: (…, inputs) → (…, outputs)."""
        if self._packed is None or x.dtype != self.weight.dtype:
            return F.gelu(super().forward(x))
        return self._product(x, self._packed, "gelu")

    @abc.abstractmethod
    def _product(self, x: Tensor, packed: Tensor, operation: str) -> Tensor:
        """The product (`operation`: none), or its GELU (gelu), of x (…, inputs)."""

    def _apply(self, *args: Any, **options: Any) -> Any:
        self._packed = None  # of another type or place, or not this copy's
        return super()._apply(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


class PackedLinear(UsedLinear):
    """The weights laid out once as oneDNN's products want them: the same results, 6 % faster."""

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)

    def _product(self, x: Tensor, packed: Tensor, operation: str) -> Tensor:
        # the last "none": no approximation of the error function
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, operation, [], "none")
        return product


@dataclass(frozen=True)
class Int8Weights:
    """A product in 8 bits: q = round(x × factor + offset), 0 to 255; y = (q - 128) · weightsᵀ × scale + bias."""

    factor: Tensor  # (K,) float32
    offset: Tensor  # (K,) float32
    weights: Tensor  # (N, K) int8
    scale: Tensor  # (N,) float32
    bias: Tensor  # (N,) float32


class Int8Linear(UsedLinear):
    """The product of 8-bit integers, summed in 32 bits; what goes in and comes out is of the weights' type."""

    def __init__(self, linear: Linear, int8: Int8Weights) -> None:
        super().__init__(linear)
        self._int8 = int8
        self._packed = torch.ops.onednn.qlinear_prepack(int8.weights, [ROWS, int8.weights.shape[1]])
        self._zeros = torch.zeros(len(int8.scale), dtype=torch.int64)

    def _product(self, x: Tensor, packed: Tensor, operation: str) -> Tensor:
        int8 = self._int8
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(_codes(torch.addcmul(int8.offset, x, int8.factor)), 1.0, MIDDLE),
            *(packed, int8.scale, self._zeros, int8.bias),
            *(1.0, 0, x.dtype, operation, [], "none"),
        )
        return product


def _codes(x: Tensor) -> Tensor:
    """`x`, float32, rounded to 0 … 255, in one walk through memory."""
    codes = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
    # the same memory as plain bytes; `int_repr` would copy it, slower than it was made
    return torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage(), 0, codes.shape, codes.stride())
