"""`bertsmith finetune`: all runs of a command (seeds, grid), the best one kept as RUN/model, and the summary.

A run that is finished is not made again, one that was killed goes on; so the same command always ends in the same
folder with the same bits.
"""

import json
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bertsmith.errors import UserError
from bertsmith.hardware import Machine, prepare_machine
from bertsmith.inference.predict import predict_file
from bertsmith.model.weights import find_model, read_config
from bertsmith.options import settings_to_toml
from bertsmith.progress import say
from bertsmith.storage import write_text
from bertsmith.tasks.classification import MultilabelTask
from bertsmith.tasks.data import TaskData, open_task_data
from bertsmith.tasks.finetune import BEST, RunPlan, finetune_once, load_best, read_result
from bertsmith.tasks.model_folder import open_tokenizer, save_task_model, start_model
from bertsmith.tasks.pictures import plot_confusion
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.settings import PAPER_GRID, FinetuneSettings
from bertsmith.tasks.task import to_weights
from bertsmith.training.metrics_log import plot_loss
from bertsmith.training.setup import CONFIG_FILE
from bertsmith.training.state import locked_run


def finetune(settings: FinetuneSettings, out: Path) -> dict[str, Any]:
    """Fine-tune as `settings` say in the run folder `out`, resuming what is there; returns the JSON summary.

    Raises UserError, before any training, for files, columns, labels and lengths that do not fit.
    """
    with locked_run(out):
        return _finetune(settings, out)


def _finetune(settings: FinetuneSettings, out: Path) -> dict[str, Any]:
    source = find_model(settings.model)
    config, _ = read_config(source)
    data = open_task_data(settings, config, open_tokenizer(source, config))
    plans = list(make_plans(settings))
    start_model(source, data.task, 0, settings.dropout, settings.random_init)  # what is wrong with it is said now
    machine = prepare_machine(settings.device, settings.precision)
    write_text(out / CONFIG_FILE, settings_to_toml(replace(settings, precision=cast(Any, machine.precision))))
    set_class_weights(settings, data)
    say(f"{machine.describe()}; {len(data.train):,} training examples, {len(plans)} run{'s' * (len(plans) > 1)}")

    results: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    for number, plan in enumerate(plans, 1):
        folder = out if len(plans) == 1 else out / "runs" / plan.name
        result = read_result(folder)
        if result is None:
            if len(plans) > 1:
                say(f"run {number}/{len(plans)}: {plan.name}")
            result = run_one(plan, settings, data, source, machine, folder)
        results.append(result)
        metric = data.task.metric
        if best is None or result["dev"][metric] > best["dev"][metric]:
            if best is not None:
                (Path(best["folder"]) / BEST).unlink(missing_ok=True)
            best = result
        else:
            (folder / BEST).unlink(missing_ok=True)
    assert best is not None
    tests = finish(settings, data, source, best, out)
    return summarize(data, results, best, out) | {"test": tests}


def make_plans(settings: FinetuneSettings) -> Iterator[RunPlan]:
    """Every combination of the grid with every seed."""
    grid = PAPER_GRID if settings.grid == "paper" else {}
    for batch_size in grid.get("batch_size", (settings.batch_size,)):
        for rate in grid.get("learning_rate", (settings.learning_rate,)):
            for epochs in grid.get("epochs", (settings.epochs,)):
                for seed in range(settings.seed, settings.seed + settings.seeds):
                    yield RunPlan(seed, float(rate), int(batch_size), float(epochs))


def run_one(
    plan: RunPlan, settings: FinetuneSettings, data: TaskData, source: Path, machine: Machine, folder: Path
) -> dict[str, Any]:
    """Make one run to its end and write its result.json, the sign that it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    model = start_model(source, data.task, plan.seed, settings.dropout, settings.random_init)
    result = finetune_once(plan, settings, data, model, machine, folder)
    plot_loss(folder, title="Fine-tuning loss")
    if confusion := result["details"].get("confusion"):
        plot_confusion(folder / "confusion.png", confusion, data.task.spec.labels)
    write_text(folder / "result.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if result["degenerate"]:
        say(f"warning: seed {plan.seed}: this run predicts one class only; it learnt nothing (degenerate)")
    return result


def set_class_weights(settings: FinetuneSettings, data: TaskData) -> None:
    """`--class-weights balanced`. Raises UserError for a task without classes."""
    if settings.class_weights == "none":
        return
    task = data.task
    counts = task.class_counts(data.train)
    if counts is None:
        raise UserError(f"class_weights: {task.spec.name} has no classes to balance; leave it out")
    if isinstance(task, MultilabelTask):
        task.set_positive_weights(counts, len(data.train))
    else:
        task.weights = to_weights(counts)
    assert task.weights is not None
    shown = ", ".join(f"{label} {weight:.3g}" for label, weight in zip(task.spec.labels, task.weights, strict=True))
    say(f"class weights: {shown}")


def finish(
    settings: FinetuneSettings, data: TaskData, source: Path, best: dict[str, Any], out: Path
) -> dict[str, dict[str, Any]]:
    """RUN/model from the best run, its pictures beside it, predictions for the test files; the summaries of these."""
    path = Path(best["folder"]) / BEST
    task = data.task
    if "null_threshold" in best["details"]:
        task = make_task(replace(task.spec, null_threshold=best["details"]["null_threshold"]), task.tokenizer)
    if path.is_file():
        model = start_model(source, task, best["seed"], settings.dropout, settings.random_init)
        load_best(path, model)
        save_task_model(out / "model", model, task)
        for picture in ("confusion.png", "loss.png"):
            if Path(best["folder"]) != out and (Path(best["folder"]) / picture).is_file():
                shutil.copyfile(Path(best["folder"]) / picture, out / picture)
        path.unlink()  # RUN/model holds it now
    return {
        name: predict_file(
            out / "model", test, out / f"{name}.predictions.jsonl", settings.device, settings.precision, score=True
        )
        for name, test in data.files.test.items()
    }


def summarize(data: TaskData, results: list[dict[str, Any]], best: dict[str, Any], out: Path) -> dict[str, Any]:
    """The JSON summary: the metric over the seeds of the best setting, and every run."""
    task = data.task
    setting = ("learning_rate", "batch_size", "epochs")
    alike = [r for r in results if all(r[key] == best[key] for key in setting)]
    values = [r["dev"][task.metric] for r in alike]
    shown = {"history", "details", "folder"}
    return {
        "task": task.spec.name,
        "metric": task.metric,
        "dev": best["dev"],
        "runs": [{key: value for key, value in r.items() if key not in shown} for r in results],
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "best": best["dev"][task.metric],
        "best_run": {key: best[key] for key in ("seed", *setting)},
        "degenerate_runs": sum(r["degenerate"] for r in results),
        "per_class": best["details"].get("per_class"),
        "labels": list(task.spec.labels),
        "model_dir": str(out / "model"),
        "data_report": data.report,
    }
