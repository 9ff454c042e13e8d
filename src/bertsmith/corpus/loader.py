"""Batches made ahead of the training loop, by a thread of this process or by worker processes.

In go a batch stream and a position; out comes the same sequence of batches for any number of workers. Workers are
spawned, not forked (the parent holds threads), get the stream's options only and map the shards themselves. A worker
that dies is an error here, never a wait without end; a parent that dies takes its workers with it.
"""

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import queue
import signal
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any

from bertsmith.corpus.batches import Batch, BatchCounts, BatchStream, StreamPosition
from bertsmith.errors import UserError
from bertsmith.workers import launching

_END = "end"


class PrefetchingLoader:
    """`with PrefetchingLoader(stream, position, workers=2) as batches: for batch in batches: …`

    `counts` counts the batches handed out (not those made ahead). Errors of the stream are raised by the iteration, a
    UserError as such. Leaving the `with` block, or `close()`, ends the thread and the workers.
    """

    def __init__(
        self,
        stream: BatchStream,
        position: StreamPosition | None = None,
        workers: int = 0,
        prefetch: int = 4,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        counts: BatchCounts | None = None,
        run: int = 1,
    ) -> None:
        """`workers`: 0 builds in a thread of this process, n > 0 in n processes. `prefetch`: batches held ready.

        `counts`: those of an earlier part of the run, to go on from. `rank`, `world_size`, `run`: which examples of
        each batch are this process's (see `BatchStream.batches`). Raises UserError for numbers out of range.
        """
        if workers < 0 or prefetch < 1:
            raise UserError(f"data workers {workers}, prefetch {prefetch}: workers from 0 on, prefetch from 1 on")
        self.counts = counts or BatchCounts()
        self._ready: queue.Queue[Batch | BaseException | str] = queue.Queue(prefetch)
        self._closing = threading.Event()
        self._finished = False
        self._workers: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        share: dict[str, Any] = {"rank": rank, "world_size": world_size, "run": run}
        options: dict[str, Any] = {"position": position, "epochs": epochs} | share
        source = self._receive() if workers else stream.batches(**options)
        if workers:
            self._start_workers(stream, options, workers)
        self._thread = threading.Thread(target=self._fill, args=(source,), name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._finished:
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, Batch):
            self.counts.add(item)
            return item
        self.close()
        if isinstance(item, BaseException):
            raise item
        raise StopIteration

    def __enter__(self) -> "PrefetchingLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and the workers and wait for them; may be called twice."""
        self._finished = True
        self._closing.set()
        for worker in self._workers:
            worker.kill()  # it ignores requests to end, and holds nothing that could be lost
        with contextlib.suppress(queue.Empty):
            while True:  # make room, so that the thread sees that it is over
                self._ready.get_nowait()
        self._thread.join()
        for worker in self._workers:
            worker.join()
            worker.close()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []

    def _fill(self, source: Iterator[Batch]) -> None:
        """The thread: put what `source` gives into the queue, and its end or its error as the last thing."""
        last: BaseException | str = _END
        try:
            for batch in source:
                if not self._put(batch):
                    return
        except BaseException as error:
            last = error
        self._put(last)

    def _put(self, item: Batch | BaseException | str) -> bool:
        """Wait for room; False when the loader is being closed."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False

    def _start_workers(self, stream: BatchStream, options: dict[str, Any], workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        multiprocessing.resource_tracker.ensure_running()  # its start unblocks Ctrl-C, which `launching` blocks
        try:
            for number in range(workers):
                receiver, sender = context.Pipe(duplex=False)
                self._pipes.append(receiver)
                worker = context.Process(
                    target=_work,
                    args=(sender, stream, options | {"worker": number, "workers": workers}),
                    name=f"batch worker {number}",
                    daemon=True,
                )
                with launching():
                    worker.start()
                self._workers.append(worker)
                sender.close()  # so that the pipe ends when the worker does
        except BaseException:
            for worker in self._workers:
                worker.kill()
                worker.join()
            raise

    def _receive(self) -> Iterator[Batch]:
        """The workers' batches in turn. A pipe holds little: each worker waits with the next one until it is due."""
        number = 0
        while not self._closing.is_set():
            try:
                kind, value = self._pipes[number].recv()
            except (EOFError, OSError):
                if self._closing.is_set():
                    return
                worker = self._workers[number]
                worker.join()
                raise UserError(
                    f"batch worker {number} (process {worker.pid}) was killed (exit code {worker.exitcode}), most "
                    "often because memory ran out; the same command resumes the run from its last checkpoint, with "
                    "fewer --examples.workers if memory is short"
                ) from None
            if kind == "batch":
                yield value
            elif kind == _END:
                return
            elif kind == "user error":
                raise UserError(value)
            else:
                raise RuntimeError(f"batch worker {number} failed:\n{value}")
            number = (number + 1) % len(self._pipes)


def _work(sender: Connection, stream: BatchStream, options: dict[str, Any]) -> None:
    """A worker process: build this worker's batches and send each when the parent takes it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, they are the parent's to handle
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone or has closed the loader
        try:
            for batch in stream.batches(**options):
                sender.send(("batch", batch))
            sender.send((_END, None))
        except UserError as error:
            sender.send(("user error", str(error)))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            sender.send(("error", traceback.format_exc()))
