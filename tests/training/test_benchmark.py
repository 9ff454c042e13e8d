"""The speed benchmark: real steps on full-length rows, and figures that follow from each other."""

import json
import statistics
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bertsmith.cli import main
from bertsmith.errors import UserError
from bertsmith.model.compiled import compile_encoder, hashed_masks
from bertsmith.model.config import useful_flops
from bertsmith.training import benchmark
from bertsmith.training.benchmark import StepTimer, benchmark_pretraining, synthetic_batch

CPU = torch.device("cpu")


def test_rows_are_full_and_masked_by_15_percent() -> None:
    batch = synthetic_batch(3, 40, CPU)
    assert batch["token_ids"].shape == batch["segment_ids"].shape == batch["position_ids"].shape == (120,)
    assert batch["sequence_starts"].tolist() == [0, 40, 80, 120]
    assert batch["position_ids"].tolist() == list(range(40)) * 3
    assert batch["segment_ids"].tolist() == ([0] * 20 + [1] * 20) * 3
    positions = batch["masked_positions"]
    assert len(positions) == len(batch["masked_labels"]) == 18
    assert len(set(positions.tolist())) == 18
    assert positions.tolist() == sorted(positions.tolist())
    assert synthetic_batch(3, 40, CPU)["token_ids"].equal(batch["token_ids"])
    assert len(synthetic_batch(1, 2, CPU)["masked_positions"]) == 1


def test_each_take_is_a_training_step() -> None:
    timer = StepTimer("tiny", 2, 16, CPU, torch.float32)
    before = {name: tensor.clone() for name, tensor in timer.model.state_dict().items()}
    for count in (1, 2):
        assert timer.take() > 0
        assert timer.optimizer.steps == count
    changed = {name for name, tensor in timer.model.state_dict().items() if not tensor.equal(before[name])}
    assert {"bert.encoder.layer.1.qkv.weight", "mlm_head.bias", "nsp_head.linear.weight"} <= changed
    assert all(parameter.grad is None for parameter in timer.model.parameters())
    assert timer.flops == useful_flops(timer.config, 32, 2 * 16**2, 5, 2)


def test_a_compiled_step_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(benchmark, "compile_encoder", partial(compile_encoder, backend="aot_eager"))
    timers = [StepTimer("tiny", 3, 15, CPU, torch.float32, compiled=compiled) for compiled in (True, False)]
    hashed = hashed_masks(timers[0].config, (0, 0), CPU)
    monkeypatch.setattr(benchmark, "DropoutMasks", lambda key: None)
    monkeypatch.setattr(benchmark, "hashed_masks", lambda config, key, device: None)
    for _ in range(2):
        for timer in timers:
            timer.take()
    states = [timer.model.state_dict() for timer in timers]
    for name, tensor in states[1].items():
        torch.testing.assert_close(states[0][name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    monkeypatch.setattr(benchmark, "hashed_masks", lambda config, key, device: hashed)
    timers[0].take()
    assert hashed.drawn == 1 + 3 * timers[0].config.num_hidden_layers, "dropout is on"
    torch._dynamo.reset()


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[float] = iter([9.0, 9.0, 0.5, 0.1, 0.2, 0.3, 0.4])  # two that warm up do not count
    monkeypatch.setattr(StepTimer, "take", lambda self: next(times))
    found = benchmark_pretraining("tiny", 2, 16, steps=5, device="cpu", precision="fp32")
    assert found["seconds_per_step"] == statistics.median([0.5, 0.1, 0.2, 0.3, 0.4])
    assert found["tokens_per_second"] == pytest.approx(32 / 0.3)
    timer = StepTimer("tiny", 2, 16, CPU, torch.float32)
    assert found["gflops"] == pytest.approx(timer.flops / 0.3 / 1e9)
    assert found["matmul_gflops"] == 100, "the rate this test run pretends to have measured"
    assert found["utilization"] == pytest.approx(found["gflops"] / found["matmul_gflops"])
    assert (found["model"], found["batch"], found["length"], found["steps"]) == ("tiny", 2, 16, 5)
    assert (found["device"], found["precision"], found["threads"]) == ("cpu", "fp32", torch.get_num_threads())
    assert found["compiled"] is False


def test_the_command(capfd: pytest.CaptureFixture[str], real_measurement: None) -> None:
    flags = ["--model", "tiny", "--batch", "2", "--length", "16", "--steps", "2", "--precision", "fp32", "--json"]
    assert main(["bench", "pretrain", *flags]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["tokens_per_second"] > 0
    assert 0 < found["utilization"] < 1
    assert found["matmul_gflops"] > 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": "huge"}, "'huge'"),
        ({"batch": 0}, "--batch 0"),
        ({"length": 1}, "--length 1"),
        ({"length": 513}, "--length 513"),
        ({"steps": 0}, "--steps 0"),
        ({"precision": "fp8"}, "'fp8'"),
        ({"compile": "maybe"}, "'maybe'"),
    ],
)
def test_wrong_options(options: dict[str, object], named: str) -> None:
    whole = {"size": "tiny", "batch": 2, "length": 16, "steps": 1, "device": "cpu", "precision": "fp32"} | options
    with pytest.raises(UserError, match=named):
        benchmark_pretraining(**whole)  # type: ignore[arg-type]


def test_the_vocabulary_is_the_published_one() -> None:
    assert benchmark.VOCAB_SIZE == 30522
