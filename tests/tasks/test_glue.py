"""`bertsmith glue` over all ten tasks in their official layout, tiny: zip, table, score; killed between tasks."""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import UserError
from bertsmith.inference.predict import evaluate_file
from bertsmith.tasks import glue
from bertsmith.tasks.glue import run_glue, settings_of_task
from bertsmith.tasks.glue_files import GLUE_TASKS
from bertsmith.tasks.submission import check_submission, glue_score, missing_files
from made_tasks import Crash, StepProbe, make_settings, timeless, write_glue

TITLES = {name: task.title for name, task in GLUE_TASKS.items()}


def run(folder: Path, out: Path, model: Path, tasks: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    settings = make_settings("mnli", model, data=folder, **{"epochs": 1, "batch_size": 4, **changes})
    return run_glue(settings, str(folder), out, tasks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glue(tmp_path_factory.mktemp("glue") / "glue")


def test_all_ten(folder: Path, model: Path, tmp_path: Path, steps: StepProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one command; killed before the fourth task and in it, it goes on."""
    finetune = glue.finetune
    begun: list[str] = []

    def counted(settings: Any, *more: Any) -> dict[str, Any]:
        begun.append(settings.task)
        if len(begun) == 4:
            raise Crash
        return finetune(settings, *more)

    monkeypatch.setattr(glue, "finetune", counted)
    with pytest.raises(Crash):
        run(folder, tmp_path / "out", model)
    assert begun == ["cola", "sst-2", "mrpc", "sts-b"]
    before = steps.steps
    steps.crash_at(1)
    with pytest.raises(Crash):
        run(folder, tmp_path / "out", model)
    assert steps.steps - before == 1, "what is done is not done again"
    summary = run(folder, tmp_path / "out", model)
    assert steps.steps == before + 1 + 6 * 2

    tasks = [name for name in TITLES if name != "ax"]
    assert list(summary["tasks"]) == tasks
    assert {name: list(metrics) for name, metrics in summary["tasks"].items()} == {
        name: list(GLUE_TASKS[name].metrics) + ["mismatched_accuracy"] * (name == "mnli") for name in tasks
    }
    # the zip: every file of the leaderboard, in order, spelled as it wants
    assert check_submission(Path(summary["submission"])) == []
    assert missing_files(Path(summary["submission"])) == []
    assert summary["left_out_of_submission"] == {}
    with zipfile.ZipFile(summary["submission"]) as archive:
        lines = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    assert all(len(rows) == 6 for rows in lines.values())
    assert [row.partition("\t")[0] for row in lines["QNLI.tsv"]] == ["index", "0", "1", "2", "3", "4"]
    for file, name, split in (
        ("MNLI-mm.tsv", "mnli", "test_mismatched"),
        ("AX.tsv", "mnli", "ax"),
        ("RTE.tsv", "rte", "test"),
    ):
        written = (tmp_path / "out" / name / f"{split}.predictions.jsonl").read_text("utf-8").splitlines()
        assert [row.partition("\t")[2] for row in lines[file][1:]] == [json.loads(line)["label"] for line in written]
    # the score is that of the dev metrics, the table shows them
    results = {TITLES[name]: metrics for name, metrics in summary["tasks"].items() if name != "mnli"}
    results["MNLI-m"] = {"accuracy": summary["tasks"]["mnli"]["accuracy"]}
    results["MNLI-mm"] = {"accuracy": summary["tasks"]["mnli"]["mismatched_accuracy"]}
    expected = glue_score(results)
    assert summary["task_scores"] == expected.pop("tasks")
    assert {key: summary[key] for key in expected} == expected
    table = Path(summary["table"]).read_text("utf-8")
    for name in tasks:
        metric = GLUE_TASKS[name].metrics[0]
        assert f"| {TITLES[name]} | {metric} {100 * summary['tasks'][name][metric]:.1f}" in table
    assert f"| **score** | {summary['score']:.1f} |" in table
    # the parts are runs like any other
    mnli = evaluate_file(tmp_path / "out" / "mnli", str(folder / "MNLI" / "dev_mismatched.tsv"), "cpu", "fp32")
    assert mnli["metrics"]["accuracy"] == summary["tasks"]["mnli"]["mismatched_accuracy"]
    # once more: the same summary, nothing trained; other settings are refused by name
    taken = steps.steps
    assert timeless(run(folder, tmp_path / "out", model)) == timeless(summary)
    assert steps.steps == taken
    with pytest.raises(
        UserError, match=r"cola: this run was started with other settings.*epochs was 1\.0 and is now 2"
    ):
        run(folder, tmp_path / "out", model, epochs=2)


def test_some_of_them(folder: Path, model: Path, tmp_path: Path) -> None:
    part = tmp_path / "glue"
    for title in ("MNLI", "RTE", "AX", "CoLA"):
        shutil.copytree(folder / title, part / title.lower())
    (part / "rte" / "test.tsv").unlink()
    summary = run(part, tmp_path / "out", model, ("MNLI", "rte", "mnli"), seeds=2)
    assert list(summary["tasks"]) == ["mnli", "rte"]
    assert summary["seeds"]["rte"]["metric"] == "accuracy"
    assert summary["seeds"]["rte"]["std"] is not None
    with zipfile.ZipFile(summary["submission"]) as archive:
        assert sorted(archive.namelist()) == ["MNLI-m.tsv", "MNLI-mm.tsv"]
    absent = {"SST-2", "MRPC", "STS-B", "QQP", "QNLI", "WNLI"}
    assert summary["left_out_of_submission"] == {
        "RTE": "no test file", "CoLA": "not run", "AX": "not run", **dict.fromkeys(absent, "no folder for it")
    }  # fmt: skip
    assert " ± " in Path(summary["table"]).read_text("utf-8")
    assert check_submission(Path(summary["submission"])) == []
    assert summary["missing"]


def test_mistakes_before_any_training(folder: Path, model: Path, tmp_path: Path, steps: StepProbe) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    wnli = broken / "WNLI" / "dev.tsv"
    wnli.write_text(wnli.read_text("utf-8").replace("\t1\n", "\t2\n"), encoding="utf-8")
    one = tmp_path / "one"
    shutil.copytree(folder / "RTE", one / "RTE")
    (one / "RTE" / "train.tsv").unlink()
    empty = tmp_path / "empty"
    shutil.copytree(folder / "MNLI", empty / "MNLI")
    (empty / "AX").mkdir()
    for source, tasks, message in (
        (folder, ("mrcp",), "'mrcp' is no GLUE task"),
        (one, ("rte", "cola"), "one: holds no folder for cola; it has rte"),
        (one, (), "one: none of its 1 task folders holds a training file"),
        (one, ("rte",), r"RTE: no 'train\.tsv'"),
        (folder, ("ax",), "tasks: ax is predicted with the model of mnli; name mnli too"),
        (empty, ("mnli", "ax"), "AX: no 'diagnostic.tsv'"),
        (broken, (), r"WNLI/dev\.tsv:3: column 'label' holds '2'.*WNLI's labels are 0, 1"),
        (tmp_path / "nowhere", (), "nowhere: this folder cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            run(source, tmp_path / "out", model, tasks)
        assert not (tmp_path / "out").exists()
    assert steps.steps == 0


def test_settings_of_each(folder: Path, model: Path, tmp_path: Path) -> None:
    """One task's run by itself is what `finetune` makes of it."""
    settings = make_settings("mnli", model, data=folder, layer_decay=0.9)
    own = settings_of_task(settings, "rte", str(folder / "RTE"), tmp_path / "out")
    assert (own.task, own.data, own.layer_decay, own.train) == ("rte", str(folder / "RTE"), 0.9, None)
