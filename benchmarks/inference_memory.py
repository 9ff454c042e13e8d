"""Does memory stay flat? `python benchmarks/inference_memory.py [--calls 20000] [--rows 100000] [--model FOLDER]`

A loaded model embeds one text of random length (1 to 512 tokens) a call, and `bertsmith embed` a file of sentences of
random length in a process of its own. The model is a random tiny BERT unless one is named. Prints one JSON object:
resident memory in MB after each tenth of the calls (the first is warm-up), how much was added after it, and the peak of
the process that embedded the file.
"""

import argparse
import json
import os
import random
import resource
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bertsmith.inference.loaded import LoadedModel, load
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.weights import save_model
from bertsmith.text.tokenizer import BertTokenizer

POINTS = 10


def make_model(folder: Path) -> Path:
    """A random tiny BERT whose vocabulary has the letters."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    tokens += [f"##{letter}" for letter in string.ascii_lowercase]
    save_model(folder, BertForPreTraining(BertConfig.of_size("tiny", len(tokens))).initialize(0), "mlm")
    BertTokenizer(tokens).save(folder)
    return folder


def make_text(source: random.Random, most_words: int) -> str:
    """Words of one letter, a token each in the tiny model."""
    return " ".join(source.choices(string.ascii_lowercase, k=source.randint(0, most_words)))


def resident_mb() -> float:
    """What this process holds in memory now (elsewhere than on Linux: at most so far)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak_mb(resource.getrusage(resource.RUSAGE_SELF))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_mb(usage: resource.struct_rusage) -> float:
    """The most a process held, which Linux counts in KiB and macOS in bytes."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def measure_calls(model: LoadedModel, calls: int, seed: int = 0) -> dict[str, Any]:
    """Memory over `calls` calls of one text each."""
    source = random.Random(seed)
    points = []
    for call in range(1, calls + 1):
        model.embed([make_text(source, 510)])
        if call % max(1, calls // POINTS) == 0:
            points.append(round(resident_mb(), 1))
    return {"calls": calls, "resident_mb": points, "added_mb": round(points[-1] - points[0], 1)}


def measure_file(folder: Path, rows: int, work: Path, seed: int = 0) -> dict[str, Any]:
    """The peak of `bertsmith embed` on a file of `rows` sentences."""
    source = random.Random(seed)
    texts = work / "texts.txt"
    with texts.open("w", encoding="utf-8") as file:
        file.writelines(make_text(source, 40) + "\n" for _ in range(rows))
    command = [sys.executable, "-m", "bertsmith", "embed", folder, "--input", texts, "--output", work / "x.npy"]
    with (work / "summary.json").open("wb") as out:
        process = subprocess.Popen([*map(str, command), "--precision", "fp32", "--json"], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"bertsmith embed ended with exit code {process.returncode}")
    summary = json.loads((work / "summary.json").read_text(encoding="utf-8"))
    return {"rows": summary["rows"], "peak_mb": round(peak_mb(usage), 1), "seconds": round(summary["seconds"], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", type=Path, help="model folder (default: a random tiny BERT)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = args.model or make_model(Path(work) / "model")
        result: dict[str, Any] = {}
        if args.calls:
            result |= measure_calls(load(folder, precision="fp32"), args.calls)
        if args.rows:
            result["file"] = measure_file(folder, args.rows, Path(work))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
