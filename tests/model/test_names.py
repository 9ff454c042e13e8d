"""The table of names: reversible, and the same names that transformers and Google's checkpoints have."""

import re
from pathlib import Path

import pytest
from torch import nn

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.names import from_google_name, google_name, hugging_face_names, modern_name
from bertsmith.model.task_model import ARCHITECTURES, BertForTask
from bertsmith.model.tensor_bundle import read_bundle

CONFIG = BertConfig.of_size("tiny", vocab_size=40, num_hidden_layers=11)
MODELS = {"BertForPreTraining": BertForPreTraining(CONFIG)} | {
    ARCHITECTURES[head]: BertForTask(CONFIG, head, 2) for head in ARCHITECTURES
}


def their_names(model: nn.Module) -> list[str]:
    return [theirs for name, _ in model.named_parameters() for theirs in hugging_face_names(name)]


@pytest.mark.parametrize("kind", MODELS)
def test_names_are_those_of_transformers(kind: str) -> None:
    import transformers

    theirs = getattr(transformers, kind)(transformers.BertConfig(**CONFIG.to_dict()))
    ours = their_names(MODELS[kind])
    assert len(set(ours)) == len(ours)
    # named_parameters has a tied tensor once, under the first of its names
    assert set(ours) == {name for name, _ in theirs.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_every_name_comes_back_from_google(kind: str) -> None:
    names = their_names(MODELS[kind])
    google = {name: google_name(name) for name in names}
    assert len({theirs for theirs, _ in google.values()}) == len(names)
    for name, (theirs, transposed) in google.items():
        assert from_google_name(theirs) == (name, transposed)
        assert from_google_name(f"module/{theirs}") == (name, transposed)
        assert transposed == theirs.endswith("/kernel")


def test_names_are_those_of_a_genuine_checkpoint(shared_data: Path) -> None:
    bundle = read_bundle(shared_data / "checkpoints/tf1_tiny/bert_model.ckpt")
    genuine = {name for name in bundle if not re.search(r"/adam_[mv]$|^global_step$", name)}
    model = BertForPreTraining(BertConfig.of_size("tiny", vocab_size=15))  # of two layers, as the checkpoint is
    assert {google_name(name)[0] for name in their_names(model)} == genuine


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("cls.predictions.bias", ("cls/predictions/output_bias", False)),
        ("cls.seq_relationship.weight", ("cls/seq_relationship/output_weights", False)),
        ("classifier.weight", ("output_weights", False)),
        ("classifier.bias", ("output_bias", False)),
        ("qa_outputs.weight", ("cls/squad/output_weights", False)),
        ("bert.encoder.layer.10.attention.self.key.weight", ("bert/encoder/layer_10/attention/self/key/kernel", True)),
        ("bert.encoder.layer.0.output.LayerNorm.bias", ("bert/encoder/layer_0/output/LayerNorm/beta", False)),
        ("bert.embeddings.LayerNorm.weight", ("bert/embeddings/LayerNorm/gamma", False)),
    ],
)
def test_some_names_in_full(ours: str, theirs: tuple[str, bool]) -> None:
    assert google_name(ours) == theirs


@pytest.mark.parametrize(
    "name",
    [
        "global_step",
        "bert/embeddings/word_embeddings/adam_m",
        "bert/encoder/layer_01/output/dense/kernel",
        "bert/encoder/layer_/output/dense/kernel",
        "bert/encoder/layer_0/output/dense/weight",
        "bert/pooler/LayerNorm/gamma",
        "x/output_weights",
        "",
    ],
)
def test_what_is_not_berts_has_no_name(name: str) -> None:
    assert from_google_name(name) is None


@pytest.mark.parametrize(
    ("old", "modern"),
    [
        ("bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"),
        ("cls.predictions.transform.LayerNorm.beta", "cls.predictions.transform.LayerNorm.bias"),
        ("embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"),
        ("encoder.layer.3.output.dense.bias", "bert.encoder.layer.3.output.dense.bias"),
        ("pooler.dense.weight", "bert.pooler.dense.weight"),
        ("module.bert.pooler.dense.weight", "bert.pooler.dense.weight"),
        # none of a layer norm's
        ("gamma", "gamma"),
        ("head.gamma", "head.gamma"),
        ("crf.beta", "crf.beta"),
        ("head.MyLayerNorm.gamma", "head.MyLayerNorm.gamma"),
        ("classifier.weight", "classifier.weight"),
    ],
)
def test_names_of_old_files(old: str, modern: str) -> None:
    assert modern_name(old) == modern
    assert modern_name(modern) == modern
