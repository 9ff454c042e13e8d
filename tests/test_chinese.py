"""Chinese works end to end: a tokenizer and a model of Chinese text, then classification, entities and answers."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "chinese.py"


@pytest.mark.slow
@pytest.mark.shared_data
def test_from_raw_text_to_three_tasks(shared_data: Path, tmp_path: Path) -> None:
    sizes = (
        "--size",
        "3000",
        "--model",
        "tiny",
        "--corpora",
        "zh_wiki-00",
        "--pretrain",
        "--steps 3",
        "--paragraphs",
        "30",
    )
    settings = "--train-rows 48 --epochs 1 --max-length 256"
    finetune = ("--finetune", f"{settings} --squad.stride 120", "--finetune-ner", settings)
    command = [sys.executable, BENCHMARK, shared_data, "--out", tmp_path, *sizes, *finetune]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in done.stdout.splitlines()[2:]}
    assert list(rows) == ["ChnSentiCorp", "Weibo NER", "CMRC 2018"]
    assert all("48, " in row for row in rows.values())
