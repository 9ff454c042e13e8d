"""Running commands in tests: in this process (quick), or in one of their own (locale, signals, pipes)."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.cli import main

PROSE = "the a cat dog house tree river café 中 ♡ runs sleeps sees likes big small old young and but because night day"
WORDS = PROSE.split()
# a run of seconds
TINY = ("--model", "tiny", "--batch-size", "4", "--max-length", "32", "--precision", "fp32", "--log.examples", "0")


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1, f"more than one line on stdout: {self.out}"
        value = json.loads(self.out, parse_constant=refuse_constant)
        assert isinstance(value, dict)
        return value

    @property
    def mistake(self) -> str:
        """What the user is told of a mistake: exit code 2, nothing on stdout, no traceback."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert not self.out
        assert "Traceback" not in self.err
        return self.err.rpartition("bertsmith: ")[2].rstrip()


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def bertsmith(*arguments: object) -> Outcome:
    """`bertsmith ARGUMENTS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([os.fspath(argument) if isinstance(argument, Path) else str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def start_process(*arguments: object, **options: Any) -> "subprocess.Popen[bytes]":
    """`python -m bertsmith ARGUMENTS` as a process of its own, in a process group of its own."""
    command = [*options.pop("before", ()), sys.executable, "-m", "bertsmith", *map(os.fspath, map(str, arguments))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        start_new_session=True,
        env=environment,
        **options,
    )


def bertsmith_process(*arguments: object, **options: Any) -> Outcome:
    """`python -m bertsmith ARGUMENTS`, to its end (`timeout` seconds at most, 120 if not given)."""
    most = options.pop("timeout", 120)
    process = start_process(*arguments, **options)
    out, err = process.communicate(timeout=most)
    return Outcome(process.returncode, (out or b"").decode("utf-8"), (err or b"").decode("utf-8"))


def write_texts(folder: Path, files: int = 12, lines: int = 30) -> Path:
    """Made-up prose, the same each time: a document a file, one sentence a line."""
    folder.mkdir(parents=True)
    number = 1
    for file in range(files):
        sentences = []
        for _ in range(lines):
            words = []
            for _ in range(4 + number % 7):
                number = number * 1103515245 % 2147483647
                words.append(WORDS[number % len(WORDS)])
            sentences.append(" ".join(words).capitalize() + ".")
        (folder / f"é {file:02d}.txt").write_text("\n".join(sentences), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Made:
    """What the commands made of a little text, one after the other, and the summary each printed with --json."""

    folder: Path
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def texts(self) -> Path:
        return self.folder / "texts é"

    @property
    def vocab(self) -> Path:
        return self.folder / "vocab"

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def model(self) -> Path:
        return self.run / "model"
