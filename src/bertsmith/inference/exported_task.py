"""An exported file in the place of a fine-tuned model: what predicts by the one predicts by the other.

A file takes padded batches and the rest of bertsmith packs its sequences; this goes between the two. So a deployed file
is measured on a user's own rows by the same commands as the model that it was made of.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.errors import UserError
from bertsmith.inference.exported import MARKER, ExportedModel, load_exported
from bertsmith.model.dropout import DropoutMasks
from bertsmith.tasks.model_folder import open_task
from bertsmith.tasks.task import Task


class ExportedTask(nn.Module):
    """Stands in for a BertForTask: packed sequences → scores of their rows, `outputs` each. `exported`: the file."""

    def __init__(self, exported: ExportedModel, outputs: int) -> None:
        super().__init__()
        self.exported = exported
        self.outputs = outputs

    def forward(
        self,
        token_ids: Tensor,  # (T,)
        segment_ids: Tensor,  # (T,)
        position_ids: Tensor,  # (T,), which in a padded batch are told by the places
        sequence_starts: Tensor,  # (N+1,)
        rows: Tensor | None,  # (R,)
        masks: DropoutMasks | None = None,
    ) -> Tensor:
        """Scores at the tokens `rows` (None: at all), (R, outputs) float32; of whole sequences, one row for each.

        Raises UserError for a file that gives another number of scores than the task has.
        """
        lengths = np.diff(sequence_starts.numpy())
        real = np.arange(lengths.max()) < lengths[:, None]  # (N, L)
        ids, types = (np.zeros(real.shape, dtype=np.int64) for _ in range(2))
        ids[real], types[real] = token_ids.numpy(), segment_ids.numpy()
        found = self.exported.run(ids, real.astype(np.int64), types)
        scores = found["logits"] if "logits" in found else np.stack(list(found.values()), -1)  # (N, …) or (N, L, …)
        if scores.shape[-1] != self.outputs:
            raise UserError(
                f"{self.exported.folder}: the file gives {scores.shape[-1]} scores where its task has {self.outputs}; "
                "export the model again"
            )
        if self.exported.head in ("sequence", "choice"):
            return torch.from_numpy(scores)
        of_tokens = torch.from_numpy(scores[real])  # (T, outputs)
        return of_tokens if rows is None else of_tokens[rows]


def is_exported(folder: Path) -> bool:
    """Whether `folder` is what `bertsmith export` wrote."""
    return (folder / MARKER).is_file()


def load_exported_task(
    folder: Path, device: str, precision: str, threads: int | None = None, **columns: str | None
) -> tuple[Task, ExportedTask]:
    """An exported fine-tuned model and its task. `columns`: see `load_task_model`.

    Raises UserError for a file that predicts nothing, and where it cannot compute as `device` and `precision` ask.
    """
    task, _ = open_task(folder, **columns)
    exported = load_exported(folder, threads)
    if exported.head != task.head:
        raise UserError(
            f"{folder}: the file is for a head of the kind {exported.head}, its task {task.spec.name} needs "
            f"{task.head}; export the model again"
        )
    if device == "cuda":
        raise UserError(f"device: {folder} is an export, which is used on the CPU; leave --device out")
    if precision not in ("auto", exported.precision):
        raise UserError(
            f"precision: {folder} was exported in {exported.precision} and computes in nothing else; leave --precision "
            "out"
        )
    return task, ExportedTask(exported, task.outputs)
