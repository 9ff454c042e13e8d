"""A BERT encoder that is only used, never trained: sequences of ids → hidden states of the levels that are wanted.

Weights are brought into the arithmetic's type once; sequences of like length go through together, packed, as many
tokens at once as suit the device; layers above the highest wanted level are not computed. Results come in input order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.inference.attention import InferenceAttention
from bertsmith.inference.products import ROWS, Int8Linear, Int8Weights, PackedLinear, UsedLinear, can_pack
from bertsmith.inference.streams import map_on_threads, threads_on
from bertsmith.model.bert import BertLayer, BertModel
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.layers import Linear, TiedGradient, fill_up
from bertsmith.tasks.batches import group_for_threads
from bertsmith.text.tokenizer import BertTokenizer

Ints = npt.NDArray[np.integer]

# tokens that go through the model at once: as many as keep a thread of a CPU busy, for which each layer's weights are
# read once (2 % faster than 2,048, 8 % than 1,024 where bf16 has no tiles), and as many as fill a GPU
TOKENS_A_THREAD, TOKENS_ON_CUDA = ROWS, 65536

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    `int8`: for each layer, the linear parts by name that multiply in 8 bits, see int8.py.
    """

    def __init__(
        self, bert: BertModel, dtype: torch.dtype, int8: Sequence[Mapping[str, Int8Weights]] | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.config = bert.config
        self.compute_dtype = dtype
        self.embeddings = bert.embeddings
        # each part casts its weights to the type of its input, which is nothing to do where they have it already
        self.encoder = bert.encoder.to(dtype)
        self.pooler = bert.pooler.to(dtype)
        self.requires_grad_(False).eval()
        pack = can_pack(self.embeddings.word.device, dtype)
        for number, layer in enumerate(self.encoder.layer):
            of_8_bits = int8[number] if int8 else {}
            for name, part in layer.named_children():
                if isinstance(part, Linear) and name in of_8_bits:
                    setattr(layer, name, Int8Linear(part, of_8_bits[name]))
                elif isinstance(part, Linear) and pack:
                    setattr(layer, name, PackedLinear(part))

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
        attention = InferenceAttention(sequence_starts, self.config.num_attention_heads, tokens, self.compute_dtype)
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


def _run_layer(layer: nn.Module, hidden: Tensor, attention: InferenceAttention, rows: Tensor | None) -> Tensor:
    """BertLayer's arithmetic without what training needs: (T, H) → (T, H), or (R, H) of the tokens `rows`."""
    assert isinstance(layer, BertLayer)
    context = attention(layer.qkv(hidden))
    if rows is not None:
        context, hidden = context.index_select(0, rows), hidden.index_select(0, rows)
    hidden = layer.attention_norm(layer.attention_output(context).add_(hidden))
    # in place or with the product where it can be: an address more is a walk through memory more
    if layer.activation is not F.gelu:
        expanded = layer.activation(layer.intermediate(hidden))
    elif isinstance(layer.intermediate, UsedLinear):
        expanded = layer.intermediate.gelu(hidden)
    else:
        expanded = torch.ops.aten.gelu_(layer.intermediate(hidden))
    return layer.output_norm(layer.output(expanded).add_(hidden))


class Encoder:
    """An encoder with its tokenizer, loaded once: whoever wants hidden states asks here.

    `bert` stands on `device`. `max_length`: the most tokens of a sequence, by the tokenizer's folder and the positions
    that were trained.
    """

    def __init__(self, bert: InferenceBert, tokenizer: BertTokenizer, device: torch.device) -> None:
        self.bert = bert
        self.tokenizer = tokenizer
        self.device = device
        self.config = bert.config
        self.max_length = min(tokenizer.max_length, bert.config.trained_positions)
        self.tokens_at_once = TOKENS_A_THREAD if device.type == "cpu" else TOKENS_ON_CUDA

    def group(self, lengths: Sequence[int]) -> Iterator[Ints]:
        """Numbers of sequences of these lengths, each once, in batches of like lengths, the longest first.

        Where threads share the work, each has as many batches of as many tokens.
        """
        for group in group_for_threads(lengths, self.tokens_at_once, threads_on(self.device)):
            yield np.array(group)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Each batch, or group of numbers, with function(it), in order; on a CPU as many at once as it has cores."""
        return map_on_threads(function, items, self.device)

    def batches(self, sequences: Sequences) -> Iterator[TokenBatch]:
        """Every sequence once, in batches of like lengths, the longest first."""
        for group in self.group(sequences.lengths.tolist()):
            yield pack_sequences(sequences, group, self.device)

    def hidden_states(self, sequences: Sequences, levels: Sequence[int]) -> list[npt.NDArray[np.float32]]:
        """For each sequence, in input order, its hidden states at `levels` (0 … layers), (levels, length, H)."""

        @torch.inference_mode()
        def compute(batch: TokenBatch) -> npt.NDArray[np.float32]:
            states: npt.NDArray[np.float32] = (
                torch.stack(self.bert.levels(*batch.inputs(), levels)).float().cpu().numpy()
            )
            return states

        results: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(sequences)
        for batch, states in self.map(compute, self.batches(sequences)):
            for index, number in enumerate(batch.numbers.tolist()):
                results[number] = states[:, batch.starts[index] : batch.starts[index + 1]].copy()
        return results
