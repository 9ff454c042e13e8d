"""`bertsmith info` on what fine-tuning and export leave: results by run, the task of a model, an exported folder."""

from pathlib import Path

from bertsmith.describe import describe_path
from bertsmith.tasks.run_state import read_result
from bertsmith.tasks.runs import finetune
from bertsmith.tasks.settings import FinetuneSettings
from command_line import bertsmith
from made_tasks import make_model, tune, write_task


def test_a_fine_tuning_its_model_and_an_export(tmp_path: Path) -> None:
    train, dev = write_task(tmp_path, "classify")
    run = tmp_path / "run"
    settings = FinetuneSettings(
        task="classify", model=str(make_model(tmp_path / "model")), train=str(train), dev=str(dev), epochs=1, seeds=2
    )
    summary = finetune(settings, run)
    described = describe_path(run)
    assert described["kind"] == "run"
    assert len(described["results"]) == 2
    for name, metrics in described["results"].items():
        result = read_result(run / "runs" / name)
        assert result is not None
        assert metrics == result["dev"]
        assert described["kept_steps"][name] == result["best_step"]
    assert described["last_evaluation"]["dev_accuracy"] == metrics["accuracy"]  # of the run that was made last
    model = describe_path(run / "model")
    assert model["task"]["name"] == "classify"
    assert list(model["task"]["labels"]) == summary["labels"]
    assert model["heads"] == ["pooler", "classify"]
    assert model["unused_tensors"] == []
    out = tmp_path / "deployed"
    assert bertsmith("export", run, "--out", out, "--format", "torch").code == 0
    assert describe_path(out)["kind"] == "export"
    assert bertsmith("predict", out, "--input", dev, "--output", tmp_path / "p.csv").code == 0
    told = bertsmith("embed", out, "--input", dev, "--output", tmp_path / "v.npy").mistake
    assert "is an export, which predicts only; name the model folder" in told


def test_a_finished_fine_tuning_shows_how_far_it_went(tmp_path: Path) -> None:
    train, dev = write_task(tmp_path, "classify")
    run = tmp_path / "run"
    tune(run, "classify", make_model(tmp_path / "model"), train, dev, epochs=1)
    described, result = describe_path(run), read_result(run)
    assert result is not None
    assert described["step"] == described["last_metrics"]["step"] == result["steps"] > 0
    assert described["newest_checkpoint"] is None
    evaluation = {f"dev_{name}": value for name, value in result["history"][-1]["dev"].items()}
    assert evaluation.items() <= described["last_evaluation"].items()
    assert described["last_evaluation"]["step"] == result["steps"]


def test_other_models_have_no_task(tmp_path: Path) -> None:
    assert describe_path(make_model(tmp_path / "model"))["task"] is None
