"""int8 files: which weights have 8 bits and how well they hold, how large, fast and like the model they are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import SMALL, TOKENS

from bertsmith.errors import UserError
from bertsmith.inference import export, quantize
from bertsmith.inference.export import load_exported, random_batches
from bertsmith.inference.export_model import expected_outputs, open_exportable
from bertsmith.inference.exported import INPUTS, MARKER, ExportedModel
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.weights import load_model, save_model
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer

SHAPE = replace(SMALL, num_hidden_layers=1, max_position_embeddings=128)

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pre-trained model and its fp32 export."""
    place = tmp_path_factory.mktemp("int8")
    model = place / "model"
    save_model(model, BertForPreTraining(SHAPE).initialize(0), "mlm+nsp")
    BertTokenizer(TOKENS).save(model)
    export.export_model(model, place / "fp32", "onnx")
    return model, place / "fp32"


def export_int8(exact: tuple[Path, Path], out: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The int8 export, from the file that there is instead of tracing the model again; its summary."""

    def copy(exportable: Any, format: str, path: Path) -> int:
        shutil.copy(exact[1] / path.name, path)
        return export.OPSET

    patch.setattr(export, "_write_model", copy)
    patch.setattr(quantize, "SPEED_SECONDS", 0)
    return export.export_model(exact[0], out, "onnx", int8=True)


@pytest.fixture(scope="module")
def made(exact: tuple[Path, Path]) -> tuple[Path, Path, dict[str, Any]]:
    """The model, its int8 export, and the summary of it."""
    out = exact[0].parent / "out"
    with pytest.MonkeyPatch.context() as patch:
        return exact[0], out, export_int8(exact, out, patch)


@pytest.fixture(scope="module")
def tensors(made: tuple[Path, Path, dict[str, Any]]) -> dict[str, np.ndarray]:
    file = onnx.load(made[1] / "model.onnx")
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in file.graph.initializer}


def test_every_product_of_tokens_is_int8_by_channel(
    made: tuple[Path, Path, dict[str, Any]], tensors: dict[str, np.ndarray]
) -> None:
    graph = onnx.load(made[1] / "model.onnx").graph
    makers = {name: node for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type == "MatMul" and node.input[1].startswith("int8.")]
    # query, key and value in one, attention output, intermediate, output; transform, decoder
    assert len(products) == 4 * SHAPE.num_hidden_layers + 2
    zeros = []
    for product in products:
        rounded, near = (makers[name] for name in product.input)
        assert rounded.op_type == near.op_type == "DequantizeLinear"
        assert makers[rounded.input[0]].op_type == "QuantizeLinear"
        weight, scale = (tensors[name] for name in near.input)
        assert weight.dtype == np.int8
        assert np.abs(weight.astype(int)).max() == 63  # 7 bits
        assert scale.shape == (weight.shape[1],)
        zeros.append(int(tensors[rounded.input[2]]))
    assert [zeros[number] for number in (0, 2, 4, 5)] == [128] * 4  # from layer norms
    assert sum(node.op_type == "ReduceMax" for node in graph.node) == 2  # a step a token for the other two
    # no float32 copy of a matrix is left but position and segment tables, and what is for whole sequences
    large = {name for name, array in tensors.items() if array.dtype == np.float32 and array.ndim == 2}
    assert large == {
        "embeddings.position", "embeddings.segment", "embeddings.word_scale", "pooler.dense.weight",
        "nsp_head.linear.weight",
    }  # fmt: skip
    onnx.checker.check_model(str(made[1] / "model.onnx"), full_check=True)


def test_the_runtime_multiplies_integers(made: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    """What is written as rounding in front of a product of floats becomes one of bytes, GELU one operator."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "joined.onnx")
    options.log_severity_level = 3
    runtime.InferenceSession(str(made[1] / "model.onnx"), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "joined.onnx").graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 4 * SHAPE.num_hidden_layers + 2
    assert kinds.count("BiasGelu") + kinds.count("Gelu") == SHAPE.num_hidden_layers + 1
    assert "Erf" not in kinds


def test_a_texts_numbers_do_not_depend_on_those_beside_it(made: tuple[Path, Path, dict[str, Any]]) -> None:
    exported = load_exported(made[1])
    ids = np.random.default_rng(3).integers(5, SHAPE.vocab_size, (6, 40))
    ids[3:] = ids[3:, :1]  # one token again and again: other ranges than those of mixed ones
    together = exported.run(ids)
    for row in range(len(ids)):
        alone = exported.run(ids[row : row + 1])
        for name, array in together.items():
            # a sum in another order can bring a number to the next code
            np.testing.assert_allclose(alone[name][0], array[row], atol=0.05 * np.abs(array).max())
            assert np.median(np.abs(alone[name][0] - array[row])) < 1e-3 * np.abs(array).max()


def test_the_word_table_is_within_half_a_step_of_the_models(
    made: tuple[Path, Path, dict[str, Any]], tensors: dict[str, np.ndarray]
) -> None:
    word = load_model(made[0])[0].bert.embeddings.word.detach().numpy()
    rows, scale = tensors["embeddings.word_int8"], tensors["embeddings.word_scale"]
    assert rows.dtype == np.int8
    assert scale.shape == (SMALL.vocab_size, 1)
    assert (np.abs(rows * scale - word) <= scale * 0.501).all()
    assert (np.abs(rows.astype(int)).max(1) == 127).all()


def test_an_empty_row_of_the_word_table_stays_empty() -> None:
    table = np.array([[0, 0], [1, -2]], np.float32)
    make = onnx.helper.make_node
    graph = onnx.helper.make_graph(
        [make("Relu", ["y"], ["z"]), make("Gather", ["table", INPUTS[0]], ["y"], axis=0)], "g", [], [],
        [onnx.numpy_helper.from_array(table, "table")],
    )  # fmt: skip
    quantize._quantize_word_table(graph, onnx)
    quantize._drop_unused(graph)
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert set(arrays) == {"table_int8", "table_scale"}
    np.testing.assert_allclose(arrays["table_int8"] * arrays["table_scale"], table, atol=0.01)
    assert [node.op_type for node in graph.node] == ["Relu", "Gather", "Gather", "Cast", "Mul"]
    assert graph.node[-1].output[0] == "y"


def test_what_is_printed_is_what_the_file_does(made: tuple[Path, Path, dict[str, Any]]) -> None:
    model, out, summary = made
    exportable, exported = open_exportable(model), load_exported(out)
    assert exported.precision == "int8"
    difference = 0.0
    decisions: list[Any] = []
    for batch in random_batches(SHAPE, 0):
        found = exported.run(**batch)
        for row, tokens in enumerate(batch["attention_mask"].sum(1)):
            ids, types = (torch.from_numpy(batch[name][row, :tokens]) for name in (INPUTS[0], INPUTS[2]))
            wanted = expected_outputs(exportable, ids, types)
            mine = {"prediction_logits": found["prediction_logits"][row, :tokens]}
            mine["seq_relationship_logits"] = found["seq_relationship_logits"][row]
            for name, array in mine.items():
                difference = max(difference, float(np.abs(array - wanted[name].numpy()).max()))
                decisions.append(np.ravel(array.argmax(-1) == wanted[name].numpy().argmax(-1)))
    assert summary["max_difference"] == pytest.approx(difference, rel=1e-3)
    assert summary["agreement"]["equal_labels"] == pytest.approx(np.concatenate(decisions).mean(), abs=1e-3)
    assert summary["fp32_max_difference"] <= 1e-4 < summary["max_difference"]
    assert 0.99 < summary["agreement"]["least_cosine"] <= summary["agreement"]["cosine"] < 1
    assert summary["size_mb"] == (out / "model.onnx").stat().st_size / 1e6
    assert summary["size_mb"] < 0.6 * summary["size_mb_before"]  # a tiny model: names and shapes weigh
    assert set(summary["tokens_per_second"]) == {"fp32", "int8"}
    assert all(rate > 0 for rates in summary["tokens_per_second"].values() for rate in rates.values())
    assert {path.name for path in out.iterdir()} == {
        "model.onnx", MARKER, "config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    marker = json.loads((out / MARKER).read_text("utf-8"))
    assert marker["precision"] == "int8"
    assert marker["agreement"]["max_difference"] == summary["max_difference"]


def test_large_models_stay_two_files(
    exact: tuple[Path, Path], made: tuple[Path, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "MOST_IN_ONE_FILE", 0)
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
    quantize.save_onnx(onnx.load(exact[1] / "model.onnx"), before / "model.onnx")
    assert (before / "model.onnx.data").is_file()
    tokenizer = load_tokenizer(made[0])
    quantize.quantize_weights(before / "model.onnx", after / "model.onnx", SHAPE, tokenizer)
    assert {path.name for path in before.iterdir()} == {path.name for path in after.iterdir()}
    assert (after / "model.onnx.data").is_file()
    runtime = pytest.importorskip("onnxruntime")
    batch = next(random_batches(SHAPE, 1))
    first, second = (
        runtime.InferenceSession(str(path)).run(None, batch)[0]
        for path in (made[1] / "model.onnx", after / "model.onnx")
    )
    np.testing.assert_array_equal(first, second)


def test_int8_is_for_onnx(made: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--int8: needs --format onnx"):
        export.export_model(made[0], tmp_path / "out", "torch", int8=True)
    assert not list(tmp_path.iterdir())


def test_a_model_that_int8_spoils_is_warned_about(
    exact: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agreement decides, whatever made it: here a file whose word table was lost on the way."""
    right = quantize.save_onnx

    def lose_words(model: Any, path: Path) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == "embeddings.word_int8":
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(tensor.dims, np.int8), tensor.name))
        right(model, path)

    monkeypatch.setattr(quantize, "save_onnx", lose_words)
    summary = export_int8(exact, tmp_path / "out", monkeypatch)
    assert summary["agreement"]["cosine"] < 0.99  # of a model that makes vectors or scores of words
    assert "warning: int8 changes what this model gives for random tokens: mean cosine 0." in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_exported_without_one(
    exact: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(exact[0] / name, bare)
    export_int8((bare, exact[1]), tmp_path / "out", monkeypatch)
    assert "has no tokenizer, so that none is exported" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.onnx", MARKER, "config.json"}


# --- speed


class Clocked(ExportedModel):
    """Takes as many seconds as a list says, by a clock of its own."""

    def __init__(self, seconds: list[float], patch: pytest.MonkeyPatch) -> None:
        self.seconds, self.now, self.calls = seconds, 0.0, 0
        patch.setattr(quantize.time, "perf_counter", lambda: self.now)

    def run(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> dict[str, Any]:
        self.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        return {}

    def _compute(self, given: Any) -> Any:
        raise AssertionError


def test_speed_is_that_of_the_first_call_and_the_median_after(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.array([[1, 1, 1], [1, 0, 0]])
    batch = dict(zip(INPUTS, (mask, mask, mask), strict=True))
    monkeypatch.setattr(quantize, "SPEED_SECONDS", 20)
    model = Clocked([8.0, 2.0, 4.0, 1.0], monkeypatch)
    measured = quantize.measure_speed(model, [batch])
    assert measured == {"first_call": 4 / 8, "steady": 4 / 1}
    assert model.calls == 9  # 8 + 2 + 4 + 6 × 1
    quick = Clocked([100.0], monkeypatch)
    quantize.measure_speed(quick, [batch, batch])
    assert quick.calls == 6  # three rounds at least


def test_speed_is_measured_on_the_same_texts_of_mixed_lengths() -> None:
    batches, again = quantize.speed_batches(90, 512, 5), quantize.speed_batches(90, 512, 5)
    lengths = np.concatenate([batch["attention_mask"].sum(1) for batch in batches])
    assert lengths.min() >= 16
    assert lengths.max() <= 128
    assert len(set(lengths.tolist())) > 8
    assert all((one[INPUTS[0]] == two[INPUTS[0]]).all() for one, two in zip(batches, again, strict=True))
    assert all(batch["attention_mask"].shape[1] <= 8 for batch in quantize.speed_batches(90, 8, 5))
