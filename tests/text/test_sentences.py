"""Sentence splitting: languages, newlines, hard-wrapped text, odd characters, and that no character is lost."""

import gzip
import json
import textwrap
import time
from pathlib import Path

import pytest
import sentencex
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.text import sentences as module
from bertsmith.text.sentences import find_sentences, resolve_language, split_sentences
from bertsmith.text.wrapping import find_wrap_width, unwrap_lines

CODES = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk zh ko sv"
ODD_PIECES = (
    ". ! ? … 。 ！ ？ । ؟ \" ' “ ” ‘ ’ « » 「 」 ( ) [1] ; , - \n \n\n \r\n \t \x85 \xa0 \u2028 \u3000 \ufeff \0 a B 1 "
    "I Mr. U.S. p.m. a) 1. ii. (1) x@y.com 中 é ß İ 😀 \u0301 \u200b ... Yahoo! e.g. Ph.D. etc. J\xa0. ``x''"
)
PARAGRAPH = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it. So she "
    "was considering in her own mind, as well as she could, for the hot day made her feel very sleepy and stupid, "
    "whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies."
)


def test_english() -> None:
    text = "Hello Mr. Smith of the U.S. Army. How are you? Fine! See p. 5.\nNext line"
    assert split_sentences(text) == [
        "Hello Mr. Smith of the U.S. Army.",
        "How are you?",
        "Fine!",
        "See p. 5.",
        "Next line",
    ]


def test_chinese() -> None:
    text = "他说：“你好。”然后走了。真的吗？是的！2008年8月，大会开幕。17世纪的事。“还有。”\n\n「下一段。」完……"
    assert split_sentences(text, "zh") == [
        "他说：“你好。”",
        "然后走了。",
        "真的吗？",
        "是的！",
        "2008年8月，大会开幕。",
        "17世纪的事。",
        "“还有。”",
        "「下一段。」",
        "完……",
    ]


def test_japanese() -> None:
    text = "彼は言った。「こんにちは。」そして去った。mdadm パッケージが必要です。1台のコンピュータ。"
    assert split_sentences(text, "ja") == [
        "彼は言った。",
        "「こんにちは。」",
        "そして去った。",
        "mdadm パッケージが必要です。",
        "1台のコンピュータ。",
    ]


def test_other_scripts() -> None:
    assert split_sentences("यह पहला है। यह दूसरा है।", "hi") == ["यह पहला है।", "यह दूसरा है।"]
    assert split_sentences("هل هذا صحيح؟ نعم.", "ar") == ["هل هذا صحيح؟", "نعم."]
    assert split_sentences("Das kostet z. B. 5 Euro. Gut.", "de") == ["Das kostet z. B. 5 Euro.", "Gut."]
    assert split_sentences("첫 문장이다. 둘째 문장이다.", "ko") == ["첫 문장이다.", "둘째 문장이다."]


def test_closing_marks_do_not_stand_alone() -> None:
    for sentence in split_sentences("“走。）”，他说。’于是。 。 （完）。", "zh"):
        assert sentence[0] not in "。，”’）"


@pytest.mark.parametrize("code", ["EN", "en_US", "zh-Hans-CN", "pt-BR", "yue", "gsw", "sv", "de-at"])
def test_codes_as_people_write_them(code: str) -> None:
    assert resolve_language(code) == code.lower().replace("_", "-").split("-")[0]
    assert split_sentences("One. Two. 三。", code)


@pytest.mark.parametrize("code", ["english", "xx", "", "e", "en1", "klingon"])
def test_unknown_languages_are_refused(code: str) -> None:
    with pytest.raises(UserError, match=r"--language: .* such as en, de"):
        split_sentences("", code)


def test_newlines_and_blank_lines_end_sentences() -> None:
    assert split_sentences("a title\nSome text\n\n  \nmore\n") == ["a title", "Some text", "more"]
    assert split_sentences("") == split_sentences(" \n\t\n\x0c") == []


def test_odd_spaces_separate_words() -> None:
    text = "one\x0b\x0ctwo\x85three\u2028four\u2029five\xa0six\u3000seven\tten"
    assert split_sentences(text) == ["one  two three four five six seven ten"]


@pytest.mark.parametrize("width", [40, 60, 72, 78, 100])
@pytest.mark.parametrize("indent", ["", "   "])
def test_hard_wrapped_prose_is_unwrapped(width: int, indent: str) -> None:
    wrapped = textwrap.fill(PARAGRAPH, width, initial_indent=indent, break_on_hyphens=True)
    assert wrapped.count("\n") >= 4
    book = "\n\n".join(["CHAPTER I.", wrapped, "A short paragraph.", wrapped])
    sentences = split_sentences(book)
    plain = split_sentences(PARAGRAPH)
    assert len(plain) == 2
    assert sentences == ["CHAPTER I.", *plain, "A short paragraph.", *plain]


def test_wrapping_by_hand_is_ragged() -> None:
    words, lines, line = PARAGRAPH.split(), [], ""
    for number, word in enumerate(words):
        if len(line) + 1 + len(word) > 70 - number * 7 % 9:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    assert split_sentences("\n".join([*lines, line])) == split_sentences(PARAGRAPH)


def test_paragraphs_told_by_indentation_or_a_short_last_line() -> None:
    paragraphs = [textwrap.wrap(PARAGRAPH, 65, initial_indent="    ") for _ in range(3)]
    text = "\n".join(line for paragraph in paragraphs for line in paragraph)
    assert split_sentences(text) == split_sentences(PARAGRAPH) * 3
    text = "\n".join(["Heading", *textwrap.wrap(PARAGRAPH, 65), "Another Heading", *textwrap.wrap(PARAGRAPH, 65)])
    assert split_sentences(text) == ["Heading", *split_sentences(PARAGRAPH)[:1], *split_sentences(text)[2:]]
    assert split_sentences(text)[-3:] == ["Another Heading", *split_sentences(PARAGRAPH)]


def test_wrapped_words_are_joined_as_they_were() -> None:
    lines = [
        "She walked with the greatest care along the high and well-",
        "known path, and saw there what she had hoped to see: houses--",
        "and then a dash — with spaces, and at last a long, long word —",
        "which is what a soft hyphen is for, as in the word hyphen\xad",
        "ation, and that was all there was to say about it, she said.",
    ]
    assert unwrap_lines(lines) == [
        "She walked with the greatest care along the high and well-known path, and saw there what she had hoped to "
        "see: houses--and then a dash — with spaces, and at last a long, long word — which is what a soft hyphen is "
        "for, as in the word hyphen\xadation, and that was all there was to say about it, she said."
    ]
    wide = "一二三四五六七八九十" * 3
    chinese = [wide[:20], wide[3:23], wide[1:21], wide[2:22], wide[5:25], wide[4:24], wide[:7]]
    assert unwrap_lines(chinese) == ["".join(chinese)]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([f"Is {'very ' * (n % 13)}number {n} here?" for n in range(60)], id="a sentence a line"),
        pytest.param([f"{n} January 19{n % 90 + 10} – Event" for n in range(60)], id="list"),
        pytest.param([f"2024-05-{n % 28 + 1:02} 12:00:{n:02} INFO the server is alive" for n in range(60)], id="log"),
        pytest.param(["word"] * 50, id="words"),
        pytest.param(["Shall I compare thee to a summer's day?", "Thou art more lovely"] * 7, id="verse"),
        pytest.param([PARAGRAPH] * 10, id="a paragraph a line"),
        pytest.param(["def f(x):", "    return x + 1", "", "class A:", "    def g(self):"] * 5, id="code"),
        pytest.param(["The first line of a note that is", "wrapped"], id="too little to tell"),
    ],
)
def test_other_layouts_are_left_alone(lines: list[str]) -> None:
    assert find_wrap_width(lines) == 0
    assert unwrap_lines(lines) is lines


odd_text = st.lists(
    st.one_of(st.sampled_from(ODD_PIECES.split(" ")), st.just(" "), st.text(max_size=5)), max_size=40
).map("".join)


@settings(max_examples=300)
@given(text=odd_text, language=st.sampled_from(CODES.split(" ")))
def test_no_character_is_lost_and_order_is_kept(text: str, language: str) -> None:
    sentences = split_sentences(text, language)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(s and s == s.strip() and "\n" not in s for s in sentences)


@settings(max_examples=200)
@given(text=odd_text, language=st.sampled_from(CODES.split(" ")))
def test_places_of_sentences(text: str, language: str) -> None:
    """Between them there is nothing but blanks, and in them no end of a line."""
    places = [0]
    for first, last in find_sentences(text, language):
        assert places[-1] <= first < last
        assert text[first:last].strip(" ") == text[first:last]
        assert "\n" not in text[first:last]
        assert not text[places[-1] : first].strip()
        places.append(last)
    assert not text[places[-1] :].strip()


def test_places_of_sentences_in_long_lines() -> None:
    text = " ".join(f"Dr. Smith saw No. {number} at 5 p.m.\xa0today. He left." for number in range(1000)) + "\nYes. No."
    places = list(find_sentences(text))
    assert [text[first:last] for first, last in places[-3:]] == ["He left.", "Yes.", "No."]
    assert 2000 <= len(places) <= 2010


@settings(max_examples=60)
@given(
    words=st.lists(st.text("abcdeàé中-—.", min_size=1, max_size=12), min_size=40, max_size=120),
    width=st.integers(35, 90),
)
def test_unwrapping_loses_nothing(words: list[str], width: int) -> None:
    lines = textwrap.wrap(" ".join(words), width)
    assert "".join("".join(unwrap_lines(lines)).split()) == "".join(words)


def test_a_panic_or_a_loss_in_sentencex_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_sentences("J\xa0. K. Rowling wrote. Yes.")  # sentencex 1.0.32 panics on the no-break space

    class PanicException(BaseException):
        pass

    def panics(language: str, text: str) -> list[str]:
        raise PanicException("byte index 5 is not a char boundary")

    expected = ["One.", "Two!", "三。", "四"]
    monkeypatch.setattr(sentencex, "segment", panics)
    assert split_sentences("One. Two! 三。四") == expected
    monkeypatch.setattr(sentencex, "segment", lambda language, text: [text[:-1]])
    assert split_sentences("One. Two! 三。四") == expected
    monkeypatch.undo()
    assert split_sentences("half \ud83d one. Two.") == ["half \ud83d one.", "Two."]

    def interrupted(language: str, text: str) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(sentencex, "segment", interrupted)
    with pytest.raises(KeyboardInterrupt):
        split_sentences("One.")


@pytest.mark.parametrize("unit", ["x", "word ", "好", "好。", "“好。", "A. ", '"a." ', "!,", "a\n", "The cat sat. "])
def test_half_a_megabyte_in_a_line_takes_linear_time(unit: str) -> None:
    times = []
    for size in (50_000, 500_000):
        text = unit * (size // len(unit))
        start = time.process_time()
        sentences = split_sentences(text)
        times.append(time.process_time() - start)
        assert "".join("".join(sentences).split()) == "".join(text.split())
        assert max(map(len, sentences)) < 15_000
    assert times[1] < 25 * max(times[0], 0.02)


def test_long_lines_are_cut_at_sentence_ends() -> None:
    chinese = "“他说：“今天天气很好。我们去吧。””她笑了。" * 300
    for piece in module.cut_line(chinese)[:-1]:
        assert piece.endswith(("笑了。", "””"))
    english = ("The quick brown fox jumps over the lazy dog. " * 2000).strip()
    assert split_sentences(english) == ["The quick brown fox jumps over the lazy dog."] * 2000


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "language", "shortest", "longest", "least_speed"),
    [
        ("wiki_en-00", "en", 60, 160, 20),
        ("books_en-00", "en", 50, 140, 20),
        ("zh_wiki-00", "zh", 25, 60, 12),
        ("zh_novels-00", "zh", 15, 60, 8),
        ("eltec_fr-00", "fr", 50, 140, 12),
        ("debian_docs_ja-00", "ja", 25, 80, 12),
    ],
)
def test_real_text(
    shared_data: Path, name: str, language: str, shortest: int, longest: int, least_speed: float
) -> None:
    """Mean length in characters is plausible; MB a CPU second are held to half of what an idle machine shows."""
    with gzip.open(shared_data / "corpora" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(600), strict=False)]
    start = time.process_time()
    split = [split_sentences(text, language) for text in texts]
    seconds = time.process_time() - start
    size = sum(len(text.encode()) for text in texts)
    count = sum(map(len, split))
    assert shortest < sum(len(s) for sentences in split for s in sentences) / count < longest
    assert size / seconds / 1e6 > least_speed
    for text, sentences in zip(texts, split, strict=True):
        assert "".join("".join(sentences).split()) == "".join(text.split())
