"""`bertsmith embed` and `bertsmith score`: files in, files out, a row for every row; mistakes told in one sentence."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from bertsmith import progress
from bertsmith.hardware import int8_weight_bits
from bertsmith.inference import loaded
from bertsmith.inference.loaded import LoadedModel, load
from bertsmith.inference.products import can_multiply_int8
from bertsmith.model.task_model import BertForTask
from bertsmith.model.weights import read_config
from bertsmith.tasks.model_folder import save_task_model
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.spec import TaskSpec
from bertsmith.text.tokenizer import load_tokenizer
from command_line import Made, Outcome, bertsmith, bertsmith_process

TEXTS = ["The old cat sleeps.", "", "café 中 ♡", "a big dog runs " * 5, "[SEP] the"]
FP32 = ("--precision", "fp32", "--device", "cpu")


@pytest.fixture(scope="module")
def model(made: Made) -> LoadedModel:
    return load(made.model, precision="fp32")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts é") / "x.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


def embed(made: Made, source: Path, output: Path, *arguments: object) -> dict[str, Any]:
    return bertsmith("embed", made.model, "--input", source, "--output", output, *FP32, *arguments, "--json").json


def read(path: Path) -> list[np.ndarray]:
    """The vectors of each text."""
    if path.suffix == ".npy":
        return list(np.load(path)[:, None])
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        if "offsets" not in tensors:
            return list(tensors["vectors"][:, None])
        return np.split(tensors["vectors"], tensors["offsets"][1:-1])
    table = pq.read_table(path)
    width = table["vector" if "vector" in table.column_names else "vectors"].to_pylist()
    return [np.array(row, dtype=np.float32).reshape(len(row) if row and isinstance(row[0], list) else -1, 128)
            for row in width]  # fmt: skip


@pytest.mark.parametrize("ending", [".npy", ".parquet", ".safetensors"])
def test_one_vector_a_row_in_order(made: Made, model: LoadedModel, texts: Path, tmp_path: Path, ending: str) -> None:
    output = tmp_path / f"é{ending}"
    summary = embed(made, texts, output)
    expected = np.asarray(model.embed(TEXTS))
    np.testing.assert_allclose(np.concatenate(read(output)), expected, rtol=0, atol=1e-5)
    tokens = sum(len(ids) + 2 for ids in load_tokenizer(made.model).encode_ids(TEXTS))
    assert summary["rows"] == len(TEXTS)
    assert summary["vectors"] == len(TEXTS)
    assert summary["dimension"] == 128
    assert summary["layers"] == [2]
    assert summary["truncated"] == summary["truncated_tokens"] == summary["windowed"] == 0
    assert summary["tokens"] == tokens
    assert summary["seconds"] > 0
    assert summary["tokens_per_second"] == pytest.approx(tokens / summary["seconds"])
    assert 0 <= summary["unknown_rate"] < 1
    assert summary["output"] == str(output)


@pytest.mark.parametrize("ending", [".parquet", ".safetensors"])
@pytest.mark.parametrize("flags", [("--pool", "none"), ("--words",)])
def test_vectors_of_tokens_and_words(
    made: Made, model: LoadedModel, texts: Path, tmp_path: Path, ending: str, flags: tuple[str, ...]
) -> None:
    summary = embed(made, texts, tmp_path / f"x{ending}", *flags)
    words = "--words" in flags
    expected = model.embed(TEXTS, words=True) if words else model.embed(TEXTS, pool="none")
    found = read(tmp_path / f"x{ending}")
    assert len(found) == summary["rows"] == len(TEXTS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.reshape(other.shape), other, rtol=0, atol=1e-5)
    assert summary["vectors"] == sum(map(len, expected))
    if words:
        assert [len(rows) for rows in expected] == [len(text.split()) for text in TEXTS]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (("--layers", "-1"), {"layers": "-1"}),
        (("--layers", "-2:"), {"layers": "-2:"}),
        (("--layers=-1,-2",), {"layers": "-1,-2"}),
        (("--layers", "-1,-3", "--combine", "sum"), {"layers": "-1,-3", "combine": "sum"}),
        (("--layers", ":", "--combine", "mean"), {"layers": ":", "combine": "mean"}),
        (("--pool", "cls"), {"pool": "cls"}),
        (("--pool", "pooler"), {"pool": "pooler"}),
        (("--normalize",), {"normalize": True}),
        (("--max-length", "7"), {"max_length": 7}),
        (("--max-length", "7", "--long", "window"), {"max_length": 7, "long": "window"}),
        (("--allow-special",), {"allow_special": True}),
    ],
)
def test_every_option_does_something(
    made: Made, model: LoadedModel, texts: Path, tmp_path: Path, flags: tuple[str, ...], options: dict[str, Any]
) -> None:
    summary = embed(made, texts, tmp_path / "x.npy", *flags)
    expected = model.embed(TEXTS, **{"layers": -1} | options)
    found = np.load(tmp_path / "x.npy")
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    if options != {"layers": "-1"}:
        plain = np.asarray(model.embed(TEXTS))
        assert found.shape != plain.shape or np.abs(found - plain).max() > 1e-3
    long = sum(len(ids) > 5 for ids in load_tokenizer(made.model).encode_ids(TEXTS))
    assert long
    assert summary["truncated"] == (long if options == {"max_length": 7} else 0)
    assert summary["windowed"] == (long if options.get("long") == "window" else 0)


def test_what_is_cut_is_said(made: Made, texts: Path, tmp_path: Path) -> None:
    outcome = bertsmith(
        "embed", made.model, "--input", texts, "--output", tmp_path / "x.npy", "--max-length", "9", *FP32
    )
    assert outcome.code == 0
    assert "of 5 texts are longer than 9 tokens" in outcome.err
    assert "cpu, fp32, " in outcome.err
    assert "dimension: 128" in outcome.out


def test_the_column_that_a_fine_tuned_model_learnt_from_is_read(made: Made, tmp_path: Path) -> None:
    config, _ = read_config(made.model)
    task = make_task(TaskSpec("classify", 32, ("bad", "good"), text_column="body"), load_tokenizer(made.model))
    save_task_model(tmp_path / "tuned", BertForTask(config, task.head, task.outputs).initialize(1), task)

    def run(source: str, *flags: str) -> Outcome:
        (tmp_path / "x.csv").write_text(source, encoding="utf-8")
        files = ("--input", tmp_path / "x.csv", "--output", tmp_path / "x.npy")
        return bertsmith("embed", tmp_path / "tuned", *files, *FP32, *flags)

    expected = load(tmp_path / "tuned", precision="fp32").embed(["The cat"])
    told = "x.csv: has no column 'text'; texts are read from 'body', as "
    for source, flags, said in (
        ("id,body\n1,The cat\n", (), True),
        ("body,text\na,The cat\n", (), False),
        ("body,title\na,The cat\n", ("--text-column", "title"), False),
    ):
        outcome = run(source, *flags)
        assert (outcome.code, told in outcome.err) == (0, said), outcome.err
        np.testing.assert_allclose(np.load(tmp_path / "x.npy"), expected, rtol=0, atol=1e-5)
    assert "no column 'text'" in run("id,title\n1,The cat\n").mistake


@pytest.mark.parametrize(("key", "flags"), [("text", ()), ("tokens", ()), ("w", ("--text-column", "w"))])
def test_lists_of_words_ask_for_words(made: Made, tmp_path: Path, key: str, flags: tuple[str, ...]) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({key: ["the", "cat"]}) + "\n", encoding="utf-8")
    files = ("--input", tmp_path / "x.jsonl", "--output", tmp_path / "x.npy")
    told = bertsmith("embed", made.model, *files, *flags).mistake
    assert "x.jsonl: holds lists of words, not texts: --words gives a vector a word" in told


def test_texts_without_a_token_are_counted_and_said(made: Made, tmp_path: Path) -> None:
    source, output = tmp_path / "x.txt", tmp_path / "x.safetensors"
    source.write_text("a\n\nthe cat\n \u200b\n", encoding="utf-8")
    for flags, so in (
        ((), "their vectors are of [CLS] and [SEP] alone"),
        (("--pool", "none"), "their vectors are of [CLS] and [SEP] alone"),
        (("--words",), "they have no vector"),
    ):
        outcome = bertsmith("embed", made.model, "--input", source, "--output", output, *FP32, *flags, "--json")
        empty = 1 if flags == ("--words",) else 2  # what cleaning leaves nothing of is a word all the same
        assert outcome.json["empty_texts"] == empty
        assert f"warning: {empty} of 4 texts hold no token, such as {source}:2; {so}" in outcome.err
    source.write_text("a\n", encoding="utf-8")
    outcome = bertsmith("embed", made.model, "--input", source, "--output", output, *FP32, "--json")
    assert outcome.json["empty_texts"] == 0
    assert "no token" not in outcome.err


def test_tables_and_lists_of_words(made: Made, model: LoadedModel, tmp_path: Path) -> None:
    sentences = [["The", "cat"], ["a", "\U000fe4fa", "big", "dog"], []]
    expected = model.embed(sentences, words=True)
    pq.write_table(pa.table({"tokens": sentences}), tmp_path / "x.parquet")
    lines = [json.dumps({"mine": sentence if n else " ".join(sentence)}) for n, sentence in enumerate(sentences)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "x.conll").write_text("The O\ncat O\n\na O\n\U000fe4fa O\nbig O\ndog O\n", encoding="utf-8")
    for name, flags, count in (
        ("x.parquet", (), 3),
        ("x.jsonl", ("--text-column", "mine"), 3),
        ("x.conll", (), 2),
    ):
        summary = embed(made, tmp_path / name, tmp_path / "out.safetensors", "--words", *flags)
        assert summary["rows"] == count
        for one, other in zip(read(tmp_path / "out.safetensors"), expected[:count], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    (tmp_path / "x.csv").write_text("id,body\n1,The cat\n", encoding="utf-8")
    embed(made, tmp_path / "x.csv", tmp_path / "out.npy", "--text-column", "body")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), model.embed(["The cat"]), rtol=0, atol=1e-5)


def test_automatic_precision(made: Made, model: LoadedModel, texts: Path, tmp_path: Path) -> None:
    outcome = bertsmith("embed", made.model, "--input", texts, "--output", tmp_path / "x.npy", "--normalize")
    assert outcome.code == 0
    expected = model.embed(TEXTS, normalize=True)
    assert (np.load(tmp_path / "x.npy") * expected).sum(1).min() > 0.99  # bf16 or fp32


@pytest.mark.skipif(int8_weight_bits() is None or not can_multiply_int8(), reason="no 8-bit products on this machine")
@pytest.mark.parametrize("rest", ["fp32", "bf16"])
def test_8_bits_on_request(
    made: Made, model: LoadedModel, texts: Path, tmp_path: Path, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "_faster_precision", lambda device: rest)
    asked = ("--normalize", "--precision", "int8", "--device", "cpu")
    outcome = bertsmith("embed", made.model, "--input", texts, "--output", tmp_path / "x.npy", *asked)
    assert outcome.code == 0
    assert f"computes in int8 and {rest}; the least cosine between its vectors" in outcome.err
    found, exact = np.load(tmp_path / "x.npy"), model.embed(TEXTS, normalize=True)
    assert (found * exact).sum(1).min() > 0.98
    assert np.abs(found - exact).max() > 1e-5
    scored = [
        bertsmith("score", made.model, "--input", texts, "--precision", precision, "--device", "cpu", "--json").json
        for precision in ("fp32", "int8")
    ]
    assert scored[1]["pppl"] == pytest.approx(scored[0]["pppl"], rel=0.05)


def test_what_trains_has_no_8_bits(made: Made) -> None:
    data = ("--train", "x.tsv", "--dev", "y.tsv", "--out", "run")
    outcome = bertsmith("finetune", "classify", "--model", made.model, *data, "--precision", "int8")
    assert outcome.code == 2
    assert "precision = 'int8' is not allowed" in outcome.err


def test_threads_are_set(made: Made, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    embed(made, texts, tmp_path / "x.npy", "--threads", "3")
    bertsmith("score", made.model, "--input", texts, *FP32, "--threads", "2")
    assert asked == [3, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "x.txt"), "x.txt: vectors are written to .npy, .parquet, .safetensors"),
        (("--output", "x.npy", "--words"), "x.npy: .npy holds one vector a text"),
        (("--output", "x.npy", "--layers", "-9:"), "layers: -9: is not in this model, which has 0 (embeddings) to 2"),
        (("--output", "x.npy", "--layers", "9"), "layers: 9 is not in this model"),
        (("--output", "x.npy", "--pool", "max"), "invalid choice: 'max'"),
        (("--output", "x.npy", "--max-length", "900"), "max_length: 900 is not between 3 and the model's 512"),
        (("--output", "x.npy", "--long", "refuse", "--max-length", "8"), "more tokens than 8; shorten the text"),
        (("--output", "x.npy", "--text-column", "body"), "x.jsonl:1: no text column; every row must hold a text"),
        (("--output", "x.npy", "--threads", "0"), "threads: 0 is not a number from 1 up"),
        (("--output", "x.npy", "--threads", "100000"), "--threads 100,000: this machine has "),
        (("--output", "x.safetensors", "--words", "--long", "cut"), "words would have no vector"),
    ],
)
def test_mistakes(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "a cat"}\n{"text": "the cat and a dog and a cat"}\n', encoding="utf-8")
    outcome = bertsmith("embed", made.model, "--input", "x.jsonl", *FP32, *arguments)
    assert message in outcome.mistake
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("command", ["embed", "score"])
def test_mistakes_are_told_before_the_model_is_loaded(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("bertsmith.inference.loaded.load", lambda *_: pytest.fail("the model was loaded"))
    source = tmp_path / "x.csv"
    source.write_text("body\na\n", encoding="utf-8")
    good = tmp_path / ("x.npy" if command == "embed" else "x.jsonl")
    (tmp_path / "y.npy").symlink_to(source)
    (tmp_path / "y.jsonl").symlink_to(source)
    for model, name, output, flags, message in (
        (made.model, "x.csv", tmp_path / "x.xyz", (), "x.xyz: "),
        (made.model, "x.csv", good.with_stem("y"), (), "is the input as well"),
        (made.model, "x.csv", tmp_path, (), f"{tmp_path}: "),
        (made.model, "x.csv", good, (), "x.csv"),
        (made.model, "nowhere.csv", good, (), "nowhere.csv: "),
        (made.model, "x.csv", good, ("--text-column", "body", "--threads", "100000"), "--threads 100,000: "),
        (tmp_path / "gone", "x.csv", good, (), f"{tmp_path / 'gone'}: no such folder; name a model folder or a run"),
        (made.model / "config.json", "x.csv", good, (), f"is a file; name the model folder, as in {made.model}"),
    ):
        outcome = bertsmith(command, model, "--input", tmp_path / name, "--output", output, *FP32, *flags)
        assert message in outcome.mistake
    if command == "score":
        said = bertsmith("score", made.model, "--input", source, "--pairs", *FP32).mistake
        assert "x.csv: no column 'sentence_good'" in said
    assert source.read_text() == "body\na\n"


@pytest.mark.parametrize(("ending", "flags"), [(".npy", ()), (".parquet", ()), (".safetensors", ("--words",))])
def test_no_rows_in_no_vectors_out(made: Made, tmp_path: Path, ending: str, flags: tuple[str, ...]) -> None:
    source, output = tmp_path / "x.csv", tmp_path / f"x{ending}"
    source.write_text("text\n", encoding="utf-8")
    outcome = bertsmith("embed", made.model, "--input", source, "--output", output, *FP32, *flags, "--json")
    assert outcome.json["rows"] == 0
    assert f"warning: {source}: no rows, and so none in {output}\n" in outcome.err
    if ending == ".npy":
        assert np.load(output).shape == (0, 128)
    elif ending == ".parquet":
        assert pq.read_table(output).schema.names == ["vector"]
    else:
        assert {name: array.shape for name, array in load_file(output).items()} == {
            "vectors": (0, 128),
            "offsets": (1,),
        }


def test_an_output_is_no_pipe(made: Made, texts: Path, tmp_path: Path) -> None:
    """Nor what stdout is where it goes to one."""
    pipe = tmp_path / "x.npy"
    os.mkfifo(pipe)
    for command, output in (("embed", pipe), ("score", Path("/dev/stdout"))):
        outcome = bertsmith_process(command, made.model, "--input", texts, "--output", output)
        assert (
            outcome.mistake == f"{output}: is a pipe or a device, and no file can take its place; choose another name"
        )
    assert pipe.is_fifo()


def score(made: Made, *arguments: object) -> Outcome:
    return bertsmith("score", made.model, *FP32, *arguments)


def test_score(made: Made, model: LoadedModel, texts: Path, tmp_path: Path) -> None:
    summary = score(made, "--input", texts, "--output", tmp_path / "x.tsv", "--json").json
    expected = model.score(TEXTS)
    lines = (tmp_path / "x.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "pll\ttokens\tpppl"
    for line, row in zip(lines[1:], expected, strict=True):
        pll, tokens, perplexity = line.split("\t")
        assert int(tokens) == row["tokens"]
        if row["pppl"] is None:
            assert not pll
            assert not perplexity
        else:
            assert float(pll) == pytest.approx(row["pll"], abs=1e-3)
            assert float(perplexity) == pytest.approx(row["pppl"], rel=1e-3)
    total, tokens = sum(row["pll"] or 0 for row in expected), sum(row["tokens"] for row in expected)
    assert summary["rows"] == 5
    assert summary["without_tokens"] == 1
    assert summary["tokens"] == tokens
    assert summary["pll_mean"] == pytest.approx(total / 4, rel=1e-4)
    assert summary["pppl"] == pytest.approx(math.exp(-total / tokens), rel=1e-4)
    masked = score(made, "--input", texts, "--within-word", "mask", "--json").json
    assert masked["output"] is None
    assert masked["pll_mean"] == pytest.approx(sum(row["pll"] or 0 for row in model.score(TEXTS, "mask")) / 4, rel=1e-4)
    assert masked["pll_mean"] != summary["pll_mean"]


def test_score_pairs(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("schön,schlecht\nthe cat sleeps,cat the sleeps\na dog,a dog\n", encoding="utf-8")
    flags = ("--pairs", "--good-column", "schön", "--bad-column", "schlecht")
    summary = score(made, "--input", path, *flags, "--json").json
    assert summary["rows"] == 2
    assert summary["ties"] == 1
    assert summary["accuracy"] in (0.0, 0.5)
    assert "no column 'sentence_good'" in score(made, "--input", path, "--pairs").mistake
    path.write_text("sentence_good,sentence_bad\na,b\n", encoding="utf-8")
    assert (
        "holds minimal pairs, 'sentence_good' and 'sentence_bad': add --pairs" in score(made, "--input", path).mistake
    )
    assert "are for --pairs" in score(made, "--input", path, "--good-column", "schön").mistake
    assert "is for single sentences" in score(made, "--input", path, "--pairs", "--text-column", "x").mistake


def test_progress_by_batches_with_what_is_left(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of one chunk is not a bar that stands still and then is done."""
    monkeypatch.setattr(loaded, "_faster_precision", lambda device: "fp32")
    times = iter(range(1_000_000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: 3.0 * next(times))
    (tmp_path / "x.txt").write_text("a big dog runs\n" * 3000, encoding="utf-8")
    outcome = bertsmith("embed", made.model, "--input", tmp_path / "x.txt", "--output", tmp_path / "x.npy", *FP32)
    shown = [line for line in outcome.err.splitlines() if line.startswith("embedding: ") and "/3,000 rows" in line]
    assert len(shown) > 2
    assert any(" left" in line for line in shown)
    assert "3,000/3,000 rows" in shown[-1]


def test_a_row_that_cannot_be_read_is_told_before_the_work(made: Made, tmp_path: Path) -> None:
    rows = ['{"text": "the cat"}'] * 5000 + ['{"text": 3}']
    (tmp_path / "x.jsonl").write_text("\n".join(rows), encoding="utf-8")
    outcome = bertsmith("embed", made.model, "--input", tmp_path / "x.jsonl", "--output", tmp_path / "x.npy", *FP32)
    assert outcome.code == 2
    assert "x.jsonl:5001" in outcome.err
    assert "embedding: 4," not in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
