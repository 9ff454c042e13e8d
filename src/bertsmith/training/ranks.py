"""What the processes (ranks) that work on one job agree on: how they meet, and how they part.

`torchrun --nproc-per-node N -m bertsmith pretrain …` starts N processes that run the same loop. What the loop decides
(when to stop, to log, to save) is agreed on here, so that every rank takes the same steps; the first rank alone reads
the run folder, writes, and talks. On one process all of this is nothing: no process group is made and torch.distributed
is not asked for anything. How the model is spread over the ranks: distributed.py.
"""

import contextlib
import gc
import json
import math
import secrets
import signal
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertsmith.corpus.batches import Batch
from bertsmith.errors import ToldElsewhere, UserError
from bertsmith.hardware import Machine, prepare_machine
from bertsmith.options import Recipe, load_settings, settings_to_toml
from bertsmith.progress import say, silenced
from bertsmith.rank import describe_rank, local_rank, own_rank, world_size
from bertsmith.signals import sigterm_as

# how long a rank whose work was ended by another one waits to be ended too, so that torchrun names the one that failed
LINGER_SECONDS = 3.0
# for all ranks to come together, and for one to wait for another at any later point (for a checkpoint to be written)
JOIN_TIMEOUT = timedelta(minutes=30)
Arrays = list[npt.NDArray[Any]]
Settings = TypeVar("Settings")


class _Precise(Protocol):
    @property
    def precision(self) -> str:
        """fp32 or bf16."""


Made = TypeVar("Made", bound=_Precise)


class Ranks:
    """This process among those that work on one job; this class is the process that works alone.

    Every method but `even_out` is to be called by all ranks at the same point.
    """

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reads the run folder, writes and talks."""
        return self.rank == 0

    def agree(self, sums: Sequence[float], of_first: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        """`sums` added up over all ranks, and `of_first` as the first rank has them (a clock is one rank's)."""
        return list(sums), list(of_first)

    def share(self, value: Any) -> Any:
        """The first rank's `value` (anything JSON holds) on every rank; what the others give is not looked at."""
        return value

    def gather(self, value: Any, arrays: Sequence[npt.NDArray[Any]] = ()) -> Iterator[tuple[Any, Arrays]]:
        """Each rank's `value` (anything JSON holds) and `arrays`, in the order of ranks, on the first; there one by one
        as they are asked for, so that they need not be in memory together. On the others nothing."""
        return iter([(value, list(arrays))])

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, on the CPU, with the first rank's."""

    def stop(self, message: str) -> UserError:
        """What to raise where every rank finds the same, so that it is told once."""
        return (UserError if self.is_first else ToldElsewhere)(message)

    def alike(self) -> AbstractContextManager[None]:
        """What the user is to be told of in here ends every rank, and is told once; no other method may be called."""
        return nullcontext()

    def even_out(self, micro_batches: list[Batch], examples: int, micro_batch_size: int) -> list[Batch]:
        """This rank's micro-batches of a batch of `examples`, and empty ones until all ranks have the same number.

        Ranks wait for each other in the forward pass (fsdp) and at the end of the backward pass.
        """
        runs = math.ceil(examples / micro_batch_size)
        rounds = math.ceil(runs / self.size)
        return micro_batches + [micro_batches[-1].rows(0, 0)] * (rounds - len(micro_batches))


ALONE = Ranks()


class ProcessGroupRanks(Ranks):
    """Ranks of the default process group. What is agreed on goes over the host's network (gloo), gradients over nccl
    where they are on GPUs."""

    def __init__(self) -> None:
        self.rank, self.size = own_rank(), world_size()

    def agree(self, sums: Sequence[float], of_first: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        import torch.distributed as dist

        own = [*sums, *(of_first if self.is_first else [0.0] * len(of_first))]
        values = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(values)
        agreed = values.tolist()
        return agreed[: len(sums)], agreed[len(sums) :]

    def share(self, value: Any, source: int = 0) -> Any:
        import torch.distributed as dist

        content = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor(len(content))
        dist.broadcast(length, source)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(buffer, source)
        return json.loads(bytes(buffer.tolist()))

    def gather(self, value: Any, arrays: Sequence[npt.NDArray[Any]] = ()) -> Iterator[tuple[Any, Arrays]]:
        import torch.distributed as dist

        if self.is_first:
            return self._receive_all(value, list(arrays))
        shapes = [(array.dtype.str, array.shape) for array in arrays]
        header = np.frombuffer(bytearray(json.dumps((value, shapes)).encode()), dtype=np.uint8)
        dist.send(torch.tensor(len(header)), 0)
        for array in (header, *arrays):
            if array.size:
                dist.send(torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), 0)
        return iter(())

    def _receive_all(self, value: Any, arrays: Arrays) -> Iterator[tuple[Any, Arrays]]:
        import torch.distributed as dist

        yield value, arrays
        for rank in range(1, self.size):
            length = torch.tensor(0)
            dist.recv(length, rank)
            header = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(header, rank)
            value, shapes = json.loads(header.numpy().tobytes())
            received = [np.empty(shape, dtype) for dtype, shape in shapes]
            for array in received:
                if array.size:
                    dist.recv(torch.from_numpy(array.reshape(-1).view(np.uint8)), rank)
            yield value, received

    def broadcast(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        dist.broadcast(tensor, 0)

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        import torch.distributed as dist

        error: UserError | None = None
        try:
            yield
        except UserError as found:
            error = found
        failing = torch.tensor(self.size if error is None else self.rank)
        dist.all_reduce(failing, dist.ReduceOp.MIN)
        if (source := int(failing)) == self.size:
            return
        message = self.share(f"{describe_rank()}: {error}" if source else str(error), source)
        raise self.stop(message) from error


@contextlib.contextmanager
def join_ranks() -> Iterator[Ranks]:
    """`with join_ranks() as ranks:` where torchrun (or its like) started several processes; else ranks is ALONE.

    In here only the first rank talks. What `spread_model` gave must be gone when the block ends. A rank that is lost
    ends the others with a UserError (ToldElsewhere, with the reason said) as soon as they need it. Raises UserError
    when the processes cannot reach each other.
    """
    if world_size() == 1:
        yield ALONE
        return
    import torch.distributed as dist

    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        if local_rank() < torch.cuda.device_count():
            torch.cuda.set_device(local_rank())
    try:
        with _ended_by_sigterm():
            store, rank, size = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
            store.set_timeout(JOIN_TIMEOUT)
            start = dist.PrefixStore(_agree_on_start(store, rank, size), store)
            dist.init_process_group(backend, store=start, rank=rank, world_size=size)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the {world_size()} processes of this job do not reach each other ({str(error).splitlines()[0]}); start "
            "them with torchrun, and where a machine has several networks name the right one in GLOO_SOCKET_IFNAME "
            "(and NCCL_SOCKET_IFNAME)"
        ) from error
    ranks = ProcessGroupRanks()
    with nullcontext() if ranks.is_first else silenced():
        try:
            yield ranks
        except (ToldElsewhere, KeyboardInterrupt):
            if not ranks.is_first:
                _linger()
            raise
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            say(
                "bertsmith: another process of this job ended in the middle of the work; if it could say why, it did "
                "above or in its machine's log. The same command begins again, training from its last checkpoint"
            )
            _linger()
            raise ToldElsewhere("another process of this job ended in the middle of the work") from error
    # A model on the ranks holds the group; were it the last to do so, its end would wait for threads that wait for it.
    gc.collect()
    dist.destroy_process_group()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process at once: waiting for others here is no Python that a handler could interrupt."""
    with sigterm_as(signal.SIG_DFL):
        yield


def _agree_on_start(store: Any, rank: int, size: int) -> str:
    """A name for this start of the job that no earlier one had, the same on all ranks.

    torchrun keeps its store over restarts, and with it the addresses of processes that are dead, where the new ones
    would look for each other. So each rank says hello with a number of its own, the first answers each with the name,
    and all know that whoever quotes their number is alive.
    """
    own = secrets.token_hex(8)
    deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    def wait_a_moment() -> None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all came within {JOIN_TIMEOUT}")
        time.sleep(0.02)

    if rank:
        store.set(f"hello/{rank}", own)
        while not (answer := read(f"answer/{rank}")).startswith(own):
            wait_a_moment()
        name = answer.removeprefix(own)
        store.set(f"heard/{rank}", name)
        return name
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if hello := read(f"hello/{other}"):  # perhaps a dead one's: answered again until the living one has heard
                store.set(f"answer/{other}", hello + own)
            if read(f"heard/{other}") == own:
                missing.remove(other)
        if missing:
            wait_a_moment()
    return own


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective operation failed for want of another rank."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _linger() -> None:
    with contextlib.suppress(KeyboardInterrupt):  # SIGTERM: torchrun has seen the failure and ends the rest
        time.sleep(LINGER_SECONDS)


def share_settings(kind: type[Settings], make: Callable[[], Settings], ranks: Ranks) -> Settings:
    """What `make` gives on the first rank, on every rank: recipe and run folder need be on its machine only."""
    if ranks.size == 1:
        return make()
    text = ""
    with ranks.alike():
        if ranks.is_first:
            text = settings_to_toml(make())
    return load_settings(kind, Recipe(tomllib.loads(ranks.share(text)), "the first rank's settings"))


def make_alike(make: Callable[[str], Made], precision: str, ranks: Ranks) -> Made:
    """`make(precision)` on every rank; "auto", and "int8" with it, becomes on all what the first one finds it to be.

    Raises UserError, on all alike, as `make` does.
    """
    made: Made | None = None
    with ranks.alike():
        if precision not in ("auto", "int8") or ranks.is_first:
            made = make(precision)
    found = ranks.share(None if made is None else made.precision)
    with ranks.alike():
        if made is None:
            made = make(found)
    return made


def prepare_machines(device: str, precision: str, ranks: Ranks) -> Machine:
    """`prepare_machine` on every rank, with one precision. Raises UserError as it and `check_own_gpu` do."""

    def prepare(precision: str) -> Machine:
        machine = prepare_machine(device, precision)
        check_own_gpu(machine.device)
        return machine

    return make_alike(prepare, precision, ranks)


def check_own_gpu(device: torch.device) -> None:
    """Raise UserError where this machine has more processes than GPUs."""
    if device.type == "cuda" and local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"{describe_rank()}: this machine has {torch.cuda.device_count()} GPUs, too few for its processes; lower "
            "--nproc-per-node, or use --device cpu"
        )


def check_same(own: str, what: str, ranks: Ranks) -> None:
    """Raise UserError, on all alike, where a rank has another `own` (a digest of `what`) than the first."""
    first = ranks.share(own)
    with ranks.alike():
        if own != first:
            raise UserError(f"{what}: not the same here as on the first rank's machine")


def check_same_count(count: int, ranks: Ranks) -> None:
    """Raise UserError where the ranks did not read equally many rows: they have different files under one name."""
    (total,), (expected,) = ranks.agree((count,), (count,))
    if total != ranks.size * expected:
        raise ranks.stop("the input file is not the same for all processes; put it where all of them see it")


def split_evenly(sizes: Sequence[int], parts: int) -> list[slice]:
    """`parts` stretches of items of these sizes, about equal in size; none is empty while there are items for all."""
    stretches, begin, left = [], 0, sum(sizes)
    for others in range(parts - 1, -1, -1):  # stretches to come after this one
        end, size = begin, 0
        while end < len(sizes):
            fits = 2 * size + sizes[end] <= 2 * left / (others + 1) and end < len(sizes) - others
            if end > begin and others and not fits:
                break
            size += sizes[end]
            end += 1
        stretches.append(slice(begin, end))
        begin, left = end, left - size
    return stretches
