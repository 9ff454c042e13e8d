"""`bertsmith export` as a user runs it: one JSON object, exit codes, a file that another process opens and runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bertsmith.inference import export_model
from bertsmith.inference.export import load_exported
from bertsmith.inference.exported import MARKER
from bertsmith.model.task_model import BertForTask
from bertsmith.model.weights import write_folder
from command_line import Outcome, bertsmith, start_process
from made_tasks import make_config, make_tokenizer

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)

RELOAD = """
import json, sys
from bertsmith.inference.export import load_exported
exported = load_exported(sys.argv[1], threads=1)
print(json.dumps({name: array.tolist() for name, array in exported.run([[2, 9, 8, 3, 0]], [[1, 1, 1, 1, 0]]).items()}))
"""


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an output layer for three tags, in transformers' layout."""
    folder = tmp_path_factory.mktemp("tagger") / "model é"
    shape = make_config(num_hidden_layers=1)
    names = {str(number): tag for number, tag in enumerate(("O", "B-PER", "I-PER"))}
    more = {"architectures": ["BertForTokenClassification"], "id2label": names}
    write_folder(folder, BertForTask(shape, "token", 3).initialize(1), shape, more)
    make_tokenizer(folder).save(folder)
    return folder


@pytest.fixture(scope="module")
def small(tagger: Path) -> tuple[Path, Outcome]:
    """The int8 export of the tagger, made by a process of its own, and what that process left."""
    out = tagger.parent / "int8 é"
    process = start_process("export", tagger, "--out", out, "--format", "onnx", "--int8", "--json")
    printed, said = process.communicate(timeout=500)
    return out, Outcome(process.returncode, printed.decode("utf-8"), said.decode("utf-8"))


def test_one_json_object_whatever_the_exporter_has_to_say(small: tuple[Path, Outcome]) -> None:
    out, outcome = small
    summary = outcome.json
    progress = [line for line in outcome.err.splitlines() if line.startswith("weights in 8 bits: ")]
    assert progress[-1].startswith("weights in 8 bits: 4/4 products, ")
    assert [line for line in outcome.err.splitlines() if line not in progress] == [
        f"export: tracing {out.parent / 'model é'}",
        "export: writing model.onnx",
        f"export: comparing it with the model on {len(summary['compared_on'])} batches",
        "export: quantizing its weights to int8",
        f"export: comparing the int8 file with the model on {len(summary['compared_on'])} batches",
        "export: timing fp32 and int8",
    ]
    assert summary["path"] == str(out)
    assert summary["format"] == "onnx"
    assert summary["precision"] == "int8"
    assert summary["opset"] == 18
    assert summary["labels"] == ["O", "B-PER", "I-PER"]
    assert summary["inputs"] == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), "int64 (batch, sequence)"
    )
    assert summary["outputs"] == {"logits": "float32 (batch, sequence, 3)"}
    assert {"1x7", "3x40", "8x64"} <= set(summary["compared_on"])
    assert summary["fp32_max_difference"] <= 1e-4
    assert 0 < summary["size_mb"] < summary["size_mb_before"]
    assert summary["agreement"]["cosine"] > 0.99
    assert summary["tokens_per_second"]["int8"]["steady"] > 0
    assert summary["seconds"] > 0


def test_a_new_process_gives_the_same_numbers(small: tuple[Path, Outcome]) -> None:
    out, _ = small
    here = load_exported(out, threads=1).run([[2, 9, 8, 3, 0]], [[1, 1, 1, 1, 0]])["logits"]
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, os.fspath(out)], capture_output=True, text=True, timeout=500, check=True
    )
    np.testing.assert_array_equal(np.array(json.loads(done.stdout)["logits"], np.float32), here)


@pytest.mark.parametrize(
    "command",
    [
        ("fill", "{}", "the [MASK]"),
        ("predict", "{}", "--input", "{}/vocab.txt", "--output", "{}/p.jsonl"),
        ("export", "{}", "--out", "{}/o", "--format", "onnx"),
        ("convert", "{}", "{}/c"),
    ],
    ids=lambda command: command[0],
)
def test_other_commands_refuse_an_exported_folder_in_one_sentence(
    small: tuple[Path, Outcome], command: tuple[str, ...]
) -> None:
    out, _ = small
    said = bertsmith(*(part.format(out) for part in command)).mistake
    assert str(out) in said
    assert "\n" not in said
    assert not (out / "p.jsonl").exists()


def test_transformers_refuses_an_exported_folder(small: tuple[Path, Outcome]) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers.AutoModel.from_pretrained(small[0])
    assert transformers.AutoConfig.from_pretrained(small[0]).id2label == {0: "O", 1: "B-PER", 2: "I-PER"}


def test_a_program_for_a_person(tagger: Path, tmp_path: Path) -> None:
    outcome = bertsmith("export", tagger, "--out", tmp_path / "out", "--format", "torch", "--seed", 3)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}/model.pt2: a torch.export program, fp32, ")
    assert "  input  attention_mask: int64 (batch, sequence)" in lines
    assert "  output logits: float32 (batch, sequence, 3)" in lines
    assert any(line.startswith("  largest difference ") for line in lines)
    assert load_exported(tmp_path / "out").labels == ("O", "B-PER", "I-PER")


def test_a_file_that_differs_is_not_kept_and_the_exit_code_is_1(
    tagger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = export_model._linear
    monkeypatch.setattr(export_model, "_linear", lambda layer, x: right(layer, x) + 1e-3)
    outcome = bertsmith("export", tagger, "--out", tmp_path / "out", "--format", "torch", "--json")
    assert outcome.code == 1
    assert not outcome.out
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"bertsmith: {tmp_path / 'out'}: the exported file differs from the model by ")
    assert outcome.err.count("bertsmith: ") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--format", "torch", "--int8"), "--int8: needs --format onnx"),
        (("--format", "torch", "--seed", "-1"), "--seed -1: a number from 0 up is needed"),
        (("--format", "tensorrt"), "--format: invalid choice: 'tensorrt'"),
        ((), "--format"),
    ],
)
def test_wrong_options_are_named(tagger: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in bertsmith("export", tagger, "--out", tmp_path / "out", *arguments).mistake
    assert not list(tmp_path.iterdir())


def test_names_are_checked_before_the_packages_are_imported(
    tagger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertsmith.inference.export.import_optional", lambda name: pytest.fail(f"{name} is imported"))
    (tmp_path / "notes.txt").write_text("mine")
    said = bertsmith("export", tagger, "--out", tmp_path / "notes.txt", "--format", "onnx").mistake
    assert said.startswith(f"{tmp_path / 'notes.txt'}: a file stands where a folder is needed")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    said = bertsmith("export", tmp_path / "gone", "--out", tmp_path / "out", "--format", "onnx").mistake
    assert str(tmp_path / "gone") in said


def test_a_folder_in_use_is_left_alone(tagger: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for out in (tagger, tmp_path):
        before = sorted(path.name for path in out.iterdir())
        said = bertsmith("export", tagger, "--out", out, "--format", "torch").mistake
        assert said == f"{out}: exists already and is no export; name a new folder, or remove it first"
        assert sorted(path.name for path in out.iterdir()) == before
        assert MARKER not in before
