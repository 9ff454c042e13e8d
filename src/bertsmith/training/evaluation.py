"""Loss and accuracy on the held-out documents: the same examples and masks at every evaluation, each once."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from bertsmith.corpus.batches import Batch
from bertsmith.model.bert import BertForPreTraining
from bertsmith.training.device_batches import batch_tensors
from bertsmith.training.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Evaluation:
    """Means over the evaluation's targets, in nats; NSP values are None for a model without that head."""

    loss: float
    mlm_loss: float
    mlm_accuracy: float
    nsp_accuracy: float | None
    examples: int

    def as_metrics(self) -> dict[str, float | None]:
        """Under the names of the metrics log and the JSON summary."""
        return {
            "eval_loss": self.loss,
            "eval_mlm_loss": self.mlm_loss,
            "eval_mlm_accuracy": self.mlm_accuracy,
            "eval_nsp_accuracy": self.nsp_accuracy,
        }


def evaluate(
    model: BertForPreTraining, batches: Iterable[Batch], device: torch.device, ranks: Ranks = ALONE
) -> Evaluation | None:
    """Run `model` without dropout over `batches`, this rank's share of them; None when there are none on any rank.

    Sums of losses and counts are added up over the ranks, so that each example counts once.
    """
    mlm_loss = nsp_loss = 0.0
    mlm_correct = mlm_targets = nsp_correct = nsp_targets = examples = 0
    for batch in batches:
        counts = model.evaluate(**batch_tensors(batch, device))
        mlm_loss += counts.mlm_loss
        mlm_correct += counts.mlm_correct
        mlm_targets += counts.mlm_targets
        nsp_loss += counts.nsp_loss
        nsp_correct += counts.nsp_correct
        nsp_targets += counts.nsp_targets
        examples += len(batch)
    (mlm_loss, nsp_loss, *counted), _ = ranks.agree(
        (mlm_loss, nsp_loss, mlm_correct, mlm_targets, nsp_correct, nsp_targets, examples)
    )
    mlm_correct, mlm_targets, nsp_correct, nsp_targets, examples = map(int, counted)
    if not mlm_targets:
        return None
    mlm = mlm_loss / mlm_targets
    if not nsp_targets:
        return Evaluation(mlm, mlm, mlm_correct / mlm_targets, None, examples)
    nsp = nsp_loss / nsp_targets
    return Evaluation(mlm + nsp, mlm, mlm_correct / mlm_targets, nsp_correct / nsp_targets, examples)
