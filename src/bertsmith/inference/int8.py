"""Products in 8 bits for an encoder that is only used: which, and from which scales.

The products that take a layer norm's output multiply in 8 bits: queries, keys, values in one, and the feed-forward's
first, 58 % of a layer's arithmetic. What goes into the other two spreads further (GELU's output is hardly ever below
0 and now and then 25), and one scale for a whole tensor would cost more agreement than those two do together; exported
files (quantize.py) multiply those in 8 bits too, with a scale a token.

Scales: one for the whole tensor, so that sums of products are sums of integers, but each input channel is shifted to
the middle of its range and divided by a factor of its own first, which its column of weights is multiplied by
(SmoothQuant, Xiao et al. 2022), for some channels reach ten times as far as others. Ranges come from some texts and
random words that go through once: a layer norm bounds them, and the channels that reach far are the model's, not the
text's. Weights have a scale an output channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.demo_text import demo_text_paths
from bertsmith.errors import UserError, not_finite
from bertsmith.hardware import int8_weight_bits
from bertsmith.inference.encoder import Encoder, InferenceBert, Sequences, pack_sequences
from bertsmith.inference.products import MIDDLE, Int8Weights, can_multiply_int8
from bertsmith.model.bert import BertLayer, BertModel
from bertsmith.progress import Progress
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.rows import read_rows
from bertsmith.text.tokenizer import BertTokenizer

INT8 = {"int8": None, "int8+fp32": "fp32", "int8+bf16": "bf16"}
"""The names of this arithmetic where a precision is asked for, and what the rest computes in (None: the faster)."""
# How far beyond what was seen a channel may go before it is cut off; codes are as much coarser.
MARGIN = 1.1
# How much of a channel's reach its weights take over.
SHARE = 0.75
PASSAGES, PASSAGE_CHARACTERS, PASSAGE_TOKENS = 16, 300, 64
DRAWN, DRAWN_TOKENS = 16, 32
# columns that are rounded one by one before the rest is changed, in one product
BLOCK = 32
DAMPING = 0.1
ZEROS = (8, 16, 24, 32, 48, 64, 96, 128)
"""What the code of 0 may be where each row has a step of its own."""
LEAST_STEP = 1e-12
_LEAST = 1e-6


def check_int8(device: torch.device) -> int:
    """The bits that weights may have here. Raises UserError where 8-bit products are not to be had."""
    bits = int8_weight_bits() if device.type == "cpu" and can_multiply_int8() else None
    if bits is None:
        raise UserError(
            "precision: int8 needs a CPU with AVX2 and a PyTorch with oneDNN; use auto, which is the fastest other one"
        )
    return bits


def choose_int8(bert: BertModel, tokenizer: BertTokenizer, more: Sequence[str] = ()) -> list[dict[str, Int8Weights]]:
    """For each layer of `bert`, whose weights are float32, the products that multiply in 8 bits.

    `more`: texts to go through beside the demo's. Raises UserError where 8-bit products are not to be had, and for a
    model whose weights or hidden states are not finite.
    """
    device = bert.embeddings.word.device
    bits = check_int8(device)
    # codes of 8 bits are numbers whatever goes in: what is damaged in one word only would no longer show
    if not all(bool(weight.isfinite().all()) for weight in bert.parameters()):
        raise not_finite("precision: int8: the model's weights")
    encoder = Encoder(InferenceBert(bert, torch.float32), tokenizer, device)
    rows = sample_rows(tokenizer, encoder.config.vocab_size, encoder.max_length, more)
    pairs = second_segments(rows) if encoder.config.type_vocab_size > 1 else None
    norms = _norms_of(encoder, Sequences.join(rows, pairs))
    if not all(bool(norm.isfinite().all()) for norm in norms):
        raise not_finite("precision: int8: the model's hidden states")
    chosen = []
    with torch.inference_mode(), Progress("weights in 8 bits", len(bert.encoder.layer), "layers") as progress:
        for layer, first, second in zip(bert.encoder.layer, norms[::2], norms[1::2], strict=False):
            assert isinstance(layer, BertLayer)
            of_norms = {"qkv": first, "intermediate": second}
            chosen.append(
                {
                    name: quantize(getattr(layer, name).weight, getattr(layer, name).bias, seen, bits)
                    for name, seen in of_norms.items()
                }
            )
            progress.advance(1)
    return chosen


def quantize(weight: Tensor, bias: Tensor, inputs: Tensor, bits: int) -> Int8Weights:
    """The 8-bit form of a product that comes nearest to it for `inputs` (R, K), weights (N, K) of `bits` bits."""
    low, high = inputs.aminmax(dim=0)
    middle, half = (low + high) / 2, ((high - low) / 2).clamp_min(_LEAST) * MARGIN
    size = half**SHARE / weight.abs().amax(0).clamp_min(_LEAST) ** (1 - SHARE)
    size *= (half / size).amax() / (MIDDLE - 1)  # (K,): the step of each channel's codes
    codes = ((inputs - middle) / size).round()
    weights, scale = _whole_weights(weight * size, codes, bits)
    # the mean of what rounding misses is known, and goes into the bias; the rest is noise
    bias = bias + weight @ inputs.mean(0) - (weights @ codes.mean(0)) * scale
    return Int8Weights(1 / size, MIDDLE - middle / size, weights.to(torch.int8), scale, bias)


@dataclass(frozen=True)
class Int8RowWeights:
    """A product in 8 bits with a step for each row of its input, chosen as it comes: from its largest and least number.

    step = max(largest / (255 - zero), -least / zero), q = round(x / step) + zero;
    y = step × (q - zero) · weightsᵀ × scale + bias.
    """

    zero: int
    weights: Tensor  # (N, K) int8
    scale: Tensor  # (N,) float32
    bias: Tensor  # (N,) float32


def quantize_by_row(weight: Tensor, bias: Tensor, inputs: Tensor, bits: int) -> Int8RowWeights:
    """The 8-bit form, with a step a row, that comes nearest to a product for `inputs` (R, K), weights of `bits` bits.

    The code of 0 is where the steps are the smallest: in the middle for numbers of both signs, low for GELU's.
    """
    high, low = inputs.amax(1, keepdim=True), -inputs.amin(1, keepdim=True)  # (R, 1)

    def steps(zero: int) -> Tensor:
        return torch.maximum(high / (255 - zero), low / zero).clamp_min(LEAST_STEP)

    zero = min(ZEROS, key=lambda zero: float(steps(zero).square().sum()))
    near = (inputs / steps(zero)).round() * steps(zero)
    weights, scale = _whole_weights(weight, near, bits)
    bias = bias + weight @ inputs.mean(0) - (weights @ near.mean(0)) * scale
    return Int8RowWeights(zero, weights.to(torch.int8), scale, bias)


def _whole_weights(weight: Tensor, inputs: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`weight` (N, K) in whole numbers of `bits` bits, that suit `inputs` (R, K), and the scale of each row, (N,)."""
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / most
    return round_together(weight / scale[:, None], inputs, most), scale


def round_together(weights: Tensor, inputs: Tensor, most: int) -> Tensor:
    """Whole numbers from -most to most near `weights` (N, K), such that products with `inputs` (R, K) change least.

    Column by column, those of the largest inputs first; what rounding one misses, those to come make up for as far as
    their inputs go together with its (Frantar et al. 2023, GPTQ; each of N rows by itself). O(N K²).
    """
    moments = (inputs.T @ inputs).double()
    moments += torch.eye(len(moments), dtype=moments.dtype) * (DAMPING * moments.diagonal().mean() + _LEAST)
    order = moments.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments[order][:, order]))
    make_up = torch.linalg.cholesky(inverse, upper=True).float()
    make_up /= make_up.diagonal().clone()[:, None]  # row k: by how much of k's miss those after it change
    left, found = weights[:, order].T.contiguous(), torch.empty_like(weights.T)  # (K, N)
    for begin in range(0, len(left), BLOCK):
        end = min(begin + BLOCK, len(left))
        # NumPy's, on one thread: threads would wait for each other at each of so small steps
        block, rounded = left[begin:end].numpy(), found[begin:end].numpy()
        shares = make_up[begin:end, begin:end].numpy()
        for column in range(end - begin):
            np.clip(np.rint(block[column]), -most, most, out=rounded[column])
            block[column] -= rounded[column]  # from here on what was missed
            block[column + 1 :] -= shares[column, column + 1 :, None] * block[column]
        left[end:] -= make_up[begin:end, end:].T @ left[begin:end]
    result = torch.empty_like(weights)
    result[:, order] = found.T
    return result


def sample_rows(
    tokenizer: BertTokenizer | None, vocab_size: int, max_length: int, more: Sequence[str] = ()
) -> list[list[int]]:
    """Rows of ids to see ranges on, of at most `max_length`, special tokens among them.

    Beginnings of the demo's chapters, English and Chinese, and `more`; all as one row cut; entries at random, for the
    vocabulary may be of another language or of none, and scoring asks with [MASK]. Without a tokenizer, of which nobody
    knows what its entries stand for, entries at random alone.
    """
    source = np.random.default_rng(0)
    if tokenizer is None:
        return source.integers(0, vocab_size, (2 * DRAWN, min(DRAWN_TOKENS, max_length))).tolist()
    texts = list(more)
    for path in demo_text_paths():
        chapters = [text[:PASSAGE_CHARACTERS] for _, text in read_rows(path, ReadOptions(), ReadReport())]
        texts += chapters[:: -(-len(chapters) // (PASSAGES // 2))]
    rows = [row[:PASSAGE_TOKENS] for row in tokenizer.encode_ids(texts)]
    rows.append([index for row in rows for index in row])
    entries = np.setdiff1d(
        np.arange(min(tokenizer.vocab_size, vocab_size)),
        [index for index in tokenizer.special_ids if index != tokenizer.mask_id],
    )
    drawn = source.choice(entries, (DRAWN, DRAWN_TOKENS))
    drawn[:, ::8] = tokenizer.mask_id
    most = max(0, max_length - 2)
    return [[tokenizer.cls_id, *row[:most], tokenizer.sep_id] for row in [*rows, *drawn.tolist()]]


def second_segments(rows: Sequence[Sequence[int]]) -> list[int]:
    """Where the second segment of each row begins, if every other row is a pair of two halves."""
    return [len(row) // 2 if number % 2 else len(row) for number, row in enumerate(rows)]


def _norms_of(encoder: Encoder, sequences: Sequences) -> list[Tensor]:
    """What each layer norm gives for all tokens, (T, H), in the order of the arithmetic, the embeddings' first."""
    batch = pack_sequences(sequences, np.arange(len(sequences)), encoder.device)
    bert, tokens = encoder.bert, len(batch.token_ids)
    norms = [bert.embeddings.norm]
    for layer in bert.encoder.layer:
        assert isinstance(layer, BertLayer)
        norms += [layer.attention_norm, layer.output_norm]
    seen: list[Tensor] = []
    hooks = [norm.register_forward_hook(lambda *called: seen.append(called[2][:tokens])) for norm in norms]
    try:
        bert(*batch.inputs())
    finally:
        for hook in hooks:
            hook.remove()
    return seen
