"""Runs the commands of README.md as a reader would: in order, in one folder, each must succeed.

Every fenced block marked `sh` is a test; `.ci/run` calls this file (`pytest tests/readme_commands.py`), plain `pytest`
does not. The blocks run under `bash -euo pipefail` in one temporary folder that holds, as the reader's own text, the
folder `texts/` (a few dozen .txt files cut from the demo text), with the installed `bertsmith` first on PATH and the
checkout's path in $CHECKOUT. A README command may be made smaller, never replaced by another; what is changed stands in
HTML comments on the lines right before the block, invisible to the reader and plain to whoever edits the README:

    <!-- ci: --minutes 30 => --steps 20 -->    the left side must occur in the block; the right side is run instead
    <!-- ci: skip: needs four GPUs -->         the block is not run, and the reason is in the report

Several comments may stand before a block. A left side that no longer occurs is an error, so none can go stale.
"""

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
TEXTS = 40  # documents of the demo text in texts/: about 250 kB
TIME_LIMIT = 600  # seconds a block


@dataclass(frozen=True)
class Block:
    """One fenced `sh` block: the line it starts at, its commands at toy size, why it is skipped (or None)."""

    line: int
    commands: str
    skip: str | None = None


def read_blocks(markdown: str) -> list[Block]:
    """Every `sh` block of a Markdown text, its `ci:` comments applied. Raises ValueError for a comment gone stale."""
    blocks: list[Block] = []
    comments: list[str] = []
    fence: tuple[int, str, list[str]] | None = None
    for number, line in enumerate(markdown.splitlines(), start=1):
        if fence is not None:
            start, language, lines = fence
            if line.strip() != "```":
                lines.append(line)
                continue
            if language == "sh":
                blocks.append(make_block(start, "\n".join(lines), comments))
            elif comments:
                raise ValueError(f"line {start}: a ci comment stands before a block that is not sh")
            comments, fence = [], None
        elif line.startswith("```"):
            fence = (number, line.removeprefix("```").strip(), [])
        elif comment := re.fullmatch(r"<!-- ci: (.+) -->", line.strip()):
            comments.append(comment[1])
        elif comments:
            raise ValueError(f"line {number}: a ci comment must stand right before a fenced block")
    if fence is not None or comments:
        raise ValueError("a fenced block is not closed, or a ci comment stands at the end of the file")
    return blocks


def make_block(line: int, commands: str, comments: list[str]) -> Block:
    """Apply the comments to the commands, in order."""
    skip = None
    for comment in comments:
        if comment.startswith("skip: "):
            skip = comment.removeprefix("skip: ")
            continue
        old, arrow, new = (part.strip() for part in comment.partition("=>"))
        if not arrow or not old or not new:
            raise ValueError(f"line {line}: {comment!r} is neither 'OLD => NEW' nor 'skip: REASON'")
        if old not in commands:
            raise ValueError(f"line {line}: {old!r} does not occur in the block")
        commands = commands.replace(old, new)
    return Block(line, commands, skip)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's working folder: `texts/` and nothing else."""
    from bertsmith.demo_text import demo_text_paths

    folder = tmp_path_factory.mktemp("readme")
    (folder / "texts").mkdir()
    # every seventh document: some of each book, English and Chinese
    lines = [line for path in demo_text_paths() for line in gzip.decompress(Path(path).read_bytes()).splitlines()]
    for number, line in enumerate(lines[:: len(lines) // TEXTS][:TEXTS]):
        (folder / "texts" / f"{number:02d}.txt").write_text(json.loads(line)["text"], encoding="utf-8")
    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a block; a README without commands is an error, not zero tests."""
    if "block" in metafunc.fixturenames:
        blocks = read_blocks((CHECKOUT / "README.md").read_text(encoding="utf-8"))
        if not blocks:
            raise ValueError("README.md holds no sh block")
        metafunc.parametrize("block", blocks, ids=[f"line-{block.line}" for block in blocks])


@pytest.mark.timeout(TIME_LIMIT + 60)
def test_readme_command(block: Block, folder: Path) -> None:
    if block.skip is not None:
        pytest.skip(block.skip)
    print(block.commands)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CHECKOUT": str(CHECKOUT),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.commands],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, f"the block at line {block.line} of README.md failed"
