"""A run's state through JSON, phases, divergence against noise, the lock and the signals."""

import json
import math
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.corpus.batches import BatchCounts, StreamPosition
from bertsmith.corpus.windows import CorpusIndex
from bertsmith.errors import UserError
from bertsmith.training.evaluation import Evaluation
from bertsmith.training.state import Arithmetic, Divergence, Interrupts, LogWindow, RunState, locked_run

floats = st.floats(allow_nan=False, allow_infinity=False)


@given(seconds=floats, fraction=floats, loss=floats, window=st.integers(0, 2**40), evaluated=st.booleans())
def test_through_json_it_is_the_same(
    seconds: float, fraction: float, loss: float, window: int, evaluated: bool
) -> None:
    state = RunState(
        step=17,
        seconds=seconds,
        position=StreamPosition(3, window, 5, fraction),
        counts=BatchCounts(1, 2, 3, 4, 5, 6),
        window=LogWindow(2, loss, 0.5, 3.5, 1e-4, 7, 8.0, 9.0),
        evaluation=Evaluation(loss, loss, 0.25, None, 8) if evaluated else None,
        arithmetic=Arithmetic("bf16", "cpu", 2, "AVX512", "2.13.0"),
        architecture={"hidden_size": 8},
    )
    state.divergence.update(loss if abs(loss) < 1e100 else 7.0, 11.0)
    assert RunState.from_dict(json.loads(json.dumps(state.as_dict()))) == state
    assert RunState.from_dict(json.loads(json.dumps(RunState().as_dict()))) == RunState()


def test_a_state_of_another_version() -> None:
    values = RunState().as_dict()
    for other in (values | {"unknown": 1}, {k: v for k, v in values.items() if k != "counts"}, values | {"window": 3}):
        with pytest.raises(UserError, match="written by another version of bertsmith"):
            RunState.from_dict(other)


def test_skipped_steps_do_not_advance() -> None:
    state = RunState()
    state.count_update(2.0, 1.0, 0.5, 1e-3)
    for _ in range(3):
        state.count_skip()
    assert (state.step, state.skipped_steps, state.bad_in_a_row, state.window.steps) == (1, 3, 3, 1)
    state.count_update(4.0, 1.0, 0.5, 2e-3)
    assert (state.step, state.skipped_steps, state.bad_in_a_row) == (2, 3, 0)
    assert state.window == LogWindow(2, 6.0, 2.0, 1.0, 2e-3)


# --- phases


class Blocks:
    """What `enter_phase` reads of a corpus: 10 blocks in windows of 4."""

    blocks, window_blocks = 10, 4


def enter(position: StreamPosition) -> RunState:
    state = RunState(position=position, micro_batch_size=3)
    state.enter_phase(1, Blocks())  # type: ignore[arg-type]
    assert (state.phase, state.micro_batch_size) == (1, 0)
    return state


def test_a_phase_begins_at_a_window() -> None:
    assert enter(StreamPosition()).position == StreamPosition()
    at_a_window = StreamPosition(2, 1, 0, 2.4)
    assert enter(at_a_window).position == at_a_window
    state = enter(StreamPosition(2, 0, 7, 2.15))
    assert state.position == StreamPosition(2, 1, 0, 2.4)
    assert state.epochs == pytest.approx(2.15), "what is passed over does not count as read"
    state = enter(StreamPosition(2, 2, 7, 2.95))
    assert state.position == StreamPosition(3, 0, 0, 3.0)
    assert state.epochs == pytest.approx(2.95)


def test_the_fractions_are_the_streams_own(corpus: Path, tmp_path: Path) -> None:
    from made_runs import make_settings

    from bertsmith.training.setup import open_data

    data = open_data(make_settings(corpus, tmp_path, steps=3))
    from bertsmith.corpus.batches import BatchStream

    stream = BatchStream(data.corpus.split("train"), data.info, "mlm", 32, 4, block_tokens=2000, window_blocks=3)
    assert isinstance(stream.corpus, CorpusIndex)
    assert stream.corpus.windows > 2
    positions = [batch.position for batch in stream.batches(epochs=1)]
    starts = {(p.epoch, p.window): p.fraction for p in positions if p.offset == 0}
    found = 0
    for position in positions:
        state = RunState(position=position)
        state.enter_phase(1, stream.corpus)
        key = (state.position.epoch, state.position.window)
        if key in starts:
            assert state.position.fraction == pytest.approx(starts[key])
            found += 1
        assert next(stream.batches(state.position)).position is not None
    assert found > 3


# --- divergence


def first_stop(losses: np.ndarray, worst: float = 11.0) -> int | None:
    divergence = Divergence()
    return next((number for number, loss in enumerate(losses) if divergence.update(float(loss), worst)), None)


@pytest.mark.parametrize("deviation", [0.02, 0.3, 1.0, 2.5])
def test_noise_is_no_divergence(deviation: float) -> None:
    generator = np.random.default_rng(0)
    step = np.arange(5000)
    for scale in (1.0, 300.0):
        curve = 3 + 7 * np.exp(-step / scale)  # quick and slow learning
        for _ in range(5):
            assert first_stop(curve + generator.normal(0, deviation, len(step))) is None
    # heavy tails: a batch of odd text now and then
    spikes = 4 + generator.normal(0, 0.1, len(step)) + 6 * (generator.random(len(step)) < 0.02)
    assert first_stop(spikes) is None
    # a small rise, as when sequences become longer
    assert first_stop(np.where(step < 2500, 3.0, 3.8) + generator.normal(0, 0.1, len(step))) is None


@pytest.mark.parametrize("deviation", [0.0, 0.1, 1.0])
def test_divergence_is_seen_soon(deviation: float) -> None:
    generator = np.random.default_rng(1)
    noise = generator.normal(0, deviation, 400)
    step = np.arange(400)
    runaways = {
        "to the unigram entropy": np.where(step < 200, 2.5, 7.3),
        "slowly": 3 + np.maximum(step - 200, 0) * 0.05,
        "above guessing": np.where(step < 200, 10.5, 15.0),
        "exploding": np.where(step < 200, 4.0, np.minimum(4.0 * 1.5 ** np.maximum(step - 200, 0), 1e6)),
        "not a number": np.where(step < 200, 4.0, np.nan),
        "infinite": np.where(step < 200, 4.0, np.inf),
    }
    for name, curve in runaways.items():
        stop = first_stop(curve + noise)
        assert stop is not None, name
        assert 204 <= stop < (330 if name == "slowly" else 240), (name, stop)


def test_from_the_start() -> None:
    stop = first_stop(np.array([10.9] + [40.0 + n for n in range(60)]))
    assert stop is not None
    assert stop < 30


# --- rounding


def test_differences_are_named() -> None:
    before = Arithmetic("bf16", "cpu", 2, "AVX512", "2.13.0")
    assert before.differences(before) == ""
    now = Arithmetic("bf16", "cpu", 4, "AVX512", "2.14.0")
    assert before.differences(now) == "threads 2 → 4, torch 2.13.0 → 2.14.0"


# --- the lock


def hold(out: Path, ready: "multiprocessing.synchronize.Event", leave: "multiprocessing.synchronize.Event") -> None:
    with locked_run(out):
        ready.set()
        leave.wait(60)


def test_a_run_folder_has_one_writer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "run", ready, leave))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(UserError, match="another process is training in this run folder"), locked_run(tmp_path / "run"):
        pass
    holder.kill()
    holder.join()
    with locked_run(tmp_path / "run"):  # the lock went with the process
        (tmp_path / "run" / "file").touch()
    assert (tmp_path / "run" / "file").exists()


def test_an_error_passes_and_an_empty_folder_goes(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of the body"), locked_run(tmp_path / "a" / "run"):
        raise OSError("of the body")
    assert not (tmp_path / "a" / "run").exists()
    (tmp_path / "mine").mkdir()
    with locked_run(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").exists(), "a folder that was there stays"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="a file stands where a folder is needed"), locked_run(tmp_path / "file"):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("bertsmith.training.state.fcntl.flock", refuse)
    with locked_run(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()


# --- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert not interrupts.requested
        signal.raise_signal(number)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_interrupts_outside_the_main_thread() -> None:
    source = (
        "import threading\n"
        "from bertsmith.training.state import Interrupts\n"
        "def work():\n"
        "    with Interrupts() as interrupts:\n"
        "        print(interrupts.requested)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_nan_is_kept_in_an_evaluation() -> None:
    state = RunState(evaluation=Evaluation(math.nan, math.nan, 0.0, None, 8))
    again = RunState.from_dict(json.loads(json.dumps(state.as_dict())))
    assert again.evaluation is not None
    assert math.isnan(again.evaluation.loss)
