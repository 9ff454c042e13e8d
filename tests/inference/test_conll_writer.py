"""Tagged sentences as .conll: read again they are the same; what would not be is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.inference import predictor
from bertsmith.inference.conll_writer import check_conll, check_sentences, is_conll, open_conll_writer, with_words
from bertsmith.inference.predict import evaluate_file, predict_file
from bertsmith.tasks.conll import DOCUMENT_START, SCHEMES, from_iob2, read_conll
from bertsmith.tasks.examples import TaggedExample
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.spec import TaskSpec
from bertsmith.text.tokenizer import BertTokenizer
from command_line import bertsmith
from made_tasks import sentences, write_conll, write_rows

Tuned = Callable[[str], Path]
FLAGS = ("--precision", "fp32", "--device", "cpu")


def write(path: Path, made: list[list[str]], tags: list[list[str]], separator: str = "auto") -> Path:
    """The sentences in chunks of two."""
    examples = [TaggedExample(f"in:{number}", str(number), tuple(words), None) for number, words in enumerate(made)]
    with open_conll_writer(path) as writer:
        checked = list(check_sentences(examples, separator))
        for start in range(0, len(checked), 2):
            part = slice(start, start + 2)
            writer.write(with_words(checked[part], [{"tags": each} for each in tags[part]]))
    return path


def read(path: Path, separator: str = "auto") -> list[tuple[list[str], list[str]]]:
    return [(list(e.words), list(e.tags or ())) for e in read_conll(str(path), separator=separator, labelled=True)]


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


@settings(max_examples=150, deadline=None)
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


def test_mistakes(tuned: Tuned, tokenizer: BertTokenizer, tmp_path: Path) -> None:
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
        task = make_task(TaskSpec("ner", 16, labels=("O", tag)), tokenizer)
        with pytest.raises(UserError, match=r"the tag '.*' cannot stand in a \.conll"):
            check_conll(tmp_path / "out.conll", task, ())
