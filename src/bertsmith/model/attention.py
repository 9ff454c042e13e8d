"""Self-attention within each sequence of a packed batch: which kernel, and what it must know of the batch.

In: query, key and value of all tokens side by side, (T, 3H). Out: context, (T, H). Two kernels: variable-length flash
attention on CUDA in 16 bits (varlen.py), and products over groups of sequences of like length everywhere else
(grouped.py).
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertsmith.model import varlen
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.grouped import GroupedPlan, grouped_attention, plan_groups
from bertsmith.model.varlen import VarlenPlan, varlen_attention


@dataclass(frozen=True)
class AttentionPlan:
    """Where a batch's sequences lie; made once a batch, used by every layer. What a kernel needs is made when asked."""

    starts: npt.NDArray[np.int64]
    """(N+1,), on the host: sequence n is tokens [starts[n], starts[n+1])."""
    device: torch.device
    _grouped: dict[tuple[int, torch.dtype], GroupedPlan] = field(default_factory=dict)
    _varlen: dict[int, VarlenPlan] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """T of the sequences; rows past them are none's (see `fill_up`)."""
        return int(self.starts[-1])

    def grouped(self, heads: int, dtype: torch.dtype) -> GroupedPlan:
        """For the kernel over groups of sequences of like length, which computes in `dtype`."""
        if (heads, dtype) not in self._grouped:
            self._grouped[heads, dtype] = plan_groups(self.starts, heads, dtype, self.device)
        return self._grouped[heads, dtype]

    def varlen(self, rows: int) -> VarlenPlan:
        """For the variable-length kernel over `rows` rows, T or more."""
        if rows not in self._varlen:
            longest = max(1, int(np.diff(self.starts).max(initial=0)))
            covering = torch.from_numpy(varlen.cover_rows(self.starts, rows, longest))
            self._varlen[rows] = VarlenPlan(covering.to(self.device, non_blocking=True), longest)
        return self._varlen[rows]


Plan = AttentionPlan | VarlenPlan


def plan_attention(sequence_starts: Tensor) -> AttentionPlan:
    """Of `sequence_starts` (N+1,). On a GPU this waits for them; who has them on the host makes an AttentionPlan."""
    return AttentionPlan(sequence_starts.cpu().numpy(), sequence_starts.device)


def attend(qkv: Tensor, plan: Plan, heads: int, probability: float, masks: DropoutMasks | None) -> Tensor:
    """Context of every token, (T, H), from `qkv` (T, 3H) laid out query, key, value; rows past T give what they will.

    `probability`: dropout on the attention probabilities, applied when `masks` is given.
    """
    if probability == 0:
        masks = None
    if isinstance(plan, VarlenPlan):
        return varlen_attention(qkv, plan, heads, probability, masks)
    if varlen.fits(qkv.device, qkv.dtype, qkv.shape[1] // (3 * heads)):
        return varlen_attention(qkv, plan.varlen(len(qkv)), heads, probability, masks)
    return grouped_attention(qkv, plan.grouped(heads, qkv.dtype), probability, masks)
