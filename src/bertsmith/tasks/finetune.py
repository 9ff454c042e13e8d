"""The fine-tuning loop, one run with one seed, from an open task to its best weights; it reads from top to bottom.

Everything random is a function of (seed, epoch or step), so a run that was killed and resumed, once or ten times, takes
the same steps on the same batches as one that was not. Devlin et al. 2018, section 4 and appendix A.3.
"""

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bertsmith.corpus.random_bits import derive_key, permutation
from bertsmith.errors import UserError
from bertsmith.hardware import Machine
from bertsmith.inference.predictor import CHUNK, predict_encoded
from bertsmith.model.config import encoder_flops
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.task_model import BertForTask
from bertsmith.progress import say
from bertsmith.storage import atomic_file
from bertsmith.tasks.batches import TOKENS_AT_ONCE, pack_examples, split_by_tokens
from bertsmith.tasks.data import Split, TaskData
from bertsmith.tasks.examples import EncodedSequence
from bertsmith.tasks.settings import FinetuneSettings
from bertsmith.tasks.task import Scorer, Task
from bertsmith.training.checkpoint import find_newest_checkpoint, save_checkpoint
from bertsmith.training.metrics_log import MetricsLog, ProgressLine
from bertsmith.training.optimizer import BertOptimizer, clip_gradients
from bertsmith.training.schedule import Budget, LearningRateSchedule
from bertsmith.training.state import MOST_BAD_STEPS, Arithmetic, Interrupts, warn_of_changes

BEST = "best.safetensors"
_MOST_SILENT_SECONDS = 20.0


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
    """The evaluation whose weights lie in BEST: as in `history`, with `degenerate` and the scorer's `details`."""
    arithmetic: dict[str, Any] | None = None
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
        if state.best is not None and not (folder / BEST).is_file():
            raise UserError(f"{folder / BEST}: is gone, so that this run cannot go on; start again with another --out")
        return state


def check_inputs(before: str, now: str, folder: Path) -> None:
    """Raise UserError unless a run began with the rows and the model that there are now."""
    if before != now:
        raise UserError(
            f"{folder}: this run began with another model, or with other rows to learn from or to score on, than the "
            "files hold now; give the same ones to go on, or another --out"
        )


def parameter_rates(layers: int, layer_decay: float) -> Any:
    """Name → share of the learning rate: 1 for the output layer and pooler, `layer_decay` less for each layer below."""

    def share(name: str) -> float:
        if ".embeddings." in name:
            return float(layer_decay ** (layers + 1))
        if ".encoder.layer." in name:
            return float(layer_decay ** (layers - int(name.split(".encoder.layer.")[1].partition(".")[0])))
        return 1.0

    return share


def finetune_once(
    plan: RunPlan,
    settings: FinetuneSettings,
    data: TaskData,
    model: BertForTask,
    machine: Machine,
    folder: Path,
    inputs_sha256: str,
) -> dict[str, Any]:
    """One run in `folder`, resumed where one was begun; returns its result, and leaves the kept weights in BEST.

    `inputs_sha256` stands for the data and the model that it begins with. Raises UserError when a run was begun there
    with others and when the loss stays NaN, KeyboardInterrupt after Ctrl-C or SIGTERM, with a checkpoint written.
    """
    task, device = data.task, machine.device
    model = model.to(device)
    model.bert.compute_dtype = machine.dtype
    steps_an_epoch = math.ceil(len(data.train) / plan.batch_size)
    steps = max(1, round(steps_an_epoch * plan.epochs))
    warmup = settings.warmup if settings.warmup < 1 else min(settings.warmup, steps)
    schedule = LearningRateSchedule(plan.learning_rate, warmup, Budget(steps=steps))
    rates = parameter_rates(model.config.num_hidden_layers, settings.layer_decay)
    optimizer = BertOptimizer(model.named_parameters(), settings.optimizer(plan.learning_rate), rates)
    most_tokens = settings.micro_tokens or TOKENS_AT_ONCE[device.type]
    evaluate_every = settings.eval.every or steps_an_epoch
    log_every = settings.log.every or (1 if steps < 200 else 10)
    state, now = RunState(inputs_sha256=inputs_sha256), Arithmetic.of(machine)

    checkpoint, broken = find_newest_checkpoint(folder)
    for message in broken:
        say(f"warning: {message}")
    if checkpoint is not None:
        state = RunState.from_dict(checkpoint.state, inputs_sha256, folder)
        model.load_state_dict(checkpoint.load_weights(model.state_dict()))
        optimizer.load_state_tensors(checkpoint.load_optimizer())
        say(f"resuming from {checkpoint.folder} (step {state.step:,} of {steps:,})")
        if state.arithmetic is not None:
            warn_of_changes(Arithmetic(**state.arithmetic), now)
    state.arithmetic = asdict(now)

    line = ProgressLine(steps)
    last_checkpoint = last_shown = time.monotonic()
    order, order_epoch = permutation(0, 1), -1
    with MetricsLog(folder, None if checkpoint is None else state.step) as log, Interrupts() as interrupts:

        def write_checkpoint() -> None:
            nonlocal last_checkpoint
            log.sync()
            save_checkpoint(
                folder,
                state.step,
                model.state_dict(),
                optimizer.state_tensors(),
                asdict(state),
                settings.checkpoint.keep,
            )
            last_checkpoint = time.monotonic()

        def log_window() -> None:
            window = state.window
            if not window:
                return
            metrics = {
                "loss": window["loss"] / window["steps"],
                "learning_rate": window["learning_rate"],
                "grad_norm": window["grad_norm"] / window["steps"],
                "tokens": state.tokens,
                "tokens_per_second": window["tokens"] / window["seconds"],
                "utilization": window["flops"] / window["seconds"] / machine.matmul_flops,
                "examples_per_second": window["examples"] / window["seconds"],
                "seconds": state.seconds,
                "skipped_steps": state.skipped_steps,
            }
            log.write(state.step, metrics)
            line.show(state.step, metrics, state.step / steps)
            state.window = {}

        def evaluate_dev() -> None:
            scorers = {name: score_split(task, model, split, device) for name, split in data.dev.items()}
            merged = merge_dev({name: scorer.compute() for name, scorer in scorers.items()})
            is_best = all(merged[task.metric] > earlier["dev"][task.metric] for earlier in state.history)
            entry = {"step": state.step, "epoch": state.step / steps_an_epoch, "dev": merged}
            state.history.append(entry)
            log.write(state.step, {f"dev_{name}": value for name, value in merged.items()} | {"seconds": state.seconds})
            shown = ", ".join(f"{name} {value:.4g}" for name, value in merged.items() if name in shown_metrics(task))
            line.say(f"step {state.step:,}/{steps:,}: dev {shown}{'  (best so far)' if is_best else ''}")
            if is_best if settings.keep == "best" else state.step == steps:
                first = next(iter(scorers.values()))
                state.best = entry | {"degenerate": first.one_class_only, "details": first.details()}
                save_weights(folder / BEST, model)

        while state.step < steps:
            # -- the batch: the next examples of this epoch's order, whole epochs before the next begins
            begun = time.monotonic()
            taken = state.step + state.skipped_steps
            epoch, place = divmod(taken, steps_an_epoch)
            if epoch != order_epoch:
                order, order_epoch = permutation(derive_key(plan.seed, "finetune order", epoch), len(data.train)), epoch
            numbers = order[place * plan.batch_size : (place + 1) * plan.batch_size]
            examples: list[list[EncodedSequence]] = [data.train[number] for number in numbers.tolist()]

            # -- the step
            batches = [pack_examples(part, device) for part in split_by_tokens(examples, most_tokens)]
            scale = 1 / max(sum(task.weight(batch) for batch in batches), 1e-12)
            total = torch.zeros((), device=device)
            for number, batch in enumerate(batches):
                masks = DropoutMasks((plan.seed, taken, number))
                loss = task.loss(model(*batch.inputs(), masks), batch) * scale
                loss.backward()
                total += loss.detach()
            clipped_from = clip_gradients(model.parameters(), settings.clip_norm)
            # the one time a step that the host waits for the device
            norm, loss_value = torch.stack([clipped_from, total]).tolist()
            factor = schedule.factor(state.step, state.step / steps)
            if math.isfinite(norm + loss_value):
                optimizer.step(factor)
                state.step, state.bad_in_a_row = state.step + 1, 0
            else:
                state.skipped_steps, state.bad_in_a_row = state.skipped_steps + 1, state.bad_in_a_row + 1
                line.say(f"warning: step {state.step + 1}: loss or gradient is not finite; batch skipped")
                if state.bad_in_a_row >= MOST_BAD_STEPS:
                    raise UserError(
                        f"{MOST_BAD_STEPS} steps in a row gave no finite gradient; lower --learning-rate or lengthen "
                        "--warmup, and start again with another --out"
                    )
            optimizer.zero_grad()

            # -- what it took
            now_is = time.monotonic()
            tokens = sum(len(batch.token_ids) for batch in batches)
            flops = sum(
                encoder_flops(model.config, len(batch.token_ids), batch.squared_lengths, len(batch.rows))
                for batch in batches
            )
            state.seconds += now_is - begun
            state.tokens += tokens
            state.examples += len(examples)
            if state.bad_in_a_row == 0:
                added = {
                    "steps": 1, "loss": loss_value, "grad_norm": norm, "tokens": tokens, "flops": flops,
                    "examples": len(examples), "seconds": now_is - begun,
                }  # fmt: skip
                state.window = {name: state.window.get(name, 0.0) + value for name, value in added.items()}
                state.window["learning_rate"] = plan.learning_rate * factor

            # -- once in a while: log, evaluate, write a checkpoint
            if state.step % log_every == 0 or now_is - last_shown >= _MOST_SILENT_SECONDS or state.step == steps:
                log_window()
                last_shown = now_is
                state.seconds += time.monotonic() - now_is  # a run's speed is that with its log
            is_new = not state.history or state.history[-1]["step"] != state.step
            if is_new and (state.step % evaluate_every == 0 or state.step == steps) and state.bad_in_a_row == 0:
                evaluate_dev()
            waited = time.monotonic() - last_checkpoint
            every, minutes = settings.checkpoint.every, settings.checkpoint.minutes
            due = (every and state.step % every == 0) or (minutes and waited >= 60 * minutes)
            if (due and state.step < steps) or interrupts.requested:
                write_checkpoint()
            if interrupts.requested:
                say(f"interrupted: the run is saved at step {state.step:,}; the same command resumes it")
                raise KeyboardInterrupt
        line.close()

    assert state.best is not None, "the last step is evaluated, and the first evaluation is the best so far"
    return {
        "seed": plan.seed,
        "learning_rate": plan.learning_rate,
        "batch_size": plan.batch_size,
        "epochs": plan.epochs,
        "dev": state.best["dev"],
        "best_step": state.best["step"],
        "steps": steps,
        "skipped_steps": state.skipped_steps,
        "degenerate": state.best["degenerate"],
        "history": state.history,
        "details": state.best["details"],
        "train_seconds": state.seconds,
        "examples_per_second": state.examples / state.seconds,
        "tokens_per_second": state.tokens / state.seconds,
        "inputs_sha256": inputs_sha256,
    }


def score_split(task: Task, model: BertForTask, split: Split, device: torch.device) -> Scorer:
    """Predict a file that is encoded already, and count."""
    scorer = task.scorer()
    for first in range(0, len(split.examples), CHUNK):
        examples, encoded = split.examples[first : first + CHUNK], split.encoded[first : first + CHUNK]
        scorer.add(examples, predict_encoded(task, model, examples, encoded, device))
    return scorer


def merge_dev(metrics: dict[str, dict[str, float]]) -> dict[str, float]:
    """One dictionary of several dev files: the first's names as they are, the others' with the file's name in front."""
    merged: dict[str, float] = {}
    for number, (name, values) in enumerate(metrics.items()):
        prefix = "" if number == 0 else f"{name.removeprefix('dev_')}_"
        merged |= {f"{prefix}{metric}": value for metric, value in values.items()}
    return merged


def shown_metrics(task: Task) -> tuple[str, ...]:
    """What is worth a person's eye while training."""
    names = ("matthews", "accuracy", "f1", "macro_f1", "micro_f1", "pearson", "spearman", "exact_match")
    return (task.metric, *(name for name in names if name != task.metric))


def save_weights(path: Path, model: BertForTask) -> None:
    """All parameters, complete or not at all."""
    from safetensors.torch import save_file

    with atomic_file(path) as partial:
        save_file({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, partial)


def load_best(path: Path, model: BertForTask) -> None:
    """What `save_weights` wrote."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path))


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run in `folder`; None when it is not finished."""
    path = folder / "result.json"
    return json.loads(path.read_bytes()) if path.is_file() else None
