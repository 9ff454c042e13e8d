"""Exported files compute what the model does, on any shape, and refuse what would give wrong numbers in silence."""

import json
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL, TOKENS, save_pretrained

from bertsmith.errors import UserError
from bertsmith.inference import export, export_model, quantize
from bertsmith.inference.export import ExportMismatch, compare, load_exported, random_batches
from bertsmith.inference.export_model import PaddedBert, expected_outputs, open_exportable
from bertsmith.inference.exported import FORMATS, INPUTS, MARKER, ExportedModel, OnnxModel, TorchModel
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.weights import save_model
from bertsmith.text.tokenizer import BertTokenizer

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)


def save_layers(folder: Path, layers: int, positions: int) -> Path:
    """A pre-trained folder of that many layers: what an export costs is a matter of them."""
    shape = replace(SMALL, num_hidden_layers=layers, max_position_embeddings=positions)
    save_model(folder, BertForPreTraining(shape).initialize(0), "mlm+nsp")
    BertTokenizer(TOKENS).save(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_layers(tmp_path_factory.mktemp("export") / "model", 2, 512)


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_layers(tmp_path_factory.mktemp("little") / "model", 1, 32)


@pytest.fixture(scope="module")
def folders(model: Path) -> dict[str, Path]:
    """Format → exported folder. Tests must not change them."""
    places = {format: model.parent / format for format in FORMATS}
    for format, place in places.items():
        export.export_model(model, place, format)
    return places


@pytest.fixture(scope="module")
def exported(folders: dict[str, Path]) -> dict[str, ExportedModel]:
    return {format: load_exported(folder) for format, folder in folders.items()}


@pytest.fixture(params=FORMATS)
def one(request: pytest.FixtureRequest, exported: dict[str, ExportedModel]) -> ExportedModel:
    return exported[request.param]


def make_batch(lengths: list[int], longest: int, seed: int = 0, segments: bool = True) -> dict[str, np.ndarray]:
    source = np.random.default_rng(seed)
    mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
    ids = source.integers(5, SMALL.vocab_size, mask.shape) * mask
    types = mask * (np.arange(longest) >= np.array(lengths)[:, None] // 2) if segments else np.zeros_like(mask)
    return dict(zip(INPUTS, (ids, mask, types), strict=True))


# --- the numbers


def test_both_formats_equal_transformers_on_padded_pairs_of_many_shapes(model: Path, one: ExportedModel) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForPreTraining.from_pretrained(model).eval()
    for shape, segments in (((1, 7), True), ((1, 7), False), ((3, 40), True), ((8, 512), True), ((1, 1), False)):
        lengths = [max(1, shape[1] - 60 * row) for row in range(shape[0])]
        batch = make_batch(lengths, shape[1], segments=segments)
        found = one.run(**batch)
        with torch.inference_mode():
            wanted = theirs(**{name: torch.from_numpy(array) for name, array in batch.items()})
        assert set(found) == {"prediction_logits", "seq_relationship_logits"}
        real = batch["attention_mask"].astype(bool)
        for name, array in found.items():
            where = real if name == "prediction_logits" else slice(None)
            assert np.abs(array[where] - wanted[name].numpy()[where]).max() <= 1e-4


@settings(max_examples=12)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 9), st.integers(0, 2**31))
def test_alone_or_padded_in_a_batch_the_same(
    exported: dict[str, ExportedModel], lengths: list[int], padding: int, seed: int
) -> None:
    batch = make_batch(lengths, max(lengths) + padding, seed)
    for model in exported.values():
        together = model.run(**batch)
        for row, length in enumerate(lengths):
            alone = model.run(**{name: array[row : row + 1, :length] for name, array in batch.items()})
            np.testing.assert_allclose(
                together["prediction_logits"][row, :length], alone["prediction_logits"][0], atol=1e-5
            )
            np.testing.assert_allclose(
                together["seq_relationship_logits"][row], alone["seq_relationship_logits"][0], atol=1e-5
            )


def test_types_and_mask_matter_and_may_be_left_out(one: ExportedModel) -> None:
    batch = make_batch([9, 9], 9)
    ids = batch["input_ids"]
    plain = one.run(ids)["prediction_logits"]
    np.testing.assert_array_equal(plain, one.run(ids, np.ones_like(ids), np.zeros_like(ids))["prediction_logits"])
    assert np.abs(plain - one.run(**batch)["prediction_logits"]).max() > 1e-3
    shorter = one.run(ids, [[1] * 6 + [0] * 3] * 2)["prediction_logits"]
    assert np.abs(plain - shorter)[:, :6].max() > 1e-3


@pytest.mark.parametrize("kind", [np.int32, np.uint16, torch.int32, list])
def test_whole_numbers_of_any_type_give_the_same(one: ExportedModel, kind: Any) -> None:
    batch = make_batch([5, 3], 5)
    as_kind: Callable[[np.ndarray], Any] = {
        list: lambda array: array.tolist(),
        torch.int32: lambda array: torch.from_numpy(array).int(),
    }.get(kind, lambda array: array.astype(kind))
    found = one.run(**{name: as_kind(array) for name, array in batch.items()})
    for name, array in one.run(**batch).items():
        np.testing.assert_array_equal(found[name], array)


def test_every_task_head_of_transformers_gives_its_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = replace(SMALL, max_position_embeddings=32).to_dict()
    kinds = {
        "BertForSequenceClassification": ("sequence", ("logits",)),
        "BertForTokenClassification": ("token", ("logits",)),
        "BertForQuestionAnswering": ("span", ("start_logits", "end_logits")),
        "BertForMultipleChoice": ("choice", ("logits",)),
        "BertForMaskedLM": ("pretraining", ("prediction_logits",)),
        "BertForNextSentencePrediction": ("pretraining", ("seq_relationship_logits",)),
        "BertModel": ("encoder", ("last_hidden_state", "pooler_output")),
    }
    batch = {name: torch.from_numpy(array) for name, array in make_batch([7, 20, 12], 20).items()}
    for kind, (head, outputs) in kinds.items():
        labels = 3 if head in ("sequence", "token") else 2
        theirs = getattr(transformers, kind)(transformers.BertConfig(**shape, num_labels=labels)).eval()
        theirs.save_pretrained(tmp_path / kind)
        exportable = open_exportable(tmp_path / kind)
        assert (exportable.head, exportable.outputs) == (head, outputs), kind
        assert (exportable.labels is not None) == (head in ("sequence", "token") and "id2label" in exportable.values)
        padded = PaddedBert(exportable).eval()
        with torch.inference_mode():
            given = {n: t[:, None] for n, t in batch.items()} if head == "choice" else batch  # (B, 1 choice, L)
            wanted = theirs(**given)
            found = padded(**batch)
        assert tuple(found) == outputs
        real = batch["attention_mask"].bool()
        for name in outputs:
            where = real if exportable.is_per_token(name) else slice(None)
            other = wanted[name if name in wanted else "logits"][where]
            torch.testing.assert_close(found[name][where], other, rtol=0, atol=1e-5, msg=f"{kind} {name}")
            axes = exportable.axes(name).split(", ")
            assert len(axes) == found[name].ndim
            assert not axes[-1].isdigit() or int(axes[-1]) == found[name].shape[-1]
        one_row = expected_outputs(exportable, batch["input_ids"][1], batch["token_type_ids"][1])
        for name in outputs:
            torch.testing.assert_close(one_row[name], found[name][1], rtol=0, atol=1e-5, msg=f"{kind} {name}")
        assert padded.state_dict().keys() <= set(dict(padded.named_parameters()))
        assert ("pooler.dense.weight" in padded.state_dict()) == (
            head in ("sequence", "choice") or bool({"pooler_output", "seq_relationship_logits"} & set(outputs))
        )


def test_heads_that_were_not_trained_are_not_exported(tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "mlm", "mlm")
    assert open_exportable(folder).outputs == ("prediction_logits",)


def test_models_of_too_few_positions_are_refused(tmp_path: Path) -> None:
    folder = save_layers(tmp_path / "m", 1, 2)
    with pytest.raises(UserError, match="has 2 positions; an axis of any length needs 3 at least"):
        open_exportable(folder)


def test_outputs_that_are_all_0_agree(
    model: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = {"prediction_logits": torch.zeros(4), "seq_relationship_logits": torch.zeros(2)}
    monkeypatch.setattr(export, "expected_outputs", lambda exportable, ids, types: (
        {"prediction_logits": torch.zeros(len(ids), 4), "seq_relationship_logits": nothing["seq_relationship_logits"]}
    ))  # fmt: skip

    class Nothing(ExportedModel):
        def __init__(self) -> None: ...

        def run(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
            rows = len(input_ids)
            return {
                "prediction_logits": np.zeros((*np.shape(input_ids), 4), np.float32),
                "seq_relationship_logits": np.zeros((rows, 2), np.float32),
            }

        def _compute(self, given: Any) -> Any: ...

    found = compare(Nothing(), open_exportable(model), list(random_batches(SMALL, 0))[:1])
    assert (found.max_difference, found.cosine, found.least_cosine) == (0, 1, 1)


def test_a_folder_without_its_output_layer_is_refused(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    values = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    values["architectures"] = ["BertForTokenClassification"]
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match=r"classifier\.weight is missing, so that its output layer was never trained"):
        open_exportable(tmp_path)


# --- the files


def test_onnx_has_named_inputs_and_two_free_axes(folders: dict[str, Path]) -> None:
    import onnx

    file = onnx.load(folders["onnx"] / "model.onnx")
    onnx.checker.check_model(file, full_check=True)
    shapes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*file.graph.input, *file.graph.output)
    }
    assert list(shapes)[:3] == list(INPUTS)
    assert all(shapes[name] == ["batch", "sequence"] for name in INPUTS)
    assert shapes["prediction_logits"] == ["batch", "sequence", SMALL.vocab_size]
    assert shapes["seq_relationship_logits"] == ["batch", 2]
    assert [(entry.domain, entry.version) for entry in file.opset_import] == [("", export.OPSET)]
    assert all(value.type.tensor_type.elem_type == onnx.TensorProto.INT64 for value in file.graph.input)


def test_onnx_runtime_itself_refuses_a_missing_input_and_int32(exported: dict[str, ExportedModel]) -> None:
    one = exported["onnx"]
    assert isinstance(one, OnnxModel)
    batch = make_batch([4], 4)
    with pytest.raises(Exception, match="token_type_ids"):
        one.session.run(None, {name: batch[name] for name in INPUTS[:2]})
    with pytest.raises(Exception, match="int32"):
        one.session.run(None, {name: array.astype(np.int32) for name, array in batch.items()})


def test_the_program_takes_inputs_by_name_only_and_knows_its_limit(folders: dict[str, Path]) -> None:
    module = torch.export.load(str(folders["torch"] / "model.pt2")).module()
    batch = {name: torch.from_numpy(array) for name, array in make_batch([4], 4).items()}
    in_another_order = dict(reversed(batch.items()))
    assert torch.equal(module(**batch)["prediction_logits"], module(**in_another_order)["prediction_logits"])
    with pytest.raises(ValueError, match="keyword"):
        module(*batch.values())
    with pytest.raises(RuntimeError, match="to be <= 512, but got 513"):
        module(**{name: torch.from_numpy(array) for name, array in make_batch([513], 513).items()})


def test_the_folder_can_be_deployed_alone(model: Path, folders: dict[str, Path]) -> None:
    for format, folder in folders.items():
        names = {path.name for path in folder.iterdir()}
        file = {"onnx": "model.onnx", "torch": "model.pt2"}[format]
        assert names == {file, MARKER, "config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"}
        for name in ("vocab.txt", "tokenizer.json"):
            assert (folder / name).read_bytes() == (model / name).read_bytes()
        source, copy = (json.loads((place / "config.json").read_text("utf-8")) for place in (model, folder))
        assert copy == source


def test_no_path_of_this_machine_is_in_the_files(folders: dict[str, Path]) -> None:
    here = str(Path(export_model.__file__).parent).encode()
    for folder in folders.values():
        for path in folder.iterdir():
            content = path.read_bytes()
            if path.suffix == ".pt2":
                with zipfile.ZipFile(path) as archive:
                    content = b"".join(archive.read(name) for name in archive.namelist())
            assert here not in content, path
            assert b"stack_trace" not in content, path


def test_large_models_are_two_files(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    whole = onnx.load(folders["onnx"] / "model.onnx")
    batch = make_batch([6, 2], 6)
    wanted = load_exported(folders["onnx"]).run(**batch)
    for name in ("config.json", MARKER):
        (tmp_path / name).write_bytes((folders["onnx"] / name).read_bytes())
    monkeypatch.setattr(quantize, "MOST_IN_ONE_FILE", 0)
    quantize.save_onnx(whole, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").stat().st_size > (tmp_path / "model.onnx").stat().st_size
    marker = json.loads((tmp_path / MARKER).read_text("utf-8"))
    marker["files"] = {path.name: path.stat().st_size for path in tmp_path.glob("model.onnx*")}
    (tmp_path / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    np.testing.assert_array_equal(
        load_exported(tmp_path).run(**batch)["prediction_logits"], wanted["prediction_logits"]
    )
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(UserError, match=r"model\.onnx\.data: is missing where"):
        load_exported(tmp_path)


# --- what goes in


def test_arrays_that_lie_another_way_are_taken(one: ExportedModel) -> None:
    ids = np.array([[5, 6, 7], [8, 9, 10]])
    wanted = one.run(ids)["prediction_logits"]
    turned, locked = np.ascontiguousarray(ids[:, ::-1])[:, ::-1], ids.copy()
    locked.setflags(write=False)
    for laid in (turned, locked, np.asfortranarray(ids), ids.T.copy().T):
        np.testing.assert_array_equal(one.run(laid)["prediction_logits"], wanted)
    with pytest.raises(UserError, match="whole numbers of shape"):
        one.run(torch.tensor([[1.0]], requires_grad=True))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"input_ids": [[1, 2], [3]]}, "input_ids: the rows are of unlike length; pad them"),
        ({"input_ids": [1, 2]}, r"input_ids: whole numbers of shape \(rows, tokens\) are needed.* shape \(2,\)"),
        ({"input_ids": np.zeros((0, 4), int)}, "at least one of each"),
        ({"input_ids": np.zeros((2, 0), int)}, "at least one of each"),
        ({"input_ids": [[0.5, 1.0]]}, "whole numbers .* not float64"),
        ({"input_ids": [[2, SMALL.vocab_size]]}, f"input_ids: {SMALL.vocab_size} is not from 0 to"),
        ({"input_ids": [[2, -1]]}, "input_ids: -1 is not from 0 to"),
        ({"input_ids": [[2, 3]], "token_type_ids": [[0, 2]]}, "token_type_ids: 2 is not from 0 to 1"),
        ({"input_ids": [[2, 3]], "attention_mask": [[1]]}, r"attention_mask: has shape \(1, 1\), input_ids \(1, 2\)"),
        ({"input_ids": [[2] * 513]}, "513 tokens a row are more than the model's 512; cut them"),
        ({"input_ids": [[2, 3], [0, 2]], "attention_mask": [[1, 1], [0, 1]]}, "row 2 begins with padding"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused(one: ExportedModel, inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        one.run(**inputs)


def test_a_tokenizers_order_of_outputs_cannot_swap_mask_and_types(model: Path, one: ExportedModel) -> None:
    """C7: tokenizers give ids, types, mask; models take ids, mask, types."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    encoded = tokenizer(["the cat", "a dog runs"], ["sat on a mat", "sees"], padding=True, return_tensors="np")
    assert list(encoded) == [INPUTS[0], INPUTS[2], INPUTS[1]]
    one.run(**encoded)
    with pytest.raises(UserError, match="give the mask before the types"):
        one.run(*encoded.values())


# --- loading


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_the_wrong_loader_is_refused(model: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was exported for onnx, not for torch; export it again for torch"):
        load_exported(folders["onnx"], format="torch")
    with pytest.raises(UserError, match="was exported for torch, not for onnx"):
        load_exported(folders["torch"], format="onnx")
    with pytest.raises(UserError, match="format: 'tf' is not known"):
        load_exported(folders["torch"], format="tf")
    with pytest.raises(UserError, match=rf"is no exported model \(no {MARKER} here\); run `bertsmith export"):
        load_exported(model)
    with pytest.raises(UserError, match="no such folder"):
        load_exported(tmp_path / "none")
    with pytest.raises(UserError, match="was exported already"):
        open_exportable(folders["onnx"])
    # one file under the other's name
    mixed = copy_folder(folders["torch"], tmp_path / "mixed")
    (mixed / "model.onnx").write_bytes((mixed / "model.pt2").read_bytes())
    marker = json.loads((mixed / MARKER).read_text("utf-8"))
    size = (mixed / "model.onnx").stat().st_size
    marker |= {"format": "onnx", "file": "model.onnx", "files": {"model.onnx": size}}
    (mixed / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    with pytest.raises(UserError, match=r"model\.onnx: cannot be loaded"):
        load_exported(mixed)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_are_refused(folders: dict[str, Path], tmp_path: Path, format: str) -> None:
    folder = copy_folder(folders[format], tmp_path / "copy")
    file = folder / {"onnx": "model.onnx", "torch": "model.pt2"}[format]
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"has [\d,]+ bytes where [\d,]+ bytes were exported; copy the folder again"):
        load_exported(folder)
    file.write_bytes(bytes(len(content)))
    with pytest.raises(UserError, match=str(file)):
        load_exported(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "tf"},
        {"file": "../model.onnx"},
        {"files": {}},
        {"files": {"../x": 1}},
        {"max_length": "512"},
        {"labels": 3},
    ],
)
def test_a_marker_that_we_did_not_write_is_refused(folders: dict[str, Path], tmp_path: Path, change: Any) -> None:
    folder = copy_folder(folders["onnx"], tmp_path / "copy")
    marker = json.loads((folder / MARKER).read_text("utf-8")) | change
    (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    with pytest.raises(UserError, match="is not what this version of bertsmith writes"):
        load_exported(folder)


class Boom:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def rewrite(
    source: Path, target: Path, change: Callable[[str, bytes], bytes], more: dict[str, bytes] | None = None
) -> None:
    """Copy an archive, its members changed by their name within the archive's folder."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name.partition("/")[2], old.read(name)))
        for name, content in (more or {}).items():
            new.writestr(f"model/{name}", content)


def test_a_program_with_code_in_it_is_refused_and_not_run(folders: dict[str, Path], tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch.save(Boom(touched), tmp_path / "boom.pt")
    boom = (tmp_path / "boom.pt").read_bytes()
    code = f"__import__('pathlib').Path({str(touched)!r}).touch()"

    def edit(name: str, old: str, new: str) -> Callable[[str, bytes], bytes]:
        def change(member: str, content: bytes) -> bytes:
            if member == name:
                assert old.encode() in content
                return content.replace(old.encode(), json.dumps(new)[1:-1].encode(), 1)
            return content

        return change

    model, weights = "models/model.json", "data/weights/model_weights_config.json"
    hostile: dict[str, tuple[Callable[[str, bytes], bytes], dict[str, bytes]]] = {
        "sample inputs": (lambda name, content: boom if name.startswith("data/sample_inputs") else content, {}),
        "pickled weight": (edit(weights, '"use_pickle": false', "x"), {}),
        "another file": (lambda name, content: content, {"data/constants/custom_obj_0": boom}),
        "guard": (edit(model, "L['input_ids'].size()[0] == ", f"{code} == "), {}),
        "size": (edit(model, "Symbol('s", f"{code}+Symbol('s"), {}),
        "operator": (edit(model, "torch.ops.aten.tanh.default", "torch.hub.load"), {}),
        "name": (edit(model, "input_ids", f"x={code};"), {}),
    }
    hostile["pickled weight"] = (
        lambda name, content: (
            content.replace(b'"use_pickle": false', b'"use_pickle": true', 1) if name == weights else content
        ),
        {},
    )
    for what, (change, more) in hostile.items():
        folder = copy_folder(folders["torch"], tmp_path / what)
        rewrite(folders["torch"] / "model.pt2", folder / "model.pt2", change, more)
        marker = json.loads((folder / MARKER).read_text("utf-8"))
        marker["files"]["model.pt2"] = (folder / "model.pt2").stat().st_size
        (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")
        with pytest.raises(UserError, match="which could be code and was not run"):
            load_exported(folder)
        assert not touched.exists(), what
    rewrite(folders["torch"] / "model.pt2", folder / "model.pt2", lambda name, content: content)
    marker["files"]["model.pt2"] = (folder / "model.pt2").stat().st_size
    (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    assert load_exported(folder).run([[2, 3]])  # the rewriting alone does no harm


def test_threads_are_those_asked_for(folders: dict[str, Path]) -> None:
    for threads in (1, 2):
        one = load_exported(folders["onnx"], threads)
        assert isinstance(one, OnnxModel)
        assert one.session.get_session_options().intra_op_num_threads == threads
    default = load_exported(folders["onnx"])
    assert isinstance(default, OnnxModel)
    assert default.session.get_session_options().intra_op_num_threads == torch.get_num_threads()
    with pytest.raises(UserError, match="threads: 0"):
        load_exported(folders["torch"], 0)
    before = torch.get_num_threads()
    one = load_exported(folders["torch"], before + 1)
    assert isinstance(one, TorchModel)
    seen = []
    module = one.module
    one.module = lambda **inputs: seen.append(torch.get_num_threads()) or module(**inputs)  # type: ignore[assignment]
    one.run([[2, 3]])
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


# --- the check


class Fake(ExportedModel):
    """Gives what the model gives, and something else where a test says so."""

    def __init__(self, exportable: Any, spoil: Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], None]) -> None:
        self.exportable, self.spoil = exportable, spoil

    def run(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> dict[str, np.ndarray]:
        given = dict(zip(INPUTS, (input_ids, attention_mask, token_type_ids), strict=True))
        with torch.inference_mode():
            outputs = PaddedBert(self.exportable)(**{name: torch.from_numpy(a) for name, a in given.items()})
        arrays = {name: tensor.numpy().copy() for name, tensor in outputs.items()}
        self.spoil(arrays, given)
        return arrays

    def _compute(self, given: Any) -> Any:
        raise AssertionError


def test_comparison_sees_real_places_only_and_the_largest_difference(model: Path) -> None:
    exportable = open_exportable(model)
    batches = [make_batch([4, 9], 9), make_batch([6], 6)]

    def spoil_padding(arrays: dict[str, np.ndarray], given: dict[str, np.ndarray]) -> None:
        arrays["prediction_logits"][given["attention_mask"] == 0] = np.nan

    exact = compare(Fake(exportable, spoil_padding), exportable, batches)
    assert exact.max_difference < 1e-5
    assert exact.cosine == pytest.approx(1, abs=1e-6)
    assert exact.equal_labels == 1

    def spoil_one(arrays: dict[str, np.ndarray], given: dict[str, np.ndarray]) -> None:
        if len(given["input_ids"]) == 1:
            arrays["prediction_logits"][0, 5, 0] += 100  # the last real token of all

    off = compare(Fake(exportable, spoil_one), exportable, batches)
    assert off.max_difference == pytest.approx(100, abs=1e-3)
    assert off.least_cosine is not None
    assert off.least_cosine < 0.9
    assert off.equal_labels == pytest.approx(1 - 1 / (4 + 9 + 6 + 3))  # tokens, and three next-sentence decisions

    def spoil_with_nan(arrays: dict[str, np.ndarray], given: dict[str, np.ndarray]) -> None:
        arrays["seq_relationship_logits"][0, 1] = np.nan

    assert compare(Fake(exportable, spoil_with_nan), exportable, batches).max_difference == np.inf


def test_the_random_texts_hold_every_shape_padding_and_both_segments() -> None:
    batches = list(random_batches(SMALL, 3))
    shapes = [batch["input_ids"].shape for batch in batches]
    assert {(1, 7), (3, 40), (8, 512)} <= set(shapes)
    assert any((batch["attention_mask"] == 0).any() for batch in batches)
    assert any(batch["token_type_ids"].any() for batch in batches)
    assert all((batch["token_type_ids"] <= batch["attention_mask"]).all() for batch in batches)
    assert any(not row.any() for batch in batches for row in batch["token_type_ids"][:, 1:])
    assert all(batch["attention_mask"].sum(1).max() == batch["input_ids"].shape[1] for batch in batches)
    again, other = list(random_batches(SMALL, 3)), list(random_batches(SMALL, 4))
    assert all((one["input_ids"] == two["input_ids"]).all() for one, two in zip(batches, again, strict=True))
    assert not np.array_equal(batches[3]["input_ids"], other[3]["input_ids"])
    short = list(random_batches(replace(SMALL, max_position_embeddings=16, type_vocab_size=1), 0))
    assert max(batch["input_ids"].shape[1] for batch in short) == 16
    assert not any(batch["token_type_ids"].any() for batch in short)


def test_a_file_that_computes_something_else_is_not_kept(
    little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: types passed as mask."""
    right = PaddedBert.forward
    monkeypatch.setattr(PaddedBert, "forward", lambda self, input_ids, attention_mask, token_type_ids: right(
        self, input_ids, token_type_ids, attention_mask
    ))  # fmt: skip
    with pytest.raises(ExportMismatch, match=r"differs from the model by [\d.]+, more than 0.0001; it was not kept"):
        export.export_model(little, tmp_path / "out", "torch")
    assert not list(tmp_path.iterdir())


def test_out_may_hold_an_earlier_export_and_nothing_else(
    little: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    weights = (little / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists already and is no export"):
        export.export_model(little, little, "torch")
    assert (little / "model.safetensors").read_bytes() == weights
    earlier = copy_folder(folders["onnx"], tmp_path / "out")
    export.export_model(little, earlier, "torch")
    assert load_exported(earlier).format == "torch"
    assert not (earlier / "model.onnx").exists()


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_before_any_work(
    package: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{package} is not installed; run `pip install 'bertsmith\[export\]'`"):
        export.export_model(model, tmp_path / "out", "onnx")
    assert not list(tmp_path.iterdir())
