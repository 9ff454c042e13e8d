"""Whole jobs in tests: torchrun starts the processes, one is killed or all are asked to stop."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rank_runs import free_port
from watching import wait_until


@dataclass
class Job:
    """One torchrun and what it says."""

    process: "subprocess.Popen[bytes]"
    out: IO[bytes]

    def workers(self) -> dict[int, int]:
        """The process ids of its ranks, by rank."""
        found = {}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                found |= {int(v[5:]): int(child) for v in variables if v.startswith(b"RANK=")}
        return found

    def kill_worker(self) -> None:
        """SIGKILL for the rank with the highest number."""
        os.kill(max(self.workers().items())[1], signal.SIGKILL)

    def kill_and_wait(self) -> str:
        """`kill_worker`; the job ends within seconds, and says why, that rank first. What was said by all."""
        self.kill_worker()
        killed = time.monotonic()
        said = self.wait(60)
        assert time.monotonic() - killed < 20
        assert self.process.returncode != 0
        assert "another process of this job ended in the middle of the work" in said
        assert re.search(r"Root Cause.*rank\s+: 1 .*exitcode\s+: -9 ", said, re.DOTALL), said
        return said

    def wait(self, seconds: float) -> str:
        """Wait for its end; what was said by all."""
        self.process.wait(seconds)
        return self.said()

    def said(self) -> str:
        self.out.seek(0)
        return self.out.read().decode("utf-8", "replace")

    def wait_until(self, condition: Any, what: str) -> None:
        """Wait for `condition()` while the job runs."""
        wait_until(condition, what, process=self.process, said=self.said)


@contextlib.contextmanager
def started(
    folder: Path, launcher: list[str], arguments: Sequence[object], before: tuple[str, ...] = (), **variables: str
) -> Iterator[Job]:
    """`torchrun LAUNCHER -m bertsmith ARGUMENTS`; nothing of it is left afterwards."""
    command = [*before, sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "bertsmith"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables
    with (folder / f"said-{time.monotonic_ns()}.txt").open("w+b") as out:
        process = subprocess.Popen(
            [*command, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
        )
        job = Job(process, out)
        workers: dict[int, int] = {}
        try:
            yield job
            with contextlib.suppress(OSError):
                workers = job.workers()
        finally:
            for number in (process.pid, *workers.values()):
                if process.poll() is None or number != process.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
            process.wait()


def on_this_machine(ranks: int, *more: str) -> list[str]:
    """torchrun's options; the rendezvous is at 127.0.0.1."""
    return [f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={free_port()}", *more]
