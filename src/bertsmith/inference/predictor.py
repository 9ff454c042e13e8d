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

from bertsmith.errors import not_finite
from bertsmith.inference.exported_task import ExportedTask
from bertsmith.inference.streams import map_on_threads, threads_on
from bertsmith.model.task_model import BertForTask
from bertsmith.tasks.batches import TOKENS_AT_ONCE, group_for_threads, pack_examples
from bertsmith.tasks.examples import EncodedSequence, EncodingReport
from bertsmith.tasks.task import Row, Task
from bertsmith.training.ranks import ALONE, Ranks, check_same_count, split_evenly

# examples in memory at a time: enough that batches of like lengths fill up
CHUNK = 512
# evaluation keeps no activations for a backward pass
_MORE_AT_ONCE = 2
# of a batch on one of many threads
_LEAST_TOKENS = 2048


def compute_logits(
    model: BertForTask | ExportedTask, sequences: Sequence[EncodedSequence], device: torch.device
) -> list[npt.NDArray[np.float32]]:
    """The scores of each sequence's positions, (P, outputs) each, in the order given; no dropout."""

    @torch.inference_mode()
    def compute(group: list[int]) -> list[npt.NDArray[np.float32]]:
        batch = pack_examples([[sequences[index]] for index in group], device)
        return [part.numpy() for part in model(*batch.inputs()).cpu().split(batch.row_counts)]

    results: list[Any] = [None] * len(sequences)
    threads = threads_on(device)
    most = _MORE_AT_ONCE * TOKENS_AT_ONCE[device.type]
    groups = group_for_threads([len(s) for s in sequences], max(most // threads, min(most, _LEAST_TOKENS)), threads)
    for group, logits in map_on_threads(compute, groups, device):
        for index, scores in zip(group, logits, strict=True):
            results[index] = scores
    return results


def predict_encoded(
    task: Task,
    model: BertForTask | ExportedTask,
    examples: Sequence[Any],
    encoded: Sequence[Sequence[EncodedSequence]],
    device: torch.device,
) -> list[Row]:
    """The prediction for each example, from its sequences.

    Raises UserError where scores are not finite: neither a label nor a metric made of them would mean anything.
    """
    logits = iter(compute_logits(model, [sequence for sequences in encoded for sequence in sequences], device))
    rows = []
    for example, sequences in zip(examples, encoded, strict=True):
        scores = [next(logits) for _ in sequences]
        if not all(np.isfinite(part).all() for part in scores):
            raise not_finite(f"{example.place}: the model's scores")
        rows.append(task.decode(example, sequences, scores))
    return rows


def predict_examples(
    task: Task,
    model: BertForTask | ExportedTask,
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
        with ranks.alike():
            predicted = predict_encoded(task, model, own, encoded, device)
        rows: list[Row] = []
        for (part, counts), _ in ranks.gather((predicted, asdict(counted))):
            rows += part
            report.merge(EncodingReport(**counts))
        if ranks.is_first:
            yield chunk, rows
        on_rows(len(chunk))
