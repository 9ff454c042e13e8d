"""`bertsmith info` on everything: what it is, what is broken in it, and nothing is changed by looking."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from bertsmith.describe import describe_path
from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.weights import save_model
from bertsmith.storage import PARTIAL
from command_line import Made


def listing(folder: Path) -> dict[str, tuple[int, float]]:
    """Size and time of everything in a folder."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime) for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("corpus", "corpus"),
        ("run", "run"),
        ("run/model", "model"),
        ("run/checkpoints/step-00000006", "checkpoint"),
        ("vocab", "tokenizer"),
        ("corpus/tokenizer", "tokenizer"),
        # a file stands for its folder
        ("run/config.toml", "run"),
        ("run/model/config.json", "model"),
        ("vocab/vocab.txt", "tokenizer"),
        ("corpus/corpus.json", "corpus"),
    ],
)
def test_every_kind_is_recognized_and_left_as_it_is(name: str, kind: str, made: Made) -> None:
    before = listing(made.folder)
    described = describe_path(made.folder / name)
    assert described["kind"] == kind
    path = made.folder / name
    assert described["folder"] == str(path if path.is_dir() else path.parent)
    json.dumps(described, allow_nan=False)
    assert listing(made.folder) == before


def test_a_corpus(made: Made) -> None:
    described = describe_path(made.corpus)
    assert described["sha256"] == made.summaries["prepare"]["sha256"]
    assert sum(split["tokens"] for split in described["splits"].values()) == made.summaries["prepare"]["tokens"]
    assert described["unigram_entropy"] == pytest.approx(made.summaries["pretrain"]["unigram_entropy"], abs=1e-4)


def test_a_tokenizer(made: Made) -> None:
    described = describe_path(made.vocab)
    assert described["vocab_size"] == made.summaries["vocab"]["size"]
    assert (described["lowercase"], described["strip_accents"], described["max_length"]) == (True, True, 512)
    assert described["fingerprint"] == describe_path(made.corpus)["tokenizer_fingerprint"]


def test_a_run(made: Made) -> None:
    described = describe_path(made.run)
    assert described["step"] == 6
    assert described["newest_checkpoint"] == str(made.run / "checkpoints" / "step-00000006")
    assert described["broken_checkpoints"] == []
    assert described["finished_model"] == str(made.model)
    assert described["last_metrics"]["step"] == 6
    assert described["last_metrics"]["loss"] == pytest.approx(made.summaries["pretrain"]["train_loss"])
    assert described["last_evaluation"]["eval_loss"] == pytest.approx(made.summaries["pretrain"]["eval_loss"])
    assert described["settings"]["model"] == "tiny"


def test_a_model(made: Made) -> None:
    described = describe_path(made.model)
    assert described["heads"] == ["mlm", "nsp", "pooler"]
    assert described["objective"] == "mlm+nsp"
    assert (described["trained_positions"], described["config"]["max_position_embeddings"]) == (32, 512)
    assert described["tokenizer"] == {k: v for k, v in describe_path(made.vocab).items() if k not in ("kind", "folder")}
    config = BertConfig.of_size("tiny", made.summaries["vocab"]["size"])
    model = BertForPreTraining(config)
    assert described["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert described["encoder_parameters"] == sum(parameter.numel() for parameter in model.bert.parameters())


def test_heads_that_were_not_trained_are_told_from_those_that_were(made: Made, tmp_path: Path) -> None:
    whole = describe_path(made.model)
    assert whole["untrained_heads"] == []
    config = BertConfig.of_size("tiny", whole["config"]["vocab_size"])
    save_model(tmp_path, BertForPreTraining(config, next_sentence=False).initialize(0), "mlm")
    described = describe_path(tmp_path)
    assert described["objective"] == "mlm"
    assert described["heads"] == ["mlm"]
    assert described["untrained_heads"] == ["nsp", "pooler"]
    assert described["tokenizer"] is None


def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    described = describe_path(tmp_path)
    assert described["heads"] == ["pooler"]
    assert described["unused_tensors"] == ["classifier.bias", "classifier.weight"]
    assert described["encoder_parameters"] == sum(parameter.numel() for parameter in model.bert.parameters())
    assert described["parameters"] == described["encoder_parameters"]


# --- what is broken, and what is under way


@pytest.fixture
def run(made: Made, tmp_path: Path) -> Path:
    """A copy of the run, with an older checkpoint beside the newest."""
    run = tmp_path / "run"
    shutil.copytree(made.run, run)
    older = run / "checkpoints" / "step-00000003"
    shutil.copytree(run / "checkpoints" / "step-00000006", older)
    manifest = json.loads((older / "manifest.json").read_text(encoding="utf-8"))
    (older / "manifest.json").write_text(json.dumps(manifest | {"step": 3}), encoding="utf-8")
    return run


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def test_a_broken_newest_checkpoint_is_named_and_the_one_before_it_found(run: Path) -> None:
    damage(run / "checkpoints" / "step-00000006" / "optimizer.safetensors")
    described = describe_path(run)
    assert described["step"] == 3
    assert described["newest_checkpoint"].endswith("step-00000003")
    (broken,) = described["broken_checkpoints"]
    assert "step-00000006: broken checkpoint, optimizer.safetensors is damaged" in broken


def test_a_run_whose_checkpoints_are_all_broken_is_described(run: Path) -> None:
    for folder in (run / "checkpoints").iterdir():
        damage(folder / "model.safetensors")
    described = describe_path(run)
    assert (described["step"], described["newest_checkpoint"]) == (0, None)
    assert len(described["broken_checkpoints"]) == 2


def test_what_a_running_training_is_writing_is_left_alone(run: Path) -> None:
    half = run / "checkpoints" / f".step-00000009{PARTIAL}{os.getppid()}"
    half.mkdir()
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"step": 7, "lo')
    described = describe_path(run)
    assert half.is_dir()
    assert described["last_metrics"]["step"] == 6


def test_a_run_that_has_only_begun(run: Path) -> None:
    for name in ("checkpoints", "model", "tensorboard"):
        shutil.rmtree(run / name)
    (run / "metrics.jsonl").unlink()
    described = describe_path(run)
    expected: dict[str, Any] = {"step": 0, "newest_checkpoint": None, "finished_model": None, "last_metrics": None}
    assert expected.items() <= described.items()


def test_a_broken_settings_file_is_named(run: Path) -> None:
    (run / "config.toml").write_text("steps = ", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.toml, end of document: not valid TOML"):
        describe_path(run)


def test_a_broken_checkpoint_is_named(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000003"
    (folder / "state.json").unlink()
    with pytest.raises(UserError, match=r"broken checkpoint, .*state\.json"):
        describe_path(folder)


@pytest.mark.parametrize("name", ["train-00000.arrow", "report.json", "token_counts.npy", "tokenizer"])
def test_a_corpus_that_lacks_a_part_is_named(name: str, made: Made, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(made.corpus, corpus)
    if (corpus / name).is_dir():
        shutil.rmtree(corpus / name)
    else:
        (corpus / name).unlink()
    with pytest.raises(UserError, match=name):
        describe_path(corpus)


def test_a_folder_of_such_folders_names_them(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no corpus.*; name one of .*/corpus, .*/run, .*/vocab$"):
        describe_path(made.folder)
    with pytest.raises(UserError, match=r"is no corpus, run, checkpoint, model or tokenizer folder$"):
        describe_path(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        describe_path(tmp_path / "nowhere")
    (tmp_path / "x.txt").write_bytes(b"")
    with pytest.raises(UserError, match=r"x\.txt: is no folder"):
        describe_path(tmp_path / "x.txt")
