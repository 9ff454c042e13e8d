"""The two pre-training heads: masked language model (tied to the word embeddings) and next-sentence prediction.

Losses come as sums over targets divided by a number the caller knows (all targets of the optimizer step), so that
accumulation over micro-batches and ranks is exact. Devlin et al. 2018, section 3.1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.config import BertConfig
from bertsmith.model.layers import LayerNorm, Linear, TiedGradient, activation

# logits of this many masked positions are held at once: enough rows for the matrix product's best speed, few enough
# that the walks over the logits find them in the cache (30,522 × 256 × 4 bytes = 31 MB)
ROWS_AT_ONCE = 256
# on a GPU a product of 256 rows is too small, and each part reads and writes the weight's gradient once more; these are
# 500 MB of logits in bf16
ROWS_AT_ONCE_ON_CUDA = 8192
# a target that rounds to probability 0 counts as 87 nats, float32's smallest normal number; its gradient is exact
LEAST_LIKELIHOOD = torch.finfo(torch.float32).tiny


class MaskedLanguageModelHead(nn.Module):
    """Transform (dense, activation, layer norm), then the word embeddings transposed, with a bias of its own."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = Linear(config.hidden_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = activation(config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states of the wanted positions (M, H) → what is compared with the word embeddings (M, H)."""
        return self.norm(self.activation(self.transform(hidden)))


class NextSentenceHead(nn.Module):
    """Two logits from the pooled [CLS]: 0 = the second segment is the next, 1 = it is random (or swapped, SOP)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.linear = Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        """(N, H) → (N, 2)."""
        return self.linear(pooled)


class _LinearCrossEntropy(torch.autograd.Function):
    """Σ cross-entropy(hidden · weightᵀ + bias) · scale, its gradients computed while the logits are at hand.

    The gradient of the logits is softmax(logits) - onehot(label). The softmax overwrites the logits, the scale goes to
    the smaller operand of each product and the one-hot part is a gather, so the logits are walked over twice in all.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, scale: float, tied: TiedGradient | None
    ) -> Tensor:
        matrix = weight.to(hidden.dtype)  # (V, H)
        vector = bias.to(hidden.dtype)
        rows_in_all = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.empty(matrix.shape, dtype=torch.float32, device=hidden.device)
        if rows_in_all == 0:
            grad_weight.zero_()
        grad_bias = torch.zeros(vector.shape, dtype=torch.float32, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        at_once = rows_at_once(hidden.device)
        room = hidden.new_empty(min(rows_in_all, at_once), matrix.shape[0])
        for first in range(0, rows_in_all, at_once):
            rows = slice(first, first + at_once)
            part, label = hidden[rows], labels[rows]
            real = len(label)
            logits = torch.addmm(vector, part, matrix.t(), out=room[: part.shape[0]])  # (m, V)
            probabilities = torch.softmax(logits, 1, out=logits)
            probabilities[real:] = 0
            likelihood = probabilities[:real].gather(1, label[:, None]).float()
            loss -= likelihood.clamp_(min=LEAST_LIKELIHOOD).log_().sum()
            torch.mm(probabilities, matrix, out=grad_hidden[rows])
            grad_hidden[rows][:real].sub_(matrix.index_select(0, label)).mul_(scale)
            _accumulate_product(grad_weight, probabilities.t(), part * scale, first == 0)
            grad_weight.index_add_(0, label, part[:real].float(), alpha=-scale)
            grad_bias.add_(probabilities.sum(0), alpha=scale)
            grad_bias.index_add_(0, label, torch.full_like(label, -scale, dtype=grad_bias.dtype))
        ctx.grads, ctx.tied = (grad_hidden, grad_weight, grad_bias), tied
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.grads
        del ctx.grads
        # the caller normalizes through `scale`, so the incoming gradient is 1 and the pass over the weight's gradient
        # is saved; on an accelerator reading it would wait for the device, multiplying is cheaper
        if grad_loss.device.type != "cpu" or grad_loss.item() != 1:
            for grad in (grad_hidden, grad_weight, grad_bias):
                grad.mul_(grad_loss.to(grad.dtype))
        if ctx.tied is None:
            return grad_hidden, grad_weight, grad_bias, None, None, None
        ctx.tied.put(grad_weight)
        return grad_hidden, None, grad_bias, None, None, None


def rows_at_once(device: torch.device) -> int:
    """Rows whose logits training holds at once."""
    return ROWS_AT_ONCE if device.type == "cpu" else ROWS_AT_ONCE_ON_CUDA


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total (float32) = left @ right when `first`, else += ; without a pass to clear it."""
    if total.dtype != left.dtype:
        product = torch.mm(left, right)
        total.copy_(product) if first else total.add_(product.float())  # faster than adding two types
    elif first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, scale: float, tied: TiedGradient | None = None
) -> Tensor:
    """`scale` × Σ over rows of -log softmax(hidden · weightᵀ + bias)[label]; a float32 scalar, 0 for no rows.

    `hidden` (M, H), `weight` (V, H) and `bias` (V,) float32 masters, `labels` (M,), or fewer: rows of `hidden` past
    them count for nothing. When gradients are wanted they are computed in this call and the logits are gone when it
    returns; otherwise logits are taken in float32. With `tied`, the gradient of `weight` goes to the word look-up (see
    TiedGradient) instead of to autograd.
    """
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden, weight, bias, labels, scale, tied)
    hidden = hidden[: len(labels)]
    losses = [
        F.cross_entropy(logits, labels[rows], reduction="sum") for rows, logits in logits_in_parts(hidden, weight, bias)
    ]
    return torch.stack(losses).sum() * scale if losses else hidden.new_zeros((), dtype=torch.float32)


def logits_in_parts(hidden: Tensor, weight: Tensor, bias: Tensor) -> list[tuple[slice, Tensor]]:
    """(rows, float32 logits (m, V)) for ROWS_AT_ONCE rows of `hidden` (M, H) at a time."""
    parts = []
    for first in range(0, hidden.shape[0], ROWS_AT_ONCE):
        rows = slice(first, min(first + ROWS_AT_ONCE, hidden.shape[0]))
        parts.append((rows, F.linear(hidden[rows].float(), weight, bias)))
    return parts
