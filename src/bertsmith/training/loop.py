"""The pre-training loop, from settings to a finished model folder; it reads from top to bottom.

Everything random in a step is a function of (seed, step or example), so a run that was killed and resumed, once or ten
times, takes the same steps on the same batches as one that was not. Devlin et al. 2018, section 3.1 and appendix A.2.
"""

import hashlib
import math
import time
from contextlib import nullcontext
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, cast

import torch

from bertsmith.corpus.batches import Batch, BatchCounts, describe_example, split_batch
from bertsmith.corpus.loader import PrefetchingLoader
from bertsmith.errors import UserError
from bertsmith.model.compiled import compile_encoder, hashed_masks
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.weights import WEIGHTS, save_model
from bertsmith.options import settings_to_toml
from bertsmith.progress import say
from bertsmith.storage import atomic_folder, write_text
from bertsmith.training.checkpoint import find_newest_checkpoint, save_checkpoint
from bertsmith.training.device_batches import BatchShape, DeviceFeed
from bertsmith.training.distributed import load_optimizer, spread_model, whole_model, whole_tensors
from bertsmith.training.evaluation import evaluate
from bertsmith.training.metrics_log import MetricsLog, NoMetricsLog, ProgressLine, describe_references, plot_loss
from bertsmith.training.optimizer import BertOptimizer, clip_gradients
from bertsmith.training.ranks import ALONE, Ranks
from bertsmith.training.schedule import phase_of
from bertsmith.training.settings import PretrainSettings
from bertsmith.training.setup import (
    CONFIG_FILE,
    TrainingData,
    choose_compiled,
    evaluation_stream,
    find_start,
    fixed_settings,
    micro_batch_size,
    open_data,
    take_machine,
    training_streams,
)
from bertsmith.training.state import (
    MOST_BAD_STEPS,
    Interrupts,
    LogWindow,
    RunState,
    count_work,
    locked_run,
    window_metrics,
)

# on a slow machine a line on the terminal at least this often
MOST_SILENT_SECONDS = 20.0
EXAMPLE_LEGEND = (
    "the first training examples: [MASK]{word} is a masked token and what it was, new{old} one replaced at random, "
    "same{same} one to be guessed though it stands there"
)


def pretrain(settings: PretrainSettings, out: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Pre-train as `settings` say, in the run folder `out`, resuming what is there; returns the JSON summary.

    Several processes (`ranks`, see ranks.py) call it together with the same settings; all but the first one
    return {}. Batches, their order and their masks do not depend on how many there are, losses by rounding only;
    dropout masks depend on `micro_batch_size`, whose default does depend on it.

    Raises UserError before any work for settings, corpus or folder that do not fit, and when the loss diverges or stays
    NaN; KeyboardInterrupt after Ctrl-C or SIGTERM, with a checkpoint written.
    """
    with locked_run(out) if ranks.is_first else nullcontext():
        return _pretrain(settings, out, ranks)


def _pretrain(settings: PretrainSettings, out: Path, ranks: Ranks) -> dict[str, Any]:
    # -- set-up: all mistakes are found before anything is written
    with ranks.alike():
        data = open_data(settings)
        budget, schedule, phases = settings.budget, settings.learning_rate_schedule, settings.phases
        streams = training_streams(settings, data)
        held_out = evaluation_stream(settings, data)
    start = find_start(settings, data, out, ranks)
    model, state, machine, checkpoint = start.model, start.state, start.machine, start.checkpoint
    device = machine.device
    model.bert.compute_dtype = machine.dtype
    with ranks.alike():
        compiled = choose_compiled(settings.compile, machine, model.config)
    if compiled:
        compile_encoder(model.bert)
    model_built = time.monotonic()
    if checkpoint is not None:
        model.load_state_dict(checkpoint.load_weights(model.state_dict()))
    spread = spread_model(model, settings.parallel, ranks, machine)
    model = spread.model
    optimizer = BertOptimizer(model.named_parameters(), settings.optimizer, arithmetic=machine.dtype)
    if start.resumed:
        load_optimizer(optimizer, checkpoint, ranks)
    take_machine(state, settings, machine, ranks.size, compiled)
    (matmul_flops,), _ = ranks.agree([machine.matmul_flops])
    state.settings = fixed_settings(settings) | {"precision": machine.precision}
    state.budget = {"steps": settings.steps, "minutes": settings.minutes, "epochs": settings.epochs}
    if ranks.is_first:
        # with the precision found, so that config.toml repeats the run even where the two are about as fast
        write_text(out / CONFIG_FILE, settings_to_toml(replace(settings, precision=cast(Any, machine.precision))))
    processes = f"{ranks.size} processes ({settings.parallel}), each on " if ranks.size > 1 else ""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{processes}{machine.describe()}; {parameters:,} parameters; {budget.describe()}")
    say(describe_references(data.ln_vocab, data.corpus.unigram_entropy))
    for message in streams[settings.max_length].planner.warnings():
        say(f"warning: {message}")

    worst_loss = data.ln_vocab + (math.log(2) if settings.paired else 0.0)
    log_every = settings.log.every or (1 if settings.steps is not None and settings.steps < 200 else 10)
    progress_line = ProgressLine(settings.steps)
    resumed_step = state.step if start.resumed else None
    saved_step, changed = resumed_step, not start.resumed
    resume_seconds: float | None = None
    resumed_seconds, begun = state.seconds, time.monotonic()
    last_checkpoint, last_shown = state.seconds, begun
    loader: PrefetchingLoader | None = None
    feed: DeviceFeed

    with (
        MetricsLog(out, resumed_step) if ranks.is_first else NoMetricsLog() as log,
        Interrupts(patient=ranks.size > 1) as interrupts,
    ):
        # What follows is decided by every rank for itself from what all of them know: the steps, the losses of all,
        # the time by the first one's clock.

        def clock() -> float:
            return ranks.agree((), (resumed_seconds + time.monotonic() - begun,))[1][0]

        def asked_to_stop() -> bool:
            return ranks.agree((interrupts.requested,))[0][0] > 0

        def stop(what: str) -> UserError:
            return ranks.stop(stop_message(out, what) if ranks.is_first else what)

        def used() -> float:
            return budget.progress(state.step, state.epochs, state.seconds)

        def log_window() -> bool:
            if not state.window.steps:
                return False
            metrics = window_metrics(state, matmul_flops, settings.paired)
            log.write(state.step, metrics)
            progress_line.show(state.step, metrics, used())
            state.train_loss, state.window = metrics["loss"], LogWindow()
            if state.divergence.update(metrics["loss"], worst_loss):
                raise stop(f"the loss diverged: it is {metrics['loss']:.2f}")
            return True

        def evaluate_held_out() -> bool:
            wanted = (state.step, settings.eval.examples)
            if held_out is None or (state.evaluated_step, state.evaluated_examples) == wanted:
                return False
            state.evaluated_step, state.evaluated_examples = wanted
            batches = held_out.evaluation_batches(settings.eval.examples, rank=ranks.rank, world_size=ranks.size)
            state.evaluation = evaluate(model, batches, device, ranks)
            log_evaluation(log, progress_line, state)
            return True

        def write_checkpoint() -> None:
            nonlocal saved_step, last_checkpoint, changed
            log.sync()
            state.seconds = clock()
            weights = whole_tensors(model.state_dict(), ranks)
            moments = whole_tensors(optimizer.state_tensors(), ranks)
            if ranks.is_first:
                save_checkpoint(out, state.step, weights, moments, state.as_dict(), settings.checkpoint.keep)
            saved_step, last_checkpoint, changed = state.step, clock(), False

        try:
            while (progress := used()) < 1:
                # -- once in a while: other sequence lengths from here on
                phase = phase_of(progress, phases)
                stream = streams[phases[phase].max_length]
                if phase != state.phase:
                    state.enter_phase(phase, stream.corpus)
                    if loader is not None:
                        loader.close()
                        loader = None
                if loader is None:
                    if not state.micro_batch_size:
                        state.micro_batch_size = micro_batch_size(settings, stream.max_length, device, ranks.size)
                    loader = PrefetchingLoader(
                        stream,
                        state.position,
                        settings.examples.workers,
                        rank=ranks.rank,
                        world_size=ranks.size,
                        run=state.micro_batch_size,  # whole micro-batches, the same ones for any number of ranks
                        epochs=None
                        if settings.epochs is None
                        else math.ceil(settings.epochs + state.epochs_passed_over),
                    )
                    shape = BatchShape.of(stream, state.micro_batch_size) if compiled else None
                    feed = DeviceFeed(loader, device, state.micro_batch_size, shape)

                # -- the step
                step_begun = time.monotonic()
                is_first = state.counts.examples == 0
                batch = feed.next_batch()
                if batch is None:  # the epochs asked for are read
                    break
                counts, squares = count_batch(batch, ranks)
                state.counts.merge(counts)
                if checkpoint is not None and resume_seconds is None:
                    resume_seconds = time.monotonic() - model_built
                    say(f"training goes on {resume_seconds:.2f} s after the model was built")
                if is_first and settings.log.examples:
                    say(EXAMPLE_LEGEND)
                    for n in range(min(settings.log.examples, len(batch))):
                        say(describe_example(batch, n, data.tokenizer, settings.objective))
                losses = torch.zeros(2, device=device)
                micros = split_batch(batch, state.micro_batch_size)
                micros = ranks.even_out(micros, counts.examples, state.micro_batch_size)
                for turn, tensors in enumerate(feed.on_device(micros)):
                    number = turn * ranks.size + ranks.rank  # in the whole batch
                    key = (settings.seed, state.step + state.skipped_steps, number)
                    masks = hashed_masks(model.config, key, device) if compiled else DropoutMasks(key)
                    with spread.micro_batch(last=turn == len(micros) - 1):
                        loss = spread(
                            **tensors,
                            # over the targets of all ranks, whose gradients are averaged
                            mlm_scale=ranks.size / max(counts.masked, 1),
                            nsp_scale=ranks.size / counts.examples,
                            masks=masks,
                        )
                        loss.total.backward()
                    losses[0] += loss.mlm
                    if loss.nsp is not None:
                        losses[1] += loss.nsp
                clipped_from = clip_gradients(model.parameters(), settings.clip_norm)
                # the one time a step that the host waits for the device
                norm, *own_losses = torch.stack([clipped_from, *losses]).tolist()
                losses_of_all, (norm,) = ranks.agree(own_losses, (norm,))
                mlm_loss, nsp_loss = (loss / ranks.size for loss in losses_of_all)
                is_good = math.isfinite(norm + mlm_loss + nsp_loss)
                if is_good:
                    factor = schedule.factor(state.step, progress)
                    optimizer.step(factor)
                    state.count_update(mlm_loss, nsp_loss, norm, factor * schedule.peak)
                else:
                    state.count_skip()
                optimizer.zero_grad()
                state.position, changed = batch.position, True
                now = time.monotonic()
                (stops,), (state.seconds,) = ranks.agree((interrupts.requested,), (resumed_seconds + now - begun,))
                count_work(state, model.config, counts, squares, settings.paired, now - step_begun, matmul_flops)

                if not is_good:
                    progress_line.say(f"warning: step {state.step + 1}: loss or gradient is not finite; batch skipped")
                    if state.bad_in_a_row >= MOST_BAD_STEPS:
                        raise stop(f"{MOST_BAD_STEPS} steps in a row gave no finite gradient")
                if used() >= 1:
                    break  # what follows is done at the end

                # -- once in a while: log, evaluate, write a checkpoint
                if state.step % log_every == 0:
                    log_window()
                    last_shown = now
                elif now - last_shown >= MOST_SILENT_SECONDS and state.window.steps:
                    # slow steps: a person is told all the same, the log keeps its rhythm
                    progress_line.show(state.step, window_metrics(state, matmul_flops, settings.paired), used())
                    last_shown = now
                if settings.eval.every and state.step % settings.eval.every == 0:
                    evaluate_held_out()
                due = settings.checkpoint.every and state.step % settings.checkpoint.every == 0
                late = (
                    settings.checkpoint.minutes and state.seconds - last_checkpoint >= 60 * settings.checkpoint.minutes
                )
                # a loss that runs away does not push out the checkpoints of when it was well
                if ((due and state.step != saved_step) or late) and not state.divergence.strikes:
                    write_checkpoint()
                if stops:
                    break
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"memory ran out with {state.micro_batch_size} sequences at once; the same command with a smaller "
                f"--micro-batch-size goes on from the last checkpoint (results change by rounding only): {error}"
            ) from error
        finally:
            progress_line.close()
            if loader is not None:
                loader.close()

        # -- the end: held-out loss, final state, model folder
        if not asked_to_stop():
            logged, evaluated = log_window(), evaluate_held_out()
            changed = changed or logged or evaluated
        if changed:
            write_checkpoint()
        if asked_to_stop():
            say(f"interrupted: the run is saved at step {state.step:,}; the same command resumes it")
            raise KeyboardInterrupt

    model_folder = out / "model"
    weights = whole_tensors(model.state_dict(), ranks)
    if not ranks.is_first:
        return {}
    with atomic_folder(model_folder) as partial:
        save_model(partial, whole_model(model, weights), settings.objective)
        data.tokenizer.save(partial)
    plot_loss(out, data.ln_vocab, data.corpus.unigram_entropy)
    if state.evaluation and state.evaluation.mlm_loss > data.corpus.unigram_entropy:
        say(
            f"note: the held-out MLM loss of {state.evaluation.mlm_loss:.2f} is not below the unigram entropy of "
            f"{data.corpus.unigram_entropy:.2f}: after {state.step:,} steps the model knows little more than which "
            "tokens are frequent; the same command with a longer budget goes on from here"
        )
    return summarize(settings, data, state, model_folder) | {
        "precision": machine.precision,
        "resumed_from_step": None if resume_seconds is None else resumed_step,
        "resume_seconds": None if resume_seconds is None else round(resume_seconds, 3),
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch, on either kind of device, or Python could not have the memory asked for."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def count_batch(batch: Batch, ranks: Ranks) -> tuple[BatchCounts, int]:
    """What the whole batch holds, of which this rank has `batch`; and Σ length², what attention's work goes by."""
    own = BatchCounts()
    own.add(batch)
    lengths = batch.sequence_starts[1:] - batch.sequence_starts[:-1]
    sums, _ = ranks.agree((*astuple(own), int((lengths**2).sum())))
    *values, squares = map(int, sums)
    return BatchCounts(*values), squares


def log_evaluation(log: MetricsLog, line: ProgressLine, state: RunState) -> None:
    """Write and say what the evaluation just made found."""
    evaluation = state.evaluation
    if evaluation is None:
        return
    log.write(state.step, evaluation.as_metrics() | {"seconds": state.seconds})
    text = f"step {state.step:,}: held-out MLM loss {evaluation.mlm_loss:.3f}, accuracy {evaluation.mlm_accuracy:.1%}"
    if evaluation.nsp_accuracy is not None:
        text += f", next-sentence accuracy {evaluation.nsp_accuracy:.1%}"
    line.say(f"{text} ({evaluation.examples:,} examples)")


def stop_message(out: Path, what: str) -> str:
    """Why the run stops, what is left of it, and what to do."""
    checkpoint, _ = find_newest_checkpoint(out)
    left = f"the last good checkpoint is {checkpoint.folder}" if checkpoint else "no checkpoint was due yet"
    return f"{what}; {left}. Lower --learning-rate or lengthen --warmup, and start again with another --out"


def summarize(settings: PretrainSettings, data: TrainingData, state: RunState, model_folder: Path) -> dict[str, Any]:
    """The JSON summary: nothing but what the run's state, corpus and model folder hold."""
    no_evaluation = {"eval_loss": None, "eval_mlm_loss": None, "eval_mlm_accuracy": None, "eval_nsp_accuracy": None}
    with (model_folder / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    summary = {
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "tokens": state.counts.tokens,
        "epochs": state.epochs,
        "train_loss": state.train_loss,
        **(state.evaluation.as_metrics() if state.evaluation else no_evaluation),
        "unigram_entropy": data.corpus.unigram_entropy,
        "ln_vocab": data.ln_vocab,
        "tokens_per_second": state.counts.tokens / state.step_seconds if state.step_seconds else None,
        "utilization": state.flops / state.possible_flops if state.possible_flops else None,
        "seconds": state.seconds,
        "examples": state.counts.as_dict(settings.objective),
        "model_dir": str(model_folder),
        "weights_sha256": digest,
    }
    # JSON has no word for NaN and infinity
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
