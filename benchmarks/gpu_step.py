"""The GPU path: checked against the CPU on small inputs, then measured beside transformers at its best.

Figures on a GPU have not been taken yet: none was at hand. What this prints there is what benchmarks/LOG.md predicts.

The step is the pre-training loop's: batches from a corpus (real lengths; the shipped demo text by default), copied
ahead, compiled encoder, variable-length flash attention, dropout, clipping, fused AdamW, one wait a step. transformers
gets the same examples, padded: bf16 autocast, torch.compile of the whole model, SDPA, fused AdamW; where
lengths differ most also grouped by length, and the better one counts. Tokens are real ones, padding is not counted; MFU
is useful arithmetic (`useful_flops`) over the matrix-product rate measured just before. Medians over the steps.

    benchmarks/gpu.sh --out results              at most 8 minutes on one GPU
    benchmarks/gpu.sh --out results --dry-run    the same code at CPU size; traced, but no code generated
    benchmarks/gpu.sh --out results --corpus DIR another prepared corpus
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_parity

# all of it, with room for what a GPU machine needs to start; then each measurement's share
SECONDS_IN_ALL = 450
LIMITS = {"parity": 90, "ours": 75, "theirs": 130, "theirs-grouped": 130}
# the batches that steps take in turn
BATCHES = 4
GROUPS = 4


@dataclass(frozen=True)
class Scale:
    """The sizes of everything: a GPU's, or the dry run's."""

    device: str
    precision: str
    backend: str
    tokens: int
    """Of a step, padding of transformers' batches among them."""
    steps: int
    vocab_size: int
    """Of the models; the corpus's may be smaller."""
    cases: tuple[tuple[str, str, int], ...]
    """(name, model, length)"""
    corpus_vocab: int


GPU = Scale(
    "cuda", "bf16", "inductor", 65536, 20, 30522,
    (("base at 128", "base", 128), ("large at 128", "large", 128), ("base at 512", "base", 512)), 8000,
)  # fmt: skip
DRY_RUN = Scale(
    "cpu", "fp32", "aot_eager", 256, 2, 1000,
    (("base at 128", "tiny", 16), ("large at 128", "tiny", 16), ("base at 512", "tiny", 32)), 1000,
)  # fmt: skip


def prepare_demo(folder: Path, vocab_size: int) -> Path:
    """A corpus of the English demo text."""
    from bertsmith.corpus.prepare import prepare_corpus
    from bertsmith.demo_text import demo_text_paths
    from bertsmith.text.vocabulary import build_vocabulary

    texts = [str(path) for path in demo_text_paths() if "english" in Path(path).name]
    build_vocabulary(texts, folder / "vocab", size=vocab_size, workers=1)
    prepare_corpus(texts, folder / "vocab", folder / "corpus", workers=1)
    return folder / "corpus"


def open_stream(corpus: Path, length: int, rows: int) -> Any:
    """Pairs with next-sentence labels, as the paper's base is trained."""
    from bertsmith.corpus.batches import BatchStream
    from bertsmith.corpus.masking import TokenizerInfo
    from bertsmith.corpus.shards import open_corpus
    from bertsmith.text.tokenizer import load_tokenizer

    opened = open_corpus(str(corpus))
    info = TokenizerInfo.of(load_tokenizer(opened.tokenizer))
    return BatchStream(opened.split("train"), info, max_length=length, batch_size=rows)


def batch_flops(config: Any, batch: Any) -> float:
    """Useful arithmetic of a step on `batch`."""
    from bertsmith.model.config import useful_flops

    squares = int((np.diff(batch.sequence_starts) ** 2).sum())
    return useful_flops(config, len(batch.token_ids), squares, len(batch.masked_labels), len(batch))


def measure_ours(scale: Scale, corpus: Path, size: str, length: int) -> dict[str, Any]:
    """The loop's step, compiled."""
    from bertsmith.corpus.batches import split_batch
    from bertsmith.hardware import prepare_machine
    from bertsmith.model.bert import BertForPreTraining
    from bertsmith.model.compiled import compile_encoder, hashed_masks
    from bertsmith.model.config import BertConfig
    from bertsmith.training.device_batches import BatchShape, DeviceFeed
    from bertsmith.training.optimizer import BertOptimizer, OptimizerSettings, clip_gradients

    machine = prepare_machine(scale.device, scale.precision)
    config, rows = BertConfig.of_size(size, scale.vocab_size), scale.tokens // length
    model = BertForPreTraining(config).initialize(0).to(machine.device)
    model.bert.compute_dtype = machine.dtype
    compile_encoder(model.bert, scale.backend)
    optimizer = BertOptimizer(model.named_parameters(), OptimizerSettings(), arithmetic=machine.dtype)
    stream = open_stream(corpus, length, rows)
    batches = list(islice(stream.batches(), BATCHES))
    shape = BatchShape.of(stream, rows)
    feed = DeviceFeed(cycle(batches), machine.device, rows, shape)

    def step(number: int) -> tuple[Any, float]:
        begun = time.perf_counter()
        batch = feed.next_batch()
        assert batch is not None
        loss = None
        for tensors in feed.on_device(split_batch(batch, rows)):
            masks = hashed_masks(config, (0, number, 0), machine.device)
            scales = {"mlm_scale": 1 / len(batch.masked_labels), "nsp_scale": 1 / len(batch)}
            loss = model(**tensors, **scales, masks=masks)
            loss.total.backward()
        assert loss is not None
        norm = clip_gradients(model.parameters(), 1.0)
        torch.stack([norm, loss.mlm]).tolist()
        optimizer.step(1.0)
        optimizer.zero_grad()
        return batch, time.perf_counter() - begun

    found = take_steps(scale, step, config, machine.matmul_flops)
    tokens = [len(batch.token_ids) for batch in batches]
    lengths = np.concatenate([np.diff(batch.sequence_starts) for batch in batches])
    return found | {
        "shape": asdict(shape),
        "filled_up_share": 1 - statistics.mean(tokens) / shape.tokens,
        "batches_past_the_shape": sum(shape.fill(batch) is None for batch in batches),
        "mean_length": float(lengths.mean()),
        "full_rows": float((lengths == length).mean()),
    }


def measure_theirs(scale: Scale, corpus: Path, size: str, length: int, grouped: bool = False) -> dict[str, Any]:
    """transformers' BertForPreTraining on the same examples, padded to `length`, or in groups of like lengths."""
    from transformers import BertConfig, BertForPreTraining

    from bertsmith.hardware import PRECISIONS, choose_device, measure_matmul
    from bertsmith.model.config import BertConfig as OurConfig

    device, config = choose_device(scale.device), OurConfig.of_size(size, scale.vocab_size)
    limit = measure_matmul(device, PRECISIONS[scale.precision])
    torch.set_float32_matmul_precision("high")
    model = BertForPreTraining(BertConfig(**config.to_dict(), attn_implementation="sdpa")).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    compiled = torch.compile(model, backend=scale.backend, dynamic=None if grouped else False)
    rows = scale.tokens // length
    batches = list(islice(open_stream(corpus, length, rows).batches(), BATCHES))
    padded = [pad_batch(batch, length, GROUPS if grouped else 1, device) for batch in batches]
    pieces = 1

    def take(batch: Any, groups: list[dict[str, Any]]) -> None:
        total = torch.zeros((), device=device)
        for group in groups:
            for first in range(0, len(group["input_ids"]), max(1, len(group["input_ids"]) // pieces)):
                part = {name: tensor[first : first + max(1, len(tensor) // pieces)] for name, tensor in group.items()}
                with torch.autocast(device.type, torch.bfloat16, enabled=scale.precision == "bf16"):
                    loss = compiled(**part).loss * (len(part["input_ids"]) / len(batch))
                loss.backward()
                total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.stack([norm, total]).tolist()
        optimizer.step()
        optimizer.zero_grad()

    def step(number: int) -> tuple[Any, float]:
        nonlocal pieces
        which = number % len(batches)
        while True:
            begun = time.perf_counter()
            try:
                take(batches[which], padded[which])
                return batches[which], time.perf_counter() - begun
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
                torch.cuda.empty_cache()
                pieces *= 2

    return take_steps(scale, step, config, limit) | {"pieces": pieces}


def pad_batch(batch: Any, length: int, groups: int, device: torch.device) -> list[dict[str, Any]]:
    """A packed batch as padded rows for transformers; in `groups` of equal size by length, each to its own longest."""
    labels = np.full(len(batch.token_ids), -100)
    labels[batch.masked_positions] = batch.masked_labels
    lengths = np.diff(batch.sequence_starts)
    padded = []
    for numbers in np.array_split(np.argsort(lengths, kind="stable"), groups):
        # a multiple of 32: few shapes, which kernels like
        width = length if groups == 1 else min(length, -(-int(lengths[numbers].max()) // 32) * 32)
        columns = np.arange(width)
        real = columns < lengths[numbers, None]  # (rows, width)
        places = np.where(real, batch.sequence_starts[numbers][:, None] + columns, 0)
        arrays = {
            "input_ids": np.where(real, batch.token_ids[places], 0),
            "token_type_ids": np.where(real, batch.segment_ids[places], 0),
            "attention_mask": real.astype(np.int64),
            "labels": np.where(real, labels[places], -100),
            "next_sentence_label": batch.next_sentence_labels[numbers],
        }
        padded.append({name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
    return padded


def take_steps(scale: Scale, step: Any, config: Any, limit: float) -> dict[str, Any]:
    """Every batch once to warm up, and the median of the steps after."""
    begun = time.perf_counter()
    for number in range(BATCHES):
        step(number)
    warm = time.perf_counter() - begun
    taken = [step(BATCHES + number) for number in range(scale.steps)]
    seconds = statistics.median(seconds for _, seconds in taken)
    rate = statistics.median(len(batch.token_ids) / seconds for batch, seconds in taken)
    flops = statistics.median(batch_flops(config, batch) / seconds for batch, seconds in taken)
    found = {
        "tokens_per_second": rate,
        "seconds_per_step": seconds,
        "tflops": flops / 1e12,
        "matmul_tflops": limit / 1e12,
        "utilization": flops / limit,
        "warm_up_seconds": warm,
    }
    if scale.device == "cuda":
        found["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


JOBS = {
    "parity": lambda scale, corpus, size, length: gpu_parity.run_checks(scale.device, scale.backend),
    "ours": measure_ours,
    "theirs": measure_theirs,
    "theirs-grouped": lambda *of: measure_theirs(*of, grouped=True),
}


def run_job(job: str, scale: Scale, corpus: Path, size: str, length: int, seconds: float) -> dict[str, Any]:
    """A job in a process of its own, which ends after `seconds`; {"error": …} where it did not come to its end."""
    words = [job, json.dumps(asdict(scale)), str(corpus), size, str(length)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--job", *words], capture_output=True, text=True, timeout=max(seconds, 0.1)
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished in {seconds:.0f} s"}
    if done.returncode:
        return {"error": " ".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_all(scale: Scale, corpus: Path, own_processes: bool = True) -> dict[str, Any]:
    """Checks, then the measurements, as far as the time goes."""
    begun = time.monotonic()

    def run(job: str, size: str = "tiny", length: int = 16) -> dict[str, Any]:
        print(f"{job} {size} {length} …", file=sys.stderr, flush=True)
        if not own_processes:
            torch._dynamo.reset()
            return JOBS[job](scale, corpus, size, length)
        left = SECONDS_IN_ALL - (time.monotonic() - begun)
        return run_job(job, scale, corpus, size, length, min(LIMITS[job], left))

    results: dict[str, Any] = {"device": scale.device, "precision": scale.precision, "torch": torch.__version__}
    if scale.device == "cuda":
        results["gpu"] = torch.cuda.get_device_name()
    results["parity"] = run("parity")
    results["cases"] = {
        name: {
            "model": size,
            "length": length,
            "ours": run("ours", size, length),
            "theirs": run("theirs", size, length),
        }
        for name, size, length in scale.cases
    }
    # last, for it is the one to be left out: only where padding is worth avoiding
    name, size, length = max(scale.cases, key=lambda case: case[2])
    results["cases"][name]["theirs-grouped"] = run("theirs-grouped", size, length)
    for case in results["cases"].values():
        theirs = [case[name].get("tokens_per_second") for name in ("theirs", "theirs-grouped") if name in case]
        best, ours = max([rate for rate in theirs if rate], default=None), case["ours"].get("tokens_per_second")
        case["ratio"] = ours / best if ours and best else None
    results["seconds"] = time.monotonic() - begun
    return results


def as_markdown(results: dict[str, Any]) -> str:
    """The checks and the measurements as two tables."""
    lines = ["| check | found | limit | |", "|---|---|---|---|"]
    for check in results["parity"].get("checks", []):
        lines.append(
            f"| {check['name']} | {check['found']:.3g} | {check['limit']:.3g} | {'ok' if check['ok'] else 'NO'} |"
        )
    if "error" in results["parity"]:
        lines.append(f"| {results['parity']['error']} | | | NO |")
    lines += ["", "| | tokens/s | MFU | transformers | its MFU | ratio |", "|---|---|---|---|---|---|"]
    for name, case in results["cases"].items():
        theirs = max(
            (case[n] for n in ("theirs", "theirs-grouped") if n in case), key=lambda r: r.get("utilization", 0)
        )
        cells = [
            f"{run['tokens_per_second']:,.0f} | {run['utilization']:.1%}"
            if "error" not in run
            else f"{run['error']} | "
            for run in (case["ours"], theirs)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if case['ratio'] is None else round(case['ratio'], 2)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md")
    parser.add_argument("--corpus", type=Path, help="a prepared corpus (default: the English demo text)")
    parser.add_argument("--dry-run", action="store_true", help="the same code at CPU size")
    parser.add_argument("--job", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job, scale, corpus, size, length = args.job
        print(json.dumps(JOBS[job](Scale(**json.loads(scale)), Path(corpus), size, int(length))))
        return 0
    if args.out is None:
        parser.error("--out is needed")
    scale = DRY_RUN if args.dry_run else GPU
    if scale.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; --dry-run runs the same code at CPU size")
    with tempfile.TemporaryDirectory() as folder:
        corpus = args.corpus or prepare_demo(Path(folder), scale.corpus_vocab)
        results = run_all(scale, corpus, own_processes=not args.dry_run)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (args.out / "gpu.md").write_text(as_markdown(results) + "\n", encoding="utf-8")
    print(as_markdown(results))
    print(json.dumps(results))
    return 0 if results["parity"].get("ok") else 1


if __name__ == "__main__":
    sys.exit(main())
