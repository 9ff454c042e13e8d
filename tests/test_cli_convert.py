"""`bertsmith convert`: Google's layout and any Hugging Face folder to ours and back, complete or absent, all told."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.google import write_google
from bertsmith.model.task_model import ARCHITECTURES, BertForTask
from bertsmith.model.tensor_bundle import read_bundle, write_bundle
from bertsmith.model.weights import save_model, to_hugging_face, write_folder
from bertsmith.tasks.model_folder import load_task_model, save_task_model
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.spec import TaskSpec
from bertsmith.text.tokenizer import BertTokenizer
from command_line import bertsmith

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "runs", "é", "中", "and", "sleeps", "##s"]
CONFIG = BertConfig(len(TOKENS), 16, 2, 2, 32, max_position_embeddings=20)
ENCODER = 5 + 2 * 16  # its tensors
OURS = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}
GOOGLES = {"bert_config.json", "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001", "vocab.txt"}
WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.fixture
def model() -> BertForPreTraining:
    model = BertForPreTraining(CONFIG).initialize(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model


@pytest.fixture
def google(tmp_path: Path, model: BertForPreTraining) -> Path:
    """As Google publishes: no word about case, and an optimizer's slots as run_pretraining.py leaves them."""
    folder = tmp_path / "google é"
    write_google(folder, to_hugging_face(model), CONFIG, {})
    config = json.loads((folder / "bert_config.json").read_text(encoding="utf-8"))
    del config["bertsmith"]
    (folder / "bert_config.json").write_text(json.dumps(config), encoding="utf-8")
    bundle = read_bundle(folder / "bert_model.ckpt")
    tensors = {name: bundle.tensor(name) for name in bundle}
    slots = {f"{name}/adam_{which}": value for name, value in tensors.items() for which in "mv" if value.ndim}
    write_bundle(folder / "bert_model.ckpt", tensors | slots | {"my/W": np.ones(3, np.float32)})
    (folder / "vocab.txt").write_text("\n".join(TOKENS) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def ours(tmp_path: Path, model: BertForPreTraining) -> Path:
    save_model(tmp_path / "ours", model, "mlm+nsp")
    BertTokenizer(TOKENS, max_length=20).save(tmp_path / "ours")
    return tmp_path / "ours"


def change_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_weights(folder: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# --- Google's


def test_googles_folder_becomes_ours(google: Path, model: BertForPreTraining, tmp_path: Path) -> None:
    summary = bertsmith("convert", google, tmp_path / "new", "--json").json
    assert (summary["tensors_used"], summary["tensors_unused"], summary["tensors_missing"]) == (ENCODER + 9, 1, 0)
    assert len(summary["used"]) == summary["tensors_used"]
    assert (summary["unused"], summary["missing"]) == (["my/W"], [])
    assert summary["tensors_of_optimizer"] == 2 * (ENCODER + 9) + 1
    assert summary["architecture"] == "BertForPreTraining"
    assert summary["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (summary["source_layout"], summary["layout"], summary["lowercase"]) == ("google", "bertsmith", True)
    assert len(summary["notes"]) == 1
    assert "says nothing of case; text is lower-cased" in summary["notes"][0]
    assert {path.name for path in (tmp_path / "new").iterdir()} == OURS
    assert_weights(tmp_path / "new", to_hugging_face(model))
    settings = json.loads((tmp_path / "new/tokenizer_config.json").read_text(encoding="utf-8"))
    assert (settings["do_lower_case"], settings["model_max_length"]) == (True, 20)
    assert len(bertsmith("fill", tmp_path / "new", "The [MASK] sleeps", "--json").json["texts"]) == 1


def test_the_genuine_checkpoint_goes_both_ways(shared_data: Path, tmp_path: Path) -> None:
    import transformers

    genuine = shared_data / "checkpoints/tf1_tiny"
    for number, arguments in enumerate([(genuine,), (tmp_path / "0", "--to", "google"), (tmp_path / "1",)]):
        summary = bertsmith("convert", arguments[0], tmp_path / str(number), *arguments[1:], "--json").json
        assert (summary["tensors_used"], summary["tensors_unused"], summary["tensors_missing"]) == (46, 0, 0)
        assert summary["tensors_of_optimizer"] == (93, 0, 1)[number]
    assert contents(tmp_path / "0") == contents(tmp_path / "2")
    before, after = read_bundle(genuine / "bert_model.ckpt"), read_bundle(tmp_path / "1/bert_model.ckpt")
    names = [name for name in before if "/adam_" not in name]
    assert names == list(after)
    assert all(before.tensor(n).tobytes() == after.tensor(n).tobytes() for n in names if n != "global_step")
    assert (tmp_path / "1/vocab.txt").read_text().split() == (genuine / "vocab.txt").read_text().split()
    _, info = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "0", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_a_checkpoint_can_be_named_by_its_prefix(google: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("bert_model.ckpt", "bert_model.ckpt.index")):
        assert bertsmith("convert", google / name, tmp_path / str(number), "--json").json["source_layout"] == "google"
    assert contents(tmp_path / "0") == contents(tmp_path / "1")


def test_case_is_settled_by_the_flag_and_then_kept(google: Path, tmp_path: Path) -> None:
    summary = bertsmith("convert", google, tmp_path / "cased", "--lowercase", "no", "--json").json
    assert (summary["lowercase"], summary["strip_accents"], summary["notes"]) == (False, False, [])
    back = bertsmith("convert", tmp_path / "cased", tmp_path / "back", "--to", "google", "--json").json
    assert back["notes"] == ["Google's scripts are to be given --do_lower_case=False"]
    again = bertsmith("convert", tmp_path / "back", tmp_path / "again", "--json").json
    assert (again["lowercase"], again["notes"]) == (False, [])
    told = bertsmith("convert", tmp_path / "back", tmp_path / "other", "--lowercase", "yes").mistake
    assert "was saved as cased, but uncased was asked for" in told
    assert not (tmp_path / "other").exists()


def test_trained_positions_are_kept_both_ways(ours: Path, tmp_path: Path) -> None:
    change_json(ours / "config.json", bertsmith_trained_positions=12)
    assert bertsmith("convert", ours, tmp_path / "theirs", "--to", "google").code == 0
    assert bertsmith("convert", tmp_path / "theirs", tmp_path / "back").code == 0
    assert json.loads((tmp_path / "back" / "config.json").read_bytes())["bertsmith_trained_positions"] == 12
    assert bertsmith("info", tmp_path / "back", "--json").json["trained_positions"] == 12
    change_json(ours / "config.json", bertsmith_trained_positions=21)
    told = bertsmith("info", ours).mistake
    assert "bertsmith_trained_positions: 21 is more than max_position_embeddings" in told


def test_a_person_sees_a_table(google: Path, tmp_path: Path) -> None:
    lines = bertsmith("convert", google, tmp_path / "new").out.splitlines()
    assert lines[:6] == [
        "encoder                37 tensors",
        "pooler                  2 tensors",
        "masked-LM head          5 tensors",
        "next-sentence head      2 tensors",
        "unused                  1 tensors: my/W",
        "of the optimizer       93 tensors, left out",
    ]
    assert lines[6].startswith("note: ")
    assert lines[7].startswith("BertForPreTraining of ")
    assert lines[7].endswith(f"parameters: {tmp_path / 'new'}")


def test_googles_layout_is_what_googles_scripts_read(ours: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((ours / "tokenizer.json").read_text(encoding="utf-8"))
    added = {"content": "<x>", "id": len(TOKENS), "special": False, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    (ours / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], added]}), encoding="utf-8"
    )
    weights = load_file(ours / "model.safetensors")
    weights[WORDS] = torch.cat([weights[WORDS], torch.ones(1, 16)])
    weights["cls.predictions.bias"] = torch.ones(len(TOKENS) + 1)
    save_file(weights, ours / "model.safetensors")
    change_json(ours / "config.json", vocab_size=len(TOKENS) + 1)
    summary = bertsmith("convert", ours, tmp_path / "google", "--to", "google", "--json").json
    assert summary["notes"] == [
        "Google's scripts are to be given --do_lower_case=True",
        "1 added tokens are words like others to Google's tokenizer",
    ]
    assert {path.name for path in (tmp_path / "google").iterdir()} >= GOOGLES
    assert (tmp_path / "google/vocab.txt").read_text(encoding="utf-8") == "\n".join([*TOKENS, "<x>"]) + "\n"
    assert bertsmith("convert", tmp_path / "google", tmp_path / "again", "--json").json["tensors_unused"] == 0
    assert_weights(tmp_path / "again", weights)
    again = json.loads((tmp_path / "again/tokenizer.json").read_text(encoding="utf-8"))
    assert again["added_tokens"][-1]["content"] == "<x>"


# --- Hugging Face's


def test_an_old_pickled_folder_is_read_by_every_command(ours: Path, model: BertForPreTraining, tmp_path: Path) -> None:
    tensors = to_hugging_face(model)
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in tensors.items()
    }
    old |= {"bert.embeddings.position_ids": torch.arange(20)[None], "cls.predictions.decoder.weight": tensors[WORDS]}
    torch.save(old, ours / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (ours / "model.safetensors").unlink()
    (ours / "config.json").rename(ours / "bert_config.json")
    change_json(ours / "bert_config.json", model_type=None, architectures=None, dtype=None, bertsmith_objective=None)
    (ours / "tokenizer.json").unlink()
    summary = bertsmith("convert", ours, tmp_path / "new", "--json").json
    assert (summary["tensors_used"], summary["unused"], summary["missing"]) == (ENCODER + 9, [], [])
    assert (summary["architecture"], summary["source_layout"]) == ("BertForPreTraining", "hugging-face")
    assert_weights(tmp_path / "new", tensors)
    described = bertsmith("info", ours, "--json").json
    assert (described["kind"], described["heads"]) == ("model", ["mlm", "nsp", "pooler"])
    before, after = (
        bertsmith("fill", path, "The [MASK].", "--json").json["texts"] for path in (ours, tmp_path / "new")
    )
    assert before == after


def test_nothing_is_invented_for_a_bare_encoder(ours: Path, model: BertForPreTraining, tmp_path: Path) -> None:
    bare = {
        name.removeprefix("bert."): tensor.half()
        for name, tensor in to_hugging_face(model).items()
        if name.startswith("bert.") and "pooler" not in name
    }
    save_file(bare, ours / "model.safetensors")
    change_json(ours / "config.json", architectures=["BertModel"], torch_dtype="float16", transformers_version="4.8.2")
    summary = bertsmith("convert", ours, tmp_path / "new", "--json").json
    assert summary["tensors_used"] == ENCODER
    assert summary["missing"] == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    assert_weights(tmp_path / "new", {f"bert.{name}": tensor.float() for name, tensor in bare.items()})
    config = json.loads((tmp_path / "new/config.json").read_text(encoding="utf-8"))
    assert (config["architectures"], config["dtype"]) == (["BertModel"], "float32")
    assert not {"torch_dtype", "transformers_version"} & set(config)
    shown = bertsmith("convert", ours, tmp_path / "google", "--to", "google").out
    assert "pooler                  0 tensors, missing: bert.pooler.dense.weight, bert.pooler.dense.bias\n" in shown
    assert "note: Google's model always has a pooler; it starts from random values\n" in shown
    assert "has no masked-LM head" in bertsmith("fill", tmp_path / "new", "[MASK]").mistake


@pytest.mark.parametrize(("head", "outputs"), [("sequence", 4), ("token", 4), ("span", 2), ("choice", 1)])
@pytest.mark.parametrize("to", ["bertsmith", "google"])
def test_heads_of_transformers_keep_labels_but_do_not_predict(
    head: str, outputs: int, to: str, ours: Path, tmp_path: Path
) -> None:
    model = BertForTask(CONFIG, head, outputs).initialize(1)
    labels = {"id2label": {"0": "a", "1": "é", "2": "c", "3": "d"}} if outputs == 4 else {}
    write_folder(ours, model, CONFIG, {"architectures": [ARCHITECTURES[head]], "problem_type": "x", **labels})
    summary = bertsmith("convert", ours, tmp_path / "new", "--to", to, "--json").json
    assert summary["architecture"] == ARCHITECTURES[head]
    assert (summary["unused"], summary["missing"], summary["parts"]["output"]) == ([], [], 2)
    if to == "google":
        assert bertsmith("convert", tmp_path / "new", tmp_path / "back").code == 0
    folder = tmp_path / ("new" if to == "bertsmith" else "back")
    assert_weights(folder, to_hugging_face(model))
    before, after = (json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (ours, folder))
    assert after == before
    (tmp_path / "in.jsonl").write_text('{"sentence": "a"}\n', encoding="utf-8")
    refused = bertsmith("predict", folder, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl").mistake
    assert "was not fine-tuned for a task" in refused


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_googles_classifier_gets_a_label_for_each_class(classes: int, google: Path, tmp_path: Path) -> None:
    model = BertForTask(CONFIG, "sequence", classes).initialize(1)
    bundle = read_bundle(google / "bert_model.ckpt")
    tensors = {name: bundle.tensor(name) for name in bundle if not name.startswith("cls/")}
    head = {"output_weights": model.classifier.weight, "output_bias": model.classifier.bias}
    write_bundle(google / "bert_model.ckpt", tensors | {name: tensor.detach().numpy() for name, tensor in head.items()})
    assert bertsmith("convert", google, tmp_path / "new", "--json").json["architecture"] == ARCHITECTURES["sequence"]
    config = json.loads((tmp_path / "new/config.json").read_text(encoding="utf-8"))
    assert list(config["id2label"]) == [str(number) for number in range(classes)]
    assert config["label2id"] == {label: int(number) for number, label in config["id2label"].items()}
    assert torch.equal(load_file(tmp_path / "new/model.safetensors")["classifier.weight"], model.classifier.weight)


def test_a_fine_tuned_model_predicts_the_same_after_the_whole_way(tmp_path: Path) -> None:
    tokenizer = BertTokenizer(TOKENS, max_length=20)
    task = make_task(TaskSpec("classify", 12, ("bad", "güt", "01")), tokenizer)
    model = BertForTask(CONFIG, task.head, task.outputs).initialize(2)
    save_task_model(tmp_path / "0", model, task)
    assert bertsmith("convert", tmp_path / "0", tmp_path / "1", "--to", "google").code == 0
    assert bertsmith("convert", tmp_path / "1", tmp_path / "2").code == 0
    assert contents(tmp_path / "0") == contents(tmp_path / "2")
    again, _ = load_task_model(tmp_path / "2")
    assert again.spec == task.spec


def test_heads_that_were_never_trained_are_said(ours: Path, tmp_path: Path) -> None:
    change_json(ours / "config.json", bertsmith_objective="mlm")
    summary = bertsmith("convert", ours, tmp_path / "new", "--json").json
    assert len(summary["notes"]) == 1
    assert "pooler and next-sentence head were not trained" in summary["notes"][0]
    assert bertsmith("info", tmp_path / "new", "--json").json["untrained_heads"] == ["nsp", "pooler"]


def test_a_head_that_the_class_promises_and_the_file_lacks_is_missing(ours: Path, tmp_path: Path) -> None:
    change_json(ours / "config.json", architectures=["BertForQuestionAnswering"])
    assert bertsmith("convert", ours, tmp_path / "new", "--json").json["missing"] == [
        "qa_outputs.weight",
        "qa_outputs.bias",
    ]


def test_padding_and_a_smaller_vocabulary_are_said(ours: Path, tmp_path: Path) -> None:
    weights = load_file(ours / "model.safetensors")
    rows = {
        WORDS: torch.cat([weights[WORDS], torch.ones(11, 16)]),
        "cls.predictions.bias": torch.ones(len(TOKENS) + 11),
    }
    save_file(weights | rows, ours / "model.safetensors")
    change_json(ours / "config.json", vocab_size=len(TOKENS) + 3)
    summary = bertsmith("convert", ours, tmp_path / "new", "--json").json
    first, second = summary["notes"]
    assert "24 rows for a vocabulary of 16; the last 8 are padding" in first
    assert "has 16 rows, its tokenizer 13 entries; the last 3 rows stand for no token" in second
    assert load_file(tmp_path / "new/model.safetensors")[WORDS].shape == (16, 16)
    described = bertsmith("info", tmp_path / "new", "--json").json
    assert described["notes"] == [second.replace(str(ours), str(tmp_path / "new"))]
    guesses = bertsmith("fill", tmp_path / "new", "[MASK]", "--top", 100, "--json").json["texts"][0]["masks"][0]
    assert len(guesses) == len(TOKENS)


# --- info


def test_info_describes_googles_folder_and_says_what_to_do(google: Path) -> None:
    described = bertsmith("info", google, "--json").json
    assert (described["kind"], described["folder"]) == ("google", str(google))
    assert described["to_use_it"] == f"bertsmith convert {google} DST"
    assert (described["heads"], described["unused_tensors"]) == (["mlm", "nsp", "pooler"], ["my/W"])
    assert described["tokenizer"]["vocab_size"] == len(TOKENS)
    assert bertsmith("info", google / "bert_model.ckpt", "--json").json["parameters"] == described["parameters"]
    told = bertsmith("fill", google, "[MASK]").mistake
    assert "found bert_model.ckpt.index); convert TensorFlow's checkpoint first" in told


# --- mistakes


class Code:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def put_code(folder: Path) -> None:
    torch.save({"bert.pooler.dense.bias": Code(folder / "ran")}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def remove_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()


MISTAKES = {
    "code": (put_code, "could be code and was not run"),
    "cut weights": (cut_weights, "not a readable safetensors file"),
    "no tokenizer": (remove_tokenizer, "no tokenizer here; copy the model's vocab.txt"),
    "roberta": (lambda f: change_json(f / "config.json", model_type="roberta"), "model_type is 'roberta'"),
    "distilbert": (lambda f: change_json(f / "config.json", model_type="distilbert"), "model_type is 'distilbert'"),
    "a list": (lambda f: (f / "config.json").write_text("[]", encoding="utf-8"), "holds no JSON object"),
    "terabytes": (lambda f: change_json(f / "config.json", intermediate_size=10**14), "damaged or of another model"),
    "wrong vocabulary": (lambda f: change_json(f / "config.json", vocab_size=99), "that is 13 rows, but the"),
    "longer tokenizer": (lambda f: change_json(f / "config.json", vocab_size=12), "13 entries, its word table 12"),
    "scalar head": (
        lambda f: save_file(
            load_file(f / "model.safetensors") | {"classifier.weight": torch.tensor(1.0)}, f / "model.safetensors"
        ),
        "classifier.weight has shape []",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors or pytorch_model.bin"),
}


@pytest.mark.parametrize("to", ["bertsmith", "google"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_bad_source_is_one_sentence_and_leaves_nothing(name: str, to: str, ours: Path, tmp_path: Path) -> None:
    change, message = MISTAKES[name]
    change(ours)
    told = bertsmith("convert", ours, tmp_path / "new", "--to", to).mistake
    assert message in told
    assert "\n" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    assert not (ours / "ran").exists()


def test_places_that_are_wrong_are_named(ours: Path, tmp_path: Path) -> None:
    before = contents(ours)
    (tmp_path / "file").write_text("x")
    for target in (ours, tmp_path / "file", tmp_path):
        assert bertsmith("convert", ours, target).mistake.startswith(f"{target}: exists already; name a new folder")
    assert "a file stands where" in bertsmith("convert", ours, tmp_path / "file/new").mistake
    assert bertsmith("convert", tmp_path / "no", tmp_path / "new").mistake.startswith(
        f"{tmp_path / 'no'}: no such folder"
    )
    assert "holds no" not in bertsmith("convert", tmp_path, tmp_path / "new").mistake
    assert "invalid choice: 'tf2'" in bertsmith("convert", ours, tmp_path / "new", "--to", "tf2").mistake
    assert contents(ours) == before
    (tmp_path / "empty").mkdir()
    assert bertsmith("convert", ours, tmp_path / "empty").code == 0
