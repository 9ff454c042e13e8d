"""CoNLL columns: every word with its tag, whatever the layout; four schemes, there and back, as seqeval reads them."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import BILOU, IOB1, IOB2, IOBES, Entities

from bertsmith.errors import UserError
from bertsmith.tasks.conll import SCHEMES, count_violations, detect_scheme, from_iob2, read_conll, to_iob2
from bertsmith.tasks.examples import TaggedExample
from bertsmith.text.documents import ReadReport

SEQEVAL = {"IOB1": IOB1, "IOB2": IOB2, "BIOES": IOBES, "BILOU": BILOU}


def write(path: Path, data: bytes | str) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def read(tmp_path: Path, content: bytes | str, **options: Any) -> list[tuple[tuple[str, ...], tuple[str, ...] | None]]:
    path = write(tmp_path / "x.conll", content)
    return [(example.words, example.tags) for example in read_conll(path, **options)]


def refusal(tmp_path: Path, content: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(tmp_path, content, **options)
    return str(caught.value)


def test_sentences_ids_and_places(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.txt", "\n-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\nPeter NNP O I-PER\n"
    )
    report = ReadReport()
    assert list(read_conll(path, labelled=True, report=report)) == [
        TaggedExample(f"{path}:4", "0", ("EU", "rejects"), ("B-ORG", "O")),
        TaggedExample(f"{path}:8", "1", ("Peter",), ("I-PER",)),
    ]
    assert report.skipped == {"-DOCSTART- line": 1}


def test_columns_and_separators(tmp_path: Path) -> None:
    content = "1\tNew York\tB-LOC\tx\n2\t\u3000\tO\tx\n3\t \tO\tx\t\n \t \t\n"
    assert read(tmp_path, content, token_column=1, tag_column=2) == [(("New York", "\u3000", " "), ("B-LOC", "O", "O"))]
    assert read(tmp_path, "B-PER  Anna\nO   sings \n", token_column=-1, tag_column=0) == [
        (("Anna", "sings"), ("B-PER", "O"))
    ]
    assert read(tmp_path, "a\u00a0b O\n\u2028 O\n") == [(("a\u00a0b", "\u2028"), ("O", "O"))]
    # a line with a tab is split at tabs, one without at blanks, unless one is forced
    assert read(tmp_path, "a b\tO\n", separator="blank") == [(("a",), ("O",))]
    assert read(tmp_path, "a b\tO\n\tO\n", separator="tab") == [(("a b", ""), ("O", "O"))]
    assert read(tmp_path, "a b\tO\nc O\n\tO\n") == [(("a b", "c", ""), ("O", "O", "O"))]
    assert "use one of auto, tab, blank" in refusal(tmp_path, "a O\n", separator=",")


def test_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffAnna\tB-PER\r\n\r\n\u0085\tO") == [(("Anna",), ("B-PER",)), (("\x85",), ("O",))]
    assert read(tmp_path, "Jürgen O\n".encode("latin-1"), encoding="latin-1") == [(("Jürgen",), ("O",))]


def test_hash_signs_are_words_unless_comments_are_asked_for(tmp_path: Path) -> None:
    content = "# O\n#tag O\n#\tO\n# id 5\n"
    assert "'5' is no tag" in refusal(tmp_path, content)
    content = "# O\n#tag O\n#\tO\n"
    assert read(tmp_path, content) == [(("#", "#tag", "#"), ("O", "O", "O"))]
    report = ReadReport()
    assert read(tmp_path, "# id 5 O\nx O\n#tag O\n", comments=True, report=report) == [(("x", "#tag"), ("O", "O"))]
    assert report.skipped == {"comment": 1}


def test_unlabelled_files(tmp_path: Path) -> None:
    expected = [(("Anna", "sings"), None), (("now",), None)]
    assert read(tmp_path, "Anna\nsings\n\nnow\n") == expected
    assert read(tmp_path, "Anna X Y\nsings X Y\n\nnow X Y\n", labelled=False) == expected
    assert "x.conll:1: no tag beside 'Anna' in 1 column; every word needs one" in refusal(
        tmp_path, "Anna\n", labelled=True
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("Anna B-PER\nsings\n", "x.conll:2: no tag beside 'sings' in 1 column"),
        ("Anna\tB-PER\nsings\t\n", "x.conll:2: no tag beside 'sings'"),
        ("Anna B-PER\n\nsings PER\n", "x.conll:3: 'PER' is no tag: O, or a prefix"),
        ("Anna B-\n", "x.conll:1: 'B-' is no tag"),
        ("Anna M-PER\n", "x.conll:1: 'M-PER' is no tag"),
        ("Anna o\n", "x.conll:1: 'o' is no tag"),
        ("", "x.conll: empty file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: str, told: str) -> None:
    assert told in refusal(tmp_path, content)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    told = refusal(tmp_path, "a b c\nd e\n", token_column=2, labelled=False)
    assert "x.conll:2: 2 columns; the token was to be in column 2" in told
    assert "x.conll:2: no tag beside 'c' in 2 columns" in refusal(tmp_path, "a b O\nc O\n", tag_column=2)


def test_running_text_is_not_taken_for_columns(tmp_path: Path) -> None:
    """Of each line but one word would be tagged, and nobody told."""
    assert "x.conll:3: 1 columns where the first word has 4" in refusal(
        tmp_path, "John lives in Paris\n\nhello\n", labelled=False
    )


def test_digits_of_character_files_come_off(tmp_path: Path) -> None:
    assert read(tmp_path, "科0\tO\n110\tO\np10\tO\n22\tO\n", strip_digit=True)[0][0] == ("科", "1", "p", "2")
    assert "x.conll:1: token '科' has no digit at its end to strip" in refusal(tmp_path, "科\tO\n", strip_digit=True)


# --- schemes ---

ENTITIES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4), st.sampled_from(["PER", "creative-work"])), max_size=6
)


def write_tags(entities: list[tuple[int, int, str]], scheme: str) -> tuple[str, ...]:
    """Tags of (words before, words in it, type) of each entity, by the scheme's definition."""
    tags: list[str] = []
    for gap, length, kind in entities:
        tags += ["O"] * gap
        if scheme == "IOB1":
            adjacent = bool(tags) and tags[-1][2:] == kind
            prefixes = ("B" if adjacent else "I") + "I" * (length - 1)
        elif scheme == "IOB2":
            prefixes = "B" + "I" * (length - 1)
        else:
            last, only = ("E", "S") if scheme == "BIOES" else ("L", "U")
            prefixes = only if length == 1 else f"B{'I' * (length - 2)}{last}"
        tags += [f"{prefix}-{kind}" for prefix in prefixes]
    return (*tags, "O")


@given(entities=ENTITIES, scheme=st.sampled_from(SCHEMES))
def test_schemes_there_and_back(entities: list[tuple[int, int, str]], scheme: str) -> None:
    tags, plain = write_tags(entities, scheme), write_tags(entities, "IOB2")
    assert to_iob2(tags, scheme) == plain
    assert from_iob2(plain, scheme) == tags
    assert count_violations([tags], scheme) == 0
    found = [entity.to_tuple()[1:] for entity in Entities([list(tags)], SEQEVAL[scheme]).entities[0]]
    assert found == [(kind, start, end + 1) for kind, start, end in get_entities(list(plain))]


@settings(max_examples=200)
@given(
    prefixes=st.sampled_from(["BI", "BIES"]),
    draw=st.lists(st.tuples(st.integers(0, 4), st.sampled_from("XY")), max_size=12),
)
def test_ill_formed_sequences_are_read_as_conlleval_reads_them(prefixes: str, draw: list[tuple[int, str]]) -> None:
    tags = [f"{prefixes[index]}-{kind}" if index < len(prefixes) else "O" for index, kind in draw]
    scheme = "IOB2" if prefixes == "BI" else "BIOES"
    assert get_entities(list(to_iob2(tags, scheme))) == get_entities(tags)
    assert get_entities(list(from_iob2(tags, "BIOES"))) == get_entities(list(to_iob2(tags, "IOB2")))


@given(st.lists(ENTITIES, max_size=4), st.sampled_from(SCHEMES))
def test_the_scheme_shows_in_the_tags(sentences: list[list[tuple[int, int, str]]], scheme: str) -> None:
    sentences = [*sentences, [(0, 1, "PER"), (0, 2, "PER")]]
    assert detect_scheme(write_tags(entities, scheme) for entities in sentences) == scheme


@pytest.mark.parametrize(
    ("tags", "scheme", "violations"),
    [
        ([], "IOB2", 0),
        (["O", "O"], "IOB2", 0),
        (["B-X", "O", "I-X"], "IOB2", 1),  # a slip of an annotator's, not IOB1: there B-X would follow an X
        (["I-X", "B-X", "I-Y"], "IOB1", 0),
        (["I-X", "B-Y"], "IOB2", 1),
        (["S-X", "O", "B-X", "I-X"], "BIOES", 1),
        (["U-X"], "BILOU", 0),
    ],
)
def test_schemes_of_awkward_files(tags: list[str], scheme: str, violations: int) -> None:
    assert detect_scheme([tags]) == scheme
    assert count_violations([tags], scheme) == violations


def test_two_schemes_in_one_file_are_refused() -> None:
    with pytest.raises(UserError, match="prefixes E, L are of two schemes, BIOES and BILOU"):
        detect_scheme([["E-X"], ["O", "L-X"]])
    with pytest.raises(UserError, match="use one of IOB1, IOB2, BIOES, BILOU"):
        to_iob2(["O"], "BIO")


def count_plainly(path: Path, columns: Callable[[str], list[str]]) -> tuple[int, int, int]:
    """(sentences, words, entities) by another way: the file as one text, entities where conlleval sees one begin."""
    sentences = words = entities = 0
    for block in path.read_text("utf-8").replace("\n\t\n", "\n\n").replace("\n\t\n", "\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line.strip() and not line.startswith("-DOCSTART-")]
        tags = ["O"] + [columns(line)[-1] for line in lines]
        sentences += bool(lines)
        words += len(lines)
        for before, tag in pairwise(tags):
            entities += tag[0] == "B" or (tag[0] == "I" and before[2:] != tag[2:])
    return sentences, words, entities


@pytest.mark.parametrize(
    ("name", "scheme", "counts"),
    [
        ("wnut17/wnut17train.conll", "IOB2", (3394, 62730, 1975)),
        ("wnut17/emerging.dev.conll", "IOB2", (1009, 15733, 836)),
        ("wnut17/emerging.test.annotated", "IOB2", (1287, 23394, 1079)),
        ("wikigold/wikigold.conll.txt", "IOB1", (1696, 39007, 3558)),
        ("weibo_ner/weiboNER_2nd_conll.dev", "IOB2", (270, 14509, 389)),
        ("weibo_ner/weiboNER_2nd_conll.train", "IOB2", (1350, 73778, 1895)),
    ],
)
def test_real_files_are_read_whole(shared_data: Path, name: str, scheme: str, counts: tuple[int, int, int]) -> None:
    path = shared_data / "tasks" / name
    examples = list(read_conll(str(path), strip_digit="weibo" in name, labelled=True))
    tags = [example.tags or () for example in examples]
    assert detect_scheme(tags) == scheme
    entities = sum(tag[0] == "B" for sentence in tags for tag in to_iob2(sentence, scheme))
    assert (len(examples), sum(map(len, tags)), entities) == counts
    assert count_plainly(path, lambda line: line.split("\t" if "\t" in line else " ")) == counts
    assert all(len(example.words) == len(example.tags or ()) for example in examples)
    assert [example.id for example in examples] == [str(index) for index in range(len(examples))]
    if "weibo" in name:
        assert not any(len(word) > 1 and word[-1].isdigit() for example in examples for word in example.words)
        assert "".join(examples[0].words).isprintable()
    else:
        first = examples[-1].place.rsplit(":", 1)
        line = path.read_text("utf-8").split("\n")[int(first[1]) - 1]
        assert line.split()[0] == examples[-1].words[0]
