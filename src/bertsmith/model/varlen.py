"""Self-attention over a packed batch by one variable-length kernel: flash attention (Dao 2023) on CUDA in bf16 or fp16.

In: query, key and value of all tokens side by side, (T, 3H), and where each sequence begins. Out: context, (T, H).
No scores are kept and nothing is padded. With dropout it is an operator of our own over PyTorch's kernel, for
`torch.nn.attention.varlen` has none; `torch.compile` sees either as one opaque operator. The kernel's random numbers
come from a seed for each call, so that a call made again (activations computed again) drops the same.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.grouped import grouped_attention, plan_groups

# flash attention is written for GPUs from this compute capability on (Ampere), and for heads of such sizes
FIRST_CAPABILITY = (8, 0)
HEAD_SIZE_STEP, LARGEST_HEAD_SIZE = 8, 256


@dataclass(frozen=True)
class VarlenPlan:
    """Where sequences lie, for the variable-length kernel."""

    starts: Tensor
    """(S+1,) int32, on the device: sequence s is rows [starts[s], starts[s+1]), which may be none; they cover all rows,
    for the kernel leaves what lies outside as it found it in memory."""
    longest: int
    """At least the tokens of the longest sequence, known on the host."""
    static: bool = False
    """Whether it has the shape of every batch of the run (see compiled.py)."""


def cover_rows(starts: npt.NDArray[np.int64], rows: int, longest: int) -> npt.NDArray[np.int32]:
    """`starts` (N+1,) and sequences of at most `longest` after them, up to `rows`: what VarlenPlan.starts holds.

    The sequences added are of rows that nobody looks at: they take no part in a loss, and their gradient is 0.
    """
    tail = np.arange(int(starts[-1]) + longest, rows + longest, longest) if rows > starts[-1] else np.zeros(0)
    return np.concatenate([starts, np.minimum(tail, rows)]).astype(np.int32)


def has_kernel(device: torch.device) -> bool:
    """Whether PyTorch has flash attention for this kind of device."""
    return device.type == "cuda"


def fits(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether flash attention is to be had: on a GPU that is new enough, in 16 bits, for heads of its sizes."""
    return (
        has_kernel(device)
        and dtype in (torch.bfloat16, torch.float16)
        and head_size % HEAD_SIZE_STEP == 0
        and head_size <= LARGEST_HEAD_SIZE
        and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    )


def varlen_attention(
    qkv: Tensor, plan: VarlenPlan, heads: int, probability: float, masks: DropoutMasks | None
) -> Tensor:
    """Context of every row, (T, H), from `qkv` (T, 3H) laid out query, key, value.

    `probability`: dropout on the attention probabilities, applied when `masks` is given.
    """
    if masks is not None:
        seed = masks.host_seed(masks.next_key())
        return torch.ops.bertsmith.varlen_attention(qkv, plan.starts, plan.longest, heads, probability, seed)[0]
    if has_kernel(qkv.device):
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = _split_heads(qkv, heads)
        context = varlen_attn(query, key, value, plan.starts, plan.starts, plan.longest, plan.longest)
        assert isinstance(context, Tensor)
        return context.reshape(qkv.shape[0], -1)
    no_seed = torch.zeros((), dtype=torch.int64)
    return torch.ops.bertsmith.varlen_attention(qkv, plan.starts, plan.longest, heads, 0.0, no_seed)[0]


def _split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """(T, 3H) → query, key, value, views (T, heads, d)."""
    return qkv.view(qkv.shape[0], 3, heads, -1).unbind(1)


# --- the operator


@torch.library.custom_op("bertsmith::varlen_attention", mutates_args=(), device_types="cuda")
def _forward(
    qkv: Tensor, starts: Tensor, longest: int, heads: int, probability: float, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """→ context (T, H), the logarithm of the softmax's denominator (heads, T) float32, the generator's state.

    `seed`: int64 scalar on the host, so that reading it waits for nothing.
    """
    query, key, value = _split_heads(qkv, heads)
    seed_kernel(qkv.device, seed)
    context, denominator, random_state, _, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, probability, False, False
    )
    return context.reshape(qkv.shape[0], -1), denominator, random_state


@torch.library.custom_op("bertsmith::varlen_attention_backward", mutates_args=(), device_types="cuda")
def _backward(
    grad: Tensor,
    qkv: Tensor,
    context: Tensor,
    denominator: Tensor,
    random_state: Tensor,
    starts: Tensor,
    longest: int,
    heads: int,
    probability: float,
    seed: Tensor,
) -> Tensor:
    """→ the gradient of `qkv`, (T, 3H)."""
    query, key, value = _split_heads(qkv, heads)
    grads = torch.ops.aten._flash_attention_backward(
        grad.contiguous().view(query.shape),
        query,
        key,
        value,
        context.view(query.shape),
        denominator,
        starts,
        starts,
        longest,
        longest,
        probability,
        False,
        random_state,
        qkv.new_empty(0),  # was the generator's offset once
    )
    return torch.stack(grads, 1).view(qkv.shape)


def seed_kernel(device: torch.device, seed: Tensor) -> None:
    """Make the next kernel on `device` that draws begin at `seed`; nothing else of ours draws from this generator."""
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[number].manual_seed(int(seed))


@_forward.register_fake
def _forward_shapes(
    qkv: Tensor, starts: Tensor, longest: int, heads: int, probability: float, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = qkv.shape
    on_cpu = qkv.device.type == "cpu"
    return (
        qkv.new_empty(rows, width // 3),
        qkv.new_empty((0,) if on_cpu else (heads, rows), dtype=torch.float32),
        qkv.new_empty((0,) if on_cpu else (2,), dtype=torch.uint64),
    )


@_backward.register_fake
def _backward_shapes(grad: Tensor, qkv: Tensor, *others: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, starts, ctx.longest, ctx.heads, ctx.probability, seed = inputs
    ctx.save_for_backward(qkv, *output, starts, seed)


def _differentiate(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    qkv, context, denominator, random_state, starts, seed = ctx.saved_tensors
    grad_qkv = torch.ops.bertsmith.varlen_attention_backward(
        grad, qkv, context, denominator, random_state, starts, ctx.longest, ctx.heads, ctx.probability, seed
    )
    return grad_qkv, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


# --- where there is no such kernel: the grouped one behind the same operator, its products made again in the backward
# pass, as the flash kernel does. It is what compiled code calls on a CPU.


@_forward.register_kernel("cpu")
def _forward_on_cpu(
    qkv: Tensor, starts: Tensor, longest: int, heads: int, probability: float, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    context = _grouped(qkv, starts, heads, probability, seed)
    return context, torch.empty(0), torch.empty(0, dtype=torch.uint64)


@_backward.register_kernel("cpu")
def _backward_on_cpu(
    grad: Tensor,
    qkv: Tensor,
    context: Tensor,
    denominator: Tensor,
    random_state: Tensor,
    starts: Tensor,
    longest: int,
    heads: int,
    probability: float,
    seed: Tensor,
) -> Tensor:
    with torch.enable_grad():
        leaf = qkv.detach().requires_grad_()
        return torch.autograd.grad(_grouped(leaf, starts, heads, probability, seed), leaf, grad)[0]


def _grouped(qkv: Tensor, starts: Tensor, heads: int, probability: float, seed: Tensor) -> Tensor:
    begins = np.unique(starts.numpy()).astype(np.int64)  # without the sequences that are empty
    masks = DropoutMasks((int(seed),)) if probability else None
    return grouped_attention(qkv, plan_groups(begins, heads, qkv.dtype, qkv.device), probability, masks)
