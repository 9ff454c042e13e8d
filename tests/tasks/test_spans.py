"""Every token of a context is in some window, targets are the answer's tokens, answers are cut from what was given."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.tasks.examples import Answer, EncodedSequence, EncodingReport, QuestionExample
from bertsmith.tasks.spans import (
    SpanOptions,
    SpanPrediction,
    Version,
    check_questions,
    choose_windows,
    decode_spans,
    encode_question,
    encode_questions,
    find_windows,
)
from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer, load_tokenizer

# words w0, w1, … are one token each; other words are spelled out
WORDS = [f"w{n}" for n in range(600)]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = BertTokenizer([*SPECIAL_TOKENS, *WORDS, *LETTERS, *("##" + letter for letter in LETTERS), ".", "中", "文"])


def question(text: str, context: str, *answers: tuple[str, int], labelled: bool = True) -> QuestionExample:
    found = tuple(Answer(*answer) for answer in answers) if labelled else None
    return QuestionExample("x.json:7", "q1", text, context, found)


def options(**values: int) -> SpanOptions:
    return SpanOptions(**{"max_length": 20, "stride": 4, "max_question": 8, **values})


def encode(
    example: QuestionExample, settings: SpanOptions, report: EncodingReport | None = None, train: bool = True
) -> list[EncodedSequence]:
    return encode_question(example, TOKENIZER, settings, report or EncodingReport(), train)


def one_hot(sequences: list[EncodedSequence]) -> list[np.ndarray]:
    """Logits (L, 2) of a model that knows the targets."""
    logits = [np.zeros((len(sequence), 2), dtype=np.float32) for sequence in sequences]
    for rows, sequence in zip(logits, sequences, strict=True):
        rows[sequence.targets, [0, 1]] = 10
    return logits


def random_logits(sequences: list[EncodedSequence], seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(-3, 9, (len(sequence), 2)).astype(np.float32) for sequence in sequences]


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_length": 128, "stride": 126}, "stride: 126 is more than the 125 tokens a window of max_length 128"),
        ({"max_length": 3}, "max_length: 3 tokens hold no context; use more than 3"),
        ({"stride": 0, "n_best": 0}, "stride: 0 is not a number from 1 up; n_best: 0 is not"),
        ({"max_answer_tokens": 0}, "max_answer_tokens: 0 is not a number from 1 up"),
        ({"max_question": -1}, "max_question: -1 is not a number from 0 up"),
    ],
)
def test_options_that_cannot_be_are_refused(values: dict[str, int], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        SpanOptions(**values)


def test_a_stride_that_loses_tokens_is_refused_with_both_numbers_before_the_work() -> None:
    settings = options(max_length=20, stride=12)
    short, long = question("w1 w2 w3 w4 w5", "w7"), question("w1 w2 w3 w4 w5 w6", "w7")
    check_questions([short], TOKENIZER, settings)
    assert len(encode(short, settings)) == 1
    for attempt in (
        lambda: check_questions([short, long, short], TOKENIZER, settings),
        lambda: encode(long, settings),
    ):
        with pytest.raises(UserError) as caught:
            attempt()
        assert str(caught.value) == (
            "x.json:7: a question of 6 tokens leaves room for 11 tokens of context in a sequence of max_length 20, "
            "less than the stride of 12, so that some would be in no window; use a stride of 11 or less, a larger "
            "max_length or a smaller max_question"
        )
    check_questions([long], TOKENIZER, options(max_length=20, stride=12, max_question=5))
    check_questions([], TOKENIZER, settings)


def test_a_question_that_leaves_no_room_is_refused() -> None:
    # pains.md F12: 16 tokens, a question of 20
    long = question(" ".join(WORDS[:20]), "w7")
    settings = SpanOptions(max_length=16, stride=1)
    for attempt in (lambda: check_questions([long], TOKENIZER, settings), lambda: encode(long, settings)):
        with pytest.raises(UserError, match=re.escape("leaves no room for context") + ".*" + re.escape("(room -7,")):
            attempt()
    [sequence] = encode(long, SpanOptions(max_length=16, stride=1, max_question=12), report := EncodingReport())
    assert len(sequence) == 16
    assert (report.notes, report.truncated, report.truncated_tokens) == ({"questions_cut": 1}, 1, 8)


# -- windows ----------------------------------------------------------------------------------------------------------


def reference_windows(count: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Starts and ends, as the reference finds them one after the other."""
    windows = []
    start = 0
    while True:
        length = min(count - start, room)
        windows.append((start, start + length))
        if start + length == count:
            return windows
        start += min(length, stride)


@settings(max_examples=200)
@given(count=st.integers(0, 200), room=st.integers(1, 60), data=st.data())
def test_windows_are_the_references_and_hold_every_token(count: int, room: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, room))
    starts = find_windows(count, room, stride)
    ends = np.minimum(starts + room, count)
    windows = reference_windows(count, room, stride)
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == windows
    owners = choose_windows(starts, ends)
    assert len(owners) == count
    for token, owner in enumerate(owners.tolist()):
        context = {
            number: 100 * min(token - start, end - 1 - token) + end - start
            for number, (start, end) in enumerate(windows)
            if start <= token < end
        }
        assert context, "a token in no window"
        assert owner == max(context, key=lambda number: (context[number], -number))


@settings(max_examples=200)
@given(
    asked=st.integers(0, 12),
    count=st.integers(0, 150),
    max_length=st.integers(12, 50),
    train=st.booleans(),
    data=st.data(),
)
def test_what_always_holds(asked: int, count: int, max_length: int, train: bool, data: st.DataObject) -> None:
    room = max_length - 3 - min(asked, 8)
    chosen = options(max_length=max_length, stride=data.draw(st.integers(1, room)))
    words = WORDS[100 : 100 + count]
    context = " ".join(words)
    answers = []
    if count and data.draw(st.booleans()):
        begin = data.draw(st.integers(0, count - 1))
        text = " ".join(words[begin : begin + data.draw(st.integers(1, 5))])
        answers = [(text, 5 * begin)]  # "w100 " is five characters
    report = EncodingReport()
    example = question(" ".join(WORDS[:asked]), context, *answers)
    check_questions([example], TOKENIZER, chosen)
    sequences = encode(example, chosen, report, train)
    shown: set[int] = set()
    best: list[int] = []
    held = False
    expected = TOKENIZER.encode_ids([context])[0]
    for number, sequence in enumerate(sequences):
        ids, origin, boundary = sequence.token_ids.tolist(), sequence.origin, sequence.second_segment
        assert len(ids) <= max_length
        assert [ids[0], ids[boundary - 1], ids[-1]] == [TOKENIZER.cls_id, TOKENIZER.sep_id, TOKENIZER.sep_id]
        assert ids[1 : boundary - 1] == TOKENIZER.encode_ids([" ".join(WORDS[: min(asked, 8)])])[0]
        assert sequence.positions.tolist() == list(range(len(ids)))
        assert origin.window == number
        part = ids[boundary:-1]
        assert part == expected[origin.first_token : origin.first_token + len(part)]
        assert [context[start:end] for start, end in origin.offsets] == [TOKENIZER.id_to_token(i) for i in part]
        tokens = range(origin.first_token, origin.first_token + len(part))
        shown.update(tokens)
        best += [token for token, least in zip(tokens, origin.least_last.tolist(), strict=True) if not least]
        if not train:
            assert not len(sequence.targets)
            continue
        first, last = sequence.targets.tolist()
        if answers and answers[0][0] in " ".join(words[origin.first_token : origin.first_token + len(part)]):
            assert " ".join(TOKENIZER.id_to_token(i) for i in ids[first : last + 1]) == answers[0][0]
            held = True
        else:
            assert (first, last) == (0, 0)
    assert shown == set(range(count)), "every token of the context is in some window"
    assert sorted(best) == list(range(count)), "and has its most context in exactly one"
    assert report.tokens == asked + count
    assert report.truncated_tokens == max(0, asked - 8)
    assert report.truncated == (asked > 8)
    assert (report.sequences, report.windowed) == (len(sequences), len(sequences) > 1)
    assert report.notes.get("questions_cut", 0) == (asked > 8)
    assert report.notes.get("answers_in_no_window", 0) == (train and bool(answers) and not held)


@pytest.mark.parametrize("count", [1, 2, 511, 512, 513, 5000])
def test_contexts_of_any_length(count: int) -> None:
    context = " ".join(WORDS[n % 600] for n in range(count))
    chosen = SpanOptions(max_length=512)
    sequences = encode(question("w1 w2", context), chosen, train=False)
    assert all(len(sequence) <= 512 for sequence in sequences)
    assert len(sequences) == 1 + max(0, math.ceil((count - 507) / 128))
    predicted = decode_spans(question("w1 w2", context), sequences, random_logits(sequences, 1), chosen, 1)
    assert predicted.text == context[predicted.start : predicted.end] != ""


# -- answers to learn -------------------------------------------------------------------------------------------------


def shown_answer(sequence: EncodedSequence, context: str) -> str:
    first, last = sequence.targets - sequence.second_segment
    return context[sequence.origin.offsets[first, 0] : sequence.origin.offsets[last, 1]]


@pytest.mark.parametrize(
    ("context", "answer", "shown", "widened"),
    [
        ("w1 w2 w3", "w1", "w1", False),  # at the very start
        ("w1 w2 w3", "w3", "w3", False),  # at the very end
        ("w1 w2 w3", "w1 w2 w3", "w1 w2 w3", False),
        ("w1  w2\tw3 ", "w2\tw3 ", "w2\tw3", False),  # blanks at the edges are no loss
        ("w1 W2. w3", "2", "W2", True),  # inside a token
        ("w1 abc w3", "b", "b", False),  # a piece of a word
        ("w1 w22 w3", "w1 w2", "w1 w22", True),
        ("w1 中文 w3", "文 w", "文 w3", True),
        ("w1 abe\u0301 w3", "abe\u0301", "abe\u0301", False),  # the accent is dropped from the token, not from the text
        ("w1 \ue000w2 w3", "\ue000w2", "w2", True),
    ],
)
def test_an_answer_takes_whole_tokens(context: str, answer: str, shown: str, widened: bool) -> None:
    report = EncodingReport()
    [sequence] = encode(question("w9", context, (answer, context.index(answer))), options(), report)
    assert shown_answer(sequence, context) == shown
    assert report.notes == ({"answers_widened": 1} if widened else {})


@pytest.mark.parametrize(
    ("answers", "counted"),
    [
        ([("w2", -1)], "answers_misplaced"),  # not found by the reader
        ([("w2", 0)], "answers_misplaced"),
        ([("w3", 99)], "answers_misplaced"),
        ([("\ue000", 6)], "answers_without_tokens"),
        ([(" ", 2)], "answers_without_tokens"),
        ([("", 1)], "answers_without_tokens"),
    ],
)
def test_an_answer_that_cannot_be_learnt_is_left_out_and_counted(answers: list[tuple[str, int]], counted: str) -> None:
    example = question("w9", "w1 w2 \ue000 w3", *answers)
    report = EncodingReport()
    assert encode(example, options(), report) == []
    assert (report.notes, report.examples, report.sequences) == ({counted: 1}, 1, 0)
    [sequence] = encode(example, options(), report, train=False)
    assert not len(sequence.targets), "it is predicted all the same"


def test_the_first_answer_that_has_a_place_is_learnt() -> None:
    [sequence] = encode(question("w9", "w1 w2 w3", ("w1", -1), ("w3", 6), ("w2", 3)), options())
    assert shown_answer(sequence, "w1 w2 w3") == "w3"


def test_no_answer_and_no_label_are_different_things() -> None:
    [sequence] = encode(question("w9", "w1 w2"), options())
    assert sequence.targets.tolist() == [0, 0]
    with pytest.raises(UserError, match=re.escape("x.json:7: question 'q1' has no answers field")):
        encode(question("w9", "w1 w2", labelled=False), options())
    assert len(encode(question("w9", "w1 w2", labelled=False), options(), train=False)) == 1


def test_questions_on_one_context_give_what_each_alone_gives() -> None:
    contexts = [" ".join(WORDS[:30]), " ".join(WORDS[:30]), "", "w5"]
    examples = [question(f"w{n}", context) for n, context in enumerate(contexts)]
    together, alone = EncodingReport(), EncodingReport()
    for example, sequences in zip(
        examples, encode_questions(examples, TOKENIZER, options(), together, True), strict=True
    ):
        expected = encode(example, options(), alone)
        assert [s.token_ids.tolist() for s in sequences] == [s.token_ids.tolist() for s in expected]
        assert [s.origin.offsets.tolist() for s in sequences] == [s.origin.offsets.tolist() for s in expected]
    assert together == alone


# -- predictions ------------------------------------------------------------------------------------------------------


def reference_spans(
    example: QuestionExample, sequences: list[EncodedSequence], logits: list[np.ndarray], chosen: SpanOptions
) -> list[tuple[float, str]]:
    """Score and text of every span that some window holds, the best first; of equal texts the best.

    A span's score is that of the window in which its first token has the most context, of those that hold it all.
    """
    found: dict[str, float] = {}
    windows = [range(s.origin.first_token, s.origin.first_token + len(s) - s.second_segment - 1) for s in sequences]
    for number, (sequence, rows) in enumerate(zip(sequences, logits, strict=True)):
        window, offsets = windows[number], sequence.origin.offsets
        for start in window:
            for end in range(start, min(window.stop, start + chosen.max_answer_tokens)):
                context = {  # of the first token, in each window that holds the whole span
                    other: 100 * min(start - holder.start, holder.stop - 1 - start) + len(holder)
                    for other, holder in enumerate(windows)
                    if start in holder and end in holder
                }
                if number == max(context, key=lambda other: (context[other], -other)):
                    here = sequence.second_segment - window.start
                    text = example.context[offsets[start - window.start, 0] : offsets[end - window.start, 1]]
                    found[text] = max(found.get(text, -math.inf), float(rows[start + here, 0] + rows[end + here, 1]))
    return sorted(((score, text) for text, score in found.items()), reverse=True)


@settings(max_examples=100)
@given(
    words=st.lists(st.sampled_from(["w1", "w2", "abc", "w30", "中文"]), max_size=18),
    max_answer_tokens=st.integers(1, 40),
    stride=st.integers(1, 13),
    seed=st.integers(0, 999),
)
def test_the_best_of_all_spans_is_found(words: list[str], max_answer_tokens: int, stride: int, seed: int) -> None:
    chosen = options(stride=stride, max_answer_tokens=max_answer_tokens, n_best=5)
    example = question("w9 w8 w7 w6", " ".join(words))
    sequences = encode(example, chosen, train=False)
    logits = random_logits(sequences, seed)
    expected = reference_spans(example, sequences, logits, chosen)
    null = min(float(rows[0].sum()) for rows in logits)
    forced = decode_spans(example, sequences, logits, chosen, 2, math.inf)
    for version in (1, 2):
        predicted = decode_spans(example, sequences, logits, chosen, version)
        json.dumps(asdict(predicted), allow_nan=False)
        best = expected[0][0] if expected else 0.0
        assert predicted.score == best
        assert predicted.null_score == null - best
        answered = bool(expected) and (version == 1 or predicted.null_score <= 0)
        assert (predicted.text != "") == answered
        assert forced.text == (predicted.text or forced.text)
        if answered:
            assert predicted.text == example.context[predicted.start : predicted.end]
            assert (best, predicted.text) in expected
        else:
            assert (predicted.start, predicted.end) == (-1, -1)
        texts = [entry["text"] for entry in predicted.n_best]
        assert len(set(texts) - {""}) == min(5, len(expected)), "as many answers as asked for, whatever repeats"
        assert len(set(texts)) == len(texts) <= 5 + ("" in texts)
        assert ("" in texts) == (version == 2 or not expected)
        assert math.isclose(sum(entry["probability"] for entry in predicted.n_best), 1)
        assert sorted((entry["probability"] for entry in predicted.n_best), reverse=True) == [
            entry["probability"] for entry in predicted.n_best
        ]
        scores = {text: score for score, text in expected} | {"": null}
        top = max(scores[text] for text in texts)
        weights = [math.exp(scores[text] - top) for text in texts]
        assert [entry["probability"] for entry in predicted.n_best] == pytest.approx(
            [weight / sum(weights) for weight in weights]
        ), "probabilities are the softmax of the scores"
    assert (forced.text != "") == bool(expected)


def test_an_answer_longer_than_what_its_best_window_shows_is_found_in_the_next() -> None:
    context = " ".join(WORDS[100:140])
    chosen = options(max_length=21, stride=8)  # windows of 17, 9 in common
    windows = reference_windows(40, 17, 8)
    for begin in range(40):
        for end in range(begin + 1, min(40, begin + 17) + 1):
            answer = " ".join(WORDS[100 + begin : 100 + end])
            example = question("w9", context, (answer, 5 * begin))
            report = EncodingReport()
            sequences = encode(example, chosen, report)
            held = any(first <= begin and end <= last for first, last in windows)
            assert report.notes == ({} if held else {"answers_in_no_window": 1})
            if held:
                assert decode_spans(example, sequences, one_hot(sequences), chosen, 1).text == answer


def test_the_null_score_is_the_official_difference() -> None:
    example = question("w9", "w1 w2 w3")
    chosen = options()
    sequences = encode(example, chosen, train=False)
    rows = np.zeros((len(sequences[0]), 2), dtype=np.float32)
    rows[0] = [3, 2]  # [CLS]
    rows[4] = [1, 3]  # w2
    for threshold, text in ((1.0, "w2"), (0.99, ""), (-5, ""), (1.01, "w2")):
        predicted = decode_spans(example, sequences, [rows], chosen, 2, threshold)
        assert (predicted.text, predicted.score, predicted.null_score) == (text, 4, 1)
    # [CLS] tops w2, and yet the reference's version 1 always answers
    assert decode_spans(example, sequences, [rows], chosen, 1).text == "w2"
    assert [entry["text"] for entry in decode_spans(example, sequences, [rows], chosen, 2).n_best][:2] == ["", "w2"]


def test_no_answer_must_be_likely_in_every_window() -> None:
    example = question("w9", " ".join(WORDS[:40]))
    sequences = encode(example, options(), train=False)
    assert len(sequences) > 2
    logits = [np.zeros((len(sequence), 2), dtype=np.float32) for sequence in sequences]
    for rows in logits[1:]:
        rows[0] = 50
    assert decode_spans(example, sequences, logits, options(), 2).null_score == 0


@pytest.mark.parametrize("context", ["", "   ", "\ue000"])
def test_an_empty_context_has_the_empty_answer(context: str) -> None:
    example = question("w9", context)
    [sequence] = encode(example, options())
    assert sequence.targets.tolist() == [0, 0]
    assert len(sequence) == 4
    for version in (1, 2):
        predicted = decode_spans(example, [sequence], [np.ones((4, 2), dtype=np.float32)], options(), version, math.inf)
        assert predicted == SpanPrediction("", -1, -1, 0.0, 2.0, predicted.n_best)
        assert predicted.n_best == [{"text": "", "start": -1, "end": -1, "probability": 1.0}]


def test_an_empty_question_is_a_question() -> None:
    [sequence] = encode(question("", "w1 w2", ("w2", 3)), options())
    assert sequence.second_segment == 2
    assert decode_spans(question("", "w1 w2"), [sequence], one_hot([sequence]), options(), 1).text == "w2"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_model_gone_astray_still_gives_one_answer_a_question(value: float) -> None:
    example = question("w9", " ".join(WORDS[:40]))
    sequences = encode(example, options(), train=False)
    logits = [np.full((len(sequence), 2), value, dtype=np.float32) for sequence in sequences]
    predicted = decode_spans(example, sequences, logits, options(), 1)
    assert predicted.text == "w0"
    json.dumps(asdict(predicted), allow_nan=False)


def test_other_versions_are_refused() -> None:
    [sequence] = encode(question("w9", "w1"), options())
    version: Version = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no version 3"):
        decode_spans(question("w9", "w1"), [sequence], one_hot([sequence]), options(), version)


# -- real questions ---------------------------------------------------------------------------------------------------


def read_squad(path: Path) -> Iterator[QuestionExample]:
    for article in json.loads(path.read_text("utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = tuple(Answer(answer["text"], answer["answer_start"]) for answer in entry["answers"])
                yield QuestionExample(path.name, entry["id"], entry["question"], paragraph["context"], answers)


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("file", "vocabulary", "every", "version"),
    [
        ("squad1/xquad.en.json", "bert-base-uncased", 2, 1),
        ("squad1/xquad.en.json", "bert-base-cased", 6, 1),
        ("squad1/xquad.zh.json", "bert-base-chinese", 2, 1),
        ("squad1/xquad.zh.json", "bert-base-multilingual-cased", 6, 1),
        ("squad2/cs224n-dev-v2.0.json", "bert-base-uncased", 8, 2),
        ("cmrc2018/cmrc2018_trial.json", "bert-base-chinese", 4, 1),
    ],
)
def test_what_is_learnt_is_the_answer(
    file: str, vocabulary: str, every: int, version: Version, shared_data: Path
) -> None:
    tokenizer = load_tokenizer(shared_data / "vocabs" / vocabulary)
    examples = list(read_squad(shared_data / "tasks" / file))[::every]
    chosen = SpanOptions(max_length=192, stride=64, max_answer_tokens=192, n_best=2)
    check_questions(examples, tokenizer, chosen)
    report = EncodingReport()
    exact = 0
    widened = lost = 0
    for example, sequences in zip(examples, encode_questions(examples, tokenizer, chosen, report, True), strict=True):
        is_widened = report.notes.get("answers_widened", 0) > widened
        is_lost = report.notes.get("answers_in_no_window", 0) > lost
        widened, lost = (report.notes.get(f"answers_{what}", 0) for what in ("widened", "in_no_window"))
        if not sequences or is_lost:
            continue
        predicted = decode_spans(example, sequences, one_hot(sequences), chosen, version)
        assert predicted.text == example.context[predicted.start : predicted.end] or predicted.start == -1
        gold = example.answers[0].text if example.answers else ""
        if is_widened:
            assert gold in predicted.text
        else:
            assert predicted.text == gold.strip()
            exact += 1
    assert report.examples == len(examples)
    misplaced = sum(not e.context.startswith(a.text, a.start) for e in examples for a in (e.answers or ())[:1])
    assert report.notes.get("answers_misplaced", 0) == misplaced
    assert report.windowed > 5
    assert lost <= len(examples) / 50  # cmrc2018: answers of more tokens than windows have in common
    assert exact > 0.95 * len(examples), report
