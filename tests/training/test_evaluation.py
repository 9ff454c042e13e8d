"""Evaluation: plain means over targets, the same whenever and however it is asked for, without dropout."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_runs import make_settings
from torch.nn import functional as F

from bertsmith.corpus.batches import Batch
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.dropout import DropoutMasks
from bertsmith.training.device_batches import batch_tensors
from bertsmith.training.evaluation import Evaluation, evaluate
from bertsmith.training.setup import build_model, evaluation_stream, open_data

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def batches(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    settings = make_settings(corpus, tmp_path_factory.mktemp("unused"), steps=3)
    stream = evaluation_stream(settings, open_data(settings))
    assert stream is not None
    return list(stream.evaluation_batches(60, batch_size=7))


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> BertForPreTraining:
    settings = make_settings(corpus, tmp_path_factory.mktemp("unused"), steps=3, dropout=0.5)
    model = build_model(settings, open_data(settings))
    with torch.no_grad():  # sharper than at the start, so that some answers are right
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def test_means_over_all_targets(model: BertForPreTraining, batches: list[Batch]) -> None:
    """Against logits of whole batches and torch's own cross-entropy in float64."""
    losses, right, nsp_losses, nsp_right = [], [], [], []
    for batch in batches:
        assert batch.next_sentence_labels is not None
        ids = [torch.from_numpy(a) for a in (batch.token_ids, batch.segment_ids, batch.position_ids)]
        starts, positions = torch.from_numpy(batch.sequence_starts), torch.from_numpy(batch.masked_positions)
        mlm, nsp = model.logits(*ids, starts, positions)
        labels, next_labels = torch.from_numpy(batch.masked_labels), torch.from_numpy(batch.next_sentence_labels)
        losses += F.cross_entropy(mlm.double(), labels, reduction="none").tolist()
        right += (mlm.argmax(1) == labels).tolist()
        nsp_losses += F.cross_entropy(nsp.double(), next_labels, reduction="none").tolist()
        nsp_right += (nsp.argmax(1) == next_labels).tolist()
    found = evaluate(model, batches, CPU)
    assert found is not None
    assert found.examples == 60
    assert found.mlm_loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.mlm_accuracy == np.mean(right)
    assert found.nsp_accuracy == np.mean(nsp_right)
    assert found.loss == pytest.approx(np.mean(losses) + np.mean(nsp_losses), rel=1e-5)
    metrics = found.as_metrics()
    assert list(metrics) == ["eval_loss", "eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy"]
    assert list(metrics.values()) == [found.loss, found.mlm_loss, found.mlm_accuracy, found.nsp_accuracy]


def test_twice_the_same_whatever_happened_between(model: BertForPreTraining, batches: list[Batch]) -> None:
    first = evaluate(model, batches, CPU)
    torch.manual_seed(4)
    model.train()
    model(**batch_tensors(batches[0], CPU), mlm_scale=1.0, nsp_scale=1.0, masks=DropoutMasks((1, 2))).total.backward()
    assert evaluate(model, batches, CPU) == first
    model.zero_grad()


def test_dropout_takes_part_in_training_only(model: BertForPreTraining, batches: list[Batch]) -> None:
    tensors = batch_tensors(batches[0], CPU)
    scale = 1 / len(batches[0].masked_labels)
    with torch.no_grad():
        losses = [
            float(model(**tensors, mlm_scale=scale, nsp_scale=1.0, masks=masks).mlm)
            for masks in (None, DropoutMasks((1,)), DropoutMasks((2,)), DropoutMasks((1,)))
        ]
    found = evaluate(model, batches[:1], CPU)
    assert found is not None
    assert losses[0] == pytest.approx(found.mlm_loss, rel=1e-5)
    assert losses[1] == losses[3] != losses[2] != losses[0]


def test_nothing_is_kept_for_a_gradient(model: BertForPreTraining, batches: list[Batch]) -> None:
    evaluate(model, batches[:1], CPU)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_the_second_head(corpus: Path, tmp_path: Path) -> None:
    settings = make_settings(corpus, tmp_path, steps=3, objective="mlm")
    data = open_data(settings)
    stream = evaluation_stream(settings, data)
    assert stream is not None
    found = evaluate(build_model(settings, data), stream.evaluation_batches(10), CPU)
    assert found is not None
    assert found.loss == found.mlm_loss
    assert found.nsp_accuracy is None


def test_batches_without_targets(model: BertForPreTraining, batches: list[Batch]) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    bare = replace(batches[0], masked_positions=nothing, masked_labels=nothing)
    assert evaluate(model, [], CPU) is None
    assert evaluate(model, [bare], CPU) is None
    one = evaluate(model, [batches[1]], CPU)
    both = evaluate(model, [bare, batches[1]], CPU)
    assert isinstance(one, Evaluation)
    assert isinstance(both, Evaluation)
    assert both.mlm_loss == one.mlm_loss
    assert both.examples == one.examples + len(bare)
    # in training: a loss of 0 and finite gradients
    loss = model(**batch_tensors(bare, CPU), mlm_scale=1.0, nsp_scale=1 / len(bare), masks=DropoutMasks((3,)))
    loss.total.backward()
    assert float(loss.mlm) == 0
    assert math.isfinite(float(loss.total.detach()))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
