"""Runs small enough for tests: settings, a probe that looks into the loop, and what is compared afterwards."""

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from bertsmith.corpus.batches import Batch
from bertsmith.corpus.loader import PrefetchingLoader
from bertsmith.demo_text import demo_text_paths
from bertsmith.options import Recipe
from bertsmith.training import loop
from bertsmith.training.metrics_log import read_metrics
from bertsmith.training.settings import PretrainSettings
from bertsmith.training.setup import run_settings

RECIPE: dict[str, Any] = {
    "model": "tiny",
    "batch_size": 4,
    "max_length": 32,
    "warmup": 2,
    "precision": "fp32",
    "optimizer": {"learning_rate": 1e-3},
    "eval": {"every": 0, "examples": 8},
    "checkpoint": {"every": 3, "minutes": 0},
    "log": {"examples": 0, "every": 1},
}
# what differs from run to run though the training is the same
TIMES = ("seconds", "tokens_per_second", "utilization")


class Crash(BaseException):
    """What a test raises where it wants a run to end as if it had been killed: nothing catches it."""


class Probe:
    """Sees every batch a run is fed, may change it, and is called after each backward pass."""

    def __init__(self, patch: Any) -> None:
        self.batches: list[Batch] = []
        self.micro_sizes: list[int] = []
        self.alter: Callable[[Batch], Batch] = lambda batch: batch
        self.on_update: Callable[[list[Parameter]], None] = lambda parameters: None
        probe = self

        class Loader(PrefetchingLoader):
            def __next__(self) -> Batch:
                batch = probe.alter(super().__next__())
                probe.batches.append(batch)
                return batch

        def clip(parameters: Any, max_norm: float | None) -> torch.Tensor:
            parameters = list(parameters)
            probe.on_update([parameter for parameter in parameters if parameter.grad is not None])
            return clip_gradients(parameters, max_norm)

        def split(batch: Batch, size: int) -> list[Batch]:
            probe.micro_sizes.append(size)
            return split_batch(batch, size)

        clip_gradients, split_batch = loop.clip_gradients, loop.split_batch
        patch.setattr(loop, "PrefetchingLoader", Loader)
        patch.setattr(loop, "clip_gradients", clip)
        patch.setattr(loop, "split_batch", split)

    def at_update(self, number: int, action: Callable[[], None]) -> None:
        """Do `action` after the backward pass of the `number`-th batch (from 1) from here on."""
        end = len(self.batches) + number

        def act(parameters: list[Parameter]) -> None:
            if len(self.batches) == end:
                action()

        self.on_update = act

    def crash_at(self, number: int) -> None:
        """End the run at the `number`-th batch from here on, as a kill would."""

        def crash() -> None:
            self.on_update = lambda parameters: None
            raise Crash

        self.at_update(number, crash)

    def rows(self) -> list[tuple[Any, ...]]:
        """Everything the model saw and was to say, a row a batch."""
        return [
            (
                tuple(batch.token_ids.tolist()),
                tuple(batch.segment_ids.tolist()),
                tuple(batch.masked_labels.tolist()),
                None if batch.next_sentence_labels is None else tuple(batch.next_sentence_labels.tolist()),
                tuple(batch.example_ids.tolist()),
            )
            for batch in self.batches
        ]


def make_settings(corpus: Path, out: Path, **changes: Any) -> PretrainSettings:
    """RECIPE with `changes` (`section__key` for dotted keys), by the way the command line takes."""
    if "learning_rate" in changes:
        changes["optimizer__learning_rate"] = changes.pop("learning_rate")
    overrides = [(key.replace("__", "."), str(value)) for key, value in changes.items()]
    return run_settings(out, Recipe(RECIPE, "test"), [("data", str(corpus)), *overrides])


def train(corpus: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Pre-train or resume; the summary."""
    return loop.pretrain(make_settings(corpus, out, **changes), out)


def log_lines(out: Path) -> list[dict[str, Any]]:
    """RUN/metrics.jsonl without times."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(out)]


def results(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without times and places."""
    left_out = (*TIMES, "model_dir", "resumed_from_step", "resume_seconds")
    return {key: value for key, value in summary.items() if key not in left_out}


def checkpoint_steps(out: Path) -> list[int]:
    """The steps of the checkpoints on disk."""
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file under a folder, TensorBoard's apart."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "tensorboard" not in path.parts
    }


def demo_rows(name: str, first: int, end: int) -> str:
    """Documents of a file of the demo's text, as JSON lines."""
    path = next(path for path in demo_text_paths() if Path(path).name.startswith(name))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file][first:end]
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
