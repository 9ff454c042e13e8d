"""What a command is: how it reads its arguments, the one function it calls, what its `--help` says."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bertsmith.arguments import CommandParser
from bertsmith.results import print_summary

Summary = dict[str, Any]
Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Command:
    """One command: what `--help` says, how its arguments are read, what runs, and how the result is shown."""

    summary: str
    details: str
    examples: str
    add: Callable[[CommandParser], None]
    run: Callable[[argparse.Namespace, Pairs], Summary]
    show: Callable[[Summary], None] = print_summary
    usage: str | None = None
    remote_out: bool = False
    """--out may be a URL."""
    several_processes: bool = False
    """Whether the processes that torchrun starts work together in it."""
