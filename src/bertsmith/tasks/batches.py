"""Encoded sequences → packed batches: no padding, examples whole, as many tokens at once as suit the device.

An example's sequences (windows of a long text, choices of a question) stay together, because its loss needs all their
scores. Sequences of like length lie side by side, for attention is computed by length.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.tasks.examples import EncodedSequence
from bertsmith.training.ranks import split_evenly

# tokens that go through the model at once: what stays near the caches, what fills the chip
TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 65536}
# with fewer a thread, batches side by side are not worth it
LEAST_A_THREAD = 256


@dataclass
class PackedBatch:
    """T tokens of N sequences of E examples; R rows that the head looks at."""

    token_ids: Tensor  # (T,)
    segment_ids: Tensor  # (T,)
    position_ids: Tensor  # (T,)
    sequence_starts: Tensor  # (N+1,)
    rows: Tensor  # (R,) tokens
    row_counts: list[int]
    """Rows of each sequence, N numbers."""
    sequence_examples: Tensor  # (N,) example of each sequence, 0 … E-1
    examples: int
    targets: Tensor
    """All sequences' targets, one after the other; their meaning is the task's."""
    squared_lengths: int
    """Σ length², what attention costs."""

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What BertForTask takes."""
        return self.token_ids, self.segment_ids, self.position_ids, self.sequence_starts, self.rows


def pack_examples(examples: Sequence[Sequence[EncodedSequence]], device: torch.device) -> PackedBatch:
    """Pack the sequences of `examples`, in the order given."""
    sequences = [sequence for example in examples for sequence in example]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    seconds = np.repeat([sequence.second_segment for sequence in sequences], lengths)
    rows = [sequence.positions + start for sequence, start in zip(sequences, starts[:-1], strict=True)]
    owners = np.repeat(np.arange(len(examples)), [len(example) for example in examples])

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return PackedBatch(
        token_ids=to_device(np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)),
        segment_ids=to_device((place >= seconds).astype(np.int64)),
        position_ids=to_device(place),
        sequence_starts=to_device(starts),
        rows=to_device(np.concatenate(rows).astype(np.int64)),
        row_counts=[len(sequence.positions) for sequence in sequences],
        sequence_examples=to_device(owners),
        examples=len(examples),
        targets=to_device(np.concatenate([sequence.targets for sequence in sequences])),
        squared_lengths=int((lengths**2).sum()),
    )


def pack_nothing(device: torch.device) -> PackedBatch:
    """No example: what a rank without a share of a batch puts through the model, for a loss of 0.

    It is one token of padding that the head looks at: not every attention kernel takes a batch of none.
    """
    one = torch.zeros(1, dtype=torch.int64, device=device)
    return PackedBatch(one, one, one, torch.tensor([0, 1], device=device), one, [1], one, 0, one[:0], 0)


def split_for_ranks(
    examples: Sequence[Sequence[EncodedSequence]], most_tokens: int | None, device: torch.device, ranks: int
) -> list[list[Sequence[EncodedSequence]]]:
    """The micro-batches of an optimizer step, which ranks take in turn: `split_by_tokens`.

    `most_tokens` None: what suits the device, and where there are several ranks micro-batches of about one size, as
    many for each of them.
    """
    if most_tokens is not None or ranks == 1:
        return list(split_by_tokens(examples, most_tokens or TOKENS_AT_ONCE[device.type]))
    lengths = [sum(map(len, example)) for example in examples]
    count = ranks * math.ceil(sum(lengths) / ranks / TOKENS_AT_ONCE[device.type])
    return [[examples[index] for index in group] for group in group_evenly(lengths, count)]


def split_by_tokens(
    examples: Sequence[Sequence[EncodedSequence]], most_tokens: int
) -> Iterator[list[Sequence[EncodedSequence]]]:
    """Micro-batches of at most `most_tokens` tokens (or one example, however long it is), like lengths together."""
    for group in group_by_tokens([sum(map(len, example)) for example in examples], most_tokens):
        yield [examples[index] for index in group]


def group_for_threads(lengths: Sequence[int], most_tokens: int, threads: int) -> Iterator[list[int]]:
    """Groups for so many threads side by side: as many of about one size for each, or as of `group_by_tokens`.

    The latter where there is one thread, or so little (LEAST_A_THREAD) that one group goes over all threads, or an item
    is half a group by itself.
    """
    total, longest = sum(lengths), max(lengths, default=0)
    if threads == 1 or total < threads * LEAST_A_THREAD or 2 * longest > most_tokens:
        return group_by_tokens(lengths, most_tokens)
    # a group may be larger than its share by less than one item
    return group_evenly(lengths, threads * math.ceil(total / threads / (most_tokens - longest)))


def group_evenly(lengths: Sequence[int], count: int) -> Iterator[list[int]]:
    """Numbers of items, the longest first, in at most `count` groups of about as many tokens each."""
    order = _longest_first(lengths)
    for stretch in split_evenly([lengths[index] for index in order], count):
        if order[stretch]:
            yield order[stretch]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def group_by_tokens(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Numbers of items, the longest first, in groups of at most `most_tokens` tokens (or one item)."""
    order = _longest_first(lengths)
    group: list[int] = []
    tokens = 0
    for index in order:
        if group and tokens + lengths[index] > most_tokens:
            yield group
            group, tokens = [], 0
        group.append(index)
        tokens += lengths[index]
    if group:
        yield group
