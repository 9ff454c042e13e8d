"""A pool of worker processes: items in, results out in the same order, with a bounded number of them under way.

`make_pool` gives one on this machine (here) or on a Ray cluster (ray_workers.py); who uses it sees no difference.

Local workers are fresh interpreters (spawn): nothing is forked after a library has started threads, so nothing hangs or
warns. They ignore Ctrl-C (the parent decides), use one thread each, end when the parent ends, however it ends, and one
that is killed gives an error, not a wait without end.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, Protocol, TypeVar

from bertsmith.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """The cores this process may use (a container's or a batch job's share, not the whole machine's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
    """Bytes of memory this process has held at most (resident set)."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/status", "rb") as status:
        # getrusage would count what a parent held before it started this process
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(b"VmHWM"))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Pool(Protocol):
    """`with make_pool(…) as pool: for result in pool.map_in_order(function, items)`.

    `function` must be importable by name (or a `partial` of such a one), and its results must not depend on which
    process computes them. Each worker is sent it once, so that what it carries may be large.
    """

    workers: int

    def __enter__(self) -> "Pool": ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def peak_memory(self) -> int:
        """Bytes that this process and its workers have held at most, each at its own peak, added up."""

    @property
    def summary(self) -> dict[str, Any]:
        """What a command's summary says of the pool, to be read after the work."""

    def map_in_order(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield `function(item)` for every item, in order; items are taken only as fast as results are used.

        Raises what `function` raises, and UserError if workers were killed and nobody could do their work.
        """


def make_pool(workers: int | None, ray: str | None = None) -> Pool:
    """`workers` processes here (None: one a core); with `ray`, that many tasks at a time on a Ray cluster.

    `ray` is "local" (a cluster of this machine alone, for as long as the pool is open) or the HOST:PORT of one. Raises
    UserError for what cannot be, before anything is started.
    """
    if ray is None:
        return WorkerPool(available_cores() if workers is None else workers)
    from bertsmith.ray_workers import RayPool

    return RayPool(ray, workers)


def refuse_no_workers(workers: int) -> None:
    """UserError below 1."""
    if workers < 1:
        raise UserError(f"--workers {workers}: at least 1 is needed")


class WorkerPool:
    """A Pool of processes on this machine; one worker: this process itself."""

    def __init__(self, workers: int) -> None:
        refuse_no_workers(workers)
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None
        self._peaks: dict[int, int] = {}

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._executor:
            self._executor.shutdown(wait=True, cancel_futures=True)

    @property
    def peak_memory(self) -> int:
        return peak_memory() + sum(self._peaks.values())

    @property
    def summary(self) -> dict[str, Any]:
        return {"workers": self.workers}

    def map_in_order(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        if self.workers == 1:
            yield from map(function, items)
            return
        assert self._executor is None, "a pool maps one function: its workers were started with it"
        resource_tracker.ensure_running()  # its start unblocks Ctrl-C, which `launching` blocks
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(
            self.workers, mp_context=context, initializer=_start_worker, initargs=(pickle.dumps(function),)
        )
        underway: deque[Future[tuple[int, int, Result]]] = deque()
        try:
            for item in items:
                with launching():
                    underway.append(self._executor.submit(_run, item))
                # Two a worker are enough to keep all of them busy; more would only hold memory.
                while len(underway) > 2 * self.workers or (underway and underway[0].done()):
                    yield self._take(underway.popleft())
            while underway:
                yield self._take(underway.popleft())
        except BrokenProcessPool as error:
            raise UserError(
                f"one of the {self.workers} worker processes was killed, most often because memory ran out; the result"
                " was not written; run the same command again, with fewer --workers if memory is short"
            ) from error

    def _take(self, future: "Future[tuple[int, int, Result]]") -> Result:
        process, peak, result = future.result()
        self._peaks[process] = max(peak, self._peaks.get(process, 0))
        return result


# of this worker: what it is to do with every item, unpacked when it has its first
_packed_function = b""
_function: Callable[[Any], Any] | None = None


def _run(item: Any) -> tuple[int, int, Any]:
    global _function
    if _function is None:
        _function = pickle.loads(_packed_function)
    return os.getpid(), peak_memory(), _function(item)


def use_one_thread() -> None:
    """For a worker, before numpy or tokenizers do anything: there is a worker a core already."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[variable] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Around what starts a spawned process: it inherits no Ctrl-C and does not run the user's script again.

    multiprocessing lets every new process import the parent's main module, which fails for `<stdin>` mains and starts
    scripts without an `if __name__ == "__main__"` anew. Nothing of ours lives there: it is shown an empty one.
    """
    main = sys.modules["__main__"]
    masked = hasattr(signal, "pthread_sigmask")
    with _sigterm_later():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masked else set()
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            if masked:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _sigterm_later() -> Iterator[None]:
    """Put SIGTERM off until the end: a parent that stops in the middle of a start leaves a child that complains.

    It is not blocked, as Ctrl-C is, for the child would inherit that and SIGTERM is how a pool ends its workers.
    """
    came: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    except ValueError:  # not the main thread: no handler of Python's runs in this one
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _start_worker(packed_function: bytes) -> None:
    """Runs first in every worker, before numpy or tokenizers are imported: the function that needs them is packed."""
    global _packed_function
    _packed_function = packed_function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_one_thread()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
