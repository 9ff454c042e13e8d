"""Runs the commands of README.md as a reader would: in order, in one folder, each must succeed.

Every fenced block marked `sh` is a test; `.ci/run` calls this file (`pytest tests/readme_commands.py`), plain `pytest`
does not. The blocks run under `bash -euo pipefail` in one temporary folder that holds, as the reader's own, `texts/` (a
few dozen .txt files cut from the demo text) and small files of tasks; the installed `bertsmith` is first on PATH,
the checkout is $CHECKOUT. A README command may be made smaller, never replaced by another; what is changed stands in
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
PARTS = ("train", "dev")
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
    """The reader's working folder: `texts/`, and files for fine-tuning."""
    from bertsmith.demo_text import demo_text_paths

    folder = tmp_path_factory.mktemp("readme")
    (folder / "texts").mkdir()
    # every seventh document: some of each book, English and Chinese
    lines = [line for path in demo_text_paths() for line in gzip.decompress(Path(path).read_bytes()).splitlines()]
    for number, line in enumerate(lines[:: len(lines) // TEXTS][:TEXTS]):
        (folder / "texts" / f"{number:02d}.txt").write_text(json.loads(line)["text"], encoding="utf-8")
    write_task_files(folder)
    return folder


def write_task_files(folder: Path) -> None:
    """The reader's own tables: reviews/ (demo's), glue/, ner/ and squad/ (made up, in the official layouts)."""
    from bertsmith.demo_reviews import demo_review_path

    for name in ("reviews", "glue/SST-2", "glue/MRPC", "ner", "squad"):
        (folder / name).mkdir(parents=True)
    lines = {part: gzip.decompress(Path(demo_review_path(part)).read_bytes()).decode().splitlines() for part in PARTS}
    for part, kept in (("train", 64), ("dev", 32)):
        rows = lines[part][: kept + 1]
        (folder / "reviews" / f"{part}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        cells = [row.split("\t") for row in rows[1:]]
        numbers = {"negative": 0, "positive": 1}
        sst = ["sentence\tlabel", *(f"{text}\t{numbers[label]}" for text, label in cells)]
        (folder / "glue" / "SST-2" / f"{part}.tsv").write_text("\n".join(sst) + "\n", encoding="utf-8")
        pairs = zip(cells, cells[1:] + cells[:1], strict=True)
        mrpc = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        mrpc += [f"{int(a[1] == b[1])}\t1\t2\t{a[0]}\t{b[0]}" for a, b in pairs]
        (folder / "glue" / "MRPC" / f"{part}.tsv").write_text("\n".join(mrpc) + "\n", encoding="utf-8")
        words = [[f"{word}\t{'B-LONG' if len(word) > 8 else 'O'}" for word in text.split()] for text, _ in cells]
        (folder / "ner" / f"{part}.conll").write_text("\n\n".join(map("\n".join, words)) + "\n", encoding="utf-8")
        questions = [
            {"id": f"{part}{number}", "question": "Which word comes first?", "is_impossible": number % 3 == 0,
             "answers": [] if number % 3 == 0 else [{"text": text.split()[0], "answer_start": 0}], "context": text}
            for number, (text, _) in enumerate(cells[:24])
        ]  # fmt: skip
        paragraphs = [{"context": question.pop("context"), "qas": [question]} for question in questions]
        document = {"version": "v2.0", "data": [{"title": "made up", "paragraphs": paragraphs}]}
        (folder / "squad" / f"{part}.json").write_text(json.dumps(document), encoding="utf-8")
    unlabelled = ["index\tsentence", *(f"{n}\t{row.split(chr(9))[0]}" for n, row in enumerate(lines["dev"][33:53]))]
    (folder / "glue" / "SST-2" / "test.tsv").write_text("\n".join(unlabelled) + "\n", encoding="utf-8")
    new = ["text", *(row.split("\t")[0] for row in lines["dev"][60:80])]
    (folder / "reviews" / "new.tsv").write_text("\n".join(new) + "\n", encoding="utf-8")


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
