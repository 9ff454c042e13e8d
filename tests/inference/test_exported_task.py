"""Exports of fine-tuned models predict by the commands and methods that the model itself predicts by."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from alike import assert_alike

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import UserError
from bertsmith.inference import quantize
from bertsmith.inference.export import export_model
from bertsmith.inference.exported import MARKER
from bertsmith.inference.predict import evaluate_file, predict_file

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)

Tuned = Callable[[str], Path]
Files = dict[str, tuple[Path, Path]]
# every head in ONNX, one by a program of PyTorch's; making one takes seconds
CASES = [
    ("ner", "onnx"),
    ("squad1", "onnx"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("pairs", "onnx"), ("choice", "onnx"), ("ner", "torch"))
    ),
]


@pytest.fixture(scope="module")
def exports(tuned: Tuned, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    place, made = tmp_path_factory.mktemp("exports"), {}

    def export(kind: str, format: str) -> Path:
        if (kind, format) not in made:
            made[kind, format] = place / f"{kind}-{format}"
            export_model(tuned(kind), made[kind, format], format)
        return made[kind, format]

    return export


@pytest.mark.parametrize(("kind", "format"), CASES)
def test_a_file_is_predicted_and_measured_alike(
    tuned: Tuned, exports: Callable[[str, str], Path], files: Files, tmp_path: Path, kind: str, format: str
) -> None:
    run, export, source = tuned(kind), exports(kind, format), str(files[kind][1])
    rows = []
    for number, model in enumerate((run, export)):
        predict_file(model, source, tmp_path / f"{number}.jsonl", precision="fp32")
        rows.append([json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text("utf-8").splitlines()])
    assert len(rows[0]) > 5
    assert_alike(rows[1], rows[0])
    mine, exact = (evaluate_file(model, source, precision="fp32") for model in (export, run))
    assert_alike(mine["metrics"], exact["metrics"])
    assert mine["rows"] == exact["rows"]


def test_a_loaded_export_predicts_and_says_what_it_cannot(
    tuned: Tuned, exports: Callable[[str, str], Path], tmp_path: Path
) -> None:
    model, export = bertsmith.load(tuned("ner"), precision="fp32"), bertsmith.load(exports("ner", "onnx"))
    texts = ["anna lives in london", "the day", ""]
    assert export.abilities == ("predict", "tag", "entities")
    assert export.tag(texts) == model.tag(texts)
    assert export.entities(texts) == model.entities(texts)
    assert "cpu, fp32" in repr(export)
    for call in (lambda: export.embed(texts), lambda: export.fill(texts), lambda: export.score(texts)):
        with pytest.raises(UserError, match="is an export, which predicts only; name the model folder that it was"):
            call()
    with pytest.raises(UserError, match="was fine-tuned for ner, which tags words"):
        export.answer("who?", "anna")


def test_int8_predicts_in_the_file_s_own_precision(
    tuned: Tuned, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize, "SPEED_SECONDS", 0)
    export_model(tuned("classify"), tmp_path / "small", "onnx", int8=True)
    small, exact = bertsmith.load(tmp_path / "small"), bertsmith.load(tuned("classify"), precision="fp32")
    assert small.precision == "int8"
    texts = ["a good film", "the day was bad , very bad", "☃"]
    found, wanted = ([list(row["scores"].values()) for row in each.predict(texts)] for each in (small, exact))
    assert found != wanted
    np.testing.assert_allclose(found, wanted, atol=0.05)
    data = str(files["classify"][1])
    assert main(["evaluate", str(tmp_path / "small"), "--data", data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] > 5
    assert main(["evaluate", str(tmp_path / "small"), "--data", data, "--precision", "fp32"]) == 2
    assert "was exported in int8 and computes in nothing else; leave --precision out" in capsys.readouterr().err
    with pytest.raises(UserError, match="is an export, which is used on the CPU"):
        predict_file(tmp_path / "small", data, tmp_path / "out.jsonl", "cuda")


def test_what_is_no_export_of_this_task_is_refused(
    tuned: Tuned, exports: Callable[[str, str], Path], tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for path in exports("ner", "onnx").iterdir():
        (mixed / path.name).write_bytes(path.read_bytes())
    marker = json.loads((mixed / MARKER).read_text("utf-8")) | {"head": "sequence"}
    (mixed / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    with pytest.raises(UserError, match="the file is for a head of the kind sequence, its task ner needs token"):
        bertsmith.load(mixed)
    (mixed / MARKER).write_text(json.dumps(marker | {"head": "token"}), encoding="utf-8")
    values = json.loads((mixed / "config.json").read_text("utf-8"))
    fewer = values["bertsmith_task"] | {"labels": values["bertsmith_task"]["labels"][:-1]}
    named = {str(number): label for number, label in enumerate(fewer["labels"])}
    more = {"bertsmith_task": fewer, "id2label": named, "label2id": {label: int(n) for n, label in named.items()}}
    (mixed / "config.json").write_text(json.dumps(values | more), encoding="utf-8")
    with pytest.raises(UserError, match=r"scores where its task has .*; export the model again"):
        bertsmith.load(mixed).tag(["the day"])
    del values["bertsmith_task"]
    (mixed / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match="which takes batches of ids; open it by `load_exported`, or name"):
        bertsmith.load(mixed)
