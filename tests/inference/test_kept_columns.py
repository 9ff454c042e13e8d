"""Columns carried along: the cells of every row, as they are in the input, beside what was computed of that row."""

import json
import os
import random
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kept_files import OUTPUTS, read
from small_models import save_pretrained

from bertsmith.errors import UserError
from bertsmith.inference import chunks, features, kept_columns, predictor
from bertsmith.inference.kept_columns import KeptColumns
from bertsmith.inference.loaded import LoadedModel, load
from bertsmith.inference.predict import predict_file
from bertsmith.inference.scoring import score_file, score_pairs_file
from bertsmith.tasks.glue_files import read_glue
from command_line import bertsmith
from made_tasks import questions, write_rows, write_squad

Tuned = Callable[[str], Path]
Files = dict[str, tuple[Path, Path]]
FP32 = ("--precision", "fp32", "--device", "cpu")
INPUTS = [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz", ".jsonl.gz"]
# as strange as a .tsv can hold them
CELLS = ["007", "NA", "", 'say "x"', "a,b", " padded ", "é 中 ☃", "null", "1e5", "'"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def loaded(pretrained: Path) -> LoadedModel:
    return load(pretrained, precision="fp32")


def table(path: Path, count: int = 20, text: str = "text") -> tuple[Path, list[tuple[str, str]]]:
    """A file of `count` rows, and its cells of `id` and `note`."""
    cells = [(f"{number:03d}", CELLS[number % len(CELLS)]) for number in range(count)]
    rows = [(note, f"a good film {number}", row) for number, (row, note) in enumerate(cells)]
    return write_rows(path, ("note", text, "id"), rows), cells


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("ending", INPUTS)
def test_texts_come_back_from_every_format_in_every_format(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, output: str
) -> None:
    """In several chunks; first in the row, in the order they are named in; the predictions are what they were."""
    monkeypatch.setattr(predictor, "CHUNK", 3)
    source, cells = table(tmp_path / f"in{ending}")
    run, out = tuned("classify"), tmp_path / f"out{output}"
    summary = predict_file(run, str(source), out, "cpu", "fp32", keep=["id", "note"])
    found = read(out)
    assert summary["rows"] == len(found) == 20
    assert [(row["id"], row["note"]) for row in found] == cells
    assert list(found[0]) == ["id", "note", "label", "scores"]
    predict_file(run, str(source), tmp_path / f"plain{output}", "cpu", "fp32")
    assert [{"label": row["label"], "scores": row["scores"]} for row in found] == read(tmp_path / f"plain{output}")


def test_a_key_that_a_line_lacks_is_null(tuned: Tuned, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a", "id": 1}\n\n{"text": "b"}\n{"id": 3, "text": "c"}\n', encoding="utf-8")
    predict_file(tuned("classify"), str(source), tmp_path / "out.jsonl", "cpu", "fp32", keep=["id"])
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [1, None, 3]


@pytest.mark.parametrize("kind", ["pairs", "regress", "multilabel", "choice", "ner", "squad1"])
def test_every_kind_of_task(tuned: Tuned, tmp_path: Path, kind: str) -> None:
    columns: dict[str, list[Any]] = {
        "pairs": [("sentence1", "a"), ("sentence2", "b")],
        "regress": [("text", "a")],
        "multilabel": [("text", "a")],
        "choice": [("context", "a"), ("choices", ["b", "c"])],
        "ner": [("tokens", ["a", "b"])],
        "squad1": [("question", "who"), ("context", "anna lives")],
    }
    names, cells = zip(*columns[kind], strict=True)
    source = write_rows(tmp_path / "in.jsonl", ("key", *names), [(number, *cells) for number in range(5)])
    predict_file(tuned(kind), str(source), tmp_path / "out.jsonl", "cpu", "fp32", keep=["key", names[0]])
    found = read(tmp_path / "out.jsonl")
    assert [row["key"] for row in found] == list(range(5))
    assert [row[names[0]] for row in found] == [cells[0]] * 5


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_rows(tuned: Tuned, loaded: LoadedModel, tmp_path: Path, output: str) -> None:
    source = tmp_path / "in.csv"
    source.write_text("text,id,good,bad\n", encoding="utf-8")
    out = tmp_path / f"out{output}"

    def header() -> list[str]:
        if output == ".parquet":
            assert pq.read_schema(out).field("id").type == pa.string()
            return pq.read_schema(out).names
        return out.read_text("utf-8").strip().split(",\t"[output == ".tsv"]) if output != ".jsonl" else []

    predict_file(tuned("classify"), str(source), out, "cpu", "fp32", keep=["id"])
    assert header() == ([] if output == ".jsonl" else ["id", "label", "scores"])
    score_file(loaded.scorer(), str(source), out, keep=["id"])
    assert header() == ([] if output == ".jsonl" else ["id", "pll", "tokens", "pppl"])


def test_score(loaded: LoadedModel, tmp_path: Path) -> None:
    source, cells = table(tmp_path / "in.tsv", text="good")
    plain = score_file(loaded.scorer(), str(source), tmp_path / "plain.jsonl", "good")
    kept = score_file(loaded.scorer(), str(source), tmp_path / "out.jsonl", "good", keep=["note", "id"])
    assert kept["pppl"] == plain["pppl"]
    found = read(tmp_path / "out.jsonl")
    assert [(row.pop("id"), row.pop("note")) for row in found] == cells
    assert found == read(tmp_path / "plain.jsonl")
    rows = [("the cat", "cat the", number) for number in range(5)]
    source = write_rows(tmp_path / "pairs.jsonl", ("good", "bad", "UID"), rows)
    score_pairs_file(loaded.scorer(), str(source), tmp_path / "out.parquet", keep=["UID"])
    found = read(tmp_path / "out.parquet")
    assert list(found[0]) == ["UID", "good_pll", "bad_pll", "good_tokens", "bad_tokens", "correct"]
    assert [row["UID"] for row in found] == list(range(5))


@pytest.mark.parametrize("flags", [(), ("--pool", "none"), ("--words",)])
@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_embed(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(features, "TEXTS_AT_ONCE", 7)
    source, cells = table(tmp_path / f"in{ending}")
    command = ("embed", pretrained, "--input", source, *FP32, *flags, "--json", "--output")
    assert bertsmith(*command, tmp_path / "out.parquet", "--keep", "note, id").json["rows"] == 20
    bertsmith(*command, tmp_path / "plain.parquet")
    found = read(tmp_path / "out.parquet")
    assert list(found[0])[:2] == ["note", "id"]
    assert [(row.pop("id"), row.pop("note")) for row in found] == cells
    assert found == read(tmp_path / "plain.parquet")


def test_memory_is_that_of_the_rows_between(tmp_path: Path) -> None:
    source, _ = table(tmp_path / "in.csv", 100)
    kept = KeptColumns(str(source), ["id"], tmp_path / "out.csv", [])
    rows = kept.follow(((f"{source}:{number + 2}", number) for number in range(100)), itemgetter(0))
    for number, _ in enumerate(rows):
        assert len(kept.waiting) == 1
        assert kept.take(1) == [{"id": f"{number:03d}"}]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_memory_is_bounded_by_the_size_of_what_is_kept(
    loaded: LoadedModel, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Stretches of rows with long cells are short; what is written is the same."""
    rows = [(f"a cat {number}", [f"{number}" * 400]) for number in range(40)]
    source, vectors = write_rows(tmp_path / f"in{ending}", ("text", "id"), rows), tmp_path / "v.parquet"
    most = 0
    take = KeptColumns.take

    def counting(kept: KeptColumns, count: int) -> list[dict[str, Any]]:
        nonlocal most
        most = max(most, len(kept.waiting))
        return take(kept, count)

    monkeypatch.setattr(KeptColumns, "take", counting)
    command = ("embed", pretrained, "--input", source, "--output", vectors, "--keep", "id", *FP32)
    found = []
    for bound in (1 << 20, 2000):
        monkeypatch.setattr(chunks, "KEPT_AT_ONCE", bound)
        monkeypatch.setattr(kept_columns, "KEPT_AT_ONCE", bound)
        most = 0
        score_file(loaded.scorer(), str(source), tmp_path / "out.jsonl", keep=["id"])
        assert bertsmith(*command).code == 0
        assert most == 40 if bound > 2000 else most < 8
        found.append([(row["id"], row["pll"]) for row in read(tmp_path / "out.jsonl")])
        assert [row["id"] for row in read(vectors)] == [cell for _, cell in rows]
    assert [cell for cell, _ in found[1]] == [cell for _, cell in rows]
    assert [pll for _, pll in found[0]] == pytest.approx([pll for _, pll in found[1]], abs=1e-4)


def test_bytes_that_are_replaced_are_said(tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once: of a .csv by who reads its rows, of a .parquet's column by who alone reads it."""
    (tmp_path / "in.csv").write_bytes(b"text,id\na,caf\xe9\n")
    broken = pa.StringArray.from_buffers(1, pa.array([0, 4], pa.int32()).buffers()[1], pa.py_buffer(b"caf\xe9"))
    pq.write_table(pa.table({"text": ["a"], "id": broken}), tmp_path / "in.parquet")
    for name, said in (("in.csv", "1 bytes are not utf-8"), ("in.parquet", "1 bytes are not utf-8")):
        predict_file(tuned("classify"), str(tmp_path / name), tmp_path / "out.csv", "cpu", "fp32", keep=["id"])
        assert [row["id"] for row in read(tmp_path / "out.csv")] == ["caf\ufffd"]
        assert capsys.readouterr().err.count(said) >= 1
    predict_file(
        tuned("classify"), str(tmp_path / "in.csv"), tmp_path / "out.csv", "cpu", "fp32", keep=["id"], encoding="cp1252"
    )
    assert [row["id"] for row in read(tmp_path / "out.csv")] == ["café"]


# --- mistakes


def test_mistakes(
    tuned: Tuned, pretrained: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence each, before anything is computed."""
    monkeypatch.chdir(tmp_path)

    def computed(*_: Any) -> Iterator[Any]:
        raise AssertionError("the model computed")

    monkeypatch.setattr("bertsmith.inference.predict.predict_examples", computed)
    monkeypatch.setattr("bertsmith.inference.loaded.load", computed)
    write_rows(Path("in.csv"), ("text", "label", "key"), [("a", "pos", "1")])
    write_rows(Path("in.parquet"), ("text", "vector", "id"), [("a", "x", 1)])
    Path("in.txt").write_text("a\n", encoding="utf-8")
    Path("in.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    write_squad(Path("pretty.json"), questions(2))
    Path("pretty.json").write_text(json.dumps(json.loads(Path("pretty.json").read_text()), indent=1), encoding="utf-8")
    Path("codah.tsv").write_text("i\ta\tb\tc\td\te\t0\n" * 3, encoding="utf-8")
    os.mkfifo("pipe.csv")
    nameless = "has no columns with names that --keep could mean; give a .csv, .tsv, .jsonl or .parquet file"
    predicting = ("predict", tuned("classify"), "--output", "out.jsonl", "--input")
    embedding = ("embed", pretrained, "--input", "in.parquet", "--output")
    scoring = ("score", pretrained, "--input", "in.csv")
    for command, keep, message in (
        ((*predicting, "in.csv"), "kye", "in.csv:1: no column 'kye' in the first row, which must name the columns; "
         "there are 'text', 'label', 'key'; --keep takes their names; did you mean 'key'?"),
        ((*predicting, "in.csv"), "key,KEY", "no column 'KEY'"),
        ((*predicting, "in.jsonl"), "id", "in.jsonl:1: no key 'id'; there are 'text'; --keep takes their names"),
        ((*predicting, "in.csv"), "key,label", "--keep: 'label' is what a column of the output itself is called "
         "(label, scores); rename it in the input, or leave it out"),
        ((*predicting, "in.csv"), "id, text ,id", "--keep: 'id' is given twice; name each column once"),
        ((*predicting, "in.csv"), "id,,text", "--keep: a name is empty; give the names of columns"),
        ((*predicting, "in.txt"), "id", f"in.txt: {nameless}"),
        ((*predicting, "pipe.csv"), "id", "pipe.csv: can be read once only, and --keep reads it twice"),
        (("predict", tuned("ner"), "--output", "o.csv", "--input", files["ner"][1]), "id", nameless),
        (("predict", tuned("squad1"), "--output", "o.csv", "--input", "pretty.json"), "title", nameless),
        (("predict", tuned("squad1"), "--output", "o.csv", "--input", files["squad1"][1]), "version", nameless),
        (("predict", tuned("choice"), "--output", "o.csv", "--input", "codah.tsv"), "i", nameless),
        ((*embedding, "out.npy"), "id", "out.npy: .npy holds vectors and no columns for --keep; name a .parquet"),
        ((*embedding, "out.safetensors"), "id", "out.safetensors: .safetensors holds vectors and no columns"),
        ((*embedding, "out.parquet"), "vector", "'vector' is what a column of the output itself is called (vector);"),
        ((*embedding, "out.parquet"), "idd", "in.parquet:1: no column 'idd'; there are 'text', 'vector', 'id'; "),
        (scoring, "id", "--keep: there is no file to write columns to; name one with --output"),
        ((*scoring, "--output", "out.csv"), "number", "no column 'number'"),
    ):  # fmt: skip
        said = bertsmith(*command, *FP32, "--keep", keep).mistake
        assert message in said
        assert "\n" not in said
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ('text\na\n\n""\n\n\nb\n\n', ["a", "", "b"]),  # blank lines, of one column a row to who reads tables only
        ('text\n"a\r b"\nc\n"d\r\ne"\nf\n', ["a\r b", "c", "d\ne", "f"]),  # line ends inside cells, of all kinds
    ],
)
def test_rows_line_up_where_texts_and_tables_are_read_apart(
    loaded: LoadedModel, pretrained: Path, tmp_path: Path, content: str, kept: list[str]
) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "v.parquet"
    source.write_bytes(content.encode())
    score_file(loaded.scorer(), str(source), tmp_path / "out.jsonl", keep=["text"])
    assert [row["text"] for row in read(tmp_path / "out.jsonl")] == kept
    assert bertsmith("embed", pretrained, "--input", source, "--output", out, "--keep", "text", *FP32).code == 0
    assert [row["text"] for row in read(out)] == kept


def test_what_keep_stumbles_over_is_told_before_work(
    tuned: Tuned, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole file is read beside the columns first; the bars then know their ends."""

    def computed(*_: Any) -> Iterator[Any]:
        raise AssertionError("the model computed")

    monkeypatch.setattr("bertsmith.inference.predict.predict_examples", computed)
    monkeypatch.setattr("bertsmith.inference.scoring.SentenceScorer.score", computed)
    source, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("text,id\n" + "a,1\n" * 5000 + "a,1,2\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"in\.csv:5002: 3 cells"):
        predict_file(tuned("classify"), str(source), out, "cpu", "fp32", keep=["id"])
    with pytest.raises(UserError, match=r"in\.csv:5002: not as many cells"):
        score_file(loaded.scorer(), str(source), out, keep=["id"])
    test = write_rows(tmp_path / "test.tsv", ("index", "sentence"), [(number, "a") for number in range(3)])
    kept = KeptColumns(str(test), ["index"], out, [])
    assert kept.count(kept.follow(read_glue("sst-2", str(test), "test"), attrgetter("place"))) == 3
    header = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
    test = write_rows(tmp_path / "test.tsv", header, [(1, 2, 3, "a", "b", 0)])
    test.write_text(test.read_text("utf-8") + "2\t3\t4\ta\nb\tc\t1\n", encoding="utf-8")
    kept = KeptColumns(str(test), ["id"], out, [])
    told = r"--keep reads the file as a plain table: .*test\.tsv:3: 4 cells where the first row names 6"
    with pytest.raises(UserError, match=told):
        kept.count(kept.follow(read_glue("qqp", str(test), "test"), attrgetter("place")))
    assert not out.exists()


def test_another_layout_is_refused(tmp_path: Path) -> None:
    source, _ = table(tmp_path / "in.csv", 3)
    kept = KeptColumns(str(source), ["id"], tmp_path / "out.csv", [])
    rows = ((f"{source}:{line}", line) for line in (2, 4))
    with pytest.raises(UserError, match=r"in\.csv:4: --keep finds another row here \(line 3\); another layout"):
        kept.count(kept.follow(rows, itemgetter(0)))


def test_glue_files(tuned: Tuned, tmp_path: Path) -> None:
    """Of a layout of its own, which is a table with names; line ends inside a cell, which it allows, are told."""
    kept = KeptColumns(str(write_rows(tmp_path / "test.tsv", ("index", "sentence"), [("4", '"a'), ("2", "b")])),
                       ["index"], tmp_path / "out.csv", ["label", "scores"])  # fmt: skip
    examples = kept.follow(read_glue("sst-2", str(tmp_path / "test.tsv"), "test"), lambda example: example.place)
    assert [(example.text, kept.take(1)[0]["index"]) for example in examples] == [('"a', "4"), ("b", "2")]


def test_a_random_table_through_chunks_of_any_size(tuned: Tuned, tmp_path: Path, monkeypatch: Any) -> None:
    source = random.Random(3)
    rows = [(f"a cat {'was ' * source.randrange(9)}{number}", number * 7) for number in range(60)]
    path = write_rows(tmp_path / "in.jsonl", ("text", "id"), rows)
    for size in (1, 7, 60, 64):
        monkeypatch.setattr(predictor, "CHUNK", size)
        predict_file(tuned("classify"), str(path), tmp_path / "out.parquet", "cpu", "fp32", keep=["id", "text"])
        assert [(row["text"], row["id"]) for row in read(tmp_path / "out.parquet")] == rows


def test_names_with_blanks_and_commas(pretrained: Path, tmp_path: Path) -> None:
    """Blanks around a name are its own where a column is called so; a name with commas stands in quotes."""
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text('text, id,"a,b",n\na,1,2,3\n', encoding="utf-8")
    command = ("score", pretrained, "--input", source, *FP32, "--output")
    assert bertsmith(*command, out, "--keep", ' id,"a,b", n').code == 0
    assert list(read(out)[0].items())[:3] == [(" id", "1"), ("a,b", "2"), ("n", "3")]
    assert "no column 'id'" in bertsmith(*command, out, "--keep", "id").mistake
    assert "a name is empty" in bertsmith(*command, out, "--keep", "").mistake
    assert "is no list of names as a .csv has it" in bertsmith(*command, out, "--keep", "a\nb").mistake


def test_names_that_a_tsv_writes_alike(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ("a\tb", "a b", "c\nd"), [(1, 2, 3)])
    for names, own in (["a\tb", "a b"], []), (["c\nd"], ["c d"]):
        KeptColumns(str(source), names, tmp_path / "out.csv", own)
        with pytest.raises(UserError, match=r"--keep: a \.tsv writes .* and .* alike; name another --output"):
            KeptColumns(str(source), names, tmp_path / "out.tsv", own)


def test_the_input_under_another_name_is_not_replaced(pretrained: Path, tmp_path: Path) -> None:
    source, _ = table(tmp_path / "in.csv", 2)
    before = source.read_bytes()
    for url in (f"file://{source}", f"local://{source}"):
        command = ("score", pretrained, "--input", url, "--keep", "id", *FP32, "--output")
        assert "in.csv: is the input as well" in bertsmith(*command, source).mistake
        assert bertsmith(*command, tmp_path / "out.csv").code == 0
        assert [row["id"] for row in read(tmp_path / "out.csv")] == ["000", "001"]
    assert source.read_bytes() == before


def test_bad_bytes_of_jsonl_are_said_once(pretrained: Path, tmp_path: Path) -> None:
    """By who reads the texts; halves of characters in what only is kept by who keeps it."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "caf\xe9", "id": "\xe9"}\n')
    command = ("score", pretrained, "--input", source, "--keep", "id", *FP32, "--output", tmp_path / "out.jsonl")
    said = bertsmith(*command).err
    assert said.count("bytes are not utf-8") == said.count("warning: 2 bytes are not utf-8") == 1
    source.write_text('{"text": "caf", "id": "\\ud800"}\n', encoding="utf-8")
    assert bertsmith(*command).err.count("warning: 6 bytes are not utf-8") == 1
