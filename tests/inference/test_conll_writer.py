"""Tagged sentences as .conll: read again they are the same; what would not be is refused."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.inference import predict, predictor
from bertsmith.inference.conll_writer import (
    ConllLayout,
    check_conll,
    check_sentences,
    is_conll,
    open_conll_writer,
    with_words,
)
from bertsmith.inference.predict import evaluate_file, predict_file
from bertsmith.model.weights import CONFIG, find_model
from bertsmith.tasks.conll import DOCUMENT_START, SCHEMES, from_iob2, read_conll
from bertsmith.tasks.examples import TaggedExample
from bertsmith.tasks.model_folder import load_task_model
from bertsmith.tasks.spec import TASK_KEY, TaskSpec
from command_line import bertsmith
from made_tasks import sentences, write_conll, write_rows

Tuned = Callable[[str], Path]
FLAGS = ("--precision", "fp32", "--device", "cpu")


def write(path: Path, made: list[list[str]], tags: list[list[str]], separator: str = "auto") -> Path:
    """The sentences in chunks of two."""
    examples = [TaggedExample(f"in:{number}", str(number), tuple(words), None) for number, words in enumerate(made)]
    layout = ConllLayout(TaskSpec("ner", 16, separator=separator))
    with open_conll_writer(path, layout) as writer:
        checked = list(check_sentences(examples, "in", layout))
        for start in range(0, len(checked), 2):
            part = slice(start, start + 2)
            writer.write(with_words(checked[part], [{"tags": each} for each in tags[part]]))
    return path


def read(path: Path, separator: str = "auto") -> list[tuple[list[str], list[str]]]:
    return [(list(e.words), list(e.tags or ())) for e in read_conll(str(path), separator=separator, labelled=True)]


def change_spec(run: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a run's model that learnt from files of another layout."""
    shutil.copytree(find_model(run), folder)
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    config[TASK_KEY] |= changes
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_the_output_is_an_input(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From columns and from lists the same file, in input order; `evaluate` finds its tags to be the model's."""
    monkeypatch.setattr(predictor, "CHUNK", 4)
    made = [*sentences(9), [("\U000fe4fa", "O"), ("#", "O"), ('"', "O")]]
    words = [[word for word, _ in sentence] for sentence in made]
    columns = write_conll(tmp_path / "in.conll", made, tagged=False)
    lists = write_rows(tmp_path / "in.jsonl", ("tokens",), [(each,) for each in words])
    out = tmp_path / "out.conll"
    summary = predict_file(tuned("ner"), str(columns), out, "cpu", "fp32")
    assert summary["rows"] == len(made)
    predict_file(tuned("ner"), str(lists), tmp_path / "lists.CONLL", "cpu", "fp32")
    assert (tmp_path / "lists.CONLL").read_bytes() == out.read_bytes()
    predict_file(tuned("ner"), str(columns), tmp_path / "rows.parquet", "cpu", "fp32")
    import pyarrow.parquet as pq

    tags = pq.read_table(tmp_path / "rows.parquet")["tags"].to_pylist()
    assert read(out) == list(zip(words, tags, strict=True))
    first = "".join(f"{word}\t{tag}\n" for word, tag in zip(words[0], tags[0], strict=True))
    assert out.read_text("utf-8").startswith(f"{first}\n{words[1][0]}\t")
    assert evaluate_file(tuned("ner"), str(out), "cpu", "fp32")["metrics"]["accuracy"] == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(tmp_path: Path, scheme: str) -> None:
    tags = [list(from_iob2([tag for _, tag in sentence], scheme)) for sentence in sentences(12)]
    words = [[word for word, _ in sentence] for sentence in sentences(12)]
    assert read(write(tmp_path / "out.conll", words, tags)) == list(zip(words, tags, strict=True))


WORDS = st.text(
    st.one_of(st.sampled_from("ab \t\r\n#\ufeff\u2028\x85\x0c-"), st.characters(exclude_categories=["Cs"])), max_size=4
)


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.one_of(WORDS, st.just(DOCUMENT_START)), max_size=3), min_size=1, max_size=4),
    st.sampled_from(["auto", "tab", "blank"]),
)
def test_the_same_or_refused(tmp_path_factory: pytest.TempPathFactory, made: list[list[str]], separator: str) -> None:
    path = tmp_path_factory.mktemp("conll") / "out.conll"
    tags = [["B-x"] * len(words) for words in made]
    try:
        write(path, made, tags, separator)
    except UserError:
        assert not path.exists()
        odd = ("", " ", DOCUMENT_START, "\ufeff")
        assert not all(words and not any(set("\t\r\n ") & set(word) or word.startswith(odd[2:]) or not word
                       for word in words) for words in made)  # fmt: skip
        return
    for reading in ("auto", separator):
        assert read(path, reading) == list(zip(made, tags, strict=True))


COLUMN = st.integers(-5, 5)


@given(st.tuples(COLUMN, COLUMN).filter(lambda pair: pair[0] != pair[1]), st.sampled_from(["auto", "tab", "blank"]))
def test_any_columns(tmp_path_factory: pytest.TempPathFactory, columns: tuple[int, int], separator: str) -> None:
    path = tmp_path_factory.mktemp("conll") / "out.conll"
    layout = ConllLayout(TaskSpec("ner", 16, token_column=columns[0], tag_column=columns[1], separator=separator))
    rows = [{"words": ("a", "_", "b"), "tags": ["O", "B-x", "I-x"]}, {"words": ("c",), "tags": ["O"]}]
    with open_conll_writer(path, layout) as writer:
        writer.write(rows)
    found = read_conll(str(path), *columns, separator=separator, labelled=True)
    assert [{"words": example.words, "tags": list(example.tags or ())} for example in found] == rows


@pytest.mark.parametrize("word", ["a\tb", "a\nb", "a\rb", "\t", DOCUMENT_START, "\ufeffa"])
def test_words_that_fit_no_line(tuned: Tuned, tmp_path: Path, word: str) -> None:
    first = [word] if word[0] == "\ufeff" else ["anna"]
    source = write_rows(tmp_path / "in.jsonl", ("tokens",), [(first,), (["a b", "", " "],), (["anna", word],)])
    line = 1 if word[0] == "\ufeff" else 3
    with pytest.raises(UserError, match=rf"in\.jsonl:{line}: the word '.*' cannot stand in a \.conll; name a \.jsonl"):
        predict_file(tuned("ner"), str(source), tmp_path / "out.conll", "cpu", "fp32")
    assert not (tmp_path / "out.conll").exists()
    predict_file(tuned("ner"), str(source), tmp_path / "out.jsonl", "cpu", "fp32")


def test_blanks_stay_where_tabs_separate(tmp_path: Path) -> None:
    made, tags = [["New York", "", " "], ["\xa0"]], [["B-LOC", "O", "O"], ["O"]]
    assert read(write(tmp_path / "out.conll", made, tags)) == list(zip(made, tags, strict=True))
    with pytest.raises(UserError, match="in:0: the word 'New York' cannot stand in a"):
        write(tmp_path / "out.conll", made, tags, separator="blank")


def test_mistakes(tuned: Tuned, tmp_path: Path) -> None:
    assert [is_conll(Path(name)) for name in ("a.conll", "b.CoNLL", "conll", "a.conll.gz")] == [
        True,
        True,
        False,
        False,
    ]
    source = write_rows(tmp_path / "in.jsonl", ("text", "tokens", "id"), [("a", ["a"], 1), ("b", [], 2)])
    for kind, flags, message in (
        ("classify", (), "out.conll: .conll holds a tag for each word, and classify predicts none; name a .jsonl or"),
        ("ner", ("--keep", "id"), "out.conll: .conll holds words and tags, and no columns for --keep; name a .jsonl"),
        ("ner", (), f"{source}:2: a sentence without words cannot stand in a .conll; name a .jsonl or .parquet"),
    ):
        command = ("predict", tuned(kind), "--input", source, "--output", tmp_path / "out.conll", *FLAGS, *flags)
        assert message in bertsmith(*command).mistake
    assert not list(tmp_path.glob("out*"))
    for tag in ("B-a\tb", "I-a\n", "B-a "):
        with pytest.raises(UserError, match=r"the tag '.*' cannot stand in a \.conll"):
            check_conll(tmp_path / "out.conll", TaskSpec("ner", 16, labels=("O", tag)), ())
    for spec, message in (
        (TaskSpec("ner", 16, strip_digit=True), r"takes a number off each word of a \.conll \(ner\.strip_digit\)"),
        (TaskSpec("ner", 16, token_column=1, tag_column=1), "words and tags of a .conll in one column"),
    ):
        with pytest.raises(UserError, match=message):
            check_conll(tmp_path / "out.conll", spec, ())
    out = tmp_path / "out.txt"
    for kind, also in (("ner", ", .conll"), ("classify", "")):
        mistake = bertsmith("predict", tuned(kind), "--input", source, "--output", out, *FLAGS).mistake
        assert f"out.txt: an output ends in .jsonl, .csv, .tsv, .parquet{also}, not in .txt" in mistake


@pytest.mark.parametrize(
    ("columns", "first", "more"),
    [
        ((0, -1), "anna\t{}\n", {}),
        ((1, -1), "_\tanna\t{}\n", {}),
        ((1, 0), "{}\tanna\n", {"separator": "tab"}),
        ((0, -2), "anna\t{}\t_\n", {"separator": "blank"}),
        ((-1, 2), "_\t_\t{}\tanna\n", {}),
        ((3, 1), "_\t{}\t_\tanna\n", {}),
        ((0, -1), "\ufeffanna\t{}\n", {"encoding": "latin-1"}),
        ((1, 0), "\ufeff{}\tanna\n", {"encoding": "utf-16", "scheme": "BIOES"}),
    ],
)
def test_a_model_reads_what_it_wrote(
    knowing: Path, tmp_path: Path, columns: tuple[int, int], first: str, more: dict[str, str]
) -> None:
    """In the columns and the encoding of its own files, with any words that are not refused."""
    folder = change_spec(knowing, tmp_path / "model", token_column=columns[0], tag_column=columns[1], **more)
    words = [["anna", "\u00e9t\u00e9", "lives", "in", "paris"], ["\u4e2d", "_", "\u00c3\u00a9"], ["-", "ben"]]
    source = write_rows(tmp_path / "in.jsonl", ("tokens",), [(each,) for each in words])
    out, again, rows = (tmp_path / name for name in ("out.conll", "again.conll", "rows.jsonl"))
    predict_file(folder, str(source), out, "cpu", "fp32", encoding="utf-8")
    predict_file(folder, str(out), again, "cpu", "fp32")
    assert again.read_bytes() == out.read_bytes()
    predict_file(folder, str(source), rows, "cpu", "fp32", encoding="utf-8")
    tags = [json.loads(line)["tags"] for line in rows.read_text("utf-8").splitlines()]
    assert out.read_text("utf-8").startswith(first.format(tags[0][0]))
    task, _ = load_task_model(folder)
    assert [list(example.words) for example in task.read(str(out), "test", False)] == words
    assert any(tag != "O" for each in tags for tag in each)
    metrics = evaluate_file(folder, str(out), "cpu", "fp32")["metrics"]
    assert (metrics["accuracy"], metrics["f1"]) == (1, 1)


@pytest.mark.parametrize("first", ["<html", "<?xml", "%PDF-", "{\\rtf", "PK\x03\x04", "BZh91AY&SY", "\x01" * 40])
def test_beginnings_of_what_is_no_text(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Refused before anything is computed."""
    monkeypatch.setattr(predict, "predict_examples", None)
    source = write_rows(tmp_path / "in.jsonl", ("tokens",), [([first, "anna"],)])
    with pytest.raises(
        UserError, match=r"in\.jsonl:?.* \.conll.*; name a \.jsonl or \.parquet as the --output"
    ) as caught:
        predict_file(tuned("ner"), str(source), tmp_path / "out.conll", "cpu", "fp32")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.conll").exists()


def test_no_sentences(tuned: Tuned, tmp_path: Path) -> None:
    source = tmp_path / "in.conll"
    source.write_text(f"{DOCUMENT_START} O\n\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"in\.conll: holds no sentence, and a \.conll without any is no input; name a"):
        predict_file(tuned("ner"), str(source), tmp_path / "out.conll", "cpu", "fp32")
    assert not (tmp_path / "out.conll").exists()


def test_what_can_be_read_only_once_is_checked_on_the_way(tuned: Tuned, tmp_path: Path) -> None:
    for words, right in ((("anna",), True), (("<html",), False)):
        pipe, out = tmp_path / f"pipe-{right}.conll", tmp_path / f"{right}.conll"
        os.mkfifo(pipe)
        text = f"{DOCUMENT_START} O\n\n" + "".join(f"{word}\tO\n" for word in words)
        writer = threading.Thread(target=pipe.write_text, args=(text,))
        writer.start()
        with contextlib.nullcontext() if right else pytest.raises(UserError, match="its first words is no input"):
            predict_file(tuned("ner"), str(pipe), out, "cpu", "fp32")
        writer.join()
        assert out.exists() is right
