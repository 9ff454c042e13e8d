"""The machine: its measured limit counts the right arithmetic, the faster precision is taken, memory is kept."""

import os
import subprocess
import sys

import pytest
import torch

from bertsmith import hardware
from bertsmith.errors import UserError
from bertsmith.hardware import Machine, choose_device, measure_matmul, prepare_machine

CPU = torch.device("cpu")


class Clock:
    """A clock that only matrix products move on, each by its arithmetic over `rate`; every third one at half speed."""

    def __init__(self, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.rate = 0.0, rate
        self.sizes: list[int] = []
        self.dtypes: set[torch.dtype] = set()
        monkeypatch.setattr(hardware.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(hardware.torch, "mm", self.multiply)

    def multiply(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        size = len(left)
        assert left.shape == right.shape == out.shape == (size, size)
        self.dtypes |= {left.dtype, right.dtype, out.dtype}
        self.now += 2 * size**3 / self.rate * (2 if len(self.sizes) % 3 == 2 else 1)
        self.sizes.append(size)
        return out


@pytest.mark.parametrize(
    ("rate", "size", "most_seconds"),
    [
        (400e9, 2048, 0.7),
        (150e9, 2048, 1.5),
        (20e9, 1024, 1.5),
        (1e9, 512, 2.5),  # a chip that emulates the type: 17 s for the full size
    ],
)
def test_the_rate_is_exact_and_found_in_good_time(
    rate: float, size: int, most_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(rate, monkeypatch)
    assert measure_matmul(CPU, torch.bfloat16) == pytest.approx(rate)
    assert max(clock.sizes) == clock.sizes[-1] == size
    assert clock.now < most_seconds
    assert clock.dtypes == {torch.bfloat16}


def test_a_real_measurement_is_a_rate_this_century() -> None:
    assert 1e8 < measure_matmul(CPU, torch.float32, seconds=0.01) < 1e15


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, float]:
    """What measuring says, without measuring; `asked` in it counts the measurements."""
    rates = {torch.float32: 1e11, torch.bfloat16: 3e11}
    monkeypatch.setattr(hardware, "measure_matmul", lambda device, dtype: rates[dtype])
    monkeypatch.setattr(hardware, "keep_freed_memory", lambda: None)
    return rates


def test_the_faster_precision_is_taken(rates: dict[torch.dtype, float]) -> None:
    assert prepare_machine("cpu") == Machine(CPU, "bf16", 3e11, 1e11)
    rates[torch.bfloat16] = 5e10  # a chip that lists bfloat16 and emulates it
    machine = prepare_machine("cpu", "auto")
    assert machine == Machine(CPU, "fp32", 1e11, 5e10)
    assert machine.dtype is torch.float32
    assert machine.describe().startswith("cpu, fp32, matrix products at 100 GFLOP/s measured (bf16: 50), ")


@pytest.mark.parametrize(("precision", "rate"), [("bf16", 3e11), ("fp32", 1e11)])
def test_the_precision_that_was_asked_for_is_kept(precision: str, rate: float, rates: dict[torch.dtype, float]) -> None:
    machine = prepare_machine("cpu", precision)
    assert machine == Machine(CPU, precision, rate, None)
    assert "(" not in machine.describe()


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(UserError, match="device: cuda was asked for, but PyTorch finds no CUDA device"):
        prepare_machine("cuda")
    with pytest.raises(UserError, match="device: 'tpu' is not known; use one of auto, cpu, cuda"):
        prepare_machine("tpu")
    with pytest.raises(UserError, match="precision: 'fp16' is not known; use one of auto, bf16, fp32"):
        prepare_machine("cpu", "fp16")


def test_cuda_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == CPU


FAULTS = """
import resource
import torch
from bertsmith.hardware import keep_freed_memory
def count_faults():
    for round in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(8):
            torch.empty(48 << 20, dtype=torch.uint8).fill_(1)  # past the 32 MB up to which glibc adapts by itself
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
count_faults()
keep_freed_memory()
count_faults()
"""


# by a thread of its own, which glibc gives heaps of 64 MB: memory of the sizes of an encoder's layers
THREAD_FAULTS = """
import resource, threading
import torch
from bertsmith import hardware
hardware.CORES_OF_ONE_HEAP *= {factor}
hardware.keep_freed_memory()
def take(megabytes):
    return torch.empty(megabytes << 20, dtype=torch.uint8).fill_(1)
def count_faults():
    for round in range(10):
        if round == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            hidden = take(12)
            for _ in range(6):
                wide = take(18)
                context = take(6)
                del wide
                expanded = take(25)
                following = take(12)
                del expanded
                hidden = following
                del following
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
threading.Thread(target=count_faults).start()
"""


def page_faults(program: str = FAULTS, **environment: str) -> list[int]:
    """Pages that the system mapped for memory that had been in use before: usually, and when freed memory is kept."""
    plain = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain | environment)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is meant")
def test_freed_memory_is_kept_unless_the_user_says_how() -> None:
    usual, kept = page_faults()
    if usual < 1000:
        pytest.skip("this allocator keeps freed memory by itself, or the system maps huge pages")
    assert kept < usual / 4
    usual, kept = page_faults(MALLOC_ARENA_TEST="8")
    assert kept > usual / 2


@pytest.mark.skipif(sys.platform != "linux" or (os.cpu_count() or 1) > 8, reason="glibc's heaps, of few threads")
def test_freed_memory_of_threads_is_kept_where_they_are_few() -> None:
    # whether the heaps come to lie so that glibc gives one back is chance
    many = max(page_faults(THREAD_FAULTS.format(factor=0))[0] for _ in range(5))
    (one,) = page_faults(THREAD_FAULTS.format(factor=1))
    if many < 10_000:
        pytest.skip("this allocator keeps freed memory by itself, or the system maps huge pages")
    assert one < many / 4


@pytest.mark.parametrize(
    ("features", "bits"),
    [
        ({"avx2": True, "avx512_vnni": True}, 8),
        ({"avx2": True, "avx_vnni": True}, 8),
        ({"amx_int8": True}, 8),
        ({"avx2": True, "avx512_f": True, "avx512_vnni": False}, 7),  # sums two products in 16 bits
        ({"avx2": True}, 7),
        ({"avx2": False}, None),
        ({}, None),
    ],
)
def test_bits_of_8_bit_products(features: dict[str, bool], bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert hardware.int8_weight_bits() == bits
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert hardware.int8_weight_bits() is None
