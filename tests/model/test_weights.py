"""Model folders: transformers opens ours with no key missing or unexpected, and we open theirs."""

import json
from pathlib import Path

import pytest
import torch
from packed_batches import make_packed

from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.weights import load_model, save_model, to_hugging_face

CONFIG = BertConfig.of_size("tiny", vocab_size=301)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, BertForPreTraining]:
    model = BertForPreTraining(CONFIG).initialize(9)
    save_model(tmp_path / "model", model, "mlm+nsp")
    return tmp_path / "model", model


@pytest.mark.parametrize("kind", ["AutoModelForPreTraining", "AutoModelForMaskedLM"])
def test_transformers_opens_our_folder(saved: tuple[Path, BertForPreTraining], tmp_path: Path, kind: str) -> None:
    import transformers

    folder, model = saved
    other, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    # its masked language model has no pooler, so that transformers names these four in its own pre-training folders too
    transformers.AutoModelForPreTraining.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
    own = getattr(transformers, kind).from_pretrained(tmp_path / "theirs", output_loading_info=True)[1]
    assert info["unexpected_keys"] == own["unexpected_keys"]
    if kind == "AutoModelForPreTraining":
        assert not info["unexpected_keys"]
    batch = make_packed([40, 40])
    with torch.no_grad():
        output = other.eval()(input_ids=batch.pad(batch.token_ids), token_type_ids=batch.pad(batch.segment_ids))
    mlm, nsp = model.logits(*batch.arguments(), torch.arange(80))
    logits = output.prediction_logits if kind == "AutoModelForPreTraining" else output.logits
    assert float((logits.reshape(80, -1) - mlm).abs().max()) <= 1e-4
    if kind == "AutoModelForPreTraining":
        assert float((output.seq_relationship_logits - nsp).abs().max()) <= 1e-4


def test_we_open_theirs(tmp_path: Path) -> None:
    from transformers import BertConfig as TheirConfig
    from transformers import BertForPreTraining as TheirModel

    theirs = TheirModel(TheirConfig(**CONFIG.to_dict())).eval()
    theirs.save_pretrained(tmp_path)
    model, report, _ = load_model(tmp_path)
    assert not report.missing
    assert not report.unused
    state = theirs.state_dict()
    for name, tensor in to_hugging_face(model).items():
        assert torch.equal(tensor, state[name]), name


def test_round_trip_is_exact(saved: tuple[Path, BertForPreTraining]) -> None:
    folder, model = saved
    again, report, values = load_model(folder)
    assert values["bertsmith_objective"] == "mlm+nsp"
    assert not report.missing
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_missing_head_is_reported_and_a_missing_encoder_refused(saved: tuple[Path, BertForPreTraining]) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("cls.")}, folder / "model.safetensors")
    report = load_model(folder)[1]
    assert "cls.predictions.bias" in report.missing_from("mlm")
    save_file({k: v for k, v in tensors.items() if "layer.1" not in k}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"encoder\.layer\.1"):
        load_model(folder)


def test_old_names_are_understood(saved: tuple[Path, BertForPreTraining]) -> None:
    from safetensors.torch import load_file, save_file

    folder, model = saved
    tensors = load_file(folder / "model.safetensors")
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for k, v in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(512)[None]
    save_file(old, folder / "model.safetensors")
    again, report, _ = load_model(folder)
    assert not report.missing
    assert not report.unused
    assert torch.equal(again.mlm_head.norm.weight, model.mlm_head.norm.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]), "readable"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "config.json").write_text("{", encoding="utf-8"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8"), "gpt2"),
        (
            lambda f: (f / "config.json").write_text(
                json.dumps(CONFIG.to_dict() | {"vocab_size": 302}), encoding="utf-8"
            ),
            "shape",
        ),
    ],
)
def test_bad_folders_are_refused_in_one_sentence(saved: tuple[Path, BertForPreTraining], change, message: str) -> None:
    folder, _ = saved
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
