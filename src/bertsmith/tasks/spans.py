"""Questions on a context → windows of tokens the model marks answers in, and answers cut from the original context.

SQuAD v1.1 and v2.0 as in Devlin et al. 2018, sections 4.2 and 4.3, and google-research/bert run_squad.py: [CLS]
question [SEP] part of the context [SEP], windows that begin every `stride` tokens, [CLS] for "no answer here". An
answer's text is cut out of the context by character offsets, never put together from pieces.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bertsmith.errors import UserError
from bertsmith.tasks.examples import EncodedSequence, EncodingReport, QuestionExample
from bertsmith.tasks.long_texts import count_tokens, join_segments
from bertsmith.text.tokenizer import BertTokenizer

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
Version = Literal[1, 2]

SPECIAL = 3  # [CLS] question [SEP] context [SEP]
_NO_ANSWER = -1  # where an empty answer starts and ends
_FINITE = 1e30  # stands for an infinite logit: sums stay numbers, and JSON has no infinity


@dataclass(frozen=True)
class SpanOptions:
    """How contexts are windowed and answers chosen. Raises UserError naming all values that are out of range."""

    max_length: int = field(default=384, metadata={"help": "tokens of a sequence at most"})
    """Tokens of a sequence at most, special tokens among them."""
    stride: int = field(default=128, metadata={"help": "tokens from the start of one window to that of the next"})
    """Tokens from one window's start to the next one's (the reference's doc_stride)."""
    max_question: int = field(default=64, metadata={"help": "tokens of a question at most"})
    """Tokens of a question at most; the rest of it is cut and counted."""
    n_best: int = field(default=20, metadata={"help": "answers to keep of a question"})
    """Answers of a question that are kept, the best first."""
    max_answer_tokens: int = field(default=30, metadata={"help": "tokens of an answer at most"})
    """Tokens of a predicted answer at most."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise UserError("; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong whatever the questions are, `key: what` each; empty when all is well."""
        problems = []
        if self.max_length <= SPECIAL:
            problems.append(f"max_length: {self.max_length} tokens hold no context; use more than {SPECIAL}")
        for name in ("stride", "n_best", "max_answer_tokens"):
            if getattr(self, name) < 1:
                problems.append(f"{name}: {getattr(self, name)} is not a number from 1 up")
        if self.max_question < 0:
            problems.append(f"max_question: {self.max_question} is not a number from 0 up")
        room = self.max_length - SPECIAL
        if self.stride > room > 0:
            problems.append(
                f"stride: {self.stride} is more than the {room} tokens a window of max_length {self.max_length} "
                f"has room for, so that some would be in no window; use {room} or less"
            )
        return problems


@dataclass(frozen=True, slots=True)
class WindowOrigin:
    """Which part of its context a sequence shows: what decoding needs."""

    window: int
    """The number of the window, from 0."""
    first_token: int
    """The token of the context that the window begins with; `second_segment` is where it stands in the sequence."""
    offsets: npt.NDArray[np.int32]
    """(C, 2) the characters of the context each token of the window stands for, (start, end)."""
    least_last: npt.NDArray[np.int32]
    """(C,) for each token of the window, the first one an answer that begins there may end with: so that each span is
    looked for in one window only. 0 where the token has its most context in this window, C where it may not begin."""


@dataclass(frozen=True, slots=True)
class SpanPrediction:
    """The answer to a question; "" with start and end -1 where there is none."""

    text: str
    start: int
    end: int
    """Characters of the context: context[start:end] is `text`."""
    score: float
    """Start plus end logit of the best answer that is not empty (0 where the context has no tokens)."""
    null_score: float
    """How much better no answer scores than `score`: the lowest sum of [CLS]'s logits of any window, less `score`."""
    n_best: list[dict[str, Any]]
    """{text, start, end, probability}, the best first; texts differ; v2.0: the empty answer is among them."""


class _Context(NamedTuple):
    text: str
    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]  # (tokens, 2)


# -- encoding ---------------------------------------------------------------------------------------------------------


def check_questions(examples: Sequence[QuestionExample], tokenizer: BertTokenizer, options: SpanOptions) -> None:
    """Raise UserError if any question leaves its context less room than the stride. For before the work begins."""
    if not examples or options.stride <= options.max_length - SPECIAL - options.max_question:
        return  # then the longest question leaves enough
    _, counts = tokenizer.encode_flat(example.question for example in examples)
    longest = int(counts.argmax())
    _context_room(examples[longest].place, min(int(counts[longest]), options.max_question), options)


def encode_questions(
    examples: Iterable[QuestionExample],
    tokenizer: BertTokenizer,
    options: SpanOptions,
    report: EncodingReport,
    train: bool,
) -> Iterator[list[EncodedSequence]]:
    """`encode_question` for each; questions that follow one another on the same context tokenize it once."""
    context = None
    for example in examples:
        if context is None or context.text != example.context:
            context = _encode_context(example.context, tokenizer)
        yield _encode_windows(example, context, tokenizer, options, report, train)


def encode_question(
    example: QuestionExample, tokenizer: BertTokenizer, options: SpanOptions, report: EncodingReport, train: bool
) -> list[EncodedSequence]:
    """[CLS] question [SEP] context [SEP] for each window of the context: all positions; origin a `WindowOrigin`.

    Every token of the context is in one window or more. A context without tokens makes one window without any.

    `train`: targets (2,) are the tokens of the sequence where the first answer begins and ends, whole tokens always;
    (0, 0), which is [CLS], where the window does not hold the whole answer or the question has none. No sequences at
    all, for there is nothing to learn from, where the answer is not at the place it names (`answers_misplaced`) or
    holds no token (`answers_without_tokens`). Also counted: `answers_widened`, that do not begin and end with a token;
    `answers_in_no_window`, too long for any; `questions_cut`.

    Raises UserError where the question leaves less room than the stride, and in training where it is unlabelled.
    """
    return _encode_windows(example, _encode_context(example.context, tokenizer), tokenizer, options, report, train)


def _context_room(place: str, question_tokens: int, options: SpanOptions) -> int:
    """Tokens of context a window holds beside a question of `question_tokens`."""
    room = options.max_length - SPECIAL - question_tokens
    if room < 1:
        raise UserError(
            f"{place}: a question of {question_tokens} tokens leaves no room for context in a sequence of max_length "
            f"{options.max_length} (room {room}, stride {options.stride}); use a larger max_length or a smaller "
            "max_question"
        )
    if room < options.stride:
        raise UserError(
            f"{place}: a question of {question_tokens} tokens leaves room for {room} tokens of context in a sequence "
            f"of max_length {options.max_length}, less than the stride of {options.stride}, so that some would be in "
            f"no window; use a stride of {room} or less, a larger max_length or a smaller max_question"
        )
    return room


def _encode_context(text: str, tokenizer: BertTokenizer) -> _Context:
    encoded = tokenizer.encode(text)
    offsets = np.array(encoded.offsets, dtype=np.int32).reshape(-1, 2)
    if not text.isascii():
        _include_marks(text, offsets)
    return _Context(text, np.array(encoded.ids, dtype=np.int32), offsets)


def _include_marks(text: str, offsets: npt.NDArray[np.int32]) -> None:
    """Let tokens end after the combining marks that stand behind them and are part of no token.

    An uncased tokenizer drops them, but "e" and an accent cut apart is not what the context says.
    """
    limits = np.append(offsets[1:, 0], len(text))
    for token in np.flatnonzero(offsets[:, 1] < limits).tolist():
        end, limit = int(offsets[token, 1]), int(limits[token])
        while end < limit and unicodedata.category(text[end]) == "Mn":
            end += 1
        offsets[token, 1] = end


def _encode_windows(
    example: QuestionExample,
    context: _Context,
    tokenizer: BertTokenizer,
    options: SpanOptions,
    report: EncodingReport,
    train: bool,
) -> list[EncodedSequence]:
    whole_question = np.array(tokenizer.encode_ids([example.question])[0], dtype=np.int32)
    question = whole_question[: options.max_question]
    room = _context_room(example.place, len(question), options)
    report.examples += 1
    count_tokens(report, whole_question, tokenizer)
    count_tokens(report, context.ids, tokenizer)
    if cut := len(whole_question) - len(question):
        report.truncated += 1
        report.truncated_tokens += cut
        report.note("questions_cut")
    answer = _find_answer(example, context, report) if train else None
    if train and answer is None:
        return []
    starts = find_windows(len(context.ids), room, options.stride)
    ends = np.minimum(starts + room, len(context.ids))
    owners = choose_windows(starts, ends)
    sequences = []
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        ids, second_segment = join_segments(tokenizer, question, context.ids[start:end])
        targets = np.zeros(2 if train else 0, dtype=np.int64)
        if answer and answer[0] >= start and answer[1] < end:
            targets[:] = np.add(answer, second_segment - start)
        origin = WindowOrigin(number, start, context.offsets[start:end], _find_least_last(owners, starts, ends, number))
        sequences.append(EncodedSequence(ids, second_segment, np.arange(len(ids), dtype=np.int32), targets, origin))
    report.note("answers_in_no_window", bool(answer) and not any(s.targets.any() for s in sequences))
    report.sequences += len(sequences)
    report.windowed += len(sequences) > 1
    return sequences


def find_windows(count: int, room: int, stride: int) -> npt.NDArray[np.int64]:
    """The first token of each window, (W,): every `stride` tokens, until one reaches the last of `count` tokens."""
    return np.arange(1 + max(0, -((room - count) // stride)), dtype=np.int64) * stride


def choose_windows(starts: Ints, ends: Ints) -> npt.NDArray[np.int64]:
    """The number of the window in which each token has its most context, (tokens,).

    The reference's rule: most tokens on the side where there are fewer, plus a hundredth of the window's length; of
    equals, the earlier window.
    """
    owners = np.zeros(ends[-1], dtype=np.int64)
    most = np.full(ends[-1], -1, dtype=np.int64)
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        token = np.arange(start, end)
        context = 100 * np.minimum(token - start, end - 1 - token) + (end - start)
        better = token[context > most[start:end]]
        owners[better] = number
        most[better] = context[better - start]
    return owners


def _find_least_last(owners: Ints, starts: Ints, ends: Ints, number: int) -> npt.NDArray[np.int32]:
    """Which spans are looked for in window `number`; see `WindowOrigin`.

    A span belongs to the window in which its first token has the most context. The reference leaves it at that, and so
    can't give an answer that begins in that window and ends after it; here it belongs to the next one that holds it.
    """
    start, end = int(starts[number]), int(ends[number])
    owner = owners[start:end]
    after_previous = ends[number - 1] - start
    return np.select([owner == number, owner < number], [0, after_previous], end - start).astype(np.int32)


def _find_answer(example: QuestionExample, context: _Context, report: EncodingReport) -> tuple[int, ...] | None:
    """The first and last token of the answer to learn, () if there is none, None if it cannot be learnt (counted)."""
    if example.answers is None:
        raise UserError(f"{example.place}: question {example.id!r} has no answers field; training needs the answers")
    if not example.answers:
        return ()
    answer = next((answer for answer in example.answers if answer.start >= 0), None)
    if answer is None or not example.context.startswith(answer.text, answer.start):
        report.note("answers_misplaced")
        return None
    first = int(np.searchsorted(context.offsets[:, 1], answer.start, side="right"))
    last = int(np.searchsorted(context.offsets[:, 0], answer.start + len(answer.text))) - 1
    if first > last or not answer.text:
        report.note("answers_without_tokens")
        return None
    shown = example.context[context.offsets[first, 0] : context.offsets[last, 1]]
    report.note("answers_widened", shown != answer.text.strip())
    return first, last


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode_spans(
    example: QuestionExample,
    sequences: Sequence[EncodedSequence],
    logits: Sequence[Floats],
    options: SpanOptions,
    version: Version,
    null_threshold: float = 0.0,
) -> SpanPrediction:
    """The best answer over all windows of a question, from the logits (L, 2) of each: to begin, to end there.

    An answer is at most `max_answer_tokens` of one window's context, of the window in which its first token has the
    most context (or, where that does not hold all of it, of the next that does). Version 1 always answers if the
    context has a token. Version 2 answers "" if `null_score` exceeds `null_threshold`; an infinite one gives the best
    answer always. All spans are compared; the reference looks at pairs of the `n_best` likeliest beginnings and ends
    only and may miss the best. Logits that are no finite numbers count as ±1e30.
    """
    if version not in (1, 2):
        raise ValueError(f"SQuAD has no version {version}")
    finite = [np.nan_to_num(rows.astype(np.float64), nan=-_FINITE, posinf=_FINITE, neginf=-_FINITE) for rows in logits]
    null = min(float(rows[0].sum()) for rows in finite)
    spans = _best_spans(example.context, sequences, finite, options)
    text, (score, _, _) = next(iter(spans.items()), ("", (0.0, _NO_ANSWER, _NO_ANSWER)))
    null_score = null - score
    if version == 2 or not spans:
        spans[""] = (null, _NO_ANSWER, _NO_ANSWER)
    if version == 2 and null_score > null_threshold:
        text = ""
    _, start, end = spans[text]
    return SpanPrediction(text, start, end, score, null_score, _rank(spans))


def _best_spans(
    text: str, sequences: Sequence[EncodedSequence], logits: Sequence[Floats], options: SpanOptions
) -> dict[str, tuple[float, int, int]]:
    """The `n_best` best answers that are not empty, the best first: text → score, first and last character.

    Of spans of equal text, the best; of equal scores, the first. As many spans are ranked as it takes.
    """
    found = [
        _score_spans(rows[sequence.second_segment : -1], sequence.origin, options)
        for sequence, rows in zip(sequences, logits, strict=True)
    ]
    scores, firsts, lasts = (np.concatenate(parts) for parts in zip(*found, strict=True))
    # numbers of tokens of the context; the windows' offsets put together are its offsets
    offsets = np.empty((max(s.origin.first_token + len(s.origin.offsets) for s in sequences), 2), dtype=np.int32)
    for sequence in sequences:
        origin = sequence.origin
        offsets[origin.first_token : origin.first_token + len(origin.offsets)] = origin.offsets
    ranked = options.n_best
    while True:
        best: dict[str, tuple[float, int, int]] = {}
        for span in _find_highest(scores, ranked).tolist():
            start, end = int(offsets[firsts[span], 0]), int(offsets[lasts[span], 1])
            best.setdefault(text[start:end], (float(scores[span]), start, end))
            if len(best) == options.n_best:
                return best
        if ranked >= len(scores):
            return best
        ranked *= 4


def _score_spans(scores: Floats, origin: WindowOrigin, options: SpanOptions) -> tuple[Floats, Ints, Ints]:
    """All spans of one window, from its context's logits (C, 2): score, first and last token of the context, each (S,).

    Those that `least_last` gives to another window are not among them.
    """
    count, width = len(scores), min(options.max_answer_tokens, len(scores))
    token = np.arange(count)
    least = np.maximum(origin.least_last, token)
    first = token[least < np.minimum(token + width, count), None]  # (F, 1)
    last = first + np.arange(width)  # (F, width)
    inside = (last >= least[first]) & (last < count)
    first, last = np.broadcast_to(first, last.shape)[inside], last[inside]
    return scores[first, 0] + scores[last, 1], first + origin.first_token, last + origin.first_token


def _find_highest(scores: Floats, count: int) -> Ints:
    """Where the `count` highest scores stand, the highest first; of equals, the first."""
    chosen = np.arange(len(scores))
    if len(scores) > count:  # before thousands are sorted, those that are not in question are left out
        chosen = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return chosen[np.argsort(-scores[chosen], kind="stable")[:count]]


def _rank(spans: dict[str, tuple[float, int, int]]) -> list[dict[str, Any]]:
    """Answers by falling score, with probabilities: the softmax of their scores."""
    ranked = sorted(spans.items(), key=lambda item: -item[1][0])
    weights = np.exp([score - ranked[0][1][0] for _, (score, _, _) in ranked])
    return [
        {"text": text, "start": start, "end": end, "probability": probability}
        for (text, (_, start, end)), probability in zip(ranked, (weights / weights.sum()).tolist(), strict=True)
    ]
