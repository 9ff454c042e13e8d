"""Runs: what they learn, what is kept of them, seeds and grids, options that change the arithmetic as they say."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertsmith.errors import UserError
from bertsmith.inference.predict import evaluate_file, predict_file
from bertsmith.model.task_model import BertForTask
from bertsmith.model.weights import load_folder_weights, read_config
from bertsmith.tasks import finetune as loop
from bertsmith.tasks import runs
from bertsmith.tasks.data import TaskData
from bertsmith.tasks.finetune import parameter_rates
from bertsmith.tasks.settings import FinetuneSettings
from bertsmith.training.optimizer import BertOptimizer
from made_tasks import (
    BAD,
    GOOD,
    KINDS,
    Crash,
    StepProbe,
    leftovers,
    log_lines,
    make_config,
    make_model,
    make_settings,
    reviews,
    timeless,
    tune,
    weights_of,
    write_rows,
)

Files = dict[str, tuple[Path, Path]]


# --- every kind of task


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_learnt_kept_and_scored_alike(
    tuned: Callable[[str], Path], files: Files, tmp_path: Path, kind: str
) -> None:
    """What the run says of dev is what `evaluate` says of the kept model on the same file."""
    run = tuned(kind)
    result = json.loads((run / "result.json").read_bytes())
    evaluated = evaluate_file(run, str(files[kind][1]), "cpu", "fp32")
    assert evaluated["metrics"] == pytest.approx(result["dev"], abs=1e-6)
    assert evaluated["per_class"] == result["details"].get("per_class")
    assert leftovers(run) == []
    losses = [line["loss"] for line in log_lines(run) if "loss" in line]
    assert len(losses) == result["steps"]
    assert all(math.isfinite(loss) for loss in losses)
    predicted = predict_file(run, str(files[kind][1]), tmp_path / "p.jsonl", "cpu", "fp32")
    assert predicted["rows"] == evaluated["rows"] == len((tmp_path / "p.jsonl").read_text("utf-8").splitlines())


def test_something_is_learnt(model: Path, files: Files, tmp_path: Path) -> None:
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], epochs=6)
    assert summary["dev"]["accuracy"] > 0.9
    assert summary["degenerate_runs"] == 0
    losses = [line["loss"] for line in log_lines(tmp_path / "run") if "loss" in line]
    assert np.mean(losses[-5:]) < 0.2 < 0.6 < losses[0]


def test_long_texts_decided_by_their_last_sentence(model: Path, tmp_path: Path) -> None:
    """600 words, 32 tokens at once: windows see the end, in training and prediction; a cut text does not."""
    start = " ".join(["the", "cat", "was"] * 200)
    rows = [
        (f"{start} . it was {' and '.join([word] * 6)}", label)
        for label, words in (("neg", BAD), ("pos", GOOD))
        for word in words
    ]
    path = write_rows(tmp_path / "t.csv", ("text", "label"), rows)
    same: dict[str, Any] = {"batch_size": 6, "max_length": 64, "dropout": 0, "learning_rate": 3e-3}
    for long, learnt, epochs in (("window", 1.0, 24), ("cut", 0.5, 4)):
        summary = tune(tmp_path / long, "classify", model, path, path, long=long, epochs=epochs, **same)
        assert summary["dev"]["accuracy"] == learnt
        report = summary["data_report"]["train"]
        assert (report["rows"], report["truncated"], report["windowed"]) == (6, *((0, 6) if learnt == 1 else (6, 0)))
        assert report["truncated_tokens"] == (0 if learnt == 1 else 6 * (614 - 62))
        predicted = predict_file(tmp_path / long, str(path), tmp_path / "p.jsonl", "cpu", "fp32")
        assert (predicted["rows"], predicted["truncated"]) == (6, report["truncated"])
        said = [json.loads(line)["label"] for line in (tmp_path / "p.jsonl").read_text("utf-8").splitlines()]
        assert (said == [label for _, label in rows]) is (learnt == 1)


# --- what is kept


@pytest.mark.parametrize(("keep", "step", "score"), [("best", 4, 0.9), ("last", 8, 0.4)])
def test_best_and_last(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str, step: int, score: float
) -> None:
    """The kept weights are those of the best evaluation, of equals the first, or of the last."""
    seen: dict[int, torch.Tensor] = {}
    scores = iter((0.2, 0.9, 0.9, 0.4))
    score_split = loop.score_split

    def scored(task: Any, tuned: Any, *more: Any) -> Any:
        seen[2 * len(seen) + 2] = tuned.classifier.weight.detach().clone()
        scorer: Any = score_split(task, tuned, *more)
        found = {**scorer.compute(), "accuracy": next(scores)}
        scorer.compute = lambda: found
        return scorer

    monkeypatch.setattr(loop, "score_split", scored)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 6, "eval__every": 2, "keep": keep}
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], **options)
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert [(entry["step"], entry["epoch"]) for entry in result["history"]] == [(2, 0.5), (4, 1), (6, 1.5), (8, 2)]
    assert result["best_step"] == step
    assert summary["dev"]["accuracy"] == summary["best"] == score
    kept = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert torch.equal(kept["classifier.weight"], seen[step])
    lines = [line for line in log_lines(tmp_path / "run") if "dev_accuracy" in line]
    assert [(line["step"], line["dev_accuracy"]) for line in lines] == [(2, 0.2), (4, 0.9), (6, 0.9), (8, 0.4)]


def test_an_evaluation_of_one_class_never_wins(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On unbalanced classes it may score higher than one that has begun to learn; among equals the score decides."""
    found = iter(((0.94, True), (0.8, False), (0.9, False), (0.95, True)))
    score_split = loop.score_split

    def scored(*arguments: Any) -> Any:
        scorer: Any = score_split(*arguments)
        accuracy, degenerate = next(found)
        metrics = {**scorer.compute(), "accuracy": accuracy}
        return SimpleNamespace(compute=lambda: metrics, one_class_only=degenerate, details=scorer.details)

    monkeypatch.setattr(loop, "score_split", scored)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 6, "eval__every": 2}
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], **options)
    assert (summary["runs"][0]["best_step"], summary["dev"]["accuracy"]) == (6, 0.9)
    assert summary["degenerate_runs"] == 0


def test_a_run_of_one_class_never_wins(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_one = runs.run_one
    found = iter(((0.94, True), (0.9, False), (0.95, True)))

    def scored(*arguments: Any) -> dict[str, Any]:
        result = run_one(*arguments)
        result["dev"]["accuracy"], result["degenerate"] = next(found)
        return result

    monkeypatch.setattr(runs, "run_one", scored)
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], seeds=3, epochs=1)
    assert (summary["best_run"]["seed"], summary["best"]) == (1, 0.9)


def test_without_eval_every_it_is_after_each_epoch(model: Path, files: Files, tmp_path: Path) -> None:
    tune(tmp_path / "run", "classify", model, *files["classify"], epochs=2.5, batch_size=10)
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    # 24 rows, 3 batches an epoch, the last of 4 rows; 2.5 epochs are 8 steps (7.5, to the even one)
    assert result["steps"] == 8
    assert [entry["step"] for entry in result["history"]] == [3, 6, 8]


def test_log_every(model: Path, files: Files, tmp_path: Path) -> None:
    tune(tmp_path / "one", "classify", model, *files["classify"], epochs=1, batch_size=4)
    tune(tmp_path / "four", "classify", model, *files["classify"], epochs=1, batch_size=4, log__every=4)
    each, every = ([line for line in log_lines(tmp_path / n) if "loss" in line] for n in ("one", "four"))
    assert [line["step"] for line in each] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in every] == [4, 6], "and the last one"
    assert every[0]["loss"] == pytest.approx(np.mean([line["loss"] for line in each[:4]]))
    assert every[0]["tokens"] == each[3]["tokens"]
    tune(tmp_path / "auto", "classify", model, *files["classify"], epochs=1, batch_size=4, log__every=None)
    assert log_lines(tmp_path / "auto") == log_lines(tmp_path / "one"), "each step of a short run"


# --- seeds and grids


def test_seeds(model: Path, files: Files, tmp_path: Path) -> None:
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], seeds=3, seed=5, epochs=3, train_rows=20)
    values = [run["dev"]["accuracy"] for run in summary["runs"]]
    assert [run["seed"] for run in summary["runs"]] == [5, 6, 7]
    assert summary["mean"] == pytest.approx(np.mean(values))
    assert summary["std"] == pytest.approx(np.std(values, ddof=1))
    assert summary["best"] == max(values)
    assert summary["worst"] == min(values)
    assert summary["best_run"]["seed"] == 5 + int(np.argmax(values))
    assert summary["degenerate_runs"] == sum(run["degenerate"] for run in summary["runs"])
    assert leftovers(tmp_path / "run") == []
    # RUN/model is the best run's: what the same seed gives alone
    alone = tune(tmp_path / "alone", "classify", model, *files["classify"], seed=summary["best_run"]["seed"], epochs=3,
                 train_rows=20)  # fmt: skip
    assert weights_of(tmp_path / "alone") == weights_of(tmp_path / "run")
    assert alone["dev"] == summary["dev"]
    assert (alone["std"], alone["mean"], alone["worst"]) == (None, alone["best"], alone["best"])


def test_what_a_run_leaves_for_the_eye(model: Path, files: Files, tmp_path: Path, whole_runs: None) -> None:
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], seeds=2, epochs=1)
    best = tmp_path / "run" / "runs" / f"lr-0.005-batch-8-epochs-1-seed-{summary['best_run']['seed']}"
    for name in ("result.json", "loss.png", "confusion.png", "metrics.jsonl", "tensorboard"):
        assert (best / name).exists(), name
    for name in ("confusion.png", "loss.png"):
        assert (tmp_path / "run" / name).read_bytes() == (best / name).read_bytes()
    assert (tmp_path / "run" / "config.toml").exists()


def test_the_only_weights_on_disk_are_the_best_ones(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run_one = runs.run_one
    scores = iter((0.5, 0.7, 0.6))

    def scored(*arguments: Any) -> dict[str, Any]:
        seen.append([path.parent.name[-1] for path in (tmp_path / "run").rglob("best-*")])
        result = run_one(*arguments)
        result["dev"]["accuracy"] = next(scores)
        return result

    monkeypatch.setattr(runs, "run_one", scored)
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], seeds=3, epochs=1)
    assert seen == [[], ["0"], ["1"]]
    assert summary["best_run"]["seed"] == 1
    assert leftovers(tmp_path / "run") == []


def test_a_run_that_says_one_class_only_is_flagged(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """97 to 3, a rate that teaches nothing: high accuracy, and worth nothing."""
    rows = [*reviews(2), *[row for row in reviews(64, 1) if row[1] == "pos"]]
    path = write_rows(tmp_path / "t.csv", ("text", "label"), rows)
    summary = tune(tmp_path / "run", "classify", model, path, path, seeds=2, epochs=1, clip_norm=0.1)
    assert summary["dev"]["accuracy"] > 0.9
    assert summary["dev"]["matthews"] == 0
    assert summary["degenerate_runs"] == 2
    assert all(run["degenerate"] for run in summary["runs"])
    assert (
        "seed 1: this run predicts one class only; it learnt nothing (degenerate); raise --learn"
        in capfd.readouterr().err
    )
    assert evaluate_file(tmp_path / "run", str(path), "cpu", "fp32")["one_class_only"]


BY_THE_GRID: dict[str, Any] = {"batch_size": None, "learning_rate": None, "epochs": None}


def test_the_papers_grid(tmp_path: Path, model: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings("classify", model, *files["classify"], grid="paper", seeds=2, **BY_THE_GRID)
    plans = list(runs.make_plans(settings))
    assert len(plans) == len({plan.name for plan in plans}) == 36
    assert len({dataclasses.replace(plan, seed=0) for plan in plans}) == 18
    assert {plan.batch_size for plan in plans} == {16, 32}
    assert {plan.learning_rate for plan in plans} == {5e-5, 3e-5, 2e-5}
    assert {plan.epochs for plan in plans} == {2, 3, 4}
    monkeypatch.setattr(runs, "PAPER_GRID", {"learning_rate": (1e-2, 1e-9), "epochs": (2.0,), "batch_size": (6,)})
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], grid="paper", seeds=2, **BY_THE_GRID)
    assert [(run["learning_rate"], run["seed"], run["epochs"], run["batch_size"]) for run in summary["runs"]] == [
        (1e-2, 0, 2, 6), (1e-2, 1, 2, 6), (1e-9, 0, 2, 6), (1e-9, 1, 2, 6)
    ]  # fmt: skip
    best = summary["best_run"]
    alike = [run["dev"]["accuracy"] for run in summary["runs"] if run["learning_rate"] == best["learning_rate"]]
    assert summary["mean"] == pytest.approx(np.mean(alike)), "over the seeds of the best setting"
    assert leftovers(tmp_path / "run") == []


def test_a_grid_and_a_value_of_ones_own(model: Path, files: Files, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="epochs: --grid paper tries values of its own; leave epochs out"):
        tune(tmp_path / "run", "classify", model, *files["classify"], grid="paper", **BY_THE_GRID | {"epochs": 1})


def test_a_run_that_diverged_in_its_last_step_is_no_model(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="scores are not finite numbers; its training diverged"):
        tune(tmp_path / "run", "classify", model, *files["classify"], learning_rate=1e30, epochs=1, batch_size=512)
    assert not (tmp_path / "run" / "model").exists()


# --- the same command again


def test_the_same_command_again_trains_nothing(model: Path, files: Files, tmp_path: Path, steps: StepProbe) -> None:
    options: dict[str, Any] = {"epochs": 1, "test": files["classify"][1]}
    for out, seeds in (("one", 1), ("two", 2)):
        first = tune(tmp_path / out, "classify", model, *files["classify"], seeds=seeds, **options)
        taken, weights = steps.steps, weights_of(tmp_path / out)
        assert timeless(
            tune(tmp_path / out, "classify", model, *files["classify"], seeds=seeds, **options)
        ) == timeless(first)
        assert steps.steps == taken
        assert weights_of(tmp_path / out) == weights
        assert first["test"]["test"]["metrics"] == pytest.approx(first["dev"]), "the same file"
        assert (tmp_path / out / "test.predictions.jsonl").read_text("utf-8").count("\n") == 24


def test_more_seeds_can_be_added(
    model: Path, files: Files, tmp_path: Path, steps: StepProbe, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(out: str, seeds: int) -> dict[str, Any]:
        return tune(tmp_path / out, "classify", model, *files["classify"], seeds=seeds, epochs=1)

    run("run", 2)
    before = steps.steps
    grown = run("run", 3)
    assert steps.steps - before == 3, "one run of three steps"
    assert "run: 2 of 3 runs were finished already; trained now: 1" in capfd.readouterr().err
    assert timeless(grown) == timeless(run("whole", 3))
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")
    for seeds in (1, 2):
        with pytest.raises(UserError, match=f"run: holds 3 runs and {seeds} are asked for: to several, more can be"):
            run("run", seeds)
    run("single", 1)
    with pytest.raises(UserError, match="single: holds a single run and 2 are asked for"):
        run("single", 2)


def test_other_rows_or_another_model(
    model: Path, files: Files, tmp_path: Path, steps: StepProbe, capfd: pytest.CaptureFixture[str]
) -> None:
    """A finished run is not passed off as one of other inputs, wherever they lie; nor is a begun one gone on with."""
    train, dev = (path.read_text("utf-8") for path in files["classify"])
    paths = [tmp_path / name for name in ("train.csv", "dev.csv")]
    for path, content in zip(paths, (train, dev), strict=True):
        path.write_text(content, "utf-8")
    options: dict[str, Any] = {"epochs": 2, "checkpoint__every": 1}
    tune(tmp_path / "run", "classify", model, *paths, **options)
    capfd.readouterr()
    tune(tmp_path / "run", "classify", model, *files["classify"], **options)
    assert "run: is finished already, and nothing was trained; these are its results" in capfd.readouterr().err
    steps.crash_at(3)
    with pytest.raises(Crash):
        tune(tmp_path / "begun", "classify", model, *paths, **options)
    for changed, content, part in ((paths[0], train, "to learn from"), (paths[1], dev, "to score on")):
        changed.write_text(content.replace("good", "cat", 1).replace("bad", "dog", 1), "utf-8")
        for out in ("run", "begun"):
            with pytest.raises(UserError, match=f"{out}: this run began with other rows {part} than the file holds no"):
                tune(tmp_path / out, "classify", model, *paths, **options)
            kept = (tmp_path / out / "inputs.json").rename(tmp_path / "inputs.json")  # an earlier version kept none
            with pytest.raises(UserError, match=f"{out}: this run began with another model, or with other rows"):
                tune(tmp_path / out, "classify", model, *paths, **options)
            kept.rename(tmp_path / out / "inputs.json")
        changed.write_text(content, "utf-8")
    copy = make_model(tmp_path / "copy", seed=1)
    other = make_model(tmp_path / "other", seed=2)
    data = (paths[0], paths[1])
    settings = make_settings("classify", copy, *data, **options)
    runs.finetune(settings, tmp_path / "run")
    with pytest.raises(UserError, match="this run began with another model than --model names now; give"):
        runs.finetune(dataclasses.replace(settings, model=str(other)), tmp_path / "run")


def test_a_finished_run_whose_model_is_gone(model: Path, files: Files, tmp_path: Path) -> None:
    tune(tmp_path / "run", "classify", model, *files["classify"], epochs=1)
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(UserError, match="model: is gone, and with it the best run's weights"):
        tune(tmp_path / "run", "classify", model, *files["classify"], epochs=1)


# --- options that change the arithmetic


def test_layer_decay() -> None:
    names = [
        "classifier.weight",
        "bert.pooler.dense.weight",
        "bert.encoder.layer.1.qkv.weight",
        "bert.encoder.layer.0.output_norm.bias",
        "bert.embeddings.word",
        "bert.embeddings.norm.weight",
    ]
    assert [parameter_rates(2, 0.5)(name) for name in names] == [1, 1, 0.5, 0.25, 0.125, 0.125]
    assert [parameter_rates(2, 1.0)(name) for name in names] == [1] * 6
    assert parameter_rates(12, 0.9)("bert.encoder.layer.10.qkv.weight") == pytest.approx(0.81)


def first_update(model: Path, files: Files, out: Path, **changes: Any) -> dict[str, Any]:
    """Name → (before, gradient, after) of the first update of a run, without dropout, warm-up or clipping."""
    seen: dict[str, Any] = {}
    step = BertOptimizer.step

    def watched(self: BertOptimizer, factor: float) -> None:
        assert factor == 1
        before = {
            name: (p.detach().clone(), p.grad.clone()) for name, p in self._parameters.items() if p.grad is not None
        }
        step(self, factor)
        seen.update({name: (*values, self._parameters[name].detach().clone()) for name, values in before.items()})

    plain: dict[str, Any] = {
        "dropout": 0,
        "warmup": 0,
        "clip_norm": 1e9,
        "epochs": 1,
        "batch_size": 64,
        "learning_rate": 1e-3,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BertOptimizer, "step", watched)
        tune(out, "classify", model, *files["classify"], **plain | changes)
    assert len(seen) > 20
    return seen


def test_the_first_update(model: Path, files: Files, tmp_path: Path) -> None:
    """AdamW's formulas by hand: with bias correction, as the reference without, by layers, and its decay."""
    for out, options, formula in (
        ("corrected", {}, lambda g: g / (g.abs() + 1e-6)),
        # google-research/bert, optimization.py: m = 0.1 g, v = 0.001 g², update m / (√v + ε)
        ("reference", {"bias_correction": "false"}, lambda g: 0.1 * g / ((0.001 * g * g).sqrt() + 1e-6)),
    ):
        for decay in (0.0, 0.5):
            seen = first_update(
                model, files, tmp_path / f"{out}{decay}", weight_decay=decay, layer_decay=0.5, **options
            )
            rates = parameter_rates(2, 0.5)
            for name, (before, gradient, after) in seen.items():
                decayed = decay if before.ndim == 2 and "norm" not in name and not name.endswith("bias") else 0
                expected = before - 1e-3 * rates(name) * (formula(gradient) + decayed * before)
                torch.testing.assert_close(after, expected, rtol=1e-4, atol=2e-6, msg=f"{out} {decay} {name}")


def test_gradients_are_clipped(model: Path, files: Files, tmp_path: Path) -> None:
    whole = first_update(model, files, tmp_path / "whole")
    clipped = first_update(model, files, tmp_path / "clipped", clip_norm=0.1)
    norm = math.sqrt(sum(float((gradient**2).sum()) for _, gradient, _ in whole.values()))
    assert norm > 0.2
    assert math.sqrt(sum(float((g**2).sum()) for _, g, _ in clipped.values())) == pytest.approx(0.1, rel=1e-4)
    logged = [line["grad_norm"] for out in ("whole", "clipped") for line in log_lines(tmp_path / out) if "loss" in line]
    assert logged == pytest.approx([norm, norm], rel=1e-5), "logged as it was before"


def test_the_schedule(model: Path, files: Files, tmp_path: Path) -> None:
    """Linear warm-up over a tenth, then linearly to zero; or over so many steps."""
    for out, warmup, expected in (
        ("share", 0.25, [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("steps", 4, [0.25, 0.5, 0.75, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("longer than the run", 1000, [number / 8 for number in range(1, 9)]),
    ):
        tune(tmp_path / out, "classify", model, *files["classify"], epochs=2, batch_size=6, warmup=warmup,
             learning_rate=1e-3)  # fmt: skip
        rates = [line["learning_rate"] for line in log_lines(tmp_path / out) if "loss" in line]
        assert rates == pytest.approx([1e-3 * share for share in expected])


def test_accumulation_changes_nothing(model: Path, files: Files, tmp_path: Path) -> None:
    """The logged loss and the weights, in one micro-batch or many, with weighted classes."""
    runs_of: dict[str, Any] = {}
    for out, micro in (("whole", None), ("parts", 20)):
        options: dict[str, Any] = {"micro_tokens": micro, "dropout": 0, "class_weights": "balanced", "epochs": 1}
        tune(tmp_path / out, "ner", model, *files["ner"], learning_rate=1e-3, **options)
        lines = [(line["loss"], line["grad_norm"]) for line in log_lines(tmp_path / out) if "loss" in line]
        runs_of[out] = lines, load_file(tmp_path / out / "model" / "model.safetensors")
    np.testing.assert_allclose(runs_of["whole"][0], runs_of["parts"][0], rtol=1e-4)
    for name, tensor in runs_of["whole"][1].items():
        torch.testing.assert_close(tensor, runs_of["parts"][1][name], rtol=1e-2, atol=1e-4, msg=name)


def test_dropout(model: Path, files: Files, tmp_path: Path) -> None:
    for dropout in (None, 0.0, 0.4):
        tune(tmp_path / str(dropout), "classify", model, *files["classify"], epochs=1, dropout=dropout)
        config = json.loads((tmp_path / str(dropout) / "model" / "config.json").read_bytes())
        expected = 0.1 if dropout is None else dropout
        assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == expected
    first = [log_lines(tmp_path / name)[0]["loss"] for name in ("None", "0.0", "0.4")]
    assert len(set(first)) == 3


def test_class_weights(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [*reviews(4), *[row for row in reviews(40, 1) if row[1] == "pos"]]
    path = write_rows(tmp_path / "t.csv", ("text", "label"), rows)
    tune(tmp_path / "run", "classify", model, path, path, epochs=1, class_weights="balanced")
    assert f"class weights: neg {24 / (2 * 2):.3g}, pos {24 / (2 * 22):.3g}" in capfd.readouterr().err
    tune(tmp_path / "plain", "classify", model, path, path, epochs=1)
    weighted, plain = (log_lines(tmp_path / out)[0]["loss"] for out in ("run", "plain"))
    assert weighted != plain
    for task, content in (("regress", "1"), ("choice", "")):
        path = write_rows(tmp_path / f"{task}.csv", ("text", "label"), [("a cat", content), ("a dog", "2")])
        if task == "choice":
            path = write_rows(tmp_path / "c.csv", ("context", "choice0", "choice1", "label"), [("a", "b", "c", 0)])
        with pytest.raises(UserError, match=f"--class-weights: {task} has no classes to balance; leave it out"):
            tune(tmp_path / task, task, model, path, path, class_weights="balanced")
        assert not (tmp_path / task).exists()


def test_train_rows(model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed part of the rows, the same for every seed; more than there are is said."""
    seen: list[TaskData] = []
    open_task_data = runs.open_task_data
    monkeypatch.setattr(runs, "open_task_data", lambda *a: seen.append(open_task_data(*a)) or seen[-1])
    for out, rows, seed in (("a", 10, 0), ("b", 10, 3), ("c", 12, 0), ("d", 100, 0)):
        tune(tmp_path / out, "classify", model, *files["classify"], epochs=1, train_rows=rows, seed=seed)
    texts = [[tuple(sequences[0].token_ids.tolist()) for sequences in data.train] for data in seen]
    assert [len(part) for part in texts] == [10, 10, 12, 24]
    assert texts[0] == texts[1]
    assert set(texts[0]) <= set(texts[2]) <= set(texts[3]), "a larger part holds the smaller one"
    assert [data.report["train"]["rows"] for data in seen] == [10, 10, 12, 24]
    assert texts[0] != texts[3][:10], "not the first ones"


def test_positions_that_pre_training_left_random_are_said(
    files: Files, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", bertsmith_trained_positions=16)
    told = f"warning: {model}: pre-training came to 16 of the model's 64 positions"

    def said(out: str, **changes: Any) -> bool:
        capfd.readouterr()
        tune(tmp_path / out, "classify", model, *files["classify"], epochs=1, **changes)
        assert read_config(tmp_path / out / "model")[0].trained_positions == 16
        return told in capfd.readouterr().err

    assert said("long", max_length=24)
    assert not said("short", max_length=16)
    assert not said("random", max_length=20, random_init=True)


def test_random_init(model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's shape, none of its weights."""
    started: dict[str, Any] = {}
    start_model = runs.start_model

    def watched(*arguments: Any) -> Any:
        made = start_model(*arguments)
        started[str(arguments[-1])] = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        return made

    monkeypatch.setattr(runs, "start_model", watched)
    for flag in ("false", "true"):
        tune(tmp_path / flag, "classify", model, *files["classify"], epochs=1, random_init=flag)
    source = BertForTask(make_config(), "sequence", 2).initialize(0)
    load_folder_weights(source, model, skip=("output",))
    for name, tensor in source.bert.state_dict().items():
        assert torch.equal(started["False"][f"bert.{name}"], tensor)
        if tensor.numel() > 1000:
            both = torch.stack([started["True"][f"bert.{name}"].flatten(), tensor.flatten()])
            assert abs(float(torch.corrcoef(both)[0, 1])) < 0.2, name
    assert weights_of(tmp_path / "true") != weights_of(tmp_path / "false")


def test_bf16(model: Path, files: Files, tmp_path: Path) -> None:
    """Computed in bf16, kept and updated in fp32; the precision found is written down."""
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], epochs=3, precision="bf16")
    tune(tmp_path / "fp32", "classify", model, *files["classify"], epochs=3)
    assert math.isfinite(summary["dev"]["accuracy"])
    assert weights_of(tmp_path / "run") != weights_of(tmp_path / "fp32")
    assert load_file(tmp_path / "run" / "model" / "model.safetensors")["classifier.weight"].dtype == torch.float32
    first = [log_lines(tmp_path / out)[0]["loss"] for out in ("run", "fp32")]
    assert first[0] == pytest.approx(first[1], abs=0.05)
    tune(tmp_path / "auto", "classify", model, *files["classify"], epochs=1, precision="auto", device="auto")
    config = (tmp_path / "auto" / "config.toml").read_text("utf-8")
    assert 'precision = "auto"' not in config


# --- steps that go wrong


def test_steps_without_a_finite_gradient(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One is skipped, with its batch, and said; the schedule does not move; ten in a row end the run."""
    clip_gradients, calls, bad = loop.clip_gradients, [0], {3}

    def clip(parameters: Any, max_norm: float) -> torch.Tensor:
        calls[0] += 1
        norm = clip_gradients(parameters, max_norm)
        return norm * math.nan if calls[0] in bad else norm

    monkeypatch.setattr(loop, "clip_gradients", clip)
    summary = tune(tmp_path / "run", "classify", model, *files["classify"], epochs=2)
    assert summary["runs"][0]["skipped_steps"] == 1
    assert summary["runs"][0]["steps"] == 6
    assert calls[0] == 7
    assert "warning: step 3: loss or gradient is not finite; batch skipped" in capfd.readouterr().err
    lines = [line for line in log_lines(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[2]["learning_rate"] == pytest.approx(5e-3 * 4 / 5)
    bad.update(range(1000))
    with pytest.raises(UserError, match="10 steps in a row gave no finite gradient; lower --learning-rate"):
        tune(tmp_path / "nan", "classify", model, *files["classify"], epochs=9)


# --- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "x"}, "data, train: give either --data FOLDER or --train FILE"),
        (
            {"dev": None},
            "dev, dev_share: a file to score on is needed beside --train: name one with --dev, or hold out",
        ),
        ({"dev_share": 0.1}, "dev_share: means nothing beside --dev, which names the file to score on; give one of"),
        ({"dev": None, "dev_share": 0}, "dev_share: 0.0 is not a share above 0 and below 1"),
        ({"dev": None, "dev_share": 1}, "dev_share: 1.0 is not a share"),
        ({"epochs": 0}, "epochs: 0.0 is not a number above 0"),
        ({"learning_rate": -1}, "learning_rate: -1.0 is not a number above 0"),
        ({"batch_size": 0}, "batch_size: 0 is not a number from 1 up"),
        ({"seeds": 0}, "seeds: 0 is not"),
        ({"seed": -1}, "seed: -1 is not a number from 0 to"),
        ({"max_length": 0}, "max_length: 0 is not"),
        ({"micro_tokens": 0}, "micro_tokens: 0 is not"),
        ({"train_rows": 0}, "train_rows: 0 is not"),
        ({"warmup": 1.5}, "warmup: 1.5 is neither a whole number of steps nor a share below 1"),
        ({"dropout": 1}, "dropout: 1.0 is not in"),
        ({"layer_decay": 0}, "layer_decay: 0.0 is not a share above 0 and up to 1"),
        ({"weight_decay": -0.1}, "weight_decay: -0.1 is not"),
        ({"clip_norm": 0}, "clip_norm: 0.0 is not"),
        ({"label_separator": ""}, "label_separator: empty"),
        ({"eval__every": -1}, "eval.every: -1 is negative"),
        ({"log__every": 0}, "log.every: 0 is not a number from 1 up"),
        ({"squad__stride": 0}, "squad.stride: 0 is not a number from 1 up"),
        ({"squad__n_best": 0}, "squad.n_best: 0 is not"),
        ({"keep": "first"}, "keep"),
        ({"checkpoint__keep": 0}, "checkpoint.keep"),
        ({"checkpoint__every": -1}, "checkpoint.every"),
    ],
)
def test_settings_that_are_wrong(files: Files, changes: dict[str, Any], message: str) -> None:
    train, dev = files["classify"]
    with pytest.raises(UserError) as caught:
        make_settings("classify", Path("m"), train, changes.pop("dev", dev), **changes)
    assert message in str(caught.value)


def test_defaults_are_the_papers() -> None:
    settings = FinetuneSettings("cola", "m", data="d")
    assert (settings.epochs, settings.batch_size, settings.learning_rate, settings.warmup) == (3, 32, 3e-5, 0.1)
    assert (settings.weight_decay, settings.clip_norm, settings.layer_decay) == (0.01, 1, 1)
    assert settings.problems() == []
