"""How far one fine-tuning run is, and what it keeps in its folder: checkpoints, the best weights, its result.

The first rank alone reads and writes them; where there are several, the others are told (training/ranks.py).
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.model.task_model import BertForTask
from bertsmith.progress import say
from bertsmith.storage import atomic_file, write_text
from bertsmith.tasks.table import TEXT_KINDS
from bertsmith.tasks.task import Task
from bertsmith.training.checkpoint import Checkpoint, find_newest_checkpoint
from bertsmith.training.ranks import Ranks


@dataclass(frozen=True)
class RunPlan:
    """What distinguishes one run of a command from another."""

    seed: int
    learning_rate: float
    batch_size: int
    epochs: float

    @property
    def name(self) -> str:
        """A folder's name."""
        return f"lr-{self.learning_rate:g}-batch-{self.batch_size}-epochs-{self.epochs:g}-seed-{self.seed}"


@dataclass
class RunState:
    """How far a run is; what a checkpoint keeps beside weights and optimizer."""

    step: int = 0
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    seconds: float = 0.0
    """Time in training steps and their log (not in evaluation), over all parts of the run."""
    tokens: int = 0
    examples: int = 0
    window: dict[str, float] = field(default_factory=dict)
    """Sums since the last log line."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """An evaluation each: step, epoch, the dev metrics."""
    best: dict[str, Any] | None = None
    """The evaluation whose weights are kept (see `best_weights`): as in `history`, with `degenerate` and the scorer's
    `details`."""
    arithmetic: dict[str, Any] | None = None
    unseen_words: float = 1.0
    """What weight decay has made of the words that do not occur in training (see seen_words.py)."""
    inputs_sha256: str = ""
    """Of the rows and the weights that the run began with."""

    @classmethod
    def from_dict(cls, values: dict[str, Any], inputs_sha256: str, folder: Path) -> "RunState":
        """What a checkpoint kept. Raises UserError when it is not of this version, or not of these inputs."""
        try:
            state = cls(**values)
        except TypeError as error:
            raise UserError(
                f"{folder}: its checkpoint was written by another version of bertsmith ({error}); resume with that one"
            ) from error
        check_inputs(state.inputs_sha256, inputs_sha256, folder)
        if state.best is not None and not (kept := best_weights(folder, state.best["step"])).is_file():
            raise UserError(f"{kept}: is gone, so that this run cannot go on; start again with another --out")
        return state


def check_inputs(before: str, now: str, folder: Path) -> None:
    """Raise UserError unless a run began with the rows and the model that there are now."""
    if before != now:
        raise UserError(
            f"{folder}: this run began with another model, or with other rows to learn from or to score on, than the "
            "files hold now; give the same ones to go on, or another --out"
        )


INPUTS_FILE = "inputs.json"
_INPUTS = {
    "model": "another model than --model names now",
    "train": "other rows to learn from than the file holds now",
    "dev": "other rows to score on than the file holds now",
}


def note_inputs(out: Path, now: dict[str, str], begun: bool) -> None:
    """Keep what the runs in `out` begin with, a sha256 each of model, train and dev; where they are `begun`, raise
    UserError naming what is another. Runs of earlier versions kept nothing: `check_inputs` is left to tell of them."""
    path = out / INPUTS_FILE
    if not begun:
        write_text(path, json.dumps(now, indent=1) + "\n")
    elif path.is_file():
        before = json.loads(path.read_bytes())
        if others := [what for name, what in _INPUTS.items() if before.get(name) != now[name]]:
            raise UserError(
                f"{out}: this run began with {', and with '.join(others)}; give the same to go on, or another --out"
            )


def find_start(folder: Path, inputs_sha256: str, ranks: Ranks) -> tuple[RunState, Checkpoint | None, bool]:
    """How far the run in `folder` is as the first rank finds it, what to load there, and whether it goes on at all.

    Raises UserError, on all ranks alike, for a checkpoint that does not fit.
    """
    state, checkpoint = RunState(inputs_sha256=inputs_sha256), None
    with ranks.alike():
        if ranks.is_first:
            checkpoint, broken = find_newest_checkpoint(folder)
            for message in broken:
                say(f"warning: {message}")
            if checkpoint is not None:
                state = RunState.from_dict(checkpoint.state, inputs_sha256, folder)
    values = ranks.share(None if checkpoint is None else checkpoint.state)
    if values is not None and not ranks.is_first:
        state = RunState(**values)
    return state, checkpoint, values is not None


def best_weights(folder: Path, step: int) -> Path:
    """Where the weights lie that were the best when they were evaluated after `step`.

    Each in a file of its own: a run that was killed goes on from a checkpoint that knows an earlier best only, and on
    other processors, or another number of them, what the dead one found may not come again.
    """
    return folder / f"best-{step:08d}.safetensors"


def drop_other_weights(folder: Path, steps: Collection[int]) -> None:
    """Remove what `best_weights` names, but for these `steps`."""
    kept = {best_weights(folder, step).name for step in steps}
    for path in folder.glob("best-*.safetensors"):
        if path.name not in kept:
            path.unlink()


def save_weights(path: Path, model: BertForTask) -> None:
    """All parameters, complete or not at all."""
    from safetensors.torch import save_file

    with atomic_file(path) as partial:
        save_file({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, partial)


def load_best(path: Path, model: BertForTask) -> None:
    """What `save_weights` wrote."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path))


def merit(evaluation: dict[str, Any], task: Task) -> tuple[bool, float]:
    """What evaluations, and results of runs, are chosen by: the greater is the better.

    On labels of one's own one that predicts a single class is never better than one that does not: where classes are
    unbalanced, to have learnt nothing may score higher than to have begun to learn. A published task is about its
    metric.
    """
    has_learnt = not evaluation["degenerate"] or task.spec.name not in TEXT_KINDS
    return has_learnt, evaluation["dev"][task.metric]


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run in `folder`; None when it is not finished."""
    path = folder / "result.json"
    return json.loads(path.read_bytes()) if path.is_file() else None
