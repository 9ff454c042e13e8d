"""A run that was killed, interrupted or extended, once or often, is the unbroken run: batches, log, weights, bits."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import RECIPE, Crash, Probe, checkpoint_steps, file_digests, log_lines, results, train

from bertsmith.errors import UserError
from bertsmith.options import Recipe, load_settings
from bertsmith.training.checkpoint import find_newest_checkpoint
from bertsmith.training.loop import pretrain
from bertsmith.training.settings import PretrainSettings

# dropout, accumulation, log lines that do not fall on checkpoints, two lengths, an evaluation in between
BUSY: dict[str, Any] = {
    "steps": 20,
    "micro_batch_size": 3,
    "log__every": 4,
    "eval__every": 8,
    "second_phase__share": 0.3,
    "second_phase__max_length": 48,
}
KINDS: dict[str, dict[str, Any]] = {
    "nsp, AdamW": {"objective": "mlm+nsp"},
    "sop, Muon, workers": {"objective": "mlm+sop", "optimizer__name": "muon", "examples__workers": 1},
    "mlm, bf16": {"objective": "mlm", "precision": "bf16", "optimizer__bias_correction": "false"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_often(corpus: Path, tmp_path: Path, probe: Probe, kind: str) -> None:
    options = BUSY | KINDS[kind]
    expected = results(train(corpus, tmp_path / "whole", **options))
    rows = probe.rows()
    assert len(rows) == 20

    # (batch of that part at which it dies, checkpoint it is at then): before the first checkpoint, soon after a resume
    # (twice from one checkpoint), right after the second phase began at step 14, near the end
    seen: list[Any] = []
    at = 0
    for batches, saved in ((2, None), (5, 3), (1, 3), (8, 9), (6, 12), (4, 15), (4, 18)):
        probe.batches.clear()
        probe.crash_at(batches)
        with pytest.raises(Crash):
            train(corpus, tmp_path / "run", **options)
        assert probe.rows() == rows[at : at + batches], "each part is fed what the unbroken run was"
        seen = seen[:at] + probe.rows()
        checkpoint, broken = find_newest_checkpoint(tmp_path / "run")
        assert (checkpoint.step if checkpoint else None, broken) == (saved, [])
        at = saved or 0
    probe.batches.clear()
    summary = train(corpus, tmp_path / "run", **options)
    assert seen[:at] + probe.rows() == rows
    assert results(summary) == expected
    assert summary["resumed_from_step"] == 18
    assert log_lines(tmp_path / "run") == log_lines(tmp_path / "whole")
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model" / "model.safetensors"
    ).read_bytes()


def test_a_finished_run_again_changes_nothing(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    first = train(corpus, tmp_path / "run", steps=7, log__every=3)
    before, batches = file_digests(tmp_path / "run"), len(probe.batches)
    assert train(corpus, tmp_path / "run", steps=7, log__every=3) == first
    assert file_digests(tmp_path / "run") == before
    assert len(probe.batches) == batches, "no step is taken"
    with pytest.raises(UserError, match="at step 7 already, past the 4 steps"):
        train(corpus, tmp_path / "run", steps=4)
    assert file_digests(tmp_path / "run") == before, "nor does a shorter run"


def test_an_edited_config_is_held_against_the_checkpoint(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path / "run", steps=3)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace("seed = 0", "seed = 1"), encoding="utf-8")
    with pytest.raises(UserError, match="seed was 0 and is now 1"):
        train(corpus, tmp_path / "run", steps=6, seed=1)
    config.write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.toml: holds no settings of a run"):
        train(corpus, tmp_path / "run", steps=6)


def test_a_finished_run_whose_model_was_lost_makes_it_again(corpus: Path, tmp_path: Path) -> None:
    """As after a kill between the last checkpoint and the model folder."""
    first = train(corpus, tmp_path / "run", steps=4)
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    assert train(corpus, tmp_path / "run", steps=4) == first


def test_extending_a_finished_run(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    # without decay the schedule of the first steps does not depend on the length, so the two can be compared
    options = {"schedule__decay": "constant", "log__every": 5}
    expected = train(corpus, tmp_path / "whole", steps=17, **options)
    rows = probe.rows()
    probe.batches.clear()
    assert train(corpus, tmp_path / "run", steps=4, **options)["steps"] == 4
    assert train(corpus, tmp_path / "run", steps=10, **options)["steps"] == 10
    summary = train(corpus, tmp_path / "run", steps=17, **options)
    assert probe.rows() == rows
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert summary["tokens"] == expected["tokens"]
    assert (summary["steps"], summary["resumed_from_step"]) == (17, 10)


def test_extending_with_decay_follows_the_new_length(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path / "run", steps=10)
    train(corpus, tmp_path / "run", steps=20)
    rates = [line["learning_rate"] for line in log_lines(tmp_path / "run") if "loss" in line]
    assert rates[9] == pytest.approx(1e-3 * 1 / 8)
    assert rates[10] == pytest.approx(1e-3 * 10 / 18)
    assert rates[19] == pytest.approx(1e-3 * 1 / 18)


def test_killed_before_the_first_checkpoint_starts_afresh(
    corpus: Path, tmp_path: Path, probe: Probe, capfd: pytest.CaptureFixture[str]
) -> None:
    probe.crash_at(3)
    with pytest.raises(Crash):
        train(corpus, tmp_path / "run", steps=6, checkpoint__every=0)
    assert len(log_lines(tmp_path / "run")) == 2
    # nothing is kept of it, so that other settings contradict nothing
    summary = train(corpus, tmp_path / "run", steps=6, checkpoint__every=0, seed=7)
    assert "resuming" not in capfd.readouterr().err
    expected = train(corpus, tmp_path / "whole", steps=6, checkpoint__every=0, seed=7)
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert log_lines(tmp_path / "run") == log_lines(tmp_path / "whole")
    assert summary["resumed_from_step"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    corpus: Path, tmp_path: Path, probe: Probe, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    options = {"steps": 9, "checkpoint__every": 0, "log__every": 4}
    expected = results(train(corpus, tmp_path / "whole", **options))
    probe.at_update(6, lambda: signal.raise_signal(number))
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(corpus, tmp_path / "run", **options)
    assert signal.getsignal(number) is before
    assert checkpoint_steps(tmp_path / "run") == [6]
    assert not (tmp_path / "run" / "model").exists()
    assert "interrupted: the run is saved at step 6; the same command resumes it" in capfd.readouterr().err
    summary = train(corpus, tmp_path / "run", **options)
    assert results(summary) == expected
    assert summary["resumed_from_step"] == 6
    assert log_lines(tmp_path / "run") == log_lines(tmp_path / "whole")


def test_interrupted_at_the_last_step(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    options = {"steps": 5, "checkpoint__every": 0, "log__every": 4}
    expected = results(train(corpus, tmp_path / "whole", **options))
    probe.at_update(5, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(corpus, tmp_path / "run", **options)
    assert results(train(corpus, tmp_path / "run", **options)) == expected
    assert log_lines(tmp_path / "run") == log_lines(tmp_path / "whole")


def test_a_second_interrupt_does_not_wait(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    probe.at_update(5, twice)
    with pytest.raises(KeyboardInterrupt):
        train(corpus, tmp_path / "run", steps=9)
    assert checkpoint_steps(tmp_path / "run") == [3]


def test_a_damaged_newest_checkpoint(
    corpus: Path, tmp_path: Path, probe: Probe, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = results(train(corpus, tmp_path / "whole", steps=9))
    probe.crash_at(8)
    with pytest.raises(Crash):
        train(corpus, tmp_path / "run", steps=9)
    assert checkpoint_steps(tmp_path / "run") == [3, 6]
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    with (newest / "optimizer.safetensors").open("r+b") as file:
        file.truncate(1000)
    summary = train(corpus, tmp_path / "run", steps=9)
    said = capfd.readouterr().err
    assert f"warning: {newest}: broken checkpoint, optimizer.safetensors has 1,000 of" in said
    assert f"resuming from {newest.with_name('step-00000003')} (step 3)" in said
    assert results(summary) == expected


def test_precision_and_micro_batches_are_kept(
    corpus: Path, tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from bertsmith import hardware
    from bertsmith.training import setup

    def bf16_is(rate: float) -> None:
        monkeypatch.setattr(hardware, "measure_matmul", lambda device, dtype: rate if dtype is torch.bfloat16 else 1e11)

    options = {"steps": 9, "precision": "auto"}
    bf16_is(2e11)
    monkeypatch.setitem(setup._MICRO_TOKENS, "cpu", 3 * 32)
    expected = train(corpus, tmp_path / "whole", **options)
    assert expected["precision"] == "bf16"
    probe.crash_at(5)
    with pytest.raises(Crash):
        train(corpus, tmp_path / "run", **options)
    capfd.readouterr()
    bf16_is(5e10)  # a noisy measurement now says the opposite
    monkeypatch.setitem(setup._MICRO_TOKENS, "cpu", 1 * 32)  # as another version of bertsmith might choose
    probe.micro_sizes.clear()
    summary = train(corpus, tmp_path / "run", **options)
    assert results(summary) == results(expected)
    assert set(probe.micro_sizes) == {3}
    assert "in bf16 as the run began" in capfd.readouterr().err
    # a user short of memory may choose; and settings that did not come by way of config.toml bring no other precision
    probe.micro_sizes.clear()
    changes = {"data": str(corpus), "steps": 10, "precision": "auto", "micro_batch_size": 2}
    settings = load_settings(PretrainSettings, Recipe(RECIPE | changes, "test"))
    assert settings.precision == "auto"
    assert pretrain(settings, tmp_path / "run")["precision"] == "bf16"
    assert set(probe.micro_sizes) == {2}


def test_another_machine_is_said(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train(corpus, tmp_path / "run", steps=3)
    train(corpus, tmp_path / "run", steps=4)
    assert "the run began otherwise" not in capfd.readouterr().err
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    train(corpus, tmp_path / "run", steps=5)
    assert f"the run began otherwise (threads {threads} → {threads + 1})" in capfd.readouterr().err


def test_another_corpus_is_refused_and_the_same_one_elsewhere_is_not(
    corpus: Path, other_corpus: Path, tmp_path: Path
) -> None:
    train(corpus, tmp_path / "run", steps=3)
    with pytest.raises(
        UserError, match=r"is not the corpus that the run in .*run began with; name that one .* --model"
    ):
        train(other_corpus, tmp_path / "run", steps=6)
    moved = tmp_path / "moved"
    moved.symlink_to(corpus)
    assert train(moved, tmp_path / "run", steps=6)["steps"] == 6


def test_resuming_is_quick(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    train(corpus, tmp_path / "run", steps=3)
    summary = train(corpus, tmp_path / "run", steps=4)
    assert 0 < summary["resume_seconds"] < 2
