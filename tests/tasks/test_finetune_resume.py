"""A fine-tuning that was killed or interrupted, once or often, is the unbroken one: log, result, weights, bits."""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertsmith.errors import UserError
from bertsmith.tasks import finetune as loop
from bertsmith.tasks import run_state, runs
from bertsmith.tasks.settings import FREE_TO_CHANGE, FinetuneSettings
from bertsmith.training.setup import settings_of_run
from command_line import bertsmith_process, start_process
from made_tasks import (
    SETTINGS,
    Crash,
    StepProbe,
    leftovers,
    log_lines,
    quicken,
    timeless,
    tune,
    weights_of,
)
from watching import found_in, wait_until

Files = dict[str, tuple[Path, Path]]
# dropout, accumulation, evaluations and log lines that do not fall on checkpoints
BUSY: dict[str, Any] = {
    "epochs": 4,
    "batch_size": 6,
    "micro_tokens": 40,
    "eval__every": 5,
    "log__every": 3,
    "checkpoint__every": 4,
}
STEPS = 16
Whole = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def whole(model: Path, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Kind of task and options → an unbroken run, made once, and its summary."""
    folder = tmp_path_factory.mktemp("whole")
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(kind: str, **options: Any) -> tuple[Path, dict[str, Any]]:
        key = repr((kind, options))
        if key not in made:
            out = folder / str(len(made))
            with pytest.MonkeyPatch.context() as patch:
                quicken(patch)
                made[key] = out, tune(out, kind, model, *files[kind], **options)
        return made[key]

    return make


def same(run: Path, other: Path) -> None:
    """Everything that two runs leave is the same but for times."""
    assert log_lines(run) == log_lines(other)
    results = [timeless(json.loads((out / "result.json").read_bytes())) for out in (run, other)]
    assert results[0] == results[1]
    assert weights_of(run) == weights_of(other)


@pytest.mark.parametrize("kind", ["classify", "squad2"])
def test_killed_and_resumed_often(
    model: Path,
    files: Files,
    whole: Whole,
    tmp_path: Path,
    steps: StepProbe,
    capfd: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    options = BUSY | {"squad__stride": 8}
    unbroken, expected = whole(kind, **options)
    total = expected["runs"][0]["steps"]
    capfd.readouterr()
    at = 0
    # (step of that part at which it dies, checkpoint it is at then): before the first one, twice from the same, late
    kills = ((3, 0), (6, 4), (2, 4), (7, 8), (5, 12), (total - 12, total - 1 - (total - 1) % 4))
    for number, saved in kills if kind == "classify" else kills[1:4]:
        steps.crash_at(number)
        with pytest.raises(Crash):
            tune(tmp_path / "run", kind, model, *files[kind], **options)
        said = capfd.readouterr().err
        assert (f"resuming from {tmp_path / 'run' / 'checkpoints' / f'step-{at:08d}'}" in said) is (at > 0)
        assert sorted(path.name for path in (tmp_path / "run").glob("checkpoints/step-*")) == [
            f"step-{saved:08d}" for _ in range(saved > 0)
        ], "the newest one only"
        at = saved
    summary = tune(tmp_path / "run", kind, model, *files[kind], **options)
    assert timeless(summary) == timeless(expected)
    same(tmp_path / "run", unbroken)
    assert leftovers(tmp_path / "run") == []


def test_several_seeds_killed_in_each(
    model: Path, files: Files, whole: Whole, tmp_path: Path, steps: StepProbe
) -> None:
    options = BUSY | {"seeds": 2}
    unbroken, expected = whole("classify", **options)
    for number in (6, 12 + 3, 11 + 5):  # in the first; soon after the second began; after its second checkpoint
        steps.crash_at(number)
        with pytest.raises(Crash):
            tune(tmp_path / "run", "classify", model, *files["classify"], **options)
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], **options)
    assert timeless(summary) == timeless(expected)
    assert weights_of(tmp_path / "run") == weights_of(unbroken)
    for folder in (tmp_path / "run" / "runs").iterdir():
        assert log_lines(folder) == log_lines(unbroken / "runs" / folder.name)
    assert leftovers(tmp_path / "run") == []


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "best weights written, no checkpoint of them": (loop, "save_weights", 2),
    "before a checkpoint": (loop, "save_checkpoint", 1),
    "run over, no result yet": (runs, "plot_loss", 1),
    "results there, no model yet": (runs, "save_task_model", 1),
    "model there, test file not predicted": (runs, "predict_file", 1),
}


@pytest.mark.parametrize(
    ("moment", "seeds"), [*((moment, 2) for moment in MOMENTS), ("results there, no model yet", 1)]
)
def test_killed_between_steps(
    model: Path, files: Files, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, seeds: int
) -> None:
    options = {**BUSY, "seeds": seeds, "eval__every": 2, "epochs": 2, "test": files["classify"][1]}
    unbroken, expected = whole("classify", **options)
    module, name, number = MOMENTS[moment]
    function, calls = getattr(module, name), [0]

    def crash(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and name != "save_weights":
            raise Crash
        result = function(*arguments, **named)
        if calls[0] == number:
            raise Crash
        return result

    monkeypatch.setattr(module, name, crash)
    with pytest.raises(Crash):
        tune(tmp_path / "run", "classify", model, *files["classify"], **options)
    assert timeless(tune(tmp_path / "run", "classify", model, *files["classify"], **options)) == timeless(expected)
    assert weights_of(tmp_path / "run") == weights_of(unbroken)
    assert leftovers(tmp_path / "run") == []
    predicted = [(out / "test.predictions.jsonl").read_bytes() for out in (tmp_path / "run", unbroken)]
    assert predicted[0] == predicted[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    model: Path,
    files: Files,
    whole: Whole,
    tmp_path: Path,
    steps: StepProbe,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    options = BUSY | {"checkpoint__every": 0}
    unbroken, _ = whole("classify", **BUSY)
    before = signal.getsignal(number)
    for step in (7, STEPS - 7):  # the second time at the very last step
        steps.at(step, lambda: signal.raise_signal(number))
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "run", "classify", model, *files["classify"], **options)
        assert signal.getsignal(number) is before
        assert not (tmp_path / "run" / "model").exists()
        reached = 7 if step == 7 else STEPS
        assert f"interrupted: the run is saved at step {reached}; the same command resumes it" in capfd.readouterr().err
    tune(tmp_path / "run", "classify", model, *files["classify"], **options)
    same(tmp_path / "run", unbroken)


def test_a_second_interrupt_does_not_wait(model: Path, files: Files, tmp_path: Path, steps: StepProbe) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    steps.at(6, twice)
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "run", "classify", model, *files["classify"], **BUSY)
    assert [path.name for path in (tmp_path / "run").glob("checkpoints/*")] == ["step-00000004"]


def test_checkpoints_by_the_clock(model: Path, files: Files, tmp_path: Path, steps: StepProbe) -> None:
    for out, options, expected in (
        ("each", {"checkpoint__minutes": 1e-9, "checkpoint__keep": 2}, [4, 5]),
        ("none", {"checkpoint__minutes": 1e9}, []),
    ):
        steps.crash_at(6)
        with pytest.raises(Crash):
            tune(tmp_path / out, "classify", model, *files["classify"], **BUSY | {"checkpoint__every": 0} | options)
        found = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / out).glob("checkpoints/step-*"))
        assert found == expected


def crashed(model: Path, files: Files, out: Path, steps: StepProbe, **options: Any) -> Path:
    """A run that died at step 10, its checkpoint of step 8 left."""
    steps.crash_at(10)
    with pytest.raises(Crash):
        tune(out, "classify", model, *files["classify"], **BUSY | options)
    return out


def test_a_damaged_newest_checkpoint(
    model: Path, files: Files, whole: Whole, tmp_path: Path, steps: StepProbe, capfd: pytest.CaptureFixture[str]
) -> None:
    unbroken, _ = whole("classify", **BUSY)
    run = crashed(model, files, tmp_path / "run", steps, checkpoint__keep=2)
    newest = run / "checkpoints" / "step-00000008"
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    tune(run, "classify", model, *files["classify"], **BUSY)
    said = capfd.readouterr().err
    assert f"warning: {newest}: broken checkpoint, model.safetensors has 1,000 of" in said
    assert f"resuming from {newest.with_name('step-00000004')} (step 4 of 16)" in said
    same(run, unbroken)


def test_the_best_weights_are_those_of_the_best_evaluation_though_a_dead_part_found_better_ones(
    model: Path, files: Files, tmp_path: Path, steps: StepProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came after the checkpoint may not come again: on another processor the same steps score otherwise."""
    scores = iter((0.5, 0.6, 0.9))  # after steps 2, 4 and 6; the checkpoint is of step 4
    merge_dev = loop.merge_dev
    monkeypatch.setattr(loop, "merge_dev", lambda metrics: merge_dev(metrics) | {"accuracy": next(scores)})
    options = BUSY | {"eval__every": 2}
    run = tmp_path / "run"
    steps.crash_at(7)
    with pytest.raises(Crash):
        tune(run, "classify", model, *files["classify"], **options)
    kept = {path.name: load_file(path)["classifier.weight"] for path in run.glob("best-*")}
    assert sorted(kept) == ["best-00000004.safetensors", "best-00000006.safetensors"]
    scores = iter((0.3,) * 6)
    summary = tune(run, "classify", model, *files["classify"], **options)
    assert summary["runs"][0]["best_step"] == 4
    assert summary["dev"]["accuracy"] == 0.6
    weights = load_file(run / "model" / "model.safetensors")["classifier.weight"]
    assert torch.equal(weights, kept["best-00000004.safetensors"])
    assert not torch.equal(weights, kept["best-00000006.safetensors"])
    assert leftovers(run) == []


def test_what_a_run_cannot_go_on_without(model: Path, files: Files, tmp_path: Path, steps: StepProbe) -> None:
    run = crashed(model, files, tmp_path / "run", steps)
    for kept in run.glob("best-*"):
        kept.unlink()
    with pytest.raises(UserError, match=r"best-\d+\.safetensors: is gone, so that this run cannot go on"):
        tune(run, "classify", model, *files["classify"], **BUSY)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        old = type("Old", (), {"state": {"epoch": 3}})()
        patch.setattr(run_state, "find_newest_checkpoint", lambda folder: (old, []))
        with pytest.raises(UserError, match=r"checkpoint was written by another version of bertsmith"):
            tune(run, "classify", model, *files["classify"], **BUSY)


def test_other_settings_are_refused_by_name(model: Path, files: Files, tmp_path: Path, steps: StepProbe) -> None:
    """For a run that is finished and for one that is not; what only says where things lie may change."""

    def settings(out: Path, **changes: Any) -> FinetuneSettings:
        values = {"task": "classify", "model": model, "train": files["classify"][0], "dev": files["classify"][1]}
        named = SETTINGS | {key.replace("__", "."): value for key, value in {**values, **BUSY, **changes}.items()}
        return settings_of_run(
            FinetuneSettings, FREE_TO_CHANGE, out, None, [(key, str(value)) for key, value in named.items()]
        )

    begun = crashed(model, files, tmp_path / "begun", steps)
    tune(tmp_path / "run", "classify", model, *files["classify"], **BUSY)
    for out in (begun, tmp_path / "run"):
        for key, value, message in (
            ("learning_rate", 1e-3, "learning_rate was 0.005 and is now 0.001"),
            ("seed", 4, "seed was 0 and is now 4"),
            ("squad__stride", 4, "squad.stride was 128 and is now 4"),
            ("keep", "last", "keep was best and is now last"),
            ("task", "pairs", "task was classify and is now pairs"),
        ):
            with pytest.raises(UserError, match=f"{out.name}: this run was started with other settings.*{message}"):
                settings(out, **{key: value})
        assert settings(out, checkpoint__every=2, log__every=1, device="auto", test=files["classify"][1]).log.every == 1
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.txt").touch()
    with pytest.raises(UserError, match="holds something else than a run"):
        settings(tmp_path / "else")


def test_another_machine_is_said(
    model: Path,
    files: Files,
    tmp_path: Path,
    steps: StepProbe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = crashed(model, files, tmp_path / "run", steps)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    tune(run, "classify", model, *files["classify"], **BUSY)
    assert f"the run began otherwise (threads {threads} → {threads + 1})" in capfd.readouterr().err


def test_a_moved_run_goes_on(model: Path, files: Files, whole: Whole, tmp_path: Path, steps: StepProbe) -> None:
    options = BUSY | {"seeds": 2}
    unbroken, _ = whole("classify", **options)
    steps.crash_at(STEPS + 9)
    with pytest.raises(Crash):
        tune(tmp_path / "here", "classify", model, *files["classify"], **options)
    shutil.move(tmp_path / "here", tmp_path / "there")
    tune(tmp_path / "there", "classify", model, *files["classify"], **options)
    assert weights_of(tmp_path / "there") == weights_of(unbroken)
    assert leftovers(tmp_path / "there") == []


def test_two_at_once(model: Path, files: Files, tmp_path: Path, steps: StepProbe) -> None:
    refused = []

    def again() -> None:
        with pytest.raises(UserError) as caught:
            tune(tmp_path / "run", "classify", model, *files["classify"], **BUSY)
        refused.append(str(caught.value))

    steps.at(2, again)
    tune(tmp_path / "run", "classify", model, *files["classify"], **BUSY)
    assert "another process is training in this run folder" in refused[0]


# --- processes of their own, which have one thread


def arguments(model: Path, train: Path, dev: Path, out: Path, **options: Any) -> list[object]:
    flags = SETTINGS | {key.replace("__", "."): value for key, value in options.items()}
    named = [part for key, value in flags.items() for part in (f"--{key.replace('_', '-')}", value)]
    return ["finetune", "classify", "--model", model, "--train", train, "--dev", dev, "--out", out, *named, "--json"]


def test_same_seed_same_bits(model: Path, files: Files, tmp_path: Path, one_thread: None) -> None:
    """Whatever hash seed Python has, and however the training file is packed; another seed is another run."""
    train, dev = files["classify"]
    packed = tmp_path / "train.csv.gz"
    packed.write_bytes(gzip.compress(train.read_bytes()))
    processes = [
        start_process(*arguments(model, path, dev, tmp_path / out), env={"PYTHONHASHSEED": number})
        for number, path, out in (("0", train, "a"), ("12345", packed, "b"))
    ]
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err.decode()
    same(tmp_path / "a", tmp_path / "b")
    # and what this process, with whatever went before in it, gives
    for seed in (0, 1):
        tune(tmp_path / f"here-{seed}", "classify", model, packed, dev, seed=seed)
        assert (weights_of(tmp_path / f"here-{seed}") == weights_of(tmp_path / "a")) is (seed == 0)


def written_since(begun: float, run: Path) -> bool:
    """Whether one of the runs has written to its log since then."""
    for path in found_in(run, "runs/*/metrics.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime > begun:
                return True
    return False


@pytest.mark.slow
def test_sigkill(model: Path, files: Files, tmp_path: Path, one_thread: None) -> None:
    """Three kills wherever it is just then, an interrupt, and the end: the unbroken run's bits."""
    options: dict[str, Any] = {"epochs": 20, "checkpoint__every": 3, "log__every": 1, "seeds": 2}
    command = arguments(model, *files["classify"], tmp_path / "run", **options)
    source = random.Random(os.urandom(4))
    tune(tmp_path / "whole", "classify", model, *files["classify"], **options)
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT):
        begun = time.time()
        process = start_process(*command)
        wait_until(lambda: written_since(begun, tmp_path / "run"), "a step", process=process)  # noqa: B023
        time.sleep(source.random() / 4)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (-number if number == signal.SIGKILL else 130) or process.returncode == 0
    finished = bertsmith_process(*command)
    assert finished.code == 0, finished.err
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")
    for folder in (tmp_path / "whole" / "runs").iterdir():
        assert log_lines(tmp_path / "run" / "runs" / folder.name) == log_lines(folder)
    assert leftovers(tmp_path / "run") == []
    assert not list((tmp_path / "run").rglob("*.partial-*"))
