"""Whole jobs: torchrun starts the processes, one is killed or all are asked to stop, and what is left goes on."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from made_runs import checkpoint_steps, log_lines

from bertsmith.training.metrics_log import read_metrics
from command_line import bertsmith
from torchrun_jobs import on_this_machine, started

pytestmark = pytest.mark.slow
FLAGS = [
    "--model", "tiny", "--batch-size", "4", "--micro-batch-size", "2", "--max-length", "32", "--precision", "fp32",
    "--log.examples", "0", "--log.every", "1", "--eval.every", "0", "--eval.examples", "8", "--checkpoint.every", "5",
    "--checkpoint.minutes", "0", "--schedule.decay", "constant", "--warmup", "2",
]  # fmt: skip


def test_a_killed_rank_ends_the_job_and_a_restart_goes_on(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--data", str(corpus), "--out", str(run), "--steps", "400"]
    with started(tmp_path, on_this_machine(2, "--max-restarts=1"), ["pretrain", *arguments, *FLAGS]) as job:
        job.wait_until(lambda: len(checkpoint_steps(run)) > 1, "a checkpoint")
        first = job.workers()
        job.kill_worker()
        job.wait_until(lambda: "resuming from" in job.said(), "the restart")
        assert set(job.workers().values()).isdisjoint(first.values())
        at = checkpoint_steps(run)[-1]
        job.wait_until(lambda: checkpoint_steps(run)[-1] > at, "the next checkpoint")
        said = job.kill_and_wait()
    ours = said.partition("Traceback")[0]  # torchrun's own, about the child that failed
    assert "fault of bertsmith" not in said, said
    assert "rank 1 of 2" not in ours
    # what is left goes on, on one process, as if nothing had been
    last = checkpoint_steps(run)[-1]
    whole = tmp_path / "whole"
    for out in (run, whole):
        arguments[3:] = [str(out), "--steps", str(last + 3)]
        assert bertsmith("pretrain", *arguments, *FLAGS).code == 0
    lines, expected = log_lines(run), log_lines(whole)
    assert [line["tokens"] for line in lines if "loss" in line] == [
        line["tokens"] for line in expected if "loss" in line
    ]
    assert lines[-2]["loss"] == pytest.approx(expected[-2]["loss"], rel=1e-3)


def test_sigterm_to_torchrun_saves_and_ends(corpus: Path, tmp_path: Path) -> None:
    """As Slurm and spot machines do."""
    run = tmp_path / "run"
    arguments = ["pretrain", "--data", corpus, "--out", run, "--steps", 4000, *FLAGS]
    with started(tmp_path, on_this_machine(2), arguments) as job:
        job.wait_until(lambda: (run / "metrics.jsonl").is_file() and len(read_metrics(run)) > 7, "a few steps")
        job.process.send_signal(signal.SIGTERM)
        said = job.wait(60)
    saved = re.search(r"interrupted: the run is saved at step (\d+)", said)
    assert saved, said
    assert checkpoint_steps(run)[-1] == int(saved[1])
    assert said.count("bertsmith: interrupted") <= 1
    assert "fault of bertsmith" not in said


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    """In the settings, found by every process, and in the command, found before they know of each other."""
    for arguments, sentence in (
        (["--data", str(tmp_path / "none"), "--steps", "3"], "does not exist"),
        (["--data", str(tmp_path), "--stepz", "3"], "--stepz"),
    ):
        command = ["pretrain", "--out", tmp_path / "run", *arguments, *FLAGS]
        with started(tmp_path, on_this_machine(2), command) as job:
            said = job.wait(60)
        assert job.process.returncode == 1
        assert re.search(r"Root Cause.*rank\s+: 0 .*exitcode\s+: 2 ", said, re.DOTALL), said
        sentences = [line for line in said.splitlines() if line.startswith("bertsmith: ")]
        assert len(sentences) == 1, said
        assert sentence in sentences[0]
    assert not (tmp_path / "run").exists()


# --- two machines: two network namespaces with a cable between them


@dataclass
class Machines:
    """Names of two network namespaces; each has one address, 10.77.0.1 and 10.77.0.2, and no loopback in common."""

    names: tuple[str, str]

    def run(self, number: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[number])


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Skipped where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (Debian's iproute2) to make network namespaces")
    names = (f"bert-a-{os.getpid()}", f"bert-b-{os.getpid()}")

    def ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"network namespaces cannot be made here: ip {' '.join(arguments)}: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Machines(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_two_machines(machines: Machines, corpus: Path, tmp_path: Path) -> None:
    """They meet at torchrun's rendezvous. A worker is killed: all go on from the checkpoint; again: both jobs end."""
    run = tmp_path / "run"
    arguments = ["--data", str(corpus), "--out", str(run), "--steps", "4000"]
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                started(
                    tmp_path,
                    [
                        "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=test",
                        "--rdzv-endpoint=10.77.0.1:29477", f"--local-addr=10.77.0.{number + 1}",
                        # the two have one host name here, by which torchrun would find out whose address that is
                        f"--rdzv-conf=is_host={1 - number}",
                    ],
                    ["pretrain", *arguments, *FLAGS],
                    machines.run(number),
                    GLOO_SOCKET_IFNAME="cable",
                )
            )
            for number in (0, 1)
        ]  # fmt: skip
        jobs[0].wait_until(lambda: len(checkpoint_steps(run)) > 1, "a checkpoint")
        jobs[1].kill_worker()
        jobs[0].wait_until(lambda: any("resuming from" in job.said() for job in jobs), "the restart")
        at = checkpoint_steps(run)[-1]
        jobs[0].wait_until(lambda: checkpoint_steps(run)[-1] > at, "the next checkpoint")
        jobs[1].kill_worker()
        killed = time.monotonic()
        for job in jobs:
            said = job.wait(60)
            assert job.process.returncode != 0, said
            assert "fault of bertsmith" not in said, said
        assert time.monotonic() - killed < 30
    last = checkpoint_steps(run)[-1]
    assert bertsmith("pretrain", *arguments[:-1], last + 3, *FLAGS, "--json").json["resumed_from_step"] == last
    assert [line["step"] for line in log_lines(run) if "loss" in line] == list(range(1, last + 4))
