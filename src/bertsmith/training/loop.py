"""The pre-training loop, from settings to a finished model folder; it reads from top to bottom.

Everything random in a step is a function of (seed, step or example), so a run that was killed and resumed, once or ten
times, takes the same steps on the same batches as one that was not. Devlin et al. 2018, section 3.1 and appendix A.2.
"""

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch

from bertsmith.corpus.batches import StreamPosition, describe_example, split_batch
from bertsmith.corpus.loader import PrefetchingLoader
from bertsmith.errors import UserError
from bertsmith.hardware import prepare_machine
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import useful_flops
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.weights import WEIGHTS, save_model
from bertsmith.options import settings_to_toml
from bertsmith.progress import say
from bertsmith.storage import atomic_folder, write_text
from bertsmith.training.checkpoint import find_newest_checkpoint, save_checkpoint
from bertsmith.training.evaluation import batch_tensors, evaluate
from bertsmith.training.metrics_log import MetricsLog, ProgressLine, describe_references, plot_loss
from bertsmith.training.optimizer import PretrainingOptimizer, clip_gradients
from bertsmith.training.schedule import phase_of
from bertsmith.training.settings import PretrainSettings
from bertsmith.training.setup import (
    CONFIG_FILE,
    TrainingData,
    build_model,
    evaluation_stream,
    micro_batch_size,
    open_data,
    training_stream,
)
from bertsmith.training.state import MOST_BAD_STEPS, Interrupts, LogWindow, RunState, locked_run


def pretrain(settings: PretrainSettings, out: Path) -> dict[str, Any]:
    """Pre-train as `settings` say, in the run folder `out`, resuming what is there; returns the JSON summary.

    Raises UserError before any work for settings, corpus or folder that do not fit, and when the loss diverges or stays
    NaN; KeyboardInterrupt after Ctrl-C or SIGTERM, with a checkpoint written.
    """
    with locked_run(out):
        return _pretrain(settings, out)


def _pretrain(settings: PretrainSettings, out: Path) -> dict[str, Any]:
    # -- set-up: all mistakes are found before anything is written
    data = open_data(settings)
    budget, schedule, phases = settings.budget, settings.learning_rate_schedule, settings.phases
    stream = training_stream(settings, data, phases[0].max_length)
    held_out = evaluation_stream(settings, data)
    checkpoint, broken = find_newest_checkpoint(out)
    machine = prepare_machine(settings.device, settings.precision)
    device = machine.device
    model = build_model(settings, data).to(device)
    model.bert.compute_dtype = machine.dtype
    model_built = time.monotonic()
    optimizer = PretrainingOptimizer(model.named_parameters(), settings.optimizer)
    state = RunState()
    for message in broken:
        say(f"warning: {message}")
    if checkpoint is not None:
        model.load_state_dict(checkpoint.load_weights(model.state_dict()))
        optimizer.load_state_tensors(checkpoint.load_optimizer())
        state = RunState.from_dict(checkpoint.state)
        say(f"resuming from {checkpoint.folder} (step {state.step:,})")
    write_text(out / CONFIG_FILE, settings_to_toml(settings))
    say(f"{machine.describe()}; {sum(p.numel() for p in model.parameters()):,} parameters; {budget.describe()}")
    say(describe_references(data.ln_vocab, data.corpus.unigram_entropy))
    for message in stream.planner.warnings():
        say(f"warning: {message}")
    if held_out is None:
        say("warning: no held-out documents to evaluate on; prepare the corpus with a larger --held-out share")

    paired = settings.objective != "mlm"
    worst_loss = data.ln_vocab + (math.log(2) if paired else 0.0)
    log_every = settings.log.every or (1 if settings.steps is not None and settings.steps < 200 else 10)
    progress_line = ProgressLine(settings.steps)
    checkpointed_at = -1 if checkpoint is None else state.step
    resumed_seconds, begun = state.seconds, time.monotonic()
    last_checkpoint = begun
    loader: PrefetchingLoader | None = None
    micro_size = 0

    with MetricsLog(out, None if checkpoint is None else state.step) as log, Interrupts() as interrupts:

        def evaluate_held_out() -> None:
            if held_out is not None and state.evaluated_step != state.step:
                state.evaluation = evaluate(model, held_out.evaluation_batches(settings.eval.examples), device)
                state.evaluated_step = state.step
                _log_evaluation(log, progress_line, state)

        def write_checkpoint() -> None:
            log.sync()
            save_checkpoint(
                out,
                state.step,
                model.state_dict(),
                optimizer.state_tensors(),
                state.as_dict(),
                settings.checkpoint.keep,
            )

        try:
            while not budget.done(state.step, state.position.fraction, state.seconds):
                progress = budget.progress(state.step, state.position.fraction, state.seconds)

                # -- once in a while: longer sequences from here on
                phase = phase_of(progress, phases)
                if loader is None or phase != state.phase:
                    if loader is not None:
                        loader.close()
                    if phase != state.phase:
                        state.phase, state.position = phase, _next_window(state.position, stream.corpus.windows)
                    if phases[phase].max_length != stream.max_length:
                        stream = training_stream(settings, data, phases[phase].max_length)
                    micro_size = micro_batch_size(settings, stream.max_length, device)
                    loader = PrefetchingLoader(
                        stream,
                        state.position,
                        workers=settings.examples.workers,
                        epochs=None if settings.epochs is None else math.ceil(settings.epochs),
                        counts=state.counts,
                    )

                # -- the step
                step_begun = time.monotonic()
                batch = next(loader, None)
                if batch is None:
                    break
                if state.counts.examples == len(batch):
                    for n in range(min(settings.log.examples, len(batch))):
                        say(describe_example(batch, n, data.tokenizer, settings.objective))
                mlm_targets, nsp_targets = len(batch.masked_labels), len(batch)
                losses = torch.zeros(2, device=device)
                for number, micro in enumerate(split_batch(batch, micro_size)):
                    masks = DropoutMasks((settings.seed, state.step + state.skipped_steps, number))
                    loss = model(
                        **batch_tensors(micro, device),
                        mlm_scale=1 / max(mlm_targets, 1),
                        nsp_scale=1 / nsp_targets,
                        masks=masks,
                    )
                    loss.total.backward()
                    losses[0] += loss.mlm
                    if loss.nsp is not None:
                        losses[1] += loss.nsp
                norm = float(clip_gradients(model.parameters(), settings.clip_norm))
                if math.isfinite(norm):
                    optimizer.step(schedule.factor(state.step, progress))
                    learning_rate = schedule.learning_rate(state.step, progress)
                    state.step += 1
                    state.bad_in_a_row = 0
                else:
                    state.skipped_steps += 1
                    state.bad_in_a_row += 1
                optimizer.zero_grad()
                state.position = batch.position
                now = time.monotonic()
                state.seconds = resumed_seconds + now - begun
                _count_step(state, model, batch, paired, now - step_begun)

                if not math.isfinite(norm):
                    progress_line.say(f"warning: step {state.step + 1}: the gradient is not finite; step skipped")
                    if state.bad_in_a_row >= MOST_BAD_STEPS:
                        raise UserError(_stop_message(out, f"{MOST_BAD_STEPS} steps in a row gave no finite gradient"))
                    continue
                window = state.window
                window.steps += 1
                window.mlm_loss += float(losses[0])
                window.nsp_loss += float(losses[1])
                window.grad_norm += norm
                progress = budget.progress(state.step, state.position.fraction, state.seconds)
                done = budget.done(state.step, state.position.fraction, state.seconds)

                # -- once in a while: log
                if state.step % log_every == 0 or done:
                    metrics = _log_metrics(state, learning_rate, machine.matmul_flops, paired)
                    log.write(state.step, metrics)
                    progress_line.show(state.step, metrics, progress)
                    state.train_loss = metrics["loss"]
                    state.window = LogWindow()
                    if state.divergence.update(metrics["loss"], worst_loss):
                        raise UserError(_stop_message(out, f"the loss diverged: {metrics['loss']:.2f}"))

                # -- once in a while: evaluate
                if done or (settings.eval.every and state.step % settings.eval.every == 0):
                    evaluate_held_out()

                # -- once in a while: checkpoint
                due = settings.checkpoint.every and state.step % settings.checkpoint.every == 0
                late = settings.checkpoint.minutes and now - last_checkpoint >= 60 * settings.checkpoint.minutes
                if due or late or interrupts.requested:
                    state.seconds = resumed_seconds + time.monotonic() - begun
                    write_checkpoint()
                    checkpointed_at, last_checkpoint = state.step, time.monotonic()
                state.seconds = resumed_seconds + time.monotonic() - begun
                if interrupts.requested:
                    progress_line.say(
                        f"interrupted: the run is saved at step {state.step:,}; the same command resumes it"
                    )
                    raise KeyboardInterrupt
        finally:
            progress_line.close()
            if loader is not None:
                loader.close()

        # -- the end: held-out loss, final state, model folder
        evaluate_held_out()
        if checkpointed_at != state.step:
            write_checkpoint()

    model_folder = out / "model"
    with atomic_folder(model_folder) as partial:
        save_model(partial, model, settings.objective)
        data.tokenizer.save(partial)
    plot_loss(out, data.ln_vocab, data.corpus.unigram_entropy)
    return _summary(settings, data, state, machine.matmul_flops, model_folder) | {
        "precision": machine.precision,
        "resumed_from_step": None if checkpoint is None else checkpoint.step,
        "resume_seconds": None if checkpoint is None else round(begun - model_built, 3),
    }


def _next_window(position: StreamPosition, windows: int) -> StreamPosition:
    """The start of the window after `position`: the one place that means the same text at every length."""
    if position == StreamPosition():
        return position
    if position.window + 1 < windows:
        return StreamPosition(position.epoch, position.window + 1, 0, position.epoch + (position.window + 1) / windows)
    return StreamPosition(position.epoch + 1, 0, 0, position.epoch + 1.0)


def _count_step(state: RunState, model: BertForPreTraining, batch: Any, paired: bool, seconds: float) -> None:
    lengths = batch.sequence_starts[1:] - batch.sequence_starts[:-1]
    tokens = len(batch.token_ids)
    flops = useful_flops(
        model.config, tokens, int((lengths**2).sum()), len(batch.masked_labels), len(batch) if paired else 0
    )
    state.step_seconds += seconds
    state.flops += flops
    state.window.seconds += seconds
    state.window.flops += flops
    state.window.tokens += tokens


def _log_metrics(state: RunState, learning_rate: float, limit: float, paired: bool) -> dict[str, Any]:
    window = state.window
    mlm, nsp = window.mlm_loss / window.steps, window.nsp_loss / window.steps
    return {
        "loss": mlm + nsp,
        "mlm_loss": mlm,
        "nsp_loss": nsp if paired else None,
        "learning_rate": learning_rate,
        "grad_norm": window.grad_norm / window.steps,
        "tokens": state.counts.tokens,
        "tokens_per_second": window.tokens / window.seconds,
        "utilization": window.flops / window.seconds / limit,
        "seconds": state.seconds,
        "skipped_steps": state.skipped_steps,
        "epochs": state.position.fraction,
    }


def _log_evaluation(log: MetricsLog, line: ProgressLine, state: RunState) -> None:
    evaluation = state.evaluation
    if evaluation is None:
        return
    log.write(state.step, evaluation.as_metrics() | {"seconds": state.seconds})
    text = f"step {state.step:,}: held-out MLM loss {evaluation.mlm_loss:.3f}, accuracy {evaluation.mlm_accuracy:.1%}"
    if evaluation.nsp_accuracy is not None:
        text += f", next-sentence accuracy {evaluation.nsp_accuracy:.1%}"
    line.say(f"{text} ({evaluation.examples:,} examples)")


def _stop_message(out: Path, what: str) -> str:
    checkpoint, _ = find_newest_checkpoint(out)
    left = f"the last checkpoint is {checkpoint.folder}" if checkpoint else "no checkpoint was due yet"
    return f"{what}; {left}. Lower --learning-rate or lengthen --warmup, and start again with another --out"


def _summary(
    settings: PretrainSettings,
    data: TrainingData,
    state: RunState,
    limit: float,
    model_folder: Path,
) -> dict[str, Any]:
    no_evaluation = {"eval_loss": None, "eval_mlm_loss": None, "eval_mlm_accuracy": None, "eval_nsp_accuracy": None}
    with (model_folder / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "tokens": state.counts.tokens,
        "epochs": state.position.fraction,
        "train_loss": state.train_loss,
        **(state.evaluation.as_metrics() if state.evaluation else no_evaluation),
        "unigram_entropy": data.corpus.unigram_entropy,
        "ln_vocab": data.ln_vocab,
        "tokens_per_second": state.counts.tokens / state.step_seconds if state.step_seconds else None,
        "utilization": state.flops / state.step_seconds / limit if state.step_seconds else None,
        "seconds": state.seconds,
        "examples": state.counts.as_dict(settings.objective),
        "model_dir": str(model_folder),
        "weights_sha256": digest,
    }
