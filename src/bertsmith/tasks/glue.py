"""`bertsmith glue`: every GLUE task found in a folder, fine-tuned one after the other; table, score, submission.

Each task is a fine-tuning run of its own in OUT/<task>, so that a command that was killed goes on where it was. AX is
predicted with the model of MNLI. The score is averaged as the leaderboard does it.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.inference.predict import predict_file
from bertsmith.options import Recipe, settings_to_toml
from bertsmith.progress import say
from bertsmith.storage import write_text
from bertsmith.tasks.glue_files import (
    GLUE_TASKS,
    find_glue_files,
    find_glue_tasks,
    glue_name,
    read_glue,
    require_glue_files,
)
from bertsmith.tasks.runs import finetune
from bertsmith.tasks.settings import FREE_TO_CHANGE, FinetuneSettings
from bertsmith.tasks.submission import format_similarity, glue_score, write_submission
from bertsmith.text.documents import ReadReport
from bertsmith.training.ranks import ALONE, Ranks, share_settings
from bertsmith.training.setup import settings_of_run

SUBMISSION = "submission.zip"
# split of a task's test files → the name of its file in the submission
_FILES = {"test_matched": "-m", "test_mismatched": "-mm"}


def run_glue(
    settings: FinetuneSettings, folder: str, out: Path, tasks: Sequence[str] = (), ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Fine-tune on the tasks named (all found, if none is), predict their test files, write the zip; the summary.

    `settings`: for every task alike; their `task` and files are not looked at. Tasks that are not named and whose
    folder holds no training file are left out, which is said. Several processes (`ranks`) call it together; all but the
    first one return {}. Raises UserError, before any training, for tasks and files that are not there.
    """
    with ranks.alike():
        found = find_glue_tasks(folder)
        wanted, empty = choose_tasks(folder, found, tasks)
    trained = [name for name in wanted if name != "ax"]
    each = {
        name: share_settings(FinetuneSettings, partial(settings_of_task, settings, name, found[name], out), ranks)
        for name in trained
    }
    with ranks.alike():
        check_files(wanted, found)
    summaries: dict[str, Any] = {}
    for number, name in enumerate(trained, 1):
        say(f"task {number}/{len(trained)}: {GLUE_TASKS[name].title}")
        summaries[name] = finetune(each[name], out / name, ranks)
    if "ax" in wanted:
        (path,) = require_glue_files(GLUE_TASKS["ax"], found["ax"], "test").values()
        predicted = out / "mnli" / "ax.predictions.jsonl"
        predict_file(out / "mnli", path, predicted, settings.device, settings.precision, part_of="ax", ranks=ranks)
    return write_results(out, wanted, found, empty, summaries) if ranks.is_first else {}


def choose_tasks(folder: str, found: Mapping[str, str], tasks: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The tasks to run, of those found (task → its folder); and of those that cannot be, why.

    Raises UserError for names that are not there, and where nothing is to be run.
    """
    wanted = list(dict.fromkeys(glue_name(name) for name in tasks)) or list(found)
    if absent := [name for name in wanted if name not in found]:
        raise UserError(f"{folder}: holds no folder for {', '.join(absent)}; it has {', '.join(found)}")
    if "ax" in wanted and "mnli" not in wanted:
        if tasks:
            raise UserError("tasks: ax is predicted with the model of mnli; name mnli too")
        wanted.remove("ax")
    empty = {} if tasks else find_empty(wanted, found)
    for name, reason in empty.items():
        say(f"{GLUE_TASKS[name].title} is left out: {reason}")
        wanted.remove(name)
    if not wanted:
        raise UserError(
            f"{folder}: none of its {len(empty)} task folders holds a training file; there is nothing to do"
        )
    return wanted, empty


def write_results(
    out: Path,
    wanted: Sequence[str],
    found: Mapping[str, str],
    empty: Mapping[str, str],
    summaries: dict[str, Any],
) -> dict[str, Any]:
    """Submission and table from what every task's run left in OUT/<task>; the JSON summary."""
    predictions: dict[str, list[tuple[str, str]]] = {}
    left_out: dict[str, str] = {}
    for name in summaries:
        tests = find_glue_files(GLUE_TASKS[name], found[name], "test")
        if not tests:
            left_out[GLUE_TASKS[name].title] = "no test file"
        for split, path in tests.items():  # `finetune` has predicted them
            title = GLUE_TASKS[name].title + _FILES.get(split, "")
            predictions[title] = spell_predictions(name, path, out / name / f"{split}.predictions.jsonl")
    if "ax" in wanted:
        (path,) = require_glue_files(GLUE_TASKS["ax"], found["ax"], "test").values()
        predictions["AX"] = spell_predictions("ax", path, out / "mnli" / "ax.predictions.jsonl")
    for name, task in GLUE_TASKS.items():
        if name not in wanted:
            left_out[task.title] = empty.get(name, "not run" if name in found else "no folder for it")
    for remark in write_submission(out / SUBMISSION, predictions):
        say(f"note: {remark}")
    score = glue_score(leaderboard_results(summaries))
    write_text(out / "table.md", format_table(summaries, score))
    return {
        "tasks": {name: summary["dev"] for name, summary in summaries.items()},
        "seeds": {
            name: {key: summary[key] for key in ("metric", "mean", "std", "degenerate_runs")}
            for name, summary in summaries.items()
        },
        "task_scores": score.pop("tasks"),
        **score,
        "submission": str(out / SUBMISSION),
        "left_out_of_submission": left_out,
        "table": str(out / "table.md"),
        "data_report": {name: summary["data_report"] for name, summary in summaries.items()},
    }


def find_empty(tasks: Sequence[str], folders: Mapping[str, str]) -> dict[str, str]:
    """Task → why it cannot be run, of those without a file to begin with."""
    empty = {
        name: f"{folders[name]} holds no {part} file"
        for name in tasks
        for part in ["test" if name == "ax" else "train"]
        if not find_glue_files(GLUE_TASKS[name], folders[name], part)
    }
    if "mnli" in empty and "ax" in tasks:
        empty.setdefault("ax", "it is predicted with the model of MNLI, which is left out")
    return empty


def settings_of_task(settings: FinetuneSettings, name: str, folder: str, out: Path) -> FinetuneSettings:
    """The settings of one task's run. Raises UserError where OUT/<task> was begun with others."""
    own = replace(settings, task=name, data=folder, train=None, dev=None, test=None)
    recipe = Recipe(tomllib.loads(settings_to_toml(own)), "command line")
    return settings_of_run(FinetuneSettings, FREE_TO_CHANGE, out / name, recipe, [])


def check_files(tasks: Sequence[str], folders: Mapping[str, str]) -> None:
    """Read every file once: a broken one is named now, and not when the tasks before it are done."""
    for name in tasks:
        task = GLUE_TASKS[name]
        files = {("test", path) for path in find_glue_files(task, folders[name], "test").values()}
        for part in ("test",) if name == "ax" else ("train", "dev"):
            files |= {(part, path) for path in require_glue_files(task, folders[name], part).values()}
        for part, path in sorted(files):
            for _ in read_glue(task, path, part, report=ReadReport()):
                pass


def leaderboard_results(summaries: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Dev metrics by the leaderboard's names, MNLI's two files apart."""
    results: dict[str, dict[str, float]] = {}
    for name, summary in summaries.items():
        title, dev = GLUE_TASKS[name].title, summary["dev"]
        if name == "mnli":
            results["MNLI-m"] = {"accuracy": dev["accuracy"]}
            if "mismatched_accuracy" in dev:
                results["MNLI-mm"] = {"accuracy": dev["mismatched_accuracy"]}
        else:
            results[title] = dev
    return results


def spell_predictions(name: str, path: str, predicted: Path) -> list[tuple[str, str]]:
    """(index, prediction) for every row of a test file, spelled as the leaderboard wants it."""
    with predicted.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    examples = read_glue(GLUE_TASKS[name], path, "test", False)
    return [
        (example.id, format_similarity(row["score"]) if "score" in row else row["label"])
        for example, row in zip(examples, rows, strict=True)
    ]


def format_table(summaries: dict[str, Any], score: dict[str, Any]) -> str:
    """A Markdown table: dev metrics of each task (mean and deviation over seeds where there are several)."""
    lines = ["| task | dev | mean of seeds | degenerate |", "|---|---|---|---|"]
    for name, summary in summaries.items():
        dev = ", ".join(f"{metric} {100 * value:.1f}" for metric, value in summary["dev"].items())
        spread = f"{100 * summary['mean']:.1f}" + (
            f" ± {100 * summary['std']:.1f}" if summary["std"] is not None else ""
        )
        lines.append(f"| {GLUE_TASKS[name].title} | {dev} | {spread} | {summary['degenerate_runs']} |")
    shown = {key: "none" if score[key] is None else f"{score[key]:.1f}" for key in ("score", "score_without_wnli")}
    lines.append(f"| **score** | {shown['score']} | without WNLI {shown['score_without_wnli']} | |")
    return "\n".join(lines) + "\n"
