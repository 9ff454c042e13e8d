"""finetune, glue, evaluate and predict as a user calls them: flags, help, what is printed, exit codes."""

# ruff: noqa: F401, F811 (fixtures are imported, and are arguments)
import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.option_values import show_value
from bertsmith.options import list_settings
from bertsmith.tasks import runs
from bertsmith.tasks.settings import FinetuneSettings
from command_line import bertsmith
from made_tasks import (
    SETTINGS,
    StepProbe,
    files,
    leftovers,
    model,
    quick_runs,
    reviews,
    steps,
    tuned,
    write_glue,
    write_rows,
)

Files = dict[str, tuple[Path, Path]]
COMMANDS = ("finetune", "glue", "evaluate", "predict")
TINY = [part for key, value in SETTINGS.items() for part in (f"--{key.replace('_', '-')}", value)]


def finetune(kind: str, model: Path, files: Files, out: Path, *more: object) -> Any:
    train, dev = files[kind]
    given = {more[number] for number in range(0, len(more), 2)}
    tiny = [
        part for flag, value in zip(TINY[::2], TINY[1::2], strict=True) if flag not in given for part in (flag, value)
    ]
    return bertsmith("finetune", kind, "--model", model, "--train", train, "--dev", dev, "--out", out, *tiny, *more)


# --- the four commands, one after the other


def test_what_the_test_file_says_is_shown(model: Path, files: Files, tmp_path: Path) -> None:
    """Its score where it is labelled, the predictions' place in any case; and what no learning at all would score."""
    source = files["classify"][1]
    shown = finetune("classify", model, files, tmp_path / "run", "--test", source)
    outputs = tmp_path / "run" / "test.predictions.jsonl"
    scores = re.search(r"^seed 0, rate 0\.005: (.*)$", shown.out, re.MULTILINE)
    assert scores
    assert f"\ntest: {scores[1]}, predictions: {outputs}\n" in shown.out, "the test file is the dev file"
    unlabelled = write_rows(tmp_path / "new.csv", ("text",), [("a",)])
    shown = finetune("classify", model, files, tmp_path / "other", "--test", unlabelled, "--learning-rate", 1e-9)
    assert f"\ntest: predictions: {tmp_path / 'other' / 'test.predictions.jsonl'}\n" in shown.out
    rows = [line.rpartition(",")[2] for line in source.read_text("utf-8").splitlines()[1:]]
    share = max(rows.count(label) for label in rows) / len(rows)
    assert re.search(rf"^always '(neg|pos)': accuracy {share:.4g}$", shown.out, re.MULTILINE)
    assert "degenerate" in shown.err or "no better than always answering" in shown.err


def test_a_file_without_labels_is_for_predict(tuned: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\n", encoding="utf-8")
    (tmp_path / "other.csv").write_text("body\na\n", encoding="utf-8")
    hint = "a file without labels is for `bertsmith predict`"
    assert hint in bertsmith("evaluate", tuned("classify"), "--data", tmp_path / "in.csv").mistake
    assert hint not in bertsmith("evaluate", tuned("classify"), "--data", tmp_path / "other.csv").mistake


def test_no_better_than_the_largest_class(model: Path, tmp_path: Path) -> None:
    """Some predictions differ, and yet nothing is learnt: the texts say nothing of the labels."""
    rows = [("the cat", "x"), ("a dog", "x"), ("the dog", "y")] * 6
    data = write_rows(tmp_path / "t.csv", ("text", "label"), rows)
    other = write_rows(tmp_path / "d.csv", ("text", "label"), [("the dog", "x"), ("a dog", "x"), ("the cat", "y")])
    files = {"classify": (data, other)}
    shown = finetune("classify", model, files, tmp_path / "run", "--epochs", 40, "--keep", "last")
    assert "always 'x': accuracy 0.6667" in shown.out
    assert "no better than always answering 'x' (accuracy 0.6667); raise --learning-rate (small" in shown.err


def test_from_training_to_predictions(model: Path, files: Files, tmp_path: Path) -> None:
    shown = finetune("classify", model, files, tmp_path / "run", "--epochs", 6)
    assert shown.code == 0, shown.err
    scores = r"^seed 0, rate 0\.005: accuracy [\d.]+  f1 [\d.]+  macro_f1 [\d.]+  matthews [\d.]+$"
    assert re.search(scores, shown.out, re.MULTILINE)
    assert shown.err.count("f1 is that of label 'pos'") == 1
    assert shown.out.count("f1 is that of label 'pos'\n") == 1
    assert re.search(r"^  neg +precision [\d.]+  recall [\d.]+  f1 [\d.]+  \(12\)$", shown.out, re.MULTILINE)
    assert shown.out.endswith(f"the model is {tmp_path / 'run' / 'model'}\n")
    summary = finetune("classify", model, files, tmp_path / "run", "--epochs", 6, "--json").json
    assert {
        "task",
        "metric",
        "dev",
        "runs",
        "mean",
        "std",
        "best",
        "degenerate_runs",
        "model_dir",
        "data_report",
    } <= set(summary)
    assert (summary["task"], summary["metric"], summary["labels"]) == ("classify", "accuracy", ["neg", "pos"])
    compute = ("--device", "cpu", "--precision", "fp32")
    evaluated = bertsmith("evaluate", tmp_path / "run", "--data", files["classify"][1], *compute, "--json").json
    assert evaluated["metrics"] == pytest.approx(summary["dev"])
    assert evaluated["f1_label"] == summary["f1_label"] == "pos"
    f1 = next(row["f1"] for row in evaluated["per_class"] if row["label"] == "pos")
    assert evaluated["metrics"]["f1"] == pytest.approx(f1)
    evaluated = bertsmith("evaluate", tmp_path / "run", "--data", files["classify"][1])
    assert evaluated.out.startswith("task: classify\n")
    assert evaluated.out.count("f1 is that of label 'pos'\n") == 1
    predicted = bertsmith("predict", tmp_path / "run" / "model", "--input", files["classify"][1], "--output",
                          tmp_path / "p.csv", "--json").json  # fmt: skip
    assert {"rows", "truncated", "unknown_rate", "seconds"} <= set(predicted)
    lines = (tmp_path / "p.csv").read_text("utf-8").splitlines()
    assert (lines[0], len(lines)) == ("label,scores", 25)


def test_seeds_are_shown(model: Path, files: Files, tmp_path: Path) -> None:
    shown = finetune("squad2", model, files, tmp_path / "run", "--seeds", 2, "--squad.stride", 8, "--epochs", 1)
    assert shown.code == 0, shown.err
    assert len(re.findall(r"^seed \d, rate 0\.005: exact_match [\d.]+  f1", shown.out, re.MULTILINE)) == 2
    assert re.search(r"^f1: mean [\d.]+, standard deviation [\de.-]+, best [\d.]+, worst [\d.]+, degenerate runs \d$",
                     shown.out, re.MULTILINE)  # fmt: skip


def test_glue(model: Path, tmp_path: Path) -> None:
    glue = write_glue(tmp_path / "glue")
    arguments = ("glue", "--model", model, "--data", glue, "--out", tmp_path / "out", "--tasks", "RTE,cola", *TINY)
    shown = bertsmith(*arguments)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[0] == "| task | dev | mean of seeds | degenerate |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| RTE", "| CoLA", "| **score**"]
    assert f"submission: {tmp_path / 'out' / 'submission.zip'}" in lines
    assert "  without MNLI: not run" in lines
    summary = bertsmith(*arguments, "--json").json
    assert {"tasks", "score", "submission"} <= set(summary)
    assert list(summary["tasks"]) == ["rte", "cola"]
    for more, message in (
        (("--tasks", "rte,none"), "'none' is no GLUE task; use one of cola"),
        (("--squad.stride", "5"), "--squad.stride: means nothing to GLUE's tasks; leave it out"),
        (("--text-column", "x"), "option --text-column is not known|'x'"),
        (("--train", "x"), "not known|'x'"),
        (("--dev-share", "0.1"), "option --dev-share is not known|'0.1'"),
    ):
        given = arguments if more[0] != "--tasks" else (*arguments[:7], *arguments[9:])
        assert re.search(message, bertsmith(*given, *more).mistake)
    assert (
        "data, train: give either --data FOLDER" in bertsmith("glue", "--model", model, "--out", tmp_path / "o").mistake
    )


def test_glue_without_some_files(model: Path, tmp_path: Path) -> None:
    """A folder that holds nothing yet ends nothing, unless its task is asked for."""
    glue = write_glue(tmp_path / "glue")
    for folder in glue.iterdir():
        if folder.name not in ("RTE", "MNLI", "AX", "CoLA"):
            shutil.rmtree(folder)
    (glue / "CoLA" / "train.tsv").unlink()
    for file in (glue / "MNLI").iterdir():
        file.unlink()
    arguments = ("glue", "--model", model, "--data", glue, "--out", tmp_path / "out", *TINY)
    assert "CoLA: no 'train.tsv'" in bertsmith(*arguments, "--tasks", "cola,rte").mistake
    shown = bertsmith(*arguments, "--json")
    assert f"CoLA is left out: {glue / 'CoLA'} holds no train file" in shown.err
    summary = shown.json
    assert list(summary["tasks"]) == ["rte"]
    assert "model of MNLI" in summary["left_out_of_submission"]["AX"]
    (glue / "RTE" / "train.tsv").unlink()
    nothing = bertsmith(*arguments[:6], tmp_path / "no", *TINY).mistake
    assert "none of its 4 task folders holds a training file" in nothing


def test_interrupted(model: Path, files: Files, tmp_path: Path, steps: StepProbe) -> None:
    """Exit code 130, a checkpoint, and the same command goes on."""
    steps.at(4, lambda: signal.raise_signal(signal.SIGINT))
    stopped = finetune("classify", model, files, tmp_path / "run")
    assert stopped.code == 130
    assert "interrupted: the run is saved at step 4; the same command resumes it" in stopped.err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert "resuming from" in finetune("classify", model, files, tmp_path / "run").err
    assert steps.steps == 6
    assert leftovers(tmp_path / "run") == []


def test_mistakes(model: Path, files: Files, tuned: Callable[[str], Path], tmp_path: Path) -> None:
    """Exit code 2, one sentence, nothing left."""
    train, dev = files["classify"]
    broken = tmp_path / "broken.csv"
    broken.write_text("text,label\na,pos\nb,other\n", encoding="utf-8")
    base = ("--model", model, "--train", train, "--dev", dev, "--out", tmp_path / "out")
    for arguments, message in (
        (("clasify", *base), "task: 'clasify' is not known; did you mean classify?"),
        (("ax", *base), "task: AX has no training file"),
        (("classify", *base, "--lr", "1e-5"), "option --lr is not known; did you mean --learning-rate?"),
        (("classify", *base, "--epoch", 3), "option --epoch is not known; did you mean --epochs?"),
        (("classify", *base, "--epochs", "many"), "epochs = 'many' is not allowed"),
        (("classify", *base, "--epochs", 0), "epochs: 0.0 is not a number above 0"),
        (("classify", *base, "--eval.evry", 3), "eval.evry is not known; did you mean eval.every?"),
        (("classify", *base, "--data", tmp_path), "data, train: give either --data FOLDER or --train FILE"),
        (("classify", *base[:-2], "--dev-share", 20, "--out", tmp_path / "out"), "below 1; 20 % is --dev-share 0.2"),
        (("classify", "--model", model, "--out", tmp_path / "out"), "data, train: give either --data FOLDER"),
        (("classify", "--train", train, "--dev", dev, "--out", tmp_path / "out"), "model is missing: give --model"),
        (("classify", *base[:5], broken, *base[6:]), "broken.csv:3: label 'other' is not one of the training file's"),
        (("classify", *base, "--device", "cuda", "--precision", "fp8"), "precision"),
        (
            ("squad1", "--text-column", "x", "--squad.stride", 16, *base),
            "--text-column: the files of squad1 have columns whose names are fixed",
        ),
    ):
        mistake = bertsmith("finetune", *arguments).mistake
        assert message in mistake, mistake
        assert not (tmp_path / "out").exists()
    run = tuned("classify")
    for command, more, message in (
        ("evaluate", ("--data", broken), "broken.csv:3: label 'other'"),
        ("predict", ("--input", broken, "--output", tmp_path / "x.doc"), "x.doc: an output ends in"),
        ("predict", ("--input", tmp_path / "no.csv", "--output", tmp_path / "x"), "no.csv"),
        ("predict", ("--input", broken, "--output", tmp_path / "x", "--text-column", "body"), "no column 'body'"),
    ):
        assert message in bertsmith(command, run, *more).mistake
    refused = bertsmith("predict", model, "--input", broken, "--output", tmp_path / "x").mistake
    assert "was not fine-tuned for a task, so that it has no trained output layer to predict with" in refused


def test_another_kind_of_run(model: Path, files: Files, tuned: Callable[[str], Path], tmp_path: Path) -> None:
    """Neither goes on in the other's folder, and one sentence says why."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('objective = "mlm"\ndata = "d"\nsteps = 3\n', encoding="utf-8")
    refused = finetune("classify", model, files, tmp_path / "run").mistake
    assert refused.endswith(f"{tmp_path / 'run'}: holds a pre-training run; choose another --out")
    refused = bertsmith("pretrain", "--data", tmp_path, "--out", tuned("classify")).mistake
    assert refused.endswith(f"{tuned('classify')}: holds a fine-tuning run; choose another --out")


# --- settings


def read_settings(out: Path) -> dict[str, Any]:
    """RUN/config.toml with dotted keys."""
    tables = tomllib.loads((out / "config.toml").read_text("utf-8"))
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def test_every_setting_is_tried(
    model: Path,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each in some run at another value than its default; what each changes is for tests/tasks."""
    monkeypatch.setattr(runs, "PAPER_GRID", {"learning_rate": (1e-3,), "batch_size": (4, 8), "epochs": (1.0,)})
    texts = tmp_path / "texts"
    columns = ("body", "verdict")
    for part in ("train", "dev"):
        write_rows(texts / f"{part}.csv", columns, [(f"{text} {'cat ' * 30}", label) for text, label in reviews(24)])
    pairs = write_rows(
        tmp_path / "m.csv", ("text", "title", "labels"), [("rain", "a cat", "x|y"), ("sun", "a dog", "")] * 4
    )
    words = tmp_path / "w.txt"
    words.write_text("1 安0 B-PER x\n2 娜1 I-PER x\n3 ,0 O x\n" * 3, encoding="utf-8")
    base = ("--model", model, "--device", "cpu")
    calls: dict[str, tuple[object, ...]] = {
        "classify": (
            *base, "--data", texts, "--text-column", "body", "--label-column", "verdict", "--epochs", 1,
            "--batch-size", 6, "--learning-rate", "1e-3", "--warmup", 2, "--max-length", 24, "--long", "window",
            "--class-weights", "balanced", "--seed", 3, "--seeds", 2, "--keep", "last", "--train-rows", 20,
            "--encoding", "latin-1", "--dropout", 0.2, "--weight-decay", 0.1, "--layer-decay", 0.8,
            "--bias-correction", "false", "--clip-norm", 0.5, "--micro-tokens", 64, "--precision", "bf16",
            "--eval.every", 2, "--checkpoint.every", 2, "--checkpoint.minutes", 1, "--checkpoint.keep", 2,
            "--log.every", 2, "--random-init", "true",
        ),
        "multilabel": (
            *base, "--train", pairs, "--dev-share", 0.5, "--test", pairs, "--text-column", "text",
            "--text-pair-column", "title", "--label-separator", "|", "--grid", "paper", "--max-length", 32,
        ),
        "squad2": (
            *base, "--train", files["squad2"][0], "--dev", files["squad2"][1], "--squad.stride", 6,
            "--squad.max-question", 2, "--squad.n-best", 3, "--squad.max-answer", 4, "--max-length", 32, "--epochs", 1,
        ),
        "ner": (
            *base, "--train", words, "--dev", words, "--ner.token-column", 1, "--ner.tag-column", 2, "--ner.separator",
            "blank", "--ner.strip-digit", "true", "--max-length", 32,
        ),
    }  # fmt: skip
    tried = {"task", "device"}
    for task, arguments in calls.items():
        out = tmp_path / task
        summary = bertsmith("finetune", task, *arguments, "--out", out, "--json").json
        assert summary["task"] == task
        kept = read_settings(out)
        for setting in list_settings(FinetuneSettings):
            if setting.key in kept and kept[setting.key] != setting.default:
                tried.add(setting.key)
    assert {setting.key for setting in list_settings(FinetuneSettings)} - tried == set()


# --- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str) -> None:
    """What goes in, what comes out, every flag, an example; at most 100 columns."""
    shown = bertsmith(command, "--help")
    assert shown.code == 0
    assert shown.out.startswith(f"usage: bertsmith {command}")
    assert "examples:\n" in shown.out
    assert re.search(rf"^  bertsmith {command} ", shown.out, re.MULTILINE)
    assert max(map(len, shown.out.splitlines())) <= 100
    assert command in bertsmith("--help").out


@pytest.mark.parametrize("command", ["finetune", "glue"])
def test_help_lists_every_setting_with_its_default(command: str) -> None:
    blocks = [" ".join(block.split()) for block in re.split(r"\n  (?=--)", bertsmith(command, "--help").out)]
    not_of_glue = ("train", "dev", "dev_share", "test", "grid", "encoding", "text_column", "text_pair_column",
                   "label_column", "label_separator")  # fmt: skip
    for setting in list_settings(FinetuneSettings):
        left_out = command == "glue" and (setting.key in not_of_glue or setting.key.startswith(("squad.", "ner.")))
        dotted = f"--{setting.key.replace('_', '-')}"
        found = [block for block in blocks if block.startswith((f"{dotted} ", f"{setting.flag}, {dotted} "))]
        assert len(found) == (0 if left_out or setting.key == "task" else 1), dotted
        assert setting.field.metadata["help"], setting.key
        if found and isinstance(setting.default, int | float):
            assert f"default {show_value(setting.default)}" in found[0], dotted


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, contextlib, io\nfrom bertsmith.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    codes = [main([c, '--help']) for c in ('finetune', 'glue', 'evaluate', 'predict')]\n"
        "print(json.dumps([codes, [m for m in ('torch', 'sklearn', 'pyarrow', 'matplotlib') if m in sys.modules]]))"
    )
    process = subprocess.run([sys.executable, "-c", f"import json\n{code}"], capture_output=True, text=True, timeout=60)
    assert json.loads(process.stdout) == [[0] * 4, []], process.stderr
