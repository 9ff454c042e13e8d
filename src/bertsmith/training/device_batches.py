"""How batches get to the device: as the model's arguments, of one shape for compiled code, ahead of the step on GPUs.

In go packed batches on the host; out come tensors on the device. Nothing here waits for the device: what attention must
know of the sequences is taken from the host's arrays, and on a GPU copies go from pinned memory, on a stream of their
own, while the micro-batch before is computed.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertsmith.corpus.batches import Batch, BatchStream, split_batch
from bertsmith.model.attention import AttentionPlan
from bertsmith.model.layers import filled_length
from bertsmith.model.varlen import VarlenPlan, cover_rows

Ints = npt.NDArray[np.integer]
# the shape of all micro-batches is found from so many examples, the corpus's first
SAMPLED_EXAMPLES = 4096
# room above the mean, in standard deviations of a micro-batch's sum: 1 micro-batch of 160 finds too little, and is not
# computed by compiled code; more room would be filled up, and computed for nothing, in each of them
ROOM = 2.5


@dataclass(frozen=True)
class BatchShape:
    """What micro-batches are filled up to, so that compiled code sees one shape: a budget of tokens, known before."""

    tokens: int
    sequences: int
    masked: int
    longest: int
    """The most tokens of a sequence."""

    @property
    def pieces(self) -> int:
        """The sequences that attention is told of: with those that fill up (see `cover_rows`), rarely near as many."""
        return self.sequences + self.sequences // 8 + 4

    @classmethod
    def of(cls, stream: BatchStream, micro_batch_size: int) -> "BatchShape":
        """For nearly all micro-batches of a stream. A function of corpus and settings: a resumed run has the same."""
        lengths, masked = [np.zeros(0)], [np.zeros(0)]
        enough = math.ceil(SAMPLED_EXAMPLES / stream.batch_size)
        for batch in itertools.islice(stream.batches(epochs=1), enough):
            lengths.append(np.diff(batch.sequence_starts))
            masked.append(np.diff(np.searchsorted(batch.masked_positions, batch.sequence_starts)))

        def room(values: list[npt.NDArray[Any]], most: int) -> int:
            each = np.concatenate(values)
            if not len(each):
                return most
            total = micro_batch_size * each.mean() + ROOM * math.sqrt(micro_batch_size) * each.std()
            return filled_length(max(1, min(math.ceil(total), most)))

        most = micro_batch_size * stream.max_length
        return cls(room(lengths, most), micro_batch_size, room(masked, most), stream.max_length)

    def fill(self, batch: Batch) -> dict[str, Ints | None] | None:
        """The model's arguments of this shape, and `pieces` (pieces + 1,) for VarlenPlan; None if it does not fit.

        Labels are as many as they are: no compiled code sees them. Starts past the last are 0, a row like any other.
        """
        if len(batch.token_ids) > self.tokens or len(batch) > self.sequences or len(batch.masked_labels) > self.masked:
            return None
        pieces = cover_rows(batch.sequence_starts, self.tokens, self.longest)
        if len(pieces) > self.pieces + 1:
            return None
        return {
            "token_ids": _padded(batch.token_ids, self.tokens),
            "segment_ids": _padded(batch.segment_ids, self.tokens),
            "position_ids": _padded(batch.position_ids, self.tokens),
            "sequence_starts": _padded(batch.sequence_starts[:-1], self.sequences + 1),
            "masked_positions": _padded(batch.masked_positions, self.masked),
            "masked_labels": batch.masked_labels,
            "next_sentence_labels": batch.next_sentence_labels,
            "pieces": np.pad(pieces, (0, self.pieces + 1 - len(pieces)), mode="edge"),
        }


def _padded(array: Ints, length: int) -> Ints:
    return np.pad(array, (0, length - len(array)))


def batch_tensors(batch: Batch, device: torch.device, shape: BatchShape | None = None) -> dict[str, Any]:
    """A packed batch as the keyword arguments of the model, on `device`; filled up to `shape` where it fits."""
    arrays = None if shape is None else shape.fill(batch)
    if arrays is not None and shape is not None:
        tensors = {name: _send(array, device) for name, array in arrays.items()}
        pieces = tensors.pop("pieces")
        assert pieces is not None
        return tensors | {"plan": VarlenPlan(pieces, shape.longest, static=True)}
    tensors = {
        name: _send(array, device)
        for name, array in (
            ("token_ids", batch.token_ids),
            ("segment_ids", batch.segment_ids),
            ("position_ids", batch.position_ids),
            ("sequence_starts", batch.sequence_starts),
            ("masked_positions", batch.masked_positions),
            ("masked_labels", batch.masked_labels),
            ("next_sentence_labels", batch.next_sentence_labels),
        )
    }
    plan = AttentionPlan(batch.sequence_starts, device)
    # with a shape: by the same kernel, and so under the same dropout masks, as those that have it
    return tensors | {"plan": plan if shape is None else plan.varlen(filled_length(plan.tokens))}


def _send(array: Ints | None, device: torch.device) -> Tensor | None:
    if array is None:
        return None
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class SideStream:
    """Copies to a GPU beside its computing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def start(self, batch: Batch, shape: BatchShape | None) -> tuple[dict[str, Any], Any]:
        """Begin to copy; the tensors are of use after `finish`."""
        with torch.cuda.stream(self.stream):
            tensors = batch_tensors(batch, self.device, shape)
        return tensors, self.stream.record_event()

    def finish(self, started: tuple[dict[str, Any], Any]) -> dict[str, Any]:
        """Let what is computed from here on (not the host) wait for the copies, and keep their memory until then."""
        tensors, done = started
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(done)
        plan = tensors["plan"]
        for tensor in (*tensors.values(), plan.starts if isinstance(plan, VarlenPlan) else None):
            if isinstance(tensor, Tensor):
                tensor.record_stream(computing)
        return tensors


class DeviceFeed:
    """A loader's batches, one a step, and each one's micro-batches on the device.

    With `side` (on GPUs) the copies of a micro-batch are begun before the one before it is computed, over the end of a
    step too. A batch taken ahead and not asked for is nobody's loss: the run's position is that of the last one used.
    """

    def __init__(
        self,
        loader: Iterator[Batch],
        device: torch.device,
        micro_batch_size: int,
        shape: BatchShape | None = None,
        side: SideStream | None = None,
    ) -> None:
        self.loader, self.device, self.micro_batch_size, self.shape = loader, device, micro_batch_size, shape
        self.side = SideStream(device) if side is None and device.type == "cuda" else side
        self._batch: Batch | None = None
        self._started: Any = None

    def next_batch(self) -> Batch | None:
        """The next step's batch, on the host; None when there are no more."""
        batch, self._batch = self._batch, None
        return next(self.loader, None) if batch is None else batch

    def on_device(self, micro_batches: list[Batch]) -> Iterator[dict[str, Any]]:
        """`batch_tensors` of each; they are those of the batch that `next_batch` gave last, in order."""
        if self.side is None:
            for micro in micro_batches:
                yield batch_tensors(micro, self.device, self.shape)
            return
        started = self._started or self.side.start(micro_batches[0], self.shape)
        self._started = None
        for micro in micro_batches[1:]:
            following = self.side.start(micro, self.shape)
            yield self.side.finish(started)
            started = following
        yield self.side.finish(started)
        # the GPU has the step's last micro-batch to compute
        self._batch = next(self.loader, None)
        if self._batch is not None:
            self._started = self.side.start(split_batch(self._batch, self.micro_batch_size)[0], self.shape)
