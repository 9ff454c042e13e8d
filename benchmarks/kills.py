"""Kills a pre-training run at random moments, resumes it each time, and compares it with the run that was left alone.

    python benchmarks/kills.py CORPUS [--kills 20]

SIGKILL comes at a random moment of the start-up, of the steps, or (every second one) of a save. Once the newest
checkpoint is truncated, and once the disk runs full (a small tmpfs, where mounting is allowed). Every run must end with
the same bits: weights, optimizer state, log. Prints a JSON object.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

TIMES = ("seconds", "tokens_per_second", "utilization")


@dataclass
class Job:
    """A pretrain command, but for its run folder."""

    corpus: Path
    model: str
    steps: int
    every: int
    flags: list[str]
    recipe: str = "laptop"

    def command(self, out: Path) -> list[str]:
        """As typed."""
        return [
            sys.executable, "-m", "bertsmith", "pretrain", "--data", str(self.corpus), "--out", str(out), "--json",
            "--recipe", self.recipe,
            "--model", self.model, "--steps", str(self.steps), "--checkpoint.every", str(self.every),
            "--checkpoint.minutes", "0", "--eval.every", "0", "--log.examples", "0", "--log.every", "1", *self.flags,
        ]  # fmt: skip

    def finish(self, out: Path) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(self.command(out), capture_output=True, text=True, encoding="utf-8", check=False)


@dataclass
class Tally:
    """What the kills did."""

    kills: int = 0
    during_save: int = 0
    before_first_checkpoint: int = 0
    resumes: int = 0
    runs: int = 0
    resume_seconds: list[float] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def half_written(out: Path) -> set[str]:
    """Checkpoints and model folders that stand there under their passing names."""
    return {path.name for path in [*(out / "checkpoints").glob(".step-*.partial-*"), *out.glob(".model.partial-*")]}


def checkpoint_folders(out: Path) -> list[Path]:
    """Oldest first."""
    return sorted((out / "checkpoints").glob("step-*"))


@dataclass
class Moment:
    """When a part is killed: in its start-up, after some steps, or in a save."""

    kind: str
    seconds: float
    """In the start-up: after it began; else after the step, or into the save."""
    steps: int

    @classmethod
    def drawn(cls, draw: random.Random, number: int, every: int, start_up: float) -> "Moment":
        """Every second one in a save; of the others, one in three in the start-up."""
        kind = "save" if number % 2 else draw.choice(("start-up", "step", "step"))
        return cls(kind, draw.uniform(0, start_up if kind == "start-up" else 0.3), draw.randint(1, 2 * every))

    def has_come(self, out: Path, elapsed: float, begun_at: int, leftovers: set[str]) -> bool:
        """Whether it is now, `elapsed` seconds after the part began at step `begun_at`; waits the last moments.

        `leftovers`: what the kill before left half-written.
        """
        if self.kind == "start-up":
            return elapsed >= self.seconds
        if self.kind == "step":
            if last_step(out) < begun_at + self.steps:
                return False
            time.sleep(self.seconds)
            return True
        if not half_written(out) - leftovers:
            return False
        time.sleep(self.seconds)
        self.seconds /= 2  # if that was too late, in the next save
        return bool(half_written(out) - leftovers)


def last_step(out: Path) -> int:
    """The last one in the log."""
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def kill_once(job: Job, out: Path, tally: Tally, moment: Moment) -> bool:
    """Start or resume the run and kill it at `moment`; True when the run was over before."""
    found = checkpoint_folders(out)
    begun_at = int(found[-1].name.removeprefix("step-")) if found else 0
    leftovers = half_written(out)
    with (out.parent / "stderr.txt").open("w+", encoding="utf-8") as said:
        process = subprocess.Popen(job.command(out), stdout=subprocess.DEVNULL, stderr=said)
        begun = time.monotonic()
        while process.poll() is None and not moment.has_come(out, time.monotonic() - begun, begun_at, leftovers):
            time.sleep(0.001)
        finished = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        said.seek(0)
        text = said.read()
    took_up(text, bool(found), tally)
    if finished:
        if process.returncode != 0:
            tally.faults.append(text.splitlines()[-1] if text else f"exit {process.returncode}")
        return True
    tally.kills += 1
    tally.during_save += bool(half_written(out) - leftovers)
    tally.before_first_checkpoint += not checkpoint_folders(out)
    return False


def took_up(text: str, had_checkpoint: bool, tally: Tally) -> None:
    """Count a part that resumed, by what it said."""
    if "Traceback" in text:
        tally.faults.append(text[-500:])
    if had_checkpoint and "resuming from" in text:
        tally.resumes += 1
    tally.resume_seconds += [float(found) for found in re.findall(r"training goes on ([\d.]+) s after", text)]


def compare(whole: Path, out: Path, tally: Tally) -> None:
    """Note every part of the finished run that is not the unbroken run's, bit by bit (the log but for times)."""
    tally.runs += 1
    checkpoint = f"checkpoints/{checkpoint_folders(whole)[-1].name}"
    for name in ("model/model", f"{checkpoint}/model", f"{checkpoint}/optimizer"):
        if not same_tensors(out / f"{name}.safetensors", whole / f"{name}.safetensors"):
            tally.unequal.append(f"{out.name}/{name}")
    if log_lines(out) != log_lines(whole):
        tally.unequal.append(f"{out.name}/metrics.jsonl")
    if half_written(out):
        tally.faults.append(f"{out.name}: a half-written folder was left behind")


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors, all bits (their headers list metadata in any order)."""
    if not one.is_file():
        return False
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(
        tensor.shape == second[name].shape and tensor.tobytes() == second[name].tobytes()
        for name, tensor in first.items()
    )


def log_lines(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def kill_often(job: Job, whole: Path, kills: int, seed: int, start_up: float) -> Tally:
    """Runs killed `kills` times in all, each brought to its end and compared with `whole`. `start_up`: its seconds."""
    tally, draw = Tally(), random.Random(seed)
    while tally.kills < kills:
        out = whole.with_name(f"killed-{tally.runs}")
        over = False
        while not over and tally.kills < kills:
            over = kill_once(job, out, tally, Moment.drawn(draw, tally.kills, job.every, start_up))
        if not over:
            done = job.finish(out)
            took_up(done.stderr, True, tally)
            if done.returncode:
                tally.faults.append(done.stderr[-500:])
        compare(whole, out, tally)
        shutil.rmtree(out)
    return tally


def truncate_newest(job: Job, whole: Path, tally: Tally) -> dict[str, Any]:
    """Stop a run, cut its newest checkpoint short, resume: the one before is used and the broken one named."""
    out = whole.with_name("truncated")
    process = subprocess.Popen(job.command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(checkpoint_folders(out)) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    stopped_with = process.wait()
    broken = checkpoint_folders(out)[-1]
    os.truncate(broken / "model.safetensors", (broken / "model.safetensors").stat().st_size // 2)
    done = job.finish(out)
    took_up(done.stderr, True, tally)
    compare(whole, out, tally)
    shutil.rmtree(out)
    resumed = re.search(r"resuming from \S*step-0*(\d+)", done.stderr)
    return {
        "stopped_with": stopped_with,
        "truncated": broken.name,
        "named": f"{broken}: broken checkpoint" in done.stderr,
        "resumed_from_step": int(resumed[1]) if resumed else None,
        "exit": done.returncode,
    }


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """A tmpfs of `size` bytes at `folder`; False where mounting is not allowed."""
    folder.mkdir()
    mounted = (
        shutil.which("mount") is not None
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
        ).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)


def fill_disk(job: Job, whole: Path, tally: Tally) -> dict[str, Any] | str:
    """A run on a disk that holds two checkpoints and a half; then the disk grows and the run is resumed."""
    checkpoint = sum(path.stat().st_size for path in checkpoint_folders(whole)[-1].iterdir())
    with small_disk(whole.with_name("disk"), int(2.5 * checkpoint)) as mounted:
        if not mounted:
            return "left out: mounting a small disk is not allowed here"
        out = whole.with_name("disk") / "run"
        full = job.finish(out)
        kept = [folder.name for folder in checkpoint_folders(out)]
        left = sorted(half_written(out))
        grow = ["mount", "-o", f"remount,size={int(6 * checkpoint)}", str(out.parent)]
        subprocess.run(grow, check=True)
        done = job.finish(out)
        took_up(done.stderr, True, tally)
        compare(whole, out, tally)
        resumed = re.search(r"resuming from \S*step-0*(\d+)", done.stderr)
        return {
            "exit": full.returncode,
            "said": full.stderr.splitlines()[-1].replace(str(whole.parent), ""),
            "kept": kept,
            "half_written_left": left,
            "resumed_from_step": int(resumed[1]) if resumed else None,
            "exit_after_growing": done.returncode,
        }


def measure_kills(job: Job, work: Path, kills: int, seed: int) -> dict[str, Any]:
    """All of it, in the folder `work`; the JSON object."""
    whole = work / "whole"
    begun = time.monotonic()
    done = job.finish(whole)
    if done.returncode:
        raise SystemExit(done.stderr)
    summary, wall = json.loads(done.stdout), time.monotonic() - begun
    job = replace(job, recipe=str(whole / "config.toml"))  # whatever became of the recipe meanwhile
    tally = kill_often(job, whole, kills, seed, max(1.0, wall - summary["seconds"]))
    truncated = truncate_newest(job, whole, tally)
    full_disk = fill_disk(job, whole, tally)
    return {
        "kills": tally.kills,
        "kills_during_save": tally.during_save,
        "kills_before_first_checkpoint": tally.before_first_checkpoint,
        "resumes": tally.resumes,
        "runs": tally.runs,
        "bit_equal": not tally.unequal,
        "unequal": tally.unequal,
        "faults": tally.faults,
        "worst_resume_seconds": max(tally.resume_seconds, default=None),
        "mean_resume_seconds": round(sum(tally.resume_seconds) / max(len(tally.resume_seconds), 1), 3),
        "truncated_newest": truncated,
        "full_disk": full_disk,
        "model": job.model,
        "steps": job.steps,
        "checkpoint_every": job.every,
        "seed": seed,
        "weights_sha256": summary["weights_sha256"],
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    """Read the command line, print the JSON object; exit 1 when anything was not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("corpus", type=Path, help="folder that `bertsmith prepare` wrote")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args = parser.parse_args()
    flags = ["--batch-size", str(args.batch_size), "--max-length", str(args.max_length), "--precision", args.precision]
    job = Job(args.corpus, args.model, args.steps, args.checkpoint_every, flags)
    with tempfile.TemporaryDirectory(prefix="kills-") as work:
        result = measure_kills(job, Path(work), args.kills, args.seed)
    print(json.dumps(result, indent=1, ensure_ascii=False))
    sys.exit(0 if result["bit_equal"] and not result["faults"] else 1)


if __name__ == "__main__":
    main()
