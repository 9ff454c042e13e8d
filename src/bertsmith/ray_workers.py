"""The worker pool on a Ray cluster: the same work, in the same order, with the same bound on what is under way.

One item is one Ray task. A task whose worker or machine dies is done again by Ray on another; since a result is a
function of its item alone, that changes nothing. Only this module imports Ray, and only when a pool is opened: without
--ray nothing of it runs. Ray's usage reports and its dashboard stay off, and a local cluster listens on loopback only.
"""

import importlib.metadata
import importlib.util
import io
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from bertsmith.errors import UserError
from bertsmith.progress import say
from bertsmith.workers import available_cores, peak_memory, refuse_no_workers, use_one_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

LOCAL = "local"
RETRIES = 5
"""How often Ray does a task again whose worker or machine died, before the command gives up."""
CONNECT_SECONDS = 60
"""How long a cluster may take to answer."""

_PROBE_SECONDS = 5  # for the bare connection; nobody listens at most wrong addresses
_STORE_BYTES, _STORE_BYTES_A_WORKER = 256 << 20, 64 << 20  # shared memory of a local cluster, taken as it is used
# whose versions decide what a sentence and a token are
_SAME_EVERYWHERE = ("bertsmith", "tokenizers", "sentencex")
_LONGEST_FOLDER = 40  # characters; Ray makes sockets in it, whose paths the kernel limits to 107


class RayPool:
    """A Pool (workers.py) whose workers are Ray's. `address`: "local", or HOST:PORT of a cluster this machine is in.

    `workers`: tasks at a time, None for one a processor of the cluster. Raises UserError where Ray is not installed or
    the address is none; entering it, where no cluster answers there in about a minute.
    """

    def __init__(self, address: str, workers: int | None) -> None:
        if workers is not None:
            refuse_no_workers(workers)
        if address.startswith("ray://"):
            raise UserError(
                f"--ray {address}: Ray's client protocol is not used; run the command on a machine of the cluster (or"
                " through `ray job submit`) and give HOST:PORT of its head, port 6379 as a rule"
            )
        if address != LOCAL and not re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}", address):
            raise UserError(f"--ray {address}: give local, or HOST:PORT of a cluster's head (10.0.0.5:6379, say)")
        if importlib.util.find_spec("ray") is None:
            raise UserError(f"--ray {address}: Ray is not installed here; pip install 'bertsmith[ray]'")
        self.address = address
        self.workers = workers or 0  # 0 until the cluster has told how many processors it has
        self._at_once = 0
        self._folder: Path | None = None
        self._peaks: dict[tuple[str, int], int] = {}  # of each (machine, process)

    def __enter__(self) -> "RayPool":
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_DEDUP_LOGS"] = "0"  # else it prints what it held back when the pool has closed
        self._stdout = sys.stdout
        sys.stdout = _RayLinesAside(sys.stdout)
        try:
            self._open()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _open(self) -> None:
        if self.address == LOCAL:
            self._start_local()
        else:
            self._connect()
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        processors = int(ray.cluster_resources().get("CPU", 0))
        if not processors:
            raise UserError(f"--ray {self.address}: the cluster has no processor for tasks; add a machine to it")
        self.workers = self.workers or processors
        # Where the cluster has no more processors than asked, a second task a worker waits at it, as in the local
        # pool; where it has more, it would run that at once, and more at a time than was asked.
        self._at_once = self.workers if processors > self.workers else 2 * self.workers
        say(
            f"Ray: {len(nodes)} machine{'s' * (len(nodes) != 1)}, {processors} processors; {self.workers} tasks at a"
            " time"
        )

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        ray.shutdown()
        sys.stdout = self._stdout
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def peak_memory(self) -> int:
        return peak_memory() + sum(self._peaks.values())

    @property
    def summary(self) -> dict[str, Any]:
        machines = {machine for machine, _ in self._peaks}
        return {"workers": self.workers, "ray": {"machines": len(machines), "processes": len(self._peaks)}}

    def map_in_order(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        import ray

        shared = ray.put(function)
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run)
        underway: deque[Any] = deque()
        unfinished: list[Any] = []
        for item in items:
            underway.append(task.remote(shared, item))
            unfinished.append(underway[-1])
            while underway:
                if unfinished:  # in the order they were sent
                    _, unfinished = ray.wait(unfinished, num_returns=len(unfinished), timeout=0)
                if not unfinished or underway[0] != unfinished[0]:
                    yield self._take(underway.popleft())
                elif len(underway) > 2 * self.workers:
                    ray.wait([underway[0]])  # results wait for this one: more of them would only hold memory
                elif len(unfinished) >= self._at_once:
                    ray.wait(unfinished)
                else:
                    break
        while underway:
            yield self._take(underway.popleft())

    def _take(self, reference: Any) -> Any:
        import ray

        try:
            machine, process, peak, versions, result = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            # Ray's own exception prints the worker's traceback, also for what the user can mend
            if "No module named 'bertsmith" in str(error):
                raise UserError(
                    f"--ray {self.address}: bertsmith is not installed on every machine of the cluster; install"
                    f" bertsmith {_versions()['bertsmith']} there, into the Python that Ray runs with"
                ) from None
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            what = str(error).strip().partition("\n")[0]
            raise UserError(
                f"--ray {self.address}: a piece of work was lost {RETRIES + 1} times, most often because memory ran"
                f" out on the workers' machines ({what}); run the same command again, with fewer --workers"
            ) from error
        if versions != _versions():
            raise UserError(
                f"--ray {self.address}: {machine} has {_named(versions)}, this machine {_named(_versions())}; the"
                " result would depend on who made it: install the same on both"
            )
        self._peaks[machine, process] = max(peak, self._peaks.get((machine, process), 0))
        return result

    def _start_local(self) -> None:
        cores = self.workers or available_cores()
        folder = tempfile.mkdtemp(prefix="bertsmith-ray-")
        if len(folder) > _LONGEST_FOLDER and os.path.isdir("/tmp"):
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="bertsmith-ray-", dir="/tmp")
        self._folder = Path(folder)
        use_token()
        # Ray's own switch for "no cluster of several machines": its servers then listen on 127.0.0.1 alone. It is read
        # on import.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        self._init(
            LOCAL,
            num_cpus=cores,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES + cores * _STORE_BYTES_A_WORKER,
            _temp_dir=folder,
        )

    def _connect(self) -> None:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--ray {self.address}: nobody answers there ({getattr(error, 'strerror', None) or error}); give"
                " HOST:PORT of a cluster's head, as `ray start --head` prints it"
            ) from None
        # What listens there may be no Ray at all, or another version of it: Ray then waits for minutes or ends the
        # whole process. A process of its own finds out.
        script = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level=50)"
        try:
            probe = subprocess.run(
                [sys.executable, "-c", script, self.address],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CONNECT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"--ray {self.address}: no Ray cluster answered within {CONNECT_SECONDS} seconds; is this its head's"
                " port (6379 as a rule), and is this machine part of the cluster (`ray status`)?"
            ) from None
        if b"InvalidAuthToken" in probe.stderr:
            raise UserError(
                f"--ray {self.address}: this cluster asks for a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or"
                " RAY_AUTH_TOKEN_PATH to what its head has (~/.ray/auth_token there)"
            )
        if probe.returncode:
            said = probe.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise UserError(f"--ray {self.address}: this cluster cannot be used from here: {said}")
        self._init(self.address)

    def _init(self, address: str, **options: Any) -> None:
        import ray

        main_thread = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if main_thread else None
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **options)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise UserError(f"--ray {self.address}: Ray cannot be started: {first}") from error
        finally:
            if main_thread:  # Ray puts its own there, which would end the command without cleaning up
                signal.signal(signal.SIGTERM, before)


def use_token() -> None:
    """A secret for the clusters that this process starts: other users of the machine reach its loopback as well.

    Left alone, recent releases of Ray write one into the user's home; earlier ones have none.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


class _RayLinesAside(io.TextIOBase):
    """Stands for stdout while a pool is open: Ray's threads print what befalls its workers there, in paragraphs, and
    stdout belongs to results. The first sentence of each goes to stderr; what others print passes through."""

    def __init__(self, stdout: TextIO | None) -> None:
        self.stdout = stdout

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith("ray_"):
            plain = re.sub(r"\x1b\[\d*m", "", text)
            told = re.match(r"(?:\([^)]*\) )?(.+?)(?:\. |\.?$)", plain, re.MULTILINE)
            if told and not told[1].startswith("Task "):  # that its worker died has been told
                say(f"Ray: {told[1]}")
        elif self.stdout is not None:
            self.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        if self.stdout is not None:
            self.stdout.flush()


def _run(function: Callable[[Any], Any], item: Any) -> tuple[str, int, int, dict[str, str], Any]:
    """One task, on a worker of Ray's."""
    use_one_thread()
    return socket.gethostname(), os.getpid(), peak_memory(), _versions(), function(item)


@lru_cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _SAME_EVERYWHERE}


def _named(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
