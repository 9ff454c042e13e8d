"""`bertsmith info` on what fine-tuning and export leave: results by run, the task of a model, an exported folder."""

from pathlib import Path

from bertsmith.describe import describe_path
from bertsmith.tasks.run_state import read_result
from bertsmith.tasks.runs import finetune
from bertsmith.tasks.settings import FinetuneSettings
from command_line import bertsmith
from made_tasks import make_model, write_task


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
    model = describe_path(run / "model")
    assert model["task"]["name"] == "classify"
    assert list(model["task"]["labels"]) == summary["labels"]
    out = tmp_path / "deployed"
    assert bertsmith("export", run, "--out", out, "--format", "torch").code == 0
    assert describe_path(out)["kind"] == "export"
    told = bertsmith("predict", out, "--input", dev, "--output", tmp_path / "p.csv").mistake
    assert "is an exported model" in told or "was not fine-tuned" in told


def test_other_models_have_no_task(tmp_path: Path) -> None:
    assert describe_path(make_model(tmp_path / "model"))["task"] is None
