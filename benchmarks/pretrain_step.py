"""One pre-training step, ours beside transformers' BertForPreTraining (SDPA), on this machine, in one run.

Each contender lives in a process of its own (the allocator's settings are ours, not theirs) and takes its steps in
turn, so that all see the same machine: forward with dropout, backward, clipping at 1.0, AdamW. Prints one JSON object:
medians, ratios, and the share of the matrix-product limit measured between the rounds.

    python benchmarks/pretrain_step.py --size mini --batch 32 --length 128
    python benchmarks/pretrain_step.py --size base --batch 16 --length 128 --rounds 5
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

CONTENDERS = ("ours-bf16", "ours-fp32", "transformers-bf16", "transformers-fp32")


def make_ours(size: str, batch: int, length: int, precision: str):
    """A function that takes a step of ours and returns its seconds."""
    from bertsmith.hardware import PRECISIONS, choose_device, keep_freed_memory
    from bertsmith.training.benchmark import StepTimer

    keep_freed_memory()
    return StepTimer(size, batch, length, choose_device("cpu"), PRECISIONS[precision]).take


def make_theirs(size: str, batch: int, length: int, precision: str):
    """The same for transformers, as its documentation has people train."""
    import time

    import torch
    from transformers import BertConfig, BertForPreTraining

    from bertsmith.model.config import BertConfig as OurConfig
    from bertsmith.training.benchmark import synthetic_batch

    config = BertConfig(**OurConfig.of_size(size).to_dict(), attn_implementation="sdpa")
    model = BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    packed = synthetic_batch(batch, length, torch.device("cpu"))
    rows = {
        name: packed[ours].view(batch, length)
        for name, ours in (("input_ids", "token_ids"), ("token_type_ids", "segment_ids"))
    }
    labels = torch.full((batch * length,), -100)
    labels[packed["masked_positions"]] = packed["masked_labels"]
    rows |= {"attention_mask": torch.ones(batch, length, dtype=torch.long), "labels": labels.view(batch, length)}

    def take() -> float:
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**rows, next_sentence_label=packed["next_sentence_labels"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begun

    return take


def serve(contender: str, size: str, batch: int, length: int) -> None:
    """A contender's process: warm up, then a step for each line on stdin, its seconds on stdout."""
    who, _, precision = contender.partition("-")
    take = (make_ours if who == "ours" else make_theirs)(size, batch, length, precision)
    for _ in range(2):
        take()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(take(), flush=True)


def measure(size: str, batch: int, length: int, rounds: int) -> dict:
    """Steps of all contenders in turn, `rounds` times."""
    import torch
    import transformers

    from bertsmith.hardware import PRECISIONS, measure_matmul
    from bertsmith.model.config import BertConfig, useful_flops

    command = [sys.executable, __file__, "--size", size, "--batch", str(batch), "--length", str(length), "--contender"]
    workers = {}
    for contender in CONTENDERS:
        worker = subprocess.Popen([*command, contender], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert worker.stdout
        assert worker.stdout.readline().strip() == "ready"
        workers[contender] = worker
    seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    limits: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for _ in range(rounds):
        for precision, dtype in PRECISIONS.items():
            limits[precision].append(measure_matmul(torch.device("cpu"), dtype))
        for contender, worker in workers.items():
            assert worker.stdin
            assert worker.stdout
            worker.stdin.write("step\n")
            worker.stdin.flush()
            seconds[contender].append(float(worker.stdout.readline()))
    for worker in workers.values():
        assert worker.stdin
        worker.stdin.close()
        worker.wait()
    masked = round(0.15 * batch * length)
    flops = useful_flops(BertConfig.of_size(size), batch * length, batch * length**2, masked, batch)
    medians = {contender: statistics.median(times) for contender, times in seconds.items()}
    rates = {precision: statistics.median(values) for precision, values in limits.items()}

    def ratio(ours: str, theirs: str) -> float:
        pairs = zip(seconds[theirs], seconds[ours], strict=True)
        return statistics.median(their_time / our_time for their_time, our_time in pairs)

    return {
        "size": size,
        "batch": batch,
        "length": length,
        "rounds": rounds,
        "tokens_per_second": {contender: batch * length / time for contender, time in medians.items()},
        "gflops": {contender: flops / time / 1e9 for contender, time in medians.items()},
        "matmul_gflops": {precision: rate / 1e9 for precision, rate in rates.items()},
        "utilization_of_bf16_limit": {
            contender: flops / time / rates["bf16"] for contender, time in medians.items() if "ours" in contender
        },
        "utilization_of_own_limit": {
            contender: flops / time / rates[contender.partition("-")[2]] for contender, time in medians.items()
        },
        "ratios": {f"{ours} / {theirs}": ratio(ours, theirs) for ours in CONTENDERS[:2] for theirs in CONTENDERS[2:]},
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def cpu_name() -> str:
    """The processor as Linux names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        serve(args.contender, args.size, args.batch, args.length)
    else:
        print(json.dumps(measure(args.size, args.batch, args.length, args.rounds), indent=1))
