"""Batches on several threads, each batch on one core, instead of each product spread over all cores.

Between the products of a BERT lie many small steps. On one core they cost what they are; spread over all cores they
cost a wait for the slowest each. So as many batches as there are cores go through side by side. PyTorch frees Python's
lock while it computes.
"""

import collections
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
_SECONDS_TO_START = 30.0


def threads_on(device: torch.device) -> int:
    """How many batches go side by side there: PyTorch's threads on a CPU, else one."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def map_on_threads(
    function: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> Iterator[tuple[Item, Result]]:
    """Each item with function(item), in order; on a CPU as many at once as PyTorch has threads, each on one of them.

    `items` is read as far ahead as is computed, so that results of any number of items fit into memory. What PyTorch
    keeps for each thread, inference mode among it, is for `function` to set.
    """
    count = threads_on(device)
    first = list(itertools.islice(items := iter(items), 2))
    # a single batch has all cores to itself
    pool = _pool(count) if count > 1 and len(first) > 1 else None
    waiting: collections.deque[tuple[Item, Future[Result]]] = collections.deque()
    try:
        for item in itertools.chain(first, items):
            future = None if pool is None else _submit(pool, function, item)
            if future is not None:
                waiting.append((item, future))
            while waiting and (future is None or len(waiting) > 2 * count):
                done, result = waiting.popleft()
                yield done, result.result()
            if future is None:
                yield item, function(item)
        while waiting:
            done, result = waiting.popleft()
            yield done, result.result()
    finally:  # nothing goes on computing behind the caller's back
        wait([future for _, future in waiting if not future.cancel()])


def _submit(pool: ThreadPoolExecutor, function: Callable[[Item], Result], item: Item) -> "Future[Result] | None":
    """None where the program is about to end, when threads take no more work."""
    try:
        return pool.submit(function, item)
    except RuntimeError:
        return None


def _pool(count: int) -> ThreadPoolExecutor | None:
    """`count` threads that compute on one core each, made once; None where they cannot be made."""
    with _lock:
        if count not in _pools:
            ready, made = threading.Barrier(count + 1), False
            pool = ThreadPoolExecutor(count, "bertsmith-stream", _compute_alone)
            try:
                for _ in range(count):
                    pool.submit(ready.wait, _SECONDS_TO_START)
                ready.wait(_SECONDS_TO_START)
                made = True
            except RuntimeError:  # no more threads, or the program is about to end; BrokenBarrierError is one
                return None
            finally:
                if not made:
                    ready.abort()
                    pool.shutdown(wait=False)
                # what a thread sets for itself is also what threads to come begin with
                torch.set_num_threads(count)
            _pools[count] = pool
        return _pools[count]


def _forget_threads() -> None:
    """In a forked process there are none of the threads; whoever asked them would wait for ever."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _compute_alone() -> None:
    torch.get_num_threads()  # a thread's first question sets the number to everybody's, now instead of later
    torch.set_num_threads(1)
