"""benchmarks/embed*.py at toy size: every contender that is installed gives the reference's vectors; the driver."""

import gzip
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MODULES = ("embed", "embed_contenders", "finetune", "finetune_tasks", "pretrain_step")
WORDS = ["good", "bad", "film", "paris", "london", "the", "a", "cat", "sat", "on", "mat", "in", "likes", "where", "is"]
TEXTS = [" ".join(WORDS[first % 15 :: 1 + first % 3] * (1 + first // 7)) for first in range(23)]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's files, which are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def driver(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["embed"]


@pytest.fixture(scope="module")
def contenders(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["embed_contenders"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights, saved as a bare encoder."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny-bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(contenders: ModuleType, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The exported files of the contenders that are installed."""
    files = contenders.Files(model, tmp_path_factory.mktemp("files"))
    contenders.make_files(files, [name for name in contenders.ENTRIES if is_installed(contenders, name)])
    return files


@pytest.fixture(scope="module")
def expected(contenders: ModuleType, model: Path) -> np.ndarray:
    return contenders.reference_vectors(model, TEXTS)


def is_installed(contenders: ModuleType, name: str) -> bool:
    return all(importlib.util.find_spec(package) for package, _ in contenders.ENTRIES[name].packages)


def all_names() -> list[str]:
    """Without importing the benchmark before its tests run."""
    kinds = {
        "ours": ("fp32", "bf16", "int8"),
        "ours-exported": ("int8",),
        "sentence-transformers": ("fp32", "bf16"),
        "onnxruntime": ("fp32", "int8"),
        "openvino": ("fp32", "bf16"),
        "openvino-by-16": ("bf16",),
    }
    return [f"{kind}-{precision}" for kind, precisions in kinds.items() for precision in precisions]


def test_names_are_these(contenders: ModuleType) -> None:
    assert list(contenders.ENTRIES) == all_names()


@pytest.mark.parametrize("name", all_names())
def test_vectors_are_the_references(
    driver: ModuleType, contenders: ModuleType, made: Any, expected: np.ndarray, name: str
) -> None:
    """In input order, whatever the batches."""
    if not is_installed(contenders, name):
        pytest.skip(f"{name} is not installed")
    contender = contenders.make_contender(name, made, 1)
    for row in contender.settings:
        for setting in row[:2]:
            found = contender.embed(TEXTS, **setting)
            assert found.dtype == np.float32
            least = driver.summarize_cosines(found, expected)["min"]
            assert least > {"fp32": 0.99999, "bf16": 0.999, "int8": 0.99}[name.rpartition("-")[2]]


def test_texts_are_cut_alike(contenders: ModuleType, made: Any, model: Path) -> None:
    """At 256 tokens, so that all compute the same."""
    long = [" ".join(WORDS * 30), " ".join(WORDS * 16), " ".join((WORDS * 30)[:254])]
    expected = contenders.reference_vectors(model, long)
    assert np.abs(expected[0] - expected[2]).max() < 1e-5
    found = contenders.make_contender("ours-fp32", made, 1).embed(long)
    assert np.abs(found - expected).max() < 1e-4


def test_files_are_made_once(contenders: ModuleType, model: Path, tmp_path: Path) -> None:
    files = contenders.Files(model, tmp_path / "files")
    for path in (files.onnx, files.onnx_int8, files.ours_exported):
        path.parent.mkdir(exist_ok=True)
        path.write_text("there", encoding="utf-8")
    contenders.make_files(files, all_names())
    assert files.onnx.read_text(encoding="utf-8") == "there"


def test_settings_are_tried_until_they_get_slower(contenders: ModuleType) -> None:
    cost = {16: 5.0, 32: 4.0, 64: 6.0, 128: 1.0}
    calls = []

    def take(setting: dict[str, int]) -> float:
        calls.append((setting["batch_size"], setting["streams"]))
        return cost[setting["batch_size"]] * setting["streams"] + len(calls) % 2  # the first of two is the slower one

    rows = tuple(tuple({"batch_size": size, "streams": streams} for size in cost) for streams in (2, 1))
    best, tried = contenders.choose_setting(rows, take)
    assert best == {"batch_size": 32, "streams": 1}
    assert calls == [(size, streams) for streams in (2, 1) for size in (16, 32, 64) for _ in range(2)]
    assert tried["batch_size 32, streams 1"] == 4
    assert contenders.choose_setting((({},),), take) == ({}, {})
    assert len(calls) == 12


def test_paragraphs_are_a_fixed_sample(driver: ModuleType, tmp_path: Path) -> None:
    path = write_corpus(tmp_path)
    found = driver.read_paragraphs(path, 6)
    assert found == driver.read_paragraphs(path, 6)
    assert found != driver.read_paragraphs(path, 6, seed=1)
    assert len(set(found)) == 6
    assert all(len(paragraph.split()) == 12 for paragraph in found)
    with pytest.raises(SystemExit, match="has 40 paragraphs, 41 are wanted"):
        driver.read_paragraphs(path, 41)


def write_corpus(folder: Path) -> Path:
    """20 documents: a heading, and two paragraphs of twelve words; no two are the same."""
    path = folder / "corpora" / "wiki_en-00.jsonl.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for number in range(20):
            paragraphs = [" ".join([f"{number}.{part}", *WORDS[part : part + 11]]) for part in range(2)]
            file.write(json.dumps({"text": "A heading.\n" + "\n\n".join(paragraphs)}) + "\n")
    return path


def test_figures_follow_from_seconds(driver: ModuleType) -> None:
    seconds = {"ours-fp32": [1.0, 2.0, 1.0], "ours-int8": [0.5, 1.0, 4.0], "other-fp32": [2.0, 8.0, 3.0]}
    found = driver.summarize(seconds, [100, 400, 100], [1e9, 4e9, 1e9], 2e9)
    assert found["tokens_per_second"] == {"ours-fp32": 100, "ours-int8": 200, "other-fp32": 50}
    assert found["share_of_fp32_limit"] == {"ours-fp32": 0.5, "ours-int8": 1, "other-fp32": 0.25}
    assert found["ratios"] == {
        "ours-fp32 / other-fp32": 3,
        "ours-int8 / ours-fp32": 2,
        "ours-int8 / other-fp32": 4,
    }


def test_cosines(driver: ModuleType) -> None:
    left = np.array([[1, 0], [3, 4]], dtype=np.float32)
    right = np.array([[2, 0], [4, 3]], dtype=np.float32)
    assert driver.summarize_cosines(left, right) == pytest.approx({"mean": 0.98, "min": 0.96})


def test_who_is_left_out(driver: ModuleType, contenders: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 where the chip has no use for it; who is not installed, with the line for pip."""
    names = ["ours-bf16", "sentence-transformers-bf16", "openvino-bf16", "openvino-by-16-bf16"]
    monkeypatch.setattr(driver, "ENTRIES", dict.fromkeys(names, contenders.Entry(object)))
    for rates, has_bf16, absent in [
        ({"fp32": 1e9, "bf16": 2e9}, True, []),
        ({"fp32": 2e9, "bf16": 1e9}, True, names[:1]),
        ({"fp32": 99e9, "bf16": 1e9}, True, names[:2]),
        ({"fp32": 99e9, "bf16": 1e9}, False, names),
    ]:
        monkeypatch.setattr(driver, "openvino_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert list(driver.find_absent(names, rates)) == absent
    monkeypatch.setattr(driver, "ENTRIES", {"x": contenders.Entry(object, (("no_such_x", "no-such-x"),))})
    assert driver.find_absent(["x"], {"fp32": 2.0, "bf16": 1.0}) == {"x": "not installed: pip install no-such-x"}


def test_the_whole_run(model: Path, tmp_path: Path) -> None:
    """Processes as they are meant: one JSON object on stdout, all figures in it, nobody left running."""
    write_corpus(tmp_path)
    command = [sys.executable, BENCHMARKS / "embed.py", "--data", tmp_path, "--model", model, "--threads", "1"]
    command += [
        "--paragraphs",
        "20",
        "--small",
        "4",
        "--rounds",
        "2",
        "--contenders",
        "ours-fp32,openvino-fp32",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, encoding="utf-8", env=os.environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["paragraphs"] == 20
    assert all(found[times]["tokens_per_second"]["ours-fp32"] > 0 for times in ("new", "again"))
    assert found["cosine"]["ours-fp32"]["min"] > 0.99999
    assert set(found["calls"]["ours-fp32"]) >= {"load_seconds", "first_call_seconds", "second_call_seconds", "setting"}
    assert set(found["calls"]) | set(found["left_out"]) == {"ours-fp32", "openvino-fp32"}


def test_a_contender_that_dies_ends_the_run(driver: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ours-fp32: ended with exit code 1"):
        driver.Worker("ours-fp32", tmp_path, tmp_path, 1, ["a text"])
