"""Batches on their way to the device: one shape for compiled code, copies begun ahead, nothing lost or changed."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_runs import Crash, Probe, log_lines, make_settings, results, train

from bertsmith.corpus.batches import Batch, BatchStream, split_batch
from bertsmith.errors import UserError
from bertsmith.model.attention import AttentionPlan
from bertsmith.model.compiled import compile_encoder
from bertsmith.model.layers import filled_length
from bertsmith.model.varlen import VarlenPlan
from bertsmith.training import loop, setup
from bertsmith.training.device_batches import BatchShape, DeviceFeed, batch_tensors
from bertsmith.training.setup import build_model, open_data, training_streams

CPU = torch.device("cpu")


@pytest.fixture
def stream(corpus: Path, tmp_path: Path) -> BatchStream:
    settings = make_settings(corpus, tmp_path, steps=3, batch_size=8)
    return training_streams(settings, open_data(settings))[32]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled runs are traced, forward and backward, but no code is generated, which would take a minute."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(loop, "compile_encoder", partial(compile_encoder, backend="aot_eager"))
    yield
    torch._dynamo.reset()


# --- one shape


def test_the_shape_has_room_for_nearly_all_and_little_more(stream: BatchStream) -> None:
    shape = BatchShape.of(stream, 4)
    assert shape == BatchShape.of(stream, 4)
    micros = [micro for batch in stream.batches(epochs=2) for micro in split_batch(batch, 4) if len(micro) == 4]
    fitting = [micro for micro in micros if shape.fill(micro) is not None]
    assert len(fitting) > 0.95 * len(micros)
    assert np.mean([len(micro.token_ids) for micro in micros]) < shape.tokens <= filled_length(4 * 32)
    assert (shape.tokens, shape.masked) == (filled_length(shape.tokens), filled_length(shape.masked))
    assert (shape.sequences, shape.longest) == (4, 32)


def test_filling_up_changes_no_content(stream: BatchStream) -> None:
    shape = BatchShape.of(stream, 4)
    full = next(stream.batches())
    for micro in (*split_batch(full, 4), full.rows(0, 1), full.rows(2, 2)):
        tensors = batch_tensors(micro, CPU, shape)
        plan = tensors["plan"]
        assert isinstance(plan, VarlenPlan)
        assert plan.static
        assert plan.longest == 32
        tokens, sequences, masked = len(micro.token_ids), len(micro), len(micro.masked_labels)
        for name, size, real in (
            ("token_ids", shape.tokens, micro.token_ids),
            ("segment_ids", shape.tokens, micro.segment_ids),
            ("position_ids", shape.tokens, micro.position_ids),
            ("sequence_starts", shape.sequences + 1, micro.sequence_starts[:-1]),
            ("masked_positions", shape.masked, micro.masked_positions),
            ("masked_labels", masked, micro.masked_labels),
            ("next_sentence_labels", sequences, micro.next_sentence_labels),
        ):
            assert real is not None
            assert tensors[name].shape == (size,)
            assert tensors[name][: len(real)].tolist() == real.tolist()
            assert not tensors[name][len(real) :].any()
        pieces = plan.starts.tolist()
        assert len(pieces) == shape.pieces + 1
        assert pieces[: sequences + 1] == micro.sequence_starts.tolist()
        assert pieces[-1] == shape.tokens
        assert 0 <= min(np.diff(pieces)) <= max(np.diff(pieces)) <= 32
        assert tokens <= shape.tokens


def test_what_does_not_fit_keeps_its_own_shape_and_the_kernel(stream: BatchStream) -> None:
    micro = split_batch(next(stream.batches()), 4)[0]
    tokens, masked = len(micro.token_ids), len(micro.masked_labels)
    for shape in (
        BatchShape(tokens - 1, 4, 100, 32),
        BatchShape(200, 3, 100, 32),
        BatchShape(200, 4, masked - 1, 32),
        BatchShape(tokens + 600, 4, 100, 32),  # too many pieces would fill it up
    ):
        tensors = batch_tensors(micro, CPU, shape)
        assert tensors["token_ids"].tolist() == micro.token_ids.tolist()
        assert isinstance(tensors["plan"], VarlenPlan)
        assert not tensors["plan"].static
        assert tensors["plan"].starts[-1] == filled_length(tokens)
    assert isinstance(batch_tensors(micro, CPU)["plan"], AttentionPlan)


# --- ahead of the step


class WatchedCopies:
    """Stands in for the side stream: keeps what was begun and what was waited for, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def start(self, batch: Batch, shape: BatchShape | None) -> tuple[dict[str, Any], Any]:
        first = batch.example_ids[:1].tolist()
        self.events.append(("begun", first))
        return batch_tensors(batch, CPU, shape), first

    def finish(self, started: tuple[dict[str, Any], Any]) -> dict[str, Any]:
        self.events.append(("awaited", started[1]))
        return started[0]


def take_steps(stream: BatchStream, side: Any, steps: int) -> tuple[list[list[int]], list[int]]:
    """Token ids of every micro-batch, and where each step's batch ends."""
    feed = DeviceFeed(iter(stream.batches(epochs=1)), CPU, 3, None, side)
    seen, ends = [], []
    for _ in range(steps):
        batch = feed.next_batch()
        if batch is None:
            break
        ends.append(batch.position.offset)
        seen += [tensors["token_ids"].tolist() for tensors in feed.on_device(split_batch(batch, 3))]
    return seen, ends


@pytest.mark.parametrize("steps", [3, 10_000])
def test_copies_are_begun_ahead_and_nothing_else_changes(stream: BatchStream, steps: int) -> None:
    side = WatchedCopies()
    seen, ends = take_steps(stream, side, steps)
    assert (seen, ends) == take_steps(stream, None, steps)
    begun = [first for kind, first in side.events if kind == "begun"]
    awaited = [first for kind, first in side.events if kind == "awaited"]
    assert len(awaited) == len(seen)
    assert begun[: len(awaited)] == awaited, "each is copied once, in order"
    assert len(begun) - len(awaited) == (1 if steps == 3 else 0), "one ahead, over the end of a step too"
    # the next copy is under way before the one before it is handed out, but for a step's last micro-batch
    kinds = [kind for kind, _ in side.events]
    assert kinds[:8] == ["begun", "begun", "awaited", "begun", "awaited", "awaited", "begun", "begun"]


def test_a_run_with_copies_ahead_is_the_same_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a change of length, a partial last batch and a crash."""
    options: dict[str, Any] = {
        "batch_size": 8, "micro_batch_size": 3, "second_phase__share": 0.4, "second_phase__max_length": 64, "steps": 9,
    }  # fmt: skip
    expected = train(corpus, tmp_path / "plain", **options)
    monkeypatch.setattr(loop, "DeviceFeed", partial(DeviceFeed, side=WatchedCopies()))
    assert results(train(corpus, tmp_path / "ahead", **options)) == results(expected)
    probe = Probe(monkeypatch)
    probe.crash_at(5)
    with pytest.raises(Crash):
        train(corpus, tmp_path / "crashed", **options)
    assert results(train(corpus, tmp_path / "crashed", **options)) == results(expected)


# --- compiled runs


def test_a_compiled_run(corpus: Path, tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain run's losses; no compilation after the first step, whatever the batches' lengths; exact resuming."""
    options: dict[str, Any] = {
        "steps": 5, "batch_size": 8, "micro_batch_size": 4, "checkpoint__every": 2, "examples__short_share": 0.8,
    }  # fmt: skip
    plain = train(corpus, tmp_path / "plain", dropout=0, **options)
    shapes: set[tuple[int, int]] = set()
    step = 0

    class Feed(DeviceFeed):
        def next_batch(self) -> Batch | None:
            nonlocal step
            step += 1
            if step > 1:
                torch.compiler.set_stance("fail_on_recompile")
            batch = super().next_batch()
            if batch is not None:
                shapes.update((len(micro.token_ids), len(micro.masked_labels)) for micro in split_batch(batch, 4))
            return batch

    monkeypatch.setattr(loop, "DeviceFeed", Feed)
    try:
        found = train(corpus, tmp_path / "compiled", dropout=0, compile="on", **options)
    finally:
        torch.compiler.set_stance("default")
    assert len(shapes) > 5, "the batches were of many shapes"
    # the end of the embeddings, a layer for all tokens, and one for those that a head looks at
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert found["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)
    for line, other in zip(log_lines(tmp_path / "compiled"), log_lines(tmp_path / "plain"), strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    monkeypatch.setattr(loop, "DeviceFeed", DeviceFeed)

    # with dropout: the same again, after a crash, and with activations computed again
    whole = results(train(corpus, tmp_path / "whole", compile="on", **options))
    assert whole["train_loss"] != found["train_loss"]
    assert results(train(corpus, tmp_path / "again", compile="on", parallel="fsdp", **options)) == whole
    probe = Probe(monkeypatch)
    probe.crash_at(4)
    with pytest.raises(Crash):
        train(corpus, tmp_path / "crashed", compile="on", **options)
    assert results(train(corpus, tmp_path / "crashed", compile="on", **options)) == whole


def test_compile_on_auto_and_off(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    settings = make_settings(corpus, tmp_path, steps=2)
    assert settings.compile == "auto"
    config = build_model(settings, open_data(settings)).config
    cpu, cuda = (setup.Machine(torch.device(kind), "bf16", 1e12, None) for kind in ("cpu", "cuda"))

    def chosen(how: str, machine: setup.Machine) -> bool:
        return setup.choose_compiled(make_settings(corpus, tmp_path, steps=2, compile=how).compile, machine, config)

    monkeypatch.setattr(setup, "compiler_problem", lambda *of: None)
    assert [chosen(how, machine) for machine in (cpu, cuda) for how in ("auto", "on", "off")] == [
        False, True, False, True, True, False,
    ]  # fmt: skip
    monkeypatch.setattr(setup, "compiler_problem", lambda *of: "no compiler is found")
    assert not chosen("auto", cuda)
    assert "not compiled, which costs speed: no compiler is found" in capfd.readouterr().err
    with pytest.raises(UserError, match="compile: on was asked for, but no compiler is found"):
        train(corpus, tmp_path / "run", steps=2, compile="on")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="compile"):
        make_settings(corpus, tmp_path, steps=2, compile="maybe")


def test_going_on_with_or_without_is_said(corpus: Path, tmp_path: Path, traced: None, capfd: Any) -> None:
    train(corpus, tmp_path / "run", steps=2)
    train(corpus, tmp_path / "run", steps=3, compile="on")
    assert "compiled False → True" in capfd.readouterr().err
