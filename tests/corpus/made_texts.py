"""Made-up texts for preparation, a tokenizer that knows their words, and preparation in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer

WORDS = ["a", "tree", "grows", "slowly", "near", "the", "old", "river", "and", "birds", "sing", "中", "é"]
RECORDS = ".*/unfinished/*-*.json"
"""Where an unfinished corpus, beside its place, keeps what it knows of each finished shard."""
LETTERS = [c for letter in "abcdefghijklmnopqrstuvwxyz0123456789" for c in (letter, "##" + letter)]


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer that knows WORDS, and spells all others."""
    BertTokenizer([*SPECIAL_TOKENS, ".", "!", *LETTERS, *(w for w in WORDS if len(w) > 1 or not w.isascii())]).save(
        folder
    )
    return folder


def make_documents(count: int, seed: int = 0, sentences: int = 6) -> list[str]:
    """Documents of a few lines; no two are equal."""
    generator = np.random.default_rng(seed)
    texts = []
    for number in range(count):
        lines = [
            " ".join(generator.choice(WORDS, generator.integers(2, 9))).capitalize() + "."
            for _ in range(generator.integers(1, sentences))
        ]
        texts.append("\n".join([*lines, f"Number {number}."]))
    return texts


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def run_prepare(arguments: dict[str, Any], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """prepare_corpus in a process of its own, from `python -c`; prints the summary."""
    script = (
        "import json, sys\n"
        "from bertsmith.corpus.prepare import prepare_corpus\n"
        "from bertsmith.errors import UserError\n"
        "try:\n"
        f"    print(json.dumps(prepare_corpus(**{arguments!r})))\n"
        "except UserError as error:\n"
        "    sys.exit(str(error))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | (environment or {}),
        start_new_session=True,
    )


def write_long_corpus(path: Path, megabytes: int) -> str:
    """Much text with little work: numbered copies of one text."""
    text = json.dumps("\n".join(make_documents(30, sentences=12)))[1:-1]
    with path.open("w", encoding="ascii") as file:
        for number in range(megabytes * 1_000_000 // len(text)):
            file.write(f'{{"text": "Number {number}. {text}"}}\n')
    return str(path)
