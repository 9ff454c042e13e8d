"""Google's checkpoints: a genuine one computes as it should, all tensors return bit for bit, odd ones are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from packed_batches import make_packed
from scipy.special import erf

from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.google import find_checkpoint, load_google_model, open_google, write_google
from bertsmith.model.task_model import BertForTask
from bertsmith.model.tensor_bundle import read_bundle, write_bundle
from bertsmith.model.weights import load_weights, to_hugging_face

CONFIG = BertConfig(50, 8, 2, 2, 32, max_position_embeddings=16)
Array = npt.NDArray[np.float64]


# --- a genuine checkpoint, evaluated in plain numpy from Google's own names


class Evaluation:
    """BERT in float64, one sequence at a time, as the paper and modeling.py say."""

    def __init__(self, prefix: Path, layers: int, heads: int) -> None:
        bundle = read_bundle(prefix)
        self.tensors = {name: bundle.tensor(name).astype(np.float64) for name in bundle if "/adam_" not in name}
        self.layers, self.heads = layers, heads

    def dense(self, x: Array, scope: str) -> Array:
        return x @ self.tensors[f"{scope}/kernel"] + self.tensors[f"{scope}/bias"]

    def norm(self, x: Array, scope: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * self.tensors[f"{scope}/LayerNorm/gamma"] + self.tensors[f"{scope}/LayerNorm/beta"]

    @staticmethod
    def gelu(x: Array) -> Array:
        return np.asarray(x * 0.5 * (1 + erf(x / np.sqrt(2))))

    @staticmethod
    def softmax(x: Array) -> Array:
        exponentials = np.exp(x - x.max(-1, keepdims=True))
        return np.asarray(exponentials / exponentials.sum(-1, keepdims=True))

    def hidden(self, ids: Any, segments: Any) -> Array:
        scope = "bert/embeddings"
        x = self.tensors[f"{scope}/word_embeddings"][ids] + self.tensors[f"{scope}/token_type_embeddings"][segments]
        x = self.norm(x + self.tensors[f"{scope}/position_embeddings"][: len(ids)], scope)
        for layer in range(self.layers):
            scope = f"bert/encoder/layer_{layer}"
            query, key, value = (
                np.stack(np.split(self.dense(x, f"{scope}/attention/self/{which}"), self.heads, axis=-1))
                for which in ("query", "key", "value")
            )  # each (heads, tokens, size)
            shares = self.softmax(query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1]))
            context = np.concatenate(list(shares @ value), axis=-1)
            mixed = self.norm(x + self.dense(context, f"{scope}/attention/output/dense"), f"{scope}/attention/output")
            wide = self.gelu(self.dense(mixed, f"{scope}/intermediate/dense"))
            x = self.norm(mixed + self.dense(wide, f"{scope}/output/dense"), f"{scope}/output")
        return x

    def logits(self, ids: Any, segments: Any) -> tuple[Array, Array]:
        """MLM (tokens, V) and NSP (2,)."""
        x = self.hidden(ids, segments)
        scope = "cls/predictions"
        transformed = self.norm(self.gelu(self.dense(x, f"{scope}/transform/dense")), f"{scope}/transform")
        words = self.tensors["bert/embeddings/word_embeddings"]
        mlm = transformed @ words.T + self.tensors[f"{scope}/output_bias"]
        pooled = np.tanh(self.dense(x[0], "bert/pooler/dense"))
        scope = "cls/seq_relationship"
        return mlm, pooled @ self.tensors[f"{scope}/output_weights"].T + self.tensors[f"{scope}/output_bias"]


def test_a_genuine_checkpoint_gives_the_logits_of_a_plain_evaluation(shared_data: Path) -> None:
    prefix = shared_data / "checkpoints/tf1_tiny/bert_model.ckpt"
    model, report, _ = load_google_model(prefix)
    assert not report.missing
    assert not report.unused
    reference = Evaluation(prefix, model.config.num_hidden_layers, model.config.num_attention_heads)
    batch = make_packed([16, 1, 9, 16, 5], vocab_size=15)
    mlm, nsp = model.logits(*batch.arguments(), torch.arange(len(batch.token_ids)))
    seen = 0
    for number, length in enumerate(batch.lengths):
        part = slice(seen, seen + length)
        seen += length
        expected = reference.logits(batch.token_ids[part].numpy(), batch.segment_ids[part].numpy())
        np.testing.assert_allclose(mlm[part].numpy(), expected[0], rtol=0, atol=5e-6)
        np.testing.assert_allclose(nsp[number].numpy(), expected[1], rtol=0, atol=5e-6)
    assert float(mlm.std()) > 0.01  # there is something to compare


def test_a_genuine_checkpoint_returns_bit_for_bit(shared_data: Path, tmp_path: Path) -> None:
    prefix = shared_data / "checkpoints/tf1_tiny/bert_model.ckpt"
    model, _, more = load_google_model(prefix)
    write_google(tmp_path, to_hugging_face(model), model.config, more)
    before, after = read_bundle(prefix), read_bundle(tmp_path / "bert_model.ckpt")
    assert {name for name in before if "/adam_" not in name} == set(after)
    for name in after:
        if name != "global_step":
            assert before.tensor(name).tobytes() == after.tensor(name).tobytes(), name
    assert after["global_step"].dtype == "int64"
    assert after.tensor("global_step") == 0
    again, _, _ = load_google_model(tmp_path / "bert_model.ckpt")
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name
    genuine = json.loads((prefix.parent / "bert_config.json").read_text(encoding="utf-8"))
    written = json.loads((tmp_path / "bert_config.json").read_text(encoding="utf-8"))
    shared = genuine.keys() & written.keys()
    assert len(shared) == 11
    assert all(genuine[key] == written[key] for key in shared)


# --- made-up checkpoints


@pytest.fixture
def model() -> BertForPreTraining:
    model = BertForPreTraining(CONFIG).initialize(3)
    with torch.no_grad():
        for parameter in model.parameters():  # no two parameters alike, so that none can stand for another
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model


@pytest.fixture
def folder(tmp_path: Path, model: BertForPreTraining) -> Path:
    write_google(tmp_path / "google", to_hugging_face(model), CONFIG, {})
    return tmp_path / "google"


def add_tensors(folder: Path, more: dict[str, Any], left_out: tuple[str, ...] = ()) -> None:
    """Write the checkpoint again with other tensors beside its own."""
    bundle = read_bundle(folder / "bert_model.ckpt")
    tensors = {name: bundle.tensor(name) for name in bundle if not name.startswith(left_out or "\0")}
    write_bundle(folder / "bert_model.ckpt", tensors | more)


KERNEL = "bert/encoder/layer_0/output/dense/kernel"


@pytest.mark.parametrize(
    "name",
    [
        f"{KERNEL}/adam_m",
        f"{KERNEL}/adam_v",
        f"{KERNEL}/Adam",
        f"{KERNEL}/Adam_1",
        f"{KERNEL}/AdamWeightDecayOptimizer",
        f"{KERNEL}/AdamWeightDecayOptimizer_1",
        f"{KERNEL}/LAMBOptimizer",
        f"{KERNEL}/lamb_v",
        f"{KERNEL}/BERTAdam_m",
        f"{KERNEL}/Momentum",
        f"{KERNEL}/m",
        f"{KERNEL}/vr",
        f"{KERNEL}/Whatever",
        f"LAMB/{KERNEL}",
        f"training/Adam/{KERNEL}/v",
        "output_weights/adam_m",
        "my/own/head/W/AdamWeightDecayOptimizer_1",
        "bert/AdamWeightDecayOptimizer/learning_rate",
        "beta1_power",
        "beta2_power",
        "beta_1_power",
        "beta1_power_1",
        "global_step",
        "current_loss_scale",
        "good_steps",
        "learning_rate",
    ],
)
def test_what_an_optimizer_left_is_skipped_in_any_spelling(name: str, folder: Path, model: BertForPreTraining) -> None:
    add_tensors(folder, {name: np.ones((32, 8), np.float32)})
    checkpoint = open_google(folder / "bert_model.ckpt")[1]
    assert checkpoint.skipped == sorted({name, "global_step"})
    again, report, _ = load_google_model(folder / "bert_model.ckpt")
    assert not report.missing
    assert not report.unused
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_what_is_neither_berts_nor_an_optimizers_is_unused(folder: Path) -> None:
    more = {name: np.ones(3, np.float32) for name in ("my/head/W", "adaptive/kernel", "decay_head/bias", "lambda")}
    add_tensors(folder, more)
    assert sorted(load_google_model(folder / "bert_model.ckpt")[1].unused) == [
        "adaptive/kernel",
        "decay_head/bias",
        "lambda",
        "my/head/W",
    ]


@pytest.mark.parametrize(("head", "outputs"), [("sequence", 3), ("choice", 1), ("token", 5), ("span", 2)])
def test_classifiers_travel(head: str, outputs: int, tmp_path: Path) -> None:
    model = BertForTask(CONFIG, head, outputs).initialize(1)
    labels = {"architectures": ["x"], "id2label": {"0": "é"}}
    write_google(tmp_path, to_hugging_face(model), CONFIG, labels)
    scope = "cls/squad/" if head == "span" else ""
    bundle = read_bundle(tmp_path / "bert_model.ckpt")
    assert bundle[f"{scope}output_weights"].shape == (outputs, 8)
    assert bundle[f"{scope}output_bias"].shape == (outputs,)
    config, checkpoint, values = open_google(tmp_path / "bert_model.ckpt")
    assert config == CONFIG
    assert values == labels
    again = BertForTask(config, head, outputs).initialize(2)
    report = load_weights(again, checkpoint)
    assert not report.missing + report.unused
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_what_googles_layout_has_no_place_for_comes_back(tmp_path: Path, model: BertForPreTraining) -> None:
    config = BertConfig(**{**vars(CONFIG), "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "pad_token_id": 7})
    write_google(tmp_path, to_hugging_face(model), config, {"bertsmith_objective": "mlm"})
    written = json.loads((tmp_path / "bert_config.json").read_text(encoding="utf-8"))
    assert written["hidden_act"] == "gelu"  # modeling.py knows no other name for it
    assert open_google(tmp_path / "bert_model.ckpt")[::2] == (config, {"bertsmith_objective": "mlm"})


def test_missing_pieces_are_reported(folder: Path) -> None:
    add_tensors(folder, {}, ("cls/seq_relationship", "bert/pooler"))
    report = load_google_model(folder / "bert_model.ckpt")[1]
    assert len(report.missing_from("pooler")) == len(report.missing_from("nsp")) == 2
    assert not report.missing_from("encoder", "mlm")


def test_a_padded_word_table_is_cut_and_said(folder: Path, model: BertForPreTraining) -> None:
    words = model.bert.embeddings.word.detach().numpy()
    padded = np.concatenate([words, np.ones((6, 8), np.float32)])
    bias = np.zeros(56, np.float32)
    add_tensors(folder, {"bert/embeddings/word_embeddings": padded, "cls/predictions/output_bias": bias})
    again, report, _ = load_google_model(folder / "bert_model.ckpt")
    assert np.array_equal(again.bert.embeddings.word.detach().numpy(), words)
    assert len(report.notes) == 1
    assert "56 rows for a vocabulary of 50" in report.notes[0]


def test_checkpoints_are_found_by_folder_prefix_or_file(folder: Path) -> None:
    prefix = folder / "bert_model.ckpt"
    names = (
        "",
        "bert_model.ckpt",
        "bert_model.ckpt.index",
        "bert_model.ckpt.meta",
        "bert_model.ckpt.data-00000-of-00001",
    )
    assert {find_checkpoint(folder / name) for name in names} == {prefix}
    assert find_checkpoint(folder / "nothing") is None
    assert find_checkpoint(folder.parent) is None
    for file in folder.glob("bert_model.ckpt.*"):
        shutil.copy(file, folder / file.name.replace("bert_model.ckpt", "model.ckpt-343"))
    assert find_checkpoint(folder) == prefix
    for file in folder.glob("bert_model.ckpt.*"):
        file.rename(folder / file.name.replace("bert_model.ckpt", "model.ckpt-99"))
    with pytest.raises(UserError, match=r"holds 2 checkpoints; name one of them.*model\.ckpt-343"):
        find_checkpoint(folder)
    assert load_google_model(folder / "model.ckpt-343")[1].used


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "bert_config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")

    return change


def cut_data(folder: Path) -> None:
    path = folder / "bert_model.ckpt.data-00000-of-00001"
    path.write_bytes(path.read_bytes()[:-100])


BAD = {
    "no configuration": (lambda f: (f / "bert_config.json").unlink(), "no bert_config.json beside bert_model.ckpt"),
    "a list": (lambda f: (f / "bert_config.json").write_text("[1]", encoding="utf-8"), "holds no JSON object"),
    "cut data": (cut_data, "copy the checkpoint again"),
    "larger vocabulary": (change_config(vocab_size=51), r"has shape \[50, 8\], that is 50 rows, .* vocab_size 51"),
    "wider": (change_config(intermediate_size=33), r"has shape \[32, 8\], the configuration asks for \[33, 8\]"),
    "more layers": (change_config(num_hidden_layers=3), "16 encoder tensors are missing, the first is"),
    "huge": (change_config(num_hidden_layers=10**12), "1,000,000,000,000 layers and .* parameters, but"),
    "another architecture": (change_config(model_type="albert"), "model_type is 'albert'"),
    "no numbers": (change_config(hidden_size="8"), "hidden_size: '8' is not a number"),
    "odd more": (change_config(bertsmith=3), "bertsmith is no JSON object"),
    "another model": (
        lambda f: add_tensors(f, {"electra/embeddings/word_embeddings": np.ones((500, 8), np.float32)}, ("bert/",)),
        "37 encoder tensors are missing",
    ),
    "TensorFlow 2": (
        lambda f: add_tensors(f, {"model/layer/kernel/.ATTRIBUTES/VARIABLE_VALUE": np.ones(3, np.float32)}),
        "object-based checkpoint of TensorFlow 2",
    ),
    "two names": (
        lambda f: add_tensors(f, {"module/bert/pooler/dense/bias": np.ones(8, np.float32)}),
        "bert/pooler/dense/bias and module/bert/pooler/dense/bias are two names of one tensor",
    ),
    "adapter": (
        lambda f: add_tensors(f, {"bert/encoder/layer_0/attention/output/adapters/W": np.ones(8, np.float32)}),
        "the first is bert/encoder/layer_0/attention/output/adapters/W; merge them",
    ),
    "whole numbers": (
        lambda f: add_tensors(f, {"bert/pooler/dense/bias": np.ones(8, np.int32)}),
        "bert.pooler.dense.bias is of type int32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_odd_checkpoints_are_refused_in_one_sentence(name: str, folder: Path) -> None:
    change, message = BAD[name]
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        load_google_model(folder / "bert_model.ckpt")
    assert "\n" not in str(error.value)
