"""The fine-tuning loop, one run with one seed, from an open task to its best weights; it reads from top to bottom.

Everything random is a function of (seed, epoch or step), so a run that was killed and resumed, once or ten times, takes
the same steps on the same batches as one that was not. Several processes (ranks) share each batch's micro-batches and
the dev file's examples. Devlin et al. 2018, section 4 and appendix A.3.
"""

import math
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bertsmith.corpus.random_bits import derive_key, permutation
from bertsmith.hardware import Machine
from bertsmith.inference.predictor import CHUNK, predict_encoded
from bertsmith.model.config import encoder_flops
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.task_model import BertForTask
from bertsmith.progress import say
from bertsmith.tasks.batches import pack_examples, pack_nothing, split_for_ranks
from bertsmith.tasks.data import Split, TaskData
from bertsmith.tasks.examples import EncodedSequence
from bertsmith.tasks.run_state import RunPlan, best_weights, drop_other_weights, find_start, merit, save_weights
from bertsmith.tasks.seen_words import WORDS, SeenWords
from bertsmith.tasks.settings import FinetuneSettings
from bertsmith.tasks.task import Scorer, Task
from bertsmith.training.checkpoint import save_checkpoint
from bertsmith.training.distributed import load_optimizer, spread_model
from bertsmith.training.metrics_log import MetricsLog, NoMetricsLog, ProgressLine
from bertsmith.training.optimizer import BertOptimizer, clip_gradients
from bertsmith.training.ranks import ALONE, Ranks, split_evenly
from bertsmith.training.schedule import Budget, LearningRateSchedule
from bertsmith.training.state import MOST_BAD_STEPS, Arithmetic, Interrupts, warn_of_changes

_MOST_SILENT_SECONDS = 20.0


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
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """One run in `folder`, resumed where one was begun; returns its result, and leaves the best weights there.

    `inputs_sha256` stands for the data and the model that it begins with. Several processes (`ranks`) call it together;
    the result is the first one's. Batches and their order do not depend on how many there are, losses by rounding only;
    dropout masks depend on how batches are divided, which `micro_tokens` fixes. Raises UserError when a run was begun
    there with others and when the loss stays NaN or dev scores become so, KeyboardInterrupt after Ctrl-C or SIGTERM,
    with a checkpoint written.
    """
    task, device = data.task, machine.device
    model.bert.compute_dtype = machine.dtype
    state, checkpoint, resumed = find_start(folder, inputs_sha256, ranks)
    begun_with = model.bert.embeddings.word.detach().clone()
    if checkpoint is not None:
        model.load_state_dict(checkpoint.load_weights(model.state_dict()))
    model = model.to(device)
    occurring = (sequence.token_ids for example in data.train for sequence in example)
    words = SeenWords(model.bert.embeddings, occurring, begun_with)
    spread = spread_model(model, "ddp", ranks, machine)
    model = spread.model
    steps_an_epoch = math.ceil(len(data.train) / plan.batch_size)
    steps = max(1, round(steps_an_epoch * plan.epochs))
    warmup = settings.warmup if settings.warmup < 1 else min(settings.warmup, steps)
    schedule = LearningRateSchedule(plan.learning_rate, warmup, Budget(steps=steps))
    rates = parameter_rates(model.config.num_hidden_layers, settings.layer_decay)
    optimizer = BertOptimizer(model.named_parameters(), settings.optimizer(plan.learning_rate), rates)
    evaluate_every = settings.eval.every or steps_an_epoch
    log_every = settings.log.every or (1 if steps < 200 else 10)
    now = Arithmetic.of(machine, ranks.size)
    if resumed:
        load_optimizer(optimizer, checkpoint, ranks)
        if checkpoint is not None:
            say(f"resuming from {checkpoint.folder} (step {state.step:,} of {steps:,})")
        if state.arithmetic is not None:
            warn_of_changes(Arithmetic(**state.arithmetic), now)
    state.arithmetic = asdict(now)
    (matmul_flops,), _ = ranks.agree((machine.matmul_flops,))

    line = ProgressLine(steps)
    last_checkpoint = last_shown = time.monotonic()
    order, order_epoch = permutation(0, 1), -1
    # the evaluations whose weights the checkpoints need: each the one that was the best so far
    needed = deque([state.best["step"]] if state.best else [], settings.checkpoint.keep)
    with (
        MetricsLog(folder, state.step if resumed else None) if ranks.is_first else NoMetricsLog() as log,
        Interrupts(patient=ranks.size > 1) as interrupts,
    ):
        # Every rank takes the same steps and knows the same of them; the first alone has the clock and writes.

        def write_checkpoint() -> None:
            nonlocal last_checkpoint
            log.sync()
            with words.whole(state.unseen_words):
                weights = model.state_dict()
            save_checkpoint(
                folder, state.step, weights, optimizer.state_tensors(), asdict(state), settings.checkpoint.keep
            )
            if state.best is not None:
                needed.append(state.best["step"])
                drop_other_weights(folder, needed)
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
                "utilization": window["flops"] / window["seconds"] / matmul_flops,
                "examples_per_second": window["examples"] / window["seconds"],
                "seconds": state.seconds,
                "skipped_steps": state.skipped_steps,
            }
            log.write(state.step, metrics)
            line.show(state.step, metrics, state.step / steps)
            state.window = {}

        def evaluate_dev() -> None:
            scorers = {name: score_split(task, model, split, device, ranks) for name, split in data.dev.items()}
            first = next(iter(scorers.values()))
            found = merge_dev({name: scorer.compute() for name, scorer in scorers.items()}), first.one_class_only
            merged, degenerate = ranks.share(found)
            entry = {"step": state.step, "epoch": state.step / steps_an_epoch, "dev": merged}
            candidate = entry | {"degenerate": degenerate}
            is_best = state.best is None or merit(candidate, task) > merit(state.best, task)
            state.history.append(entry)
            log.write(state.step, {f"dev_{name}": value for name, value in merged.items()} | {"seconds": state.seconds})
            shown = ", ".join(f"{name} {value:.4g}" for name, value in merged.items() if name in shown_metrics(task))
            note = "  (best so far)" if is_best and settings.keep == "best" else ""
            line.say(f"step {state.step:,}/{steps:,}: dev {shown}{note}")
            if is_best if settings.keep == "best" else state.step == steps:
                state.best = candidate | {"details": first.details()}
                if ranks.is_first:
                    save_weights(best_weights(folder, state.step), model)
                    drop_other_weights(folder, [state.step, *needed])

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
            parts = split_for_ranks(examples, settings.micro_tokens, device, ranks.size)
            batches = [pack_examples(part, device) for part in parts[ranks.rank :: ranks.size]]
            # ranks wait for each other at the end of the backward pass
            idle = [pack_nothing(device)] * (math.ceil(len(parts) / ranks.size) - len(batches))
            (weight,), _ = ranks.agree((sum(task.weight(batch) for batch in batches),))
            scale = ranks.size / max(weight, 1e-12)  # over the targets of all ranks, whose gradients are averaged
            total = torch.zeros((), device=device)
            for turn, batch in enumerate(batches + idle):
                number = turn * ranks.size + ranks.rank  # in the whole batch
                masks = DropoutMasks((plan.seed, taken, number))
                with spread.micro_batch(last=turn == len(batches + idle) - 1):
                    token_ids, *others = batch.inputs()
                    scores = spread(words.numbers(token_ids), *others, masks)
                    loss = task.loss(scores, batch) * scale if batch.examples else 0 * scores.sum()
                    loss.backward()
                total += loss.detach()
            clipped_from = clip_gradients(model.parameters(), settings.clip_norm)
            # the one time a step that the host waits for the device
            norm, own_loss = torch.stack([clipped_from, total]).tolist()
            own_tokens = sum(len(batch.token_ids) for batch in batches)
            own_flops = sum(
                encoder_flops(model.config, len(batch.token_ids), batch.squared_lengths, len(batch.rows))
                for batch in batches
            )
            (loss_of_all, tokens, flops), (norm,) = ranks.agree((own_loss, own_tokens, own_flops), (norm,))
            loss_value = loss_of_all / ranks.size
            factor = schedule.factor(state.step, state.step / steps)
            if math.isfinite(norm + loss_value):
                optimizer.step(factor)
                state.unseen_words *= optimizer.decay_factor(WORDS, factor)
                state.step, state.bad_in_a_row = state.step + 1, 0
            else:
                state.skipped_steps, state.bad_in_a_row = state.skipped_steps + 1, state.bad_in_a_row + 1
                line.say(f"warning: step {state.step + 1}: loss or gradient is not finite; batch skipped")
                if state.bad_in_a_row >= MOST_BAD_STEPS:
                    raise ranks.stop(
                        f"{MOST_BAD_STEPS} steps in a row gave no finite gradient; lower --learning-rate or lengthen "
                        "--warmup, and start again with another --out"
                    )
            optimizer.zero_grad()

            # -- what it took
            now_is = time.monotonic()
            state.seconds += now_is - begun
            state.tokens += int(tokens)
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
                with words.whole(state.unseen_words):
                    evaluate_dev()
            waited = time.monotonic() - last_checkpoint
            every, minutes = settings.checkpoint.every, settings.checkpoint.minutes
            due = (every and state.step % every == 0) or (minutes and waited >= 60 * minutes)
            stops = ranks.agree((interrupts.requested,))[0][0] > 0
            if due and state.step < steps and ranks.is_first and not stops:
                write_checkpoint()
            if stops:
                with ranks.alike():  # the others wait until it is written
                    if ranks.is_first:
                        write_checkpoint()
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


def score_split(task: Task, model: BertForTask, split: Split, device: torch.device, ranks: Ranks = ALONE) -> Scorer:
    """Predict a file that is encoded already, each rank its share, and count: on the first; elsewhere nothing is."""
    scorer = task.scorer()
    at_once = CHUNK * ranks.size
    for first in range(0, len(split.examples), at_once):
        examples, encoded = split.examples[first : first + at_once], split.encoded[first : first + at_once]
        own = split_evenly([1] * len(examples), ranks.size)[ranks.rank]
        with ranks.alike():
            rows = predict_encoded(task, model, examples[own], encoded[own], device)
        all_rows = [row for part, _ in ranks.gather(rows) for row in part]
        if ranks.is_first:
            scorer.add(examples, all_rows)
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
    names = (
        "matthews",
        "accuracy",
        "f1",
        "macro_f1",
        "micro_f1",
        "pearson",
        "spearman",
        "exact_match",
        "f1_characters",
    )
    return (task.metric, *(name for name in names if name != task.metric))
