"""Examples → predictions in order, with flat memory: chunks are encoded, batched by length, computed, decoded.

The one way that dev scores, `evaluate`, `predict` and a loaded model take, so that a text gets the same answer alone or
in a batch of any size (up to rounding).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bertsmith.model.task_model import BertForTask
from bertsmith.tasks.batches import TOKENS_AT_ONCE, group_by_tokens, pack_examples
from bertsmith.tasks.examples import EncodedSequence, EncodingReport
from bertsmith.tasks.task import Row, Task
from bertsmith.training.ranks import ALONE, Ranks, check_same_count, split_evenly

# examples in memory at a time: enough that batches of like lengths fill up
CHUNK = 512
# evaluation keeps no activations for a backward pass
_MORE_AT_ONCE = 2


@torch.inference_mode()
def compute_logits(
    model: BertForTask, sequences: Sequence[EncodedSequence], device: torch.device
) -> list[npt.NDArray[np.float32]]:
    """The scores of each sequence's positions, (P, outputs) each, in the order given; no dropout."""
    results: list[Any] = [None] * len(sequences)
    for group in group_by_tokens([len(s) for s in sequences], _MORE_AT_ONCE * TOKENS_AT_ONCE[device.type]):
        batch = pack_examples([[sequences[index]] for index in group], device)
        logits = model(*batch.inputs()).cpu()
        for index, part in zip(group, logits.split(batch.row_counts), strict=True):
            results[index] = part.numpy()
    return results


def predict_encoded(
    task: Task,
    model: BertForTask,
    examples: Sequence[Any],
    encoded: Sequence[Sequence[EncodedSequence]],
    device: torch.device,
) -> list[Row]:
    """The prediction for each example, from its sequences."""
    logits = iter(compute_logits(model, [sequence for sequences in encoded for sequence in sequences], device))
    return [
        task.decode(example, sequences, [next(logits) for _ in sequences])
        for example, sequences in zip(examples, encoded, strict=True)
    ]


def predict_examples(
    task: Task,
    model: BertForTask,
    examples: Iterable[Any],
    device: torch.device,
    report: EncodingReport,
    on_rows: Callable[[int], None] = lambda count: None,
    ranks: Ranks = ALONE,
) -> Iterator[tuple[list[Any], list[Row]]]:
    """Chunks of examples with their predictions, in the order they are read. `on_rows` is told of each chunk's size.

    Several processes (`ranks`) read the same examples and compute a share of each chunk; the first one gets all
    predictions, and counts all in `report`, the others get none.
    """
    remaining = iter(examples)
    while True:
        with ranks.alike():
            chunk = list(itertools.islice(remaining, CHUNK * ranks.size))
        check_same_count(len(chunk), ranks)
        if not chunk:
            return
        own = chunk[split_evenly([1] * len(chunk), ranks.size)[ranks.rank]]
        counted = EncodingReport()
        with ranks.alike():
            encoded = task.encode(own, counted, train=False)
        predicted = predict_encoded(task, model, own, encoded, device)
        rows: list[Row] = []
        for (part, counts), _ in ranks.gather((predicted, asdict(counted))):
            rows += part
            report.merge(EncodingReport(**counts))
        if ranks.is_first:
            yield chunk, rows
        on_rows(len(chunk))
