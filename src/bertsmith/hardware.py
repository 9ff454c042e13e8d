"""The machine the training runs on: its device, its measured matrix-product rate, and the precision that is fastest.

The rate measured here is the limit that `utilization` is a share of. It is measured, not looked up: chips that list
bfloat16 among their features differ by a factor of four in how fast they multiply it, and some multiply float32 faster.
"""

import ctypes
import os
import sys
import time
from dataclasses import dataclass

import torch

from bertsmith.errors import UserError, one_of, whole_number

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
# PyTorch ends in a segmentation fault where the system cannot make as many; more than a few a core only slow it down
MOST_THREADS_A_CORE = 8
# threads of so few share glibc's first heap: its lock is held for about a microsecond, a hundred times a layer
CORES_OF_ONE_HEAP = 8


@dataclass(frozen=True)
class Machine:
    """Where and in which arithmetic the model computes."""

    device: torch.device
    precision: str
    """`bf16` or `fp32`, resolved."""
    matmul_flops: float
    """Floating-point operations a second of a large matrix product in that precision, measured just now."""
    other_flops: float | None
    """The same in the other precision, where both were tried."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the arithmetic; master weights are float32 in either case."""
        return PRECISIONS[self.precision]

    def describe(self) -> str:
        """One line for the log."""
        text = (
            f"{self.device.type}, {self.precision}, matrix products at {self.matmul_flops / 1e9:,.0f} GFLOP/s measured"
        )
        if self.other_flops is not None:
            other = "fp32" if self.precision == "bf16" else "bf16"
            text += f" ({other}: {self.other_flops / 1e9:,.0f})"
        if self.device.type == "cpu":
            text += f", {torch.get_num_threads()} threads"
        return text


def choose_device(name: str) -> torch.device:
    """`auto` (CUDA where there is one), `cpu` or `cuda`. Raises UserError where there is no CUDA device."""
    one_of("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda was asked for, but PyTorch finds no CUDA device here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def check_threads(name: str, threads: object) -> int:
    """A number of threads that this machine can be asked for. Raises UserError, which calls it `name`, for others."""
    count, cores = whole_number(name, threads, 1), os.cpu_count() or 1
    if count > (most := MOST_THREADS_A_CORE * cores):
        raise UserError(f"{name} {count:,}: this machine has {cores} cores; give {most} at most")
    return count


def emulates_bf16(device: torch.device) -> bool:
    """Whether bf16 products there are computed by other instructions, several times slower than fp32's."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return device.type == "cpu" and supported is not None and not supported()


def measure_matmul(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """The best rate, in FLOP/s, of a square matrix product seen in about `seconds`.

    The size is 2048 (8192 on CUDA), or the largest power of two below it whose product takes no longer than `seconds`:
    a chip that emulates bfloat16 would need a minute for the full one.
    """
    largest, size = (8192, 2048) if device.type == "cuda" else (2048, 512)
    _time_products(device, dtype, size // 2, 2)  # the first products of all start threads and libraries
    taken = _time_products(device, dtype, size, 2)
    while size < largest and 8 * taken <= seconds:
        size, taken = 2 * size, _time_products(device, dtype, 2 * size, 2)
    return 2 * size**3 / min(taken, _time_products(device, dtype, size, max(2, round(seconds / max(taken, 1e-9)))))


def _time_products(device: torch.device, dtype: torch.dtype, size: int, runs: int) -> float:
    """The least seconds that one of `runs` products of size × size took, the first not counted."""
    source = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=source, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    best = float("inf")
    for run in range(runs):
        begun = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if run:
            best = min(best, time.perf_counter() - begun)
    return best


def prepare_machine(device: str = "auto", precision: str = "auto") -> Machine:
    """Choose device and precision and measure the limit. `auto` precision: the faster of the two on this machine.

    Raises UserError for unknown names or an absent device.
    """
    one_of("precision", precision, ("auto", *PRECISIONS))
    chosen = choose_device(device)
    if chosen.type == "cpu":
        keep_freed_memory()
    if precision != "auto":
        return Machine(chosen, precision, measure_matmul(chosen, PRECISIONS[precision]), None)
    rates = {name: measure_matmul(chosen, dtype) for name, dtype in PRECISIONS.items()}
    best = max(rates, key=lambda name: rates[name])
    other = "fp32" if best == "bf16" else "bf16"
    return Machine(chosen, best, rates[best], rates[other])


def mkl_multiplies_slowly() -> bool:
    """Whether MKL, PyTorch's library for fp32, is slower on this CPU than oneDNN: on AMD's.

    It leaves their AVX-512 unused: on Zen 5, whose registers are that wide, oneDNN's products are 2.3 times as fast.
    With AVX2 (Zen 3) oneDNN's are 1.06 times as fast, products of a few rows on two threads 1.3 to 5 times.
    """
    if not torch.backends.mkl.is_available() or not hasattr(torch.cpu, "get_capabilities"):
        return False
    features = torch.cpu.get_capabilities()
    return "AMD" in features.get("cpu_name", "") and bool(features.get("avx2"))


def int8_weight_bits() -> int | None:
    """The bits of weights that this CPU multiplies with 8-bit inputs and sums without overflow; None: not fast at all.

    8 where it has the instructions for it (VNNI, AMX); 7 with AVX2 only, which sums two products in 16 bits.
    """
    if not hasattr(torch.cpu, "get_capabilities"):
        return None
    features = torch.cpu.get_capabilities()
    if any(features.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")):
        return 8
    return 7 if features.get("avx2") else None


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of returning it: a training step frees and asks for the same again.

    Otherwise each large tensor is mapped afresh and its pages are faulted in one by one, which takes a good part of an
    elementwise operation's time (benchmarks/LOG.md). Elsewhere than on glibc, or where the user chose the allocator's
    settings through the environment, nothing is done.

    Threads share one heap where there are few of them: glibc gives heaps of threads other than the first back whatever
    it is told. Where there are many they would wait for each other.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold, mmap_max, arena_max = -1, -3, -4, -8  # malloc.h
    mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(mmap_max, 0)
    if (os.cpu_count() or 1) <= CORES_OF_ONE_HEAP:
        mallopt(arena_max, 1)


def bound_kernel_caches() -> None:
    """Have each thread keep the kernels of few shapes, as long as nobody chose otherwise and none was made yet.

    PyTorch's default, 1,024 shapes a thread, is gigabytes where many threads meet many shapes; what one thread drops
    is found again in oneDNN's own cache, which all share, at no cost that shows (benchmarks/LOG.md).
    """
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
