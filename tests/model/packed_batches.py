"""Packed batches of random tokens, and the same sequences padded as transformers wants them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Packed:
    """A packed batch and the same sequences padded, as transformers wants them."""

    token_ids: Tensor
    segment_ids: Tensor
    position_ids: Tensor
    sequence_starts: Tensor
    masked_positions: Tensor
    masked_labels: Tensor
    next_sentence_labels: Tensor
    lengths: list[int]

    def arguments(self) -> tuple[Tensor, ...]:
        return self.token_ids, self.segment_ids, self.position_ids, self.sequence_starts

    def targets(self) -> tuple[Tensor, ...]:
        return self.masked_positions, self.masked_labels, self.next_sentence_labels

    def pad(self, packed: Tensor, value: int = 0) -> Tensor:
        rows = torch.full((len(self.lengths), max(self.lengths)), value, dtype=packed.dtype)
        for row, (start, length) in enumerate(zip(self.sequence_starts.tolist(), self.lengths, strict=False)):
            rows[row, :length] = packed[start : start + length]
        return rows

    def attention_mask(self) -> Tensor:
        return self.pad(torch.ones_like(self.token_ids))

    def padded_labels(self) -> Tensor:
        labels = torch.full_like(self.token_ids, -100)
        labels[self.masked_positions] = self.masked_labels
        return self.pad(labels, -100)


def make_packed(lengths: list[int], vocab_size: int = 301, seed: int = 0, masked_share: float = 0.15) -> Packed:
    source = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    token_ids = torch.randint(5, vocab_size, (total,), generator=source)
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    halves = torch.cat([torch.full((length,), length // 2) for length in lengths])
    count = round(total * masked_share)
    masked = torch.randperm(total, generator=source)[:count].sort().values
    labels = torch.randint(5, vocab_size, (count,), generator=source)
    nsp = torch.randint(0, 2, (len(lengths),), generator=source)
    segments = (position_ids >= halves).long()
    return Packed(token_ids, segments, position_ids, starts, masked, labels, nsp, lengths)
