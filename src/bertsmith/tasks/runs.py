"""`bertsmith finetune`: all runs of a command (seeds, grid), the best one kept as RUN/model, and the summary.

A run that is finished is not made again, one that was killed goes on; so the same command always ends in the same
folder with the same bits.
"""

import contextlib
import json
import shutil
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bertsmith.errors import UserError
from bertsmith.hardware import Machine
from bertsmith.inference.predict import open_for_prediction, predict_file
from bertsmith.inference.predictor import predict_examples
from bertsmith.inference.row_writer import open_row_writer
from bertsmith.model.weights import find_model, read_config
from bertsmith.options import settings_to_toml
from bertsmith.progress import say
from bertsmith.storage import write_text
from bertsmith.tasks.classification import ClassifyTask, MultilabelTask
from bertsmith.tasks.data import TaskData, open_task_data
from bertsmith.tasks.examples import (
    EncodingReport,
    Example,
    QuestionExample,
    TaggedExample,
    TextExample,
    class_name,
)
from bertsmith.tasks.finetune import finetune_once
from bertsmith.tasks.model_folder import (
    empty_model,
    open_tokenizer,
    save_task_model,
    say_random_positions,
    start_model,
    weights_sha256,
)
from bertsmith.tasks.ner import TaggingTask
from bertsmith.tasks.pictures import plot_confusion
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.run_state import (
    RunPlan,
    best_weights,
    check_inputs,
    drop_other_weights,
    load_best,
    merit,
    note_inputs,
    read_result,
)
from bertsmith.tasks.settings import PAPER_GRID, FinetuneSettings
from bertsmith.tasks.task import to_weights
from bertsmith.training.metrics_log import plot_loss
from bertsmith.training.ranks import ALONE, Ranks, check_same, prepare_machines
from bertsmith.training.setup import CONFIG_FILE
from bertsmith.training.state import locked_run

_REMEDY = "raise --learning-rate (small models and small files want 1e-4 to 3e-4) or --epochs"


def finetune(settings: FinetuneSettings, out: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Fine-tune as `settings` say in the run folder `out`, resuming what is there; returns the JSON summary.

    Several processes (`ranks`, see training/ranks.py) call it together with the same settings; all but the first one
    return {}. Raises UserError, before any training, for files, columns, labels and lengths that do not fit.
    """
    with contextlib.ExitStack() as lock:
        with ranks.alike():
            if ranks.is_first:
                lock.enter_context(locked_run(out))
        return _finetune(settings, out, ranks)


def _finetune(settings: FinetuneSettings, out: Path, ranks: Ranks) -> dict[str, Any]:
    plans = list(make_plans(settings))
    with ranks.alike():
        source = find_model(settings.model)
        config, _ = read_config(source)
        data = open_task_data(settings, config, open_tokenizer(source, config))
        set_class_weights(settings, data)
        if not settings.random_init:
            say_random_positions(source, config, length := data.task.spec.max_length, length)
        if ranks.is_first:
            begun = check_runs(plans, out)
        # what is wrong with the model is said now
        start = start_model(source, data.task, 0, settings.dropout, settings.random_init)
        # of the rows and of the weights that every run begins with
        inputs = weights_sha256(start, data.sha256.encode())
        if ranks.is_first:
            # of the encoder alone: the new layer's shape is the training file's
            note_inputs(out, {"model": weights_sha256(start.bert), **data.parts}, begun)
        del start
    check_same(inputs, f"model, data: {settings.model} or the task's files", ranks)
    machine = prepare_machines(settings.device, settings.precision, ranks)
    settings = replace(settings, precision=cast(Any, machine.precision))
    if ranks.is_first:
        write_text(out / CONFIG_FILE, settings_to_toml(settings))
    processes = f"{ranks.size} processes, each on " if ranks.size > 1 else ""
    runs = f"{len(plans)} run{'s' * (len(plans) > 1)}"
    say(f"{processes}{machine.describe()}; {len(data.train):,} training examples, {runs}")

    if isinstance(data.task, ClassifyTask) and data.task.glue is None and data.task.positive is not None:
        say(f"f1 is that of label {data.task.positive!r}, macro_f1 the mean of both labels'")
    if isinstance(data.task, TaggingTask):
        say(f"tags are read as {data.task.spec.scheme}, as the whole of {data.files.train} has them")

    results: list[dict[str, Any]] = []
    made = best = 0  # the number of the best run so far: the only one whose weights stay on disk
    folders = [run_folder(plan, plans, out) for plan in plans]
    for number, (plan, folder) in enumerate(zip(plans, folders, strict=True)):
        result = ranks.share(read_result(folder) if ranks.is_first else None)
        if result is None:
            if len(plans) > 1:
                say(f"run {number + 1}/{len(plans)}: {plan.name}")
            result = ranks.share(run_one(plan, settings, data, source, machine, folder, inputs, ranks))
            made += 1
        with ranks.alike():
            check_inputs(result["inputs_sha256"], inputs, folder)
        results.append(result)
        better = merit(result, data.task) > merit(results[best], data.task)
        if ranks.is_first:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            drop_other_weights(folder, [result["best_step"]])
            if number:
                drop_other_weights(folders[best] if better else folder, [])
        best = number if better else best
    if not made:
        say(f"{out}: is finished already, and nothing was trained; these are its results (--out NEW trains again)")
    elif made < len(plans):
        say(f"{out}: {len(plans) - made} of {runs} were finished already; trained now: {made}")
    with ranks.alike():  # the others wait for the model, to predict with it
        if ranks.is_first:
            keep_best(settings, data, source, results[best], folders[best], out)
    tests = {
        name: predict_file(
            out / "model",
            test,
            out / f"{name}.predictions.jsonl",
            settings.device,
            settings.precision,
            score=True,
            ranks=ranks,
        )
        for name, test in data.files.test.items()
    }
    held_out = None if settings.dev_share is None else predict_held_out(data, settings, out, ranks)
    if not ranks.is_first:
        return {}
    return summarize(data, results, results[best], out) | {"held_out_predictions": held_out, "test": tests}


def run_folder(plan: RunPlan, plans: Sequence[RunPlan], out: Path) -> Path:
    """One run lies in RUN itself, each of several in a folder of its own."""
    return out if len(plans) == 1 else out / "runs" / plan.name


def check_runs(plans: Sequence[RunPlan], out: Path) -> bool:
    """Whether RUN holds runs begun. Raises UserError where they are not asked for; `--seeds` may grow from two up."""
    begun = {file.parent.name for kept in ("result.json", "checkpoints") for file in out.glob(f"runs/*/{kept}")}
    asked = {plan.name for plan in plans} if len(plans) > 1 else set()
    single = (out / "result.json").exists() or (out / "checkpoints").exists()
    if (single and asked) or begun - asked:
        what = "a single run" if single else f"{len(begun)} runs"
        raise UserError(
            f"{out}: holds {what} and {len(plans)} are asked for: to several, more can be added by --seeds, all else "
            "needs another --out"
        )
    return single or bool(begun)


def make_plans(settings: FinetuneSettings) -> Iterator[RunPlan]:
    """Every combination of the grid with every seed."""
    grid = PAPER_GRID if settings.grid == "paper" else {}
    for batch_size in grid.get("batch_size", (settings.batch_size,)):
        for rate in grid.get("learning_rate", (settings.learning_rate,)):
            for epochs in grid.get("epochs", (settings.epochs,)):
                for seed in range(settings.seed, settings.seed + settings.seeds):
                    yield RunPlan(seed, float(rate), int(batch_size), float(epochs))


def run_one(
    plan: RunPlan,
    settings: FinetuneSettings,
    data: TaskData,
    source: Path,
    machine: Machine,
    folder: Path,
    inputs: str,
    ranks: Ranks,
) -> dict[str, Any]:
    """Make one run to its end and write its result.json, the sign that it is whole; the result is the first rank's."""
    if ranks.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    model = start_model(source, data.task, plan.seed, settings.dropout, settings.random_init)
    result = finetune_once(plan, settings, data, model, machine, folder, inputs, ranks)
    if not ranks.is_first:
        return {}
    result["f1_label"] = data.task.f1_label
    plot_loss(folder, title="Fine-tuning loss")
    if confusion := result["details"].get("confusion"):
        plot_confusion(folder / "confusion.png", confusion, data.task.spec.labels)
    write_text(folder / "result.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    largest = largest_class(data)
    if result["degenerate"]:
        say(f"warning: seed {plan.seed}: {data.task.degenerate_run} (degenerate); {_REMEDY}")
    elif largest is not None and result["dev"].get("accuracy", 1.0) <= largest["accuracy"]:
        say(
            f"warning: seed {plan.seed}: no better than always answering {largest['label']!r} (accuracy "
            f"{largest['accuracy']:.4g}); {_REMEDY}"
        )
    return result


def set_class_weights(settings: FinetuneSettings, data: TaskData) -> None:
    """`--class-weights balanced`. Raises UserError for a task without classes."""
    if settings.class_weights == "none":
        return
    task = data.task
    counts = task.class_counts(data.train)
    if counts is None:
        raise UserError(f"--class-weights: {task.spec.name} has no classes to balance; leave it out")
    if isinstance(task, MultilabelTask):
        task.set_positive_weights(counts, len(data.train))
    else:
        task.weights = to_weights(counts)
    assert task.weights is not None
    shown = ", ".join(f"{label} {weight:.3g}" for label, weight in zip(task.spec.labels, task.weights, strict=True))
    say(f"class weights: {shown}")


def keep_best(
    settings: FinetuneSettings, data: TaskData, source: Path, best: dict[str, Any], folder: Path, out: Path
) -> None:
    """Make RUN/model of the best run's weights, which then lie there only, and put its pictures beside it."""
    path, task = best_weights(folder, best["best_step"]), data.task
    if not path.is_file() and not (out / "model").is_dir():
        raise UserError(f"{out / 'model'}: is gone, and with it the best run's weights; make them with another --out")
    if "null_threshold" in best["details"]:
        task = make_task(replace(task.spec, null_threshold=best["details"]["null_threshold"]), task.tokenizer)
    if path.is_file():
        model = empty_model(source, task, settings.dropout)
        load_best(path, model)
        save_task_model(out / "model", model, task)
        for picture in ("confusion.png", "loss.png"):
            if folder != out and (folder / picture).is_file():
                shutil.copyfile(folder / picture, out / picture)
        path.unlink()


def predict_held_out(data: TaskData, settings: FinetuneSettings, out: Path, ranks: Ranks) -> str:
    """What the model predicts for the examples that `--dev-share` held out, each with its `place` and what is right
    (`true_label`, or `true_labels`, `true_tags`, `true_answers`); returns the path."""
    path = out / "held_out.predictions.jsonl"
    task, model, device = open_for_prediction(out / "model", settings.device, settings.precision, {}, ranks)
    (dev,) = data.dev.values()
    with open_row_writer(path) if ranks.is_first else contextlib.nullcontext() as writer:
        for chunk, rows in predict_examples(task, model, dev.examples, device, EncodingReport(), ranks=ranks):
            assert writer is not None, "only the first rank gets predictions"
            writer.write(
                [{"place": example.place} | truth_of(example) | row for example, row in zip(chunk, rows, strict=True)]
            )
    return str(path)


def truth_of(example: Example) -> dict[str, Any]:
    """What an example's prediction is held against, by name."""
    match example:
        case QuestionExample():
            return {"true_answers": [answer.text for answer in example.answers or ()]}
        case TaggedExample():
            return {"true_tags": list(example.tags or ())}
        case TextExample(label=tuple(labels)):
            return {"true_labels": list(labels)}
    return {"true_label": example.label}


def largest_class(data: TaskData) -> dict[str, Any] | None:
    """The class that most dev examples are of, and the `accuracy` of always answering it; None without classes."""
    counts = Counter(class_name(example) for example in next(iter(data.dev.values())).examples)
    if not data.task.named_classes or "" in counts:
        return None
    label, count = max(counts.items(), key=lambda item: (item[1], item[0]))
    return {"label": label, "accuracy": count / counts.total()}


def summarize(data: TaskData, results: list[dict[str, Any]], best: dict[str, Any], out: Path) -> dict[str, Any]:
    """The JSON summary: the metric over the seeds of the best setting, and every run."""
    task = data.task
    setting = ("learning_rate", "batch_size", "epochs")
    alike = [r for r in results if all(r[key] == best[key] for key in setting)]
    values = [r["dev"][task.metric] for r in alike]
    left_out = {"history", "details", "inputs_sha256"}
    return {
        "task": task.spec.name,
        "metric": task.metric,
        "dev": best["dev"],
        "f1_label": task.f1_label,
        "largest_class": largest_class(data),
        "runs": [{key: value for key, value in r.items() if key not in left_out} for r in results],
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "best": best["dev"][task.metric],
        "worst": min(values),
        "best_run": {key: best[key] for key in ("seed", *setting)},
        "degenerate_runs": sum(r["degenerate"] for r in results),
        "per_class": best["details"].get("per_class"),
        "labels": list(task.spec.labels),
        "model_dir": str(out / "model"),
        "data_report": data.report,
    }
