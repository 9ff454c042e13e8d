"""Several ranks on this machine: processes that run one job together over 127.0.0.1, and what each of them did.

They are forked from a server process that has imported everything and computed nothing, so that a job costs its own
work and not two seconds of imports a rank.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# what a rank would import when it comes to need it, the compiler (asked for by DistributedDataParallel) above all
PRELOADED = [
    "rank_runs",
    "bertsmith.training.loop",
    "bertsmith.tasks.glue",
    "bertsmith.inference.embed",
    "bertsmith.inference.loaded",
    "torch._dynamo",
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
]


@dataclass
class Ending:
    """How a rank ended: what its job returned, or the error it raised, and what it wrote to stderr."""

    value: Any
    error: str | None
    said: str
    seconds: float


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_ranks(size: int, job: Callable[..., Any], *arguments: Any, timeout: float = 150) -> list[Ending]:
    """`job(*arguments)` on `size` ranks at once. A rank that is killed or silent for `timeout` seconds is an error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, begun = free_port(), time.monotonic()
    ranks = []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(rank, size, port, sender, job, arguments), daemon=True)
        process.start()
        sender.close()
        ranks.append((process, receiver))
    endings: list[Ending] = []
    try:
        for rank, (process, receiver) in enumerate(ranks):
            if not receiver.poll(max(timeout - (time.monotonic() - begun), 0)):
                raise AssertionError(f"rank {rank} does not end; so far: {endings}")
            try:
                endings.append(receiver.recv())
            except EOFError:
                process.join()
                endings.append(Ending(None, f"exit code {process.exitcode}", "", time.monotonic() - begun))
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    return endings


def _be_rank(
    rank: int, size: int, port: int, sender: Connection, job: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    from bertsmith import hardware
    from bertsmith.training import ranks as ranks_module

    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    hardware.measure_matmul = lambda device, dtype: 1e11 if dtype is torch.float32 else 9e10
    ranks_module.LINGER_SECONDS = 0.0
    value = error = None
    begun = time.monotonic()
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            value = job(*arguments)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            if not isinstance(raised, KeyboardInterrupt) and "UserError" not in error and "ToldElsewhere" not in error:
                traceback.print_exc()
        sys.stderr.flush()
        seconds = time.monotonic() - begun
        said.seek(0)
        sender.send(Ending(value, error, said.read().decode("utf-8", "replace"), seconds))
    sender.close()


@contextlib.contextmanager
def patched(place: Any, name: str, value: Any) -> Iterator[None]:
    """`place.name` is `value` in here."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


class Patch:
    """What made_runs.Probe wants of pytest's monkeypatch; a rank's process ends with its job."""

    def setattr(self, place: Any, name: str, value: Any) -> None:
        setattr(place, name, value)


def train_rank(corpus: Path, out: Path, changes: dict[str, Any], prepare: Callable[..., None] | None = None) -> Any:
    """Pre-train as `made_runs.train` does, as one of several ranks: {summary, rows}. `prepare(probe, rank)` first."""
    from made_runs import Probe, make_settings

    from bertsmith.training.loop import pretrain
    from bertsmith.training.ranks import join_ranks, share_settings
    from bertsmith.training.settings import PretrainSettings

    probe = Probe(Patch())
    with join_ranks() as ranks:
        if prepare is not None:
            prepare(probe, ranks.rank)
        settings = share_settings(PretrainSettings, lambda: make_settings(corpus, out, **changes), ranks)
        summary = pretrain(settings, out, ranks)
    return {"summary": summary, "rows": example_rows(probe.batches)}


def example_rows(batches: list[Any]) -> list[list[tuple[Any, ...]]]:
    """For each batch: an example's number, its tokens after masking, where they were masked and what stood there."""
    steps = []
    for batch in batches:
        rows = []
        for n in range(len(batch)):
            one = batch.rows(n, n + 1)
            label = None if one.next_sentence_labels is None else one.next_sentence_labels.tolist()
            rows.append(
                (
                    one.example_ids.tolist(), one.token_ids.tolist(), one.masked_positions.tolist(),
                    one.masked_labels.tolist(), label,
                )
            )  # fmt: skip
        steps.append(rows)
    return steps


def joined_rows(endings: list[Ending]) -> list[list[tuple[Any, ...]]]:
    """The examples of each step over all ranks, in the order of their numbers."""
    for ending in endings:
        assert ending.error is None, ending
    return [
        sorted(row for rows in parts for row in rows)
        for parts in zip(*(ending.value["rows"] for ending in endings), strict=True)
    ]
