"""A BERT encoder that is only used, never trained: sequences of ids → hidden states of the levels that are wanted.

Weights are brought into the arithmetic's type once; sequences of like length go through together, packed, as many
tokens at once as suit the device; layers above the highest wanted level are not computed. Results come in input order.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.attention import attend, plan_attention
from bertsmith.model.bert import BertLayer, BertModel
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.layers import TiedGradient, fill_up
from bertsmith.tasks.batches import group_by_tokens
from bertsmith.text.tokenizer import BertTokenizer

Ints = npt.NDArray[np.integer]

# tokens that go through the model at once: for each thread of a CPU as many as keep it busy and stay near its caches (a
# thread is as fast with 1,024 as with 8,192), and as many as fill a GPU
TOKENS_A_THREAD, MOST_THREADS = 2048, 8
TOKENS_ON_CUDA = 65536
# float32 numbers in the widest vector registers there are (AVX-512)
KEYS_AT_ONCE = 16


def ranges(begins: Ints, lengths: Ints) -> npt.NDArray[np.int64]:
    """The numbers begin, begin + 1, … begin + length - 1 of each pair, one stretch after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(np.sum(lengths))) + np.repeat(begins - before, lengths)


@dataclass(frozen=True)
class Sequences:
    """N sequences end to end, [CLS] and [SEP] among their T tokens."""

    token_ids: Ints  # (T,)
    starts: Ints  # (N+1,)
    seconds: Ints | None = None
    """(N,): where the second segment begins, counted from the sequence's start; None: there is one segment only."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        """Tokens of each, (N,)."""
        return np.diff(self.starts)

    @classmethod
    def join(cls, rows: Sequence[Sequence[int] | Ints], seconds: Sequence[int] | None = None) -> "Sequences":
        """From one list of ids a sequence, special tokens among them."""
        starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        token_ids = np.concatenate([np.zeros(0, dtype=np.int32), *(np.asarray(row, dtype=np.int32) for row in rows)])
        return cls(token_ids, starts, None if seconds is None else np.array(seconds, dtype=np.int64))

    @classmethod
    def frame(cls, tokenizer: BertTokenizer, flat: Ints, begins: Ints, lengths: Ints) -> "Sequences":
        """[CLS] flat[begin : begin + length] [SEP] for each pair of `begins` (N,) and `lengths` (N,)."""
        starts = np.concatenate([[0], np.cumsum(lengths + 2)]).astype(np.int64)
        token_ids = np.empty(starts[-1], dtype=np.int32)
        token_ids[starts[:-1]] = tokenizer.cls_id
        token_ids[starts[1:] - 1] = tokenizer.sep_id
        token_ids[ranges(starts[:-1] + 1, lengths)] = flat[ranges(begins, lengths)]
        return cls(token_ids, starts)


@dataclass(frozen=True)
class TokenBatch:
    """Some sequences, packed, on the device."""

    numbers: Ints
    """(n,): which sequences these are."""
    starts: Ints
    """(n+1,): where each begins, on the host."""
    token_ids: Tensor  # (T,)
    segment_ids: Tensor  # (T,)
    position_ids: Tensor  # (T,)
    sequence_starts: Tensor  # (n+1,)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the model takes."""
        return self.token_ids, self.segment_ids, self.position_ids, self.sequence_starts


def pack_sequences(sequences: Sequences, numbers: Ints, device: torch.device) -> TokenBatch:
    """The sequences `numbers` (n,), in that order, as a batch."""
    lengths = sequences.lengths[numbers]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = sequences.token_ids[ranges(sequences.starts[numbers], lengths)].astype(np.int64)
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    segments = np.zeros_like(places)
    if sequences.seconds is not None:
        segments[places >= np.repeat(sequences.seconds[numbers], lengths)] = 1
    on_device = (torch.from_numpy(array).to(device) for array in (token_ids, segments, places, starts))
    return TokenBatch(numbers, starts, *on_device)


class InferenceBert(BertModel):
    """A BertModel's weights for use in the type `dtype`; stands in for it in any model with a head.

    Takes the parts over: of another type than float32, the layers that were given are no longer fit for training.
    """

    def __init__(self, bert: BertModel, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.config = bert.config
        self.compute_dtype = dtype
        self.embeddings = bert.embeddings
        # each part casts its weights to the type of its input, which is nothing to do where they have it already
        self.encoder = bert.encoder.to(dtype)
        self.pooler = bert.pooler.to(dtype)
        self.requires_grad_(False).eval()

    @torch.inference_mode()
    def levels(
        self,
        token_ids: Tensor,  # (T,)
        segment_ids: Tensor,  # (T,)
        position_ids: Tensor,  # (T,)
        sequence_starts: Tensor,  # (N+1,)
        wanted: Sequence[int],
        rows: Tensor | None = None,
    ) -> list[Tensor]:
        """Hidden states of the levels `wanted` (0: embeddings, n: layer n), each (T, H), in that order.

        `rows` (R,): the tokens wanted of the highest of them, which then is (R, H).
        """
        top, tokens = max(wanted), len(token_ids)
        attention = _Attention(sequence_starts, self.config.num_attention_heads, tokens)
        packed = (fill_up(ids, attention.spare) for ids in (token_ids, segment_ids, position_ids))
        hidden = self.embeddings(*packed, self.compute_dtype, None)
        chosen = None if rows is None else fill_up(rows)
        found = {0: hidden}
        for number in range(1, top + 1):
            hidden = _run_layer(self.encoder.layer[number - 1], hidden, attention, chosen if number == top else None)
            if number in wanted:
                found[number] = hidden
        if top == 0 and chosen is not None:
            found[0] = hidden.index_select(0, chosen)
        return [found[level][: tokens if rows is None or level < top else len(rows)] for level in wanted]

    def hidden_states(
        self,
        token_ids: Tensor,
        segment_ids: Tensor,
        position_ids: Tensor,
        sequence_starts: Tensor,
        masks: DropoutMasks | None = None,
        tied: TiedGradient | None = None,
        rows: Tensor | None = None,
    ) -> list[Tensor]:
        """As BertModel's; `masks` and `tied` are for training and not looked at."""
        every = range(self.config.num_hidden_layers + 1)
        return self.levels(token_ids, segment_ids, position_ids, sequence_starts, every, rows)

    def forward(
        self,
        token_ids: Tensor,
        segment_ids: Tensor,
        position_ids: Tensor,
        sequence_starts: Tensor,
        masks: DropoutMasks | None = None,
        tied: TiedGradient | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """→ last hidden states, (T, H), or (R, H) of the tokens `rows`."""
        top = self.config.num_hidden_layers
        return self.levels(token_ids, segment_ids, position_ids, sequence_starts, [top], rows)[0]


def _run_layer(layer: nn.Module, hidden: Tensor, attention: "_Attention", rows: Tensor | None) -> Tensor:
    """BertLayer's arithmetic without what training needs: (T, H) → (T, H), or (R, H) of the tokens `rows`."""
    assert isinstance(layer, BertLayer)
    context = attention(layer.qkv(hidden))
    if rows is not None:
        context, hidden = context.index_select(0, rows), hidden.index_select(0, rows)
    hidden = layer.attention_norm(layer.attention_output(context).add_(hidden))
    expanded = layer.activation(layer.intermediate(hidden))
    return layer.output_norm(layer.output(expanded).add_(hidden))


class _Attention:
    """Self-attention of one batch, for all layers.

    On the CPU run by run of neighbours of one length, which lie in the batch as they are needed, by PyTorch's fused
    kernel, which keeps no probabilities: two thirds of the time that training's products take at 84 tokens, a third at
    510. Filling up shorter neighbours as training does saves calls, but copies and masks cost more: 2 to 3 % of the
    whole encoder's time. Elsewhere as in training.

    The kernel takes keys a vector at a time and what is left of them one by one, which more than doubles its time at 93
    tokens. So it is given keys up to a whole number of vectors: what lies behind the sequence, under a mask.
    """

    def __init__(self, sequence_starts: Tensor, heads: int, tokens: int) -> None:
        self.heads = heads
        self.tokens = tokens
        self.plan = None
        self.masks: dict[int, Tensor] = {}
        self.spare = 0
        """Rows that must follow the T tokens."""
        if sequence_starts.device.type != "cpu":
            self.plan = plan_attention(sequence_starts)
            return
        starts = sequence_starts.numpy()
        lengths = np.diff(starts)
        borders = [*np.flatnonzero(np.diff(lengths, prepend=-1)).tolist(), len(lengths)]
        # (first token, token after the last, length of each sequence)
        self.runs = [
            (int(starts[first]), int(starts[last]), int(lengths[first])) for first, last in itertools.pairwise(borders)
        ]
        self.spare = max((end + -length % KEYS_AT_ONCE - tokens for _, end, length in self.runs), default=0)

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T or more, 3H) → context (as many, H), 0 after the T tokens."""
        out = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
        if self.plan is not None:
            out[: self.tokens] = attend(qkv[: self.tokens], self.plan, self.heads, 0.0, None)
            return out
        width = qkv.shape[1] // (3 * self.heads)
        row = qkv.stride(0)
        for begin, end, length in self.runs:
            keys = length + -length % KEYS_AT_ONCE
            shape = ((end - begin) // length, keys, 3, self.heads, width)
            heads = qkv[begin:].as_strided(shape, (length * row, row, self.heads * width, width, 1))
            query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (n, heads, keys, d)
            mask = self._mask(length, keys, qkv)
            context = F.scaled_dot_product_attention(query[:, :, :length], key, value, attn_mask=mask)
            out[begin:end] = context.transpose(1, 2).reshape(end - begin, -1)
        return out

    def _mask(self, length: int, keys: int, like: Tensor) -> Tensor | None:
        """(1, 1, 1, keys): -inf on what lies behind a sequence of `length`; made once for all layers."""
        if length == keys:
            return None
        if length not in self.masks:
            self.masks[length] = F.pad(like.new_zeros(1, 1, 1, length), (0, keys - length), value=float("-inf"))
        return self.masks[length]


class Encoder:
    """An encoder with its tokenizer, loaded once: whoever wants hidden states asks here.

    `bert` stands on `device`. `max_length`: the most tokens of a sequence, by the tokenizer's folder and the positions.
    """

    def __init__(self, bert: InferenceBert, tokenizer: BertTokenizer, device: torch.device) -> None:
        self.bert = bert
        self.tokenizer = tokenizer
        self.device = device
        self.config = bert.config
        self.max_length = min(tokenizer.max_length, bert.config.max_position_embeddings)
        threads = min(torch.get_num_threads(), MOST_THREADS)
        self.tokens_at_once = TOKENS_A_THREAD * threads if device.type == "cpu" else TOKENS_ON_CUDA

    def batches(self, sequences: Sequences) -> Iterator[TokenBatch]:
        """Every sequence once, in batches of like lengths, the longest first."""
        for group in group_by_tokens(sequences.lengths.tolist(), self.tokens_at_once):
            yield pack_sequences(sequences, np.array(group), self.device)

    def hidden_states(self, sequences: Sequences, levels: Sequence[int]) -> list[npt.NDArray[np.float32]]:
        """For each sequence, in input order, its hidden states at `levels` (0 … layers), (levels, length, H)."""
        results: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(sequences)
        for batch in self.batches(sequences):
            states = torch.stack(self.bert.levels(*batch.inputs(), levels)).float().cpu().numpy()
            for index, number in enumerate(batch.numbers.tolist()):
                results[number] = states[:, batch.starts[index] : batch.starts[index + 1]].copy()
        return results
