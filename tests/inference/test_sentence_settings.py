"""Folders of sentence-transformers: what they say of their vectors is told where ours are made otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_models import save_pretrained

from bertsmith import progress
from bertsmith.inference.features import FeatureOptions
from bertsmith.inference.loaded import load
from bertsmith.inference.sentence_settings import other_settings

SWITCHES = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}


def write(folder: Path, steps: list[str], pooling: dict[str, Any] | None = None, cut: int | None = None) -> Path:
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, step in enumerate(steps, 1):
        place = folder / f"{number}_{step}"
        place.mkdir(parents=True)
        modules.append({"idx": number, "path": place.name, "type": f"sentence_transformers.models.{step}"})
        if step == "Pooling":
            (place / "config.json").write_text(json.dumps(pooling or SWITCHES), encoding="utf-8")
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    if cut is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": cut}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("steps", "pooling", "cut", "options", "wanted"),
    [
        (["Pooling"], None, None, {}, []),
        (["Pooling", "Normalize"], None, 64, {"normalize": True}, []),
        (["Pooling", "Normalize"], None, 32, {}, ["brings vectors to length 1 (--normalize)",
                                                  "cuts texts at 32 tokens (--max-length 32)"]),
        (["Pooling", "Dense"], {"pooling_mode_cls_token": True}, None, {},
         ["pools by cls_token (--pool cls)", "ends in a Dense layer, which is not computed here"]),
        (["Pooling"], {"pooling_mode": "cls"}, None, {"pool": "cls"}, []),
        (["Pooling"], {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, None, {},
         ["pools by max_tokens, cls_token"]),
        (["Pooling"], {"pooling_mode": ["mean", "max"]}, None, {}, ["pools by mean, max"]),
        (["Pooling", "Normalize"], None, 32, {"words": True}, []),
    ],
)  # fmt: skip
def test_only_what_differs_is_told(
    tmp_path: Path, steps: list[str], pooling: Any, cut: int | None, options: dict[str, Any], wanted: list[str]
) -> None:
    assert other_settings(write(tmp_path, steps, pooling, cut), FeatureOptions(**options), 64) == wanted


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"type": 3}', "null", "[" * 100_000])
def test_broken_files_stop_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content, encoding="utf-8")
    (tmp_path / "sentence_bert_config.json").write_text(content, encoding="utf-8")
    assert other_settings(tmp_path, FeatureOptions(), 64) == []
    assert other_settings(tmp_path / "none", FeatureOptions(), 64) == []


def test_it_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_said", set())
    model = load(write(save_pretrained(tmp_path / "m"), ["Pooling", "Normalize"]), precision="fp32")
    for _ in range(2):
        model.embed(["a cat"])
    said = capfd.readouterr().err
    assert said.count("sentence-transformers brings vectors to length 1 (--normalize); these vectors are made") == 1
    model.embed(["a cat"], normalize=True)
    assert capfd.readouterr().err == ""
