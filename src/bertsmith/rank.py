"""Which of several processes that were started together this one is: torchrun's environment variables, and no torch.

A process that nobody counted is rank 0 of 1, whatever else stands in its environment.
"""

import os
import platform


def world_size() -> int:
    """How many processes work together; 1 where RANK and WORLD_SIZE do not both stand in the environment."""
    return _number("WORLD_SIZE", 1) if "RANK" in os.environ else 1


def own_rank() -> int:
    """This process's number among them, from 0."""
    return _number("RANK", 0) if world_size() > 1 else 0


def local_rank() -> int:
    """Its number among those on its machine, from 0: which GPU is its own."""
    return _number("LOCAL_RANK", 0) if world_size() > 1 else 0


def describe_rank() -> str:
    """`rank 3 of 8 on node-b`, for messages."""
    return f"rank {own_rank()} of {world_size()} on {platform.node()}"


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else default
