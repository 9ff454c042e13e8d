"""Dropout masks drawn from a counter: mask k of a step is a function of (seed, k) alone.

PyTorch's CPU generator draws one Bernoulli number at a time; here a whole mask costs 16 random bits an element and one
comparison, about a tenth of the time. A mask can be drawn again from its key in the backward pass, so it is not stored.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class DropoutMasks:
    """Draws masks for one forward pass. `seed`: the step's key; `drawn` numbers the masks of the pass."""

    seed: tuple[int, ...]
    drawn: int = 0

    def next_key(self) -> int:
        """Reserve the next mask's number."""
        self.drawn += 1
        return self.drawn

    def draw(self, key: int, probability: float, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of `shape` holding 0 (with `probability`) or 1 / (1 - probability), in `like`'s type and place.

        The probability is met to 1/65536.
        """
        count = int(np.prod(shape))
        threshold = round(probability * 65536) - 32768
        if like.device.type == "cpu":
            # entropy words must be non-negative 32-bit pieces; SeedSequence hashes them all into the state
            generator = np.random.SFC64(np.random.SeedSequence([*self.seed, key]))
            raw = generator.random_raw((count + 3) // 4).view(np.int16)[:count]
            bits = torch.from_numpy(raw).view(shape)
        else:
            words = np.random.SeedSequence([*self.seed, key]).generate_state(1, np.uint64)
            source = torch.Generator(like.device).manual_seed(int(words[0]) & (2**63 - 1))
            bits = torch.empty(shape, dtype=torch.int16, device=like.device)
            bits.random_(-32768, 32768, generator=source)
        kept = torch.tensor(1 / (1 - probability), dtype=like.dtype)
        if kept.element_size() == bits.element_size():  # 0 or 1, then times the bits of the number: a sixth of the time
            return bits.ge_(threshold).mul_(kept.view(torch.int16).item()).view(like.dtype)
        return torch.ge(bits, threshold, out=torch.empty_like(bits, dtype=like.dtype)).mul_(kept.item())


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
