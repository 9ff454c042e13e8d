"""Encoded sequences → packed batches: no padding, examples whole, as many tokens at once as suit the device.

An example's sequences (windows of a long text, choices of a question) stay together, because its loss needs all their
scores. Sequences of like length lie side by side, for attention is computed by length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.tasks.examples import EncodedSequence

# tokens that go through the model at once: what stays near the caches, what fills the chip
TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 65536}


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


def split_by_tokens(
    examples: Sequence[Sequence[EncodedSequence]], most_tokens: int
) -> Iterator[list[Sequence[EncodedSequence]]]:
    """Micro-batches of at most `most_tokens` tokens (or one example, however long it is), like lengths together."""
    for group in group_by_tokens([sum(map(len, example)) for example in examples], most_tokens):
        yield [examples[index] for index in group]


def group_by_tokens(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Numbers of items, the longest first, in groups of at most `most_tokens` tokens (or one item)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
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
