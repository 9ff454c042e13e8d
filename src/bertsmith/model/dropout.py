"""Dropout masks drawn from a counter: mask k of a step is a function of (seed, k) alone.

PyTorch's CPU generator draws one Bernoulli number at a time; here a whole mask costs 16 random bits an element and one
comparison, about a tenth of the time.

Two kinds draw otherwise and so drop other elements, as often: DropoutMasks on the host (or by the GPU's generator), and
HashedMasks, for compiled code, by integer arithmetic on tensors that becomes part of whatever kernel applies the mask.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_32_BITS = 0xFFFFFFFF
# the integers of a floating-point type's size
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def _seeds(entropy: tuple[int, ...], count: int) -> np.ndarray:
    """(count,) int64 from 0 up; SeedSequence hashes all of `entropy` (non-negative) into each."""
    return (np.random.SeedSequence(entropy).generate_state(count, np.uint64) >> np.uint64(1)).astype(np.int64)


@dataclass
class DropoutMasks:
    """Draws masks for one forward pass. `seed`: the step's key; `drawn` numbers the masks of the pass."""

    seed: tuple[int, ...]
    drawn: int = 0

    def next_key(self) -> int:
        """Reserve the next mask's number."""
        self.drawn += 1
        return self.drawn

    def host_seed(self, key: int) -> Tensor:
        """int64 scalar on the host, from which a kernel that has random numbers of its own draws mask `key`."""
        return torch.tensor(int(_seeds((*self.seed, key), 1)[0]))

    def draw(self, key: int, probability: float, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of `shape` holding 0 (with `probability`) or 1 / (1 - probability), in `like`'s type and place.

        The probability is met to 1/65536.
        """
        bits, threshold = self._draw_bits(key, probability, shape, like.device)
        kept = torch.tensor(1 / (1 - probability), dtype=like.dtype)
        if kept.element_size() == bits.element_size():  # 0 or 1, then times the bits of the number: a sixth of the time
            return bits.ge_(threshold).mul_(kept.view(torch.int16).item()).view(like.dtype)
        return torch.ge(bits, threshold, out=torch.empty_like(bits, dtype=like.dtype)).mul_(kept.item())

    def turn_signs(self, key: int, probability: float, values: Tensor) -> None:
        """Turn the sign of all `values` (≥ 0) but those that dropout takes away, in place."""
        bits, threshold = self._draw_bits(key, probability, values.shape, values.device)
        kind = BITS[values.dtype]
        kept = bits.ge_(threshold) if kind == bits.dtype else torch.ge(bits, threshold).to(kind)
        values.view(kind).bitwise_xor_(kept.mul_(torch.iinfo(kind).min))

    def _draw_bits(
        self, key: int, probability: float, shape: torch.Size | tuple[int, ...], device: torch.device
    ) -> tuple[Tensor, int]:
        """Random int16, and the least of them that stands for what is kept."""
        if device.type == "cpu":
            count = int(np.prod(shape))
            # entropy words must be non-negative 32-bit pieces; SeedSequence hashes them all into the state
            generator = np.random.SFC64(np.random.SeedSequence([*self.seed, key]))
            raw = generator.random_raw((count + 3) // 4).view(np.int16)[:count]
            bits = torch.from_numpy(raw).view(shape)
        else:
            source = torch.Generator(device).manual_seed(int(self.host_seed(key)))
            bits = torch.empty(shape, dtype=torch.int16, device=device)
            bits.random_(-32768, 32768, generator=source)
        return bits, round(probability * 65536) - 32768


class HashedMasks(DropoutMasks):
    """Draws masks by a hash of (seed of the mask, number of the element): the same on every device, compiled or not.

    Not slower than reading the mask from memory where a compiler fuses it, and many times slower where none does.
    """

    def __init__(self, on_host: Tensor, on_device: Tensor) -> None:
        """`on_host` (K,) int64: the seeds of the pass's masks; `on_device`: the same."""
        super().__init__(())
        self.on_host, self.on_device = on_host, on_device

    @classmethod
    def of(cls, seed: tuple[int, ...], count: int, device: torch.device) -> "HashedMasks":
        """`count` masks of the step's key `seed`. On a GPU the seeds follow without the host waiting for them."""
        seeds = torch.from_numpy(_seeds(seed, count))
        if device.type == "cuda":
            return cls(seeds, seeds.pin_memory().to(device, non_blocking=True))
        return cls(seeds, seeds)

    def part(self, count: int) -> "HashedMasks":
        """The next `count` masks as an object of their own, which counts from 0 whatever came before."""
        taken = slice(self.drawn, self.drawn + count)
        self.drawn += count
        return HashedMasks(self.on_host[taken], self.on_device[taken])

    def host_seed(self, key: int) -> Tensor:
        """See DropoutMasks."""
        return self.on_host[key - 1]

    def draw(self, key: int, probability: float, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
        """See DropoutMasks. The probability is met to 2^-32; up to 2^32 elements."""
        seed = self.on_device[key - 1]
        low, high = seed & _32_BITS, seed >> 32
        # 32-bit words in 64-bit integers: with factors below 2^31 no product overflows, whose result C++ leaves open.
        # Shifts and factors as in the integer hashes of C. Wellons' hash-prospector, the seed's halves before and amid.
        word = (torch.arange(math.prod(shape), device=like.device) + low) & _32_BITS
        word = ((word ^ (word >> 16)) * 0x7FEB352D) & _32_BITS
        word = (((word ^ (word >> 15)) ^ high) * 0x45D9F3B) & _32_BITS
        word = ((word ^ (word >> 16)) * 0x45D9F3B) & _32_BITS
        word = word ^ (word >> 16)
        kept = word >= round(probability * 2**32)
        return (kept.to(like.dtype) * (1 / (1 - probability))).view(shape)

    def turn_signs(self, key: int, probability: float, values: Tensor) -> None:
        """See DropoutMasks."""
        values.copy_(torch.where(self.draw(key, probability, values.shape, values) > 0, -values, values))


def drop(hidden: Tensor, probability: float, masks: DropoutMasks | None) -> Tensor:
    """`hidden` with dropout; unchanged when `masks` is None (evaluation)."""
    if masks is None or probability == 0:
        return hidden
    return hidden * masks.draw(masks.next_key(), probability, hidden.shape, hidden)


def drop_and_add(residual: Tensor, hidden: Tensor, probability: float, masks: DropoutMasks | None) -> Tensor:
    """`residual + dropout(hidden)` in one pass over memory."""
    if masks is None or probability == 0:
        return residual + hidden
    return torch.addcmul(residual, hidden, masks.draw(masks.next_key(), probability, hidden.shape, hidden))
