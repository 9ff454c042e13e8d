"""`bertsmith glue`: every GLUE task found in a folder, fine-tuned one after the other; table, score, submission.

Each task is a fine-tuning run of its own in OUT/<task>, so that a command that was killed goes on where it was. AX is
predicted with the model of MNLI. The score is averaged as the leaderboard does it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.hardware import prepare_machine
from bertsmith.inference.predictor import predict_examples
from bertsmith.progress import say
from bertsmith.storage import write_text
from bertsmith.tasks.examples import EncodingReport
from bertsmith.tasks.glue_files import GLUE_TASKS, find_glue_files, find_glue_tasks, glue_name, read_glue
from bertsmith.tasks.model_folder import load_task_model
from bertsmith.tasks.runs import finetune
from bertsmith.tasks.settings import FinetuneSettings
from bertsmith.tasks.submission import glue_score, write_submission

SUBMISSION = "submission.zip"
# split of a task's test files → the name of its file in the submission
_FILES = {"test_matched": "-m", "test_mismatched": "-mm"}


def run_glue(settings: FinetuneSettings, folder: str, out: Path, tasks: Sequence[str] = ()) -> dict[str, Any]:
    """Fine-tune on the tasks named (all found, if none is), predict their test files, write the zip; the summary.

    `settings`: for every task alike; their `task` and files are not looked at. Raises UserError, before any training,
    for tasks and files that are not there.
    """
    found = find_glue_tasks(folder)
    wanted = [glue_name(name) for name in tasks] or list(found)
    if absent := [name for name in wanted if name not in found]:
        raise UserError(f"{folder}: holds no folder for {', '.join(absent)}; it has {', '.join(found)}")
    if "ax" in wanted and "mnli" not in wanted:
        if tasks:
            raise UserError("tasks: ax is predicted with the model of mnli; name mnli too")
        wanted.remove("ax")
    trained = [name for name in wanted if name != "ax"]
    each = {name: replace(settings, task=name, data=found[name], train=None, dev=None, test=None) for name in trained}
    summaries: dict[str, Any] = {}
    for number, name in enumerate(trained, 1):
        say(f"task {number}/{len(trained)}: {GLUE_TASKS[name].title}")
        summaries[name] = finetune(each[name], out / name)
    predictions: dict[str, list[tuple[str, str]]] = {}
    left_out: dict[str, str] = {}
    for name in trained:
        tests = find_glue_files(GLUE_TASKS[name], found[name], "test")
        if not tests:
            left_out[GLUE_TASKS[name].title] = "no test file"
        for split, path in tests.items():
            predictions[GLUE_TASKS[name].title + _FILES.get(split, "")] = predict_test(name, out / name, path, settings)
    if "ax" in wanted:
        (path,) = find_glue_files(GLUE_TASKS["ax"], found["ax"], "test").values()
        predictions["AX"] = predict_test("ax", out / "mnli", path, settings)
    elif "ax" in found:
        left_out["AX"] = "mnli was not run"
    left_out |= {task.title: "not run" for name, task in GLUE_TASKS.items() if name not in (*wanted, "ax")}
    write_submission(out / SUBMISSION, predictions)
    results = {name: summary["dev"] for name, summary in summaries.items()}
    score = glue_score(results)
    write_text(out / "table.md", format_table(summaries, score))
    return {
        "tasks": results,
        "means": {name: {key: s[key] for key in ("metric", "mean", "std", "degenerate_runs")}
                  for name, s in summaries.items()},
        "score": score["score"],
        "score_without_wnli": score["score_without_wnli"],
        "submission": str(out / SUBMISSION),
        "left_out_of_submission": left_out,
        "table": str(out / "table.md"),
        "data_report": {name: summary["data_report"] for name, summary in summaries.items()},
    }  # fmt: skip


def predict_test(name: str, run: Path, path: str, settings: FinetuneSettings) -> list[tuple[str, str]]:
    """(index, prediction) for every row of a test file, spelled as the leaderboard wants it."""
    task, model = load_task_model(run)
    machine = prepare_machine(settings.device, settings.precision)
    model = model.to(machine.device).eval()
    model.bert.compute_dtype = machine.dtype
    rows: list[tuple[str, str]] = []
    examples = read_glue(GLUE_TASKS[name], path, "test", False)
    for chunk, predictions in predict_examples(task, model, examples, machine.device, EncodingReport()):
        for example, row in zip(chunk, predictions, strict=True):
            # a similarity is a number from 0 to 5 on the leaderboard, though nothing keeps a regression within
            shown = f"{min(max(row['score'], 0.0), 5.0):.3f}" if "score" in row else row["label"]
            rows.append((example.id, shown))
    return rows


def format_table(summaries: dict[str, Any], score: dict[str, Any]) -> str:
    """A Markdown table: dev metrics of each task (mean and deviation over seeds where there are several)."""
    lines = ["| task | dev | mean of seeds | degenerate |", "|---|---|---|---|"]
    for name, summary in summaries.items():
        dev = ", ".join(f"{metric} {100 * value:.1f}" for metric, value in summary["dev"].items())
        spread = f"{100 * summary['mean']:.1f}" + (f" ± {100 * summary['std']:.1f}" if summary["std"] else "")
        lines.append(f"| {GLUE_TASKS[name].title} | {dev} | {spread} | {summary['degenerate_runs']} |")
    lines.append(f"| **score** | {score['score']:.1f} | without WNLI {score['score_without_wnli']:.1f} | |")
    return "\n".join(lines) + "\n"
