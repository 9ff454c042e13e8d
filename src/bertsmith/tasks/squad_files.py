"""SQuAD's JSON (v1.1, v2.0 and what is laid out like it), or a table of questions → QuestionExample.

Every answer's place is held against the context: an answer that stands elsewhere is moved there, one that stands
nowhere is kept as text (start -1: it can be scored, not learnt); both are counted and named in an AnswerReport.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bertsmith.errors import UserError
from bertsmith.tasks.examples import Answer, QuestionExample
from bertsmith.tasks.table import (
    Problems,
    StrictReport,
    Table,
    TableRow,
    as_label,
    clean,
    is_missing,
    kind_of,
    read_text,
    shorten,
)
from bertsmith.text.decoding import TextFile
from bertsmith.text.documents import PLACES, ReadOptions, ReadReport
from bertsmith.text.readers import detect_kind, starts_with_json_line
from bertsmith.text.tables import RepeatedKey, unique_keys

VERSIONS = (1, 2)
QUESTION_COLUMNS = ("question", "context", "id", "answers", "answer", "answer_start", "is_impossible")
LAYOUT = "SQuAD's layout is {data: [{paragraphs: [{context, qas: [{id, question, answers: [{text, answer_start}]}]}]}]}"
JSON_LINES = re.compile(r"\.(jsonl|ndjson)\b", re.IGNORECASE)
DICTIONARY = re.compile(r"\s*\{\s*['\"]text['\"]\s*:")


@dataclass
class AnswerReport:
    """The account of reading questions: what there was, and which answers were not where the file says."""

    questions: int = 0
    unanswerable: int = 0
    """Questions with labels that say: no answer (v2.0)."""
    answers: int = 0
    moved: int = 0
    """Answers not at their answer_start, that stand in the context once: there they are now."""
    moved_to_nearest: int = 0
    """The same, standing there several times: at the place nearest to answer_start, without one at the first."""
    not_in_context: int = 0
    """Answers whose text is nowhere in the context: kept with start -1."""
    empty_answers: int = 0
    """Answers without a text beside others that have one, left out, as SQuAD's own script leaves them out."""
    empty_contexts: int = 0
    empty_questions: int = 0
    places: list[str] = field(default_factory=list)
    """The first 20 answers moved or not found, as "file: question ID: what"."""

    def note(self, what: str, place: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        if len(self.places) < PLACES:
            self.places.append(f"{place}: answer {what.replace('_', ' ')}")

    def as_dict(self) -> dict[str, Any]:
        """For the JSON summary."""
        return dict(self.__dict__)


def read_squad(
    path: str,
    version: int,
    labelled: bool | None = None,
    encoding: str = "utf-8",
    answers: AnswerReport | None = None,
    report: ReadReport | None = None,
) -> Iterator[QuestionExample]:
    """The questions of a file, in order.

    A .json file is SQuAD's one document, {"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers":
    [{"text", "answer_start"}]}]}]}]}, held in memory as a whole. Any other table (.jsonl, .csv, .tsv, .parquet) holds a
    question a row: `question`, `context`, `id` (else the row from 0), and `answers`, either {"text": [...],
    "answer_start": [...]} as in Hugging Face's data sets or a list of texts, or else `answer`, a text, with
    `answer_start` where it is known.

    version: 1, an empty list of answers (or an empty text) means unlabelled; 2, it means that there is no answer.
    labelled: True, every question must say what its answers are; False, they are not looked at; None, they are used
    where they are given. answers: counts what was found; report: counts invalid bytes.

    Raises UserError for a file that is not laid out so and an id that stands twice, and at the end, naming the first
    five questions, for a question or context that is null and for absent answers and ill-formed ones.
    """
    if version not in VERSIONS:
        raise UserError(f"SQuAD's version {version!r} is not known; use one of {VERSIONS[0]}, {VERSIONS[1]}")
    account = answers if answers is not None else AnswerReport()
    problems = Problems(
        "every question needs a text, a context and an answer (those without one are for squad2)"
        if version == 1
        else "every question needs a text, a context and its `answers`, an empty list where there is none"
    )
    seen: set[str] = set()
    for place, identity, row in _questions(path, encoding, report):
        if identity in seen:
            raise UserError(f"{place}: the id {identity!r} stands twice; predictions are by id, so rename one of them")
        seen.add(identity)
        try:
            question, context = _read_given_text(row, "question"), _read_given_text(row, "context")
            found = None if labelled is False else _read_answers(row.cells, context, place, account)
            if version == 1 and found == ():
                found = None
            if labelled and found is None:
                raise ValueError("no answer")
        except ValueError as error:
            problems.add(place, str(error))
            continue
        account.questions += 1
        account.unanswerable += found == ()
        account.answers += len(found or ())
        account.empty_contexts += not context.strip()
        account.empty_questions += not question.strip()
        if not problems:
            yield QuestionExample(place, identity, question, context, found)
    problems.check()


def _questions(path: str, encoding: str, report: ReadReport | None) -> Iterator[tuple[str, str, TableRow]]:
    """(place, id, cells of QUESTION_COLUMNS) of every question."""
    if is_document(path, encoding):
        yield from _document_questions(path, encoding, report)
        return
    with Table(path, encoding, report, advice="these names are fixed; rename the columns in the file") as table:
        table.require(["question", "context"])
        for index, row in enumerate(table.rows((), QUESTION_COLUMNS)):
            place, identity = f"{path}:{row.line}", row.cells.get("id")
            yield place, _read_id(str(index) if is_missing(identity) or identity == "" else identity, place), row


def _read_given_text(row: TableRow, key: str) -> str:
    """The text of a key, which may be empty; ValueError for null, which is no text: whatever wrote it lost one."""
    if key in row.cells and row.cells[key] is None:
        raise ValueError(f"the key {key!r} holds null, not a text")
    return read_text(row, key, allow_empty=True)


def _read_id(value: Any, place: str) -> str:
    try:
        return as_label(value)
    except ValueError as error:
        raise UserError(f"{place}: the id {error}; it must be a text") from None


def is_document(path: str, encoding: str) -> bool:
    """Whether a file is one JSON document rather than an object a line."""
    file = TextFile(path, ReadOptions(encoding=encoding), ReadReport())
    try:
        if detect_kind(file) not in ("jsonl", "text"):
            return False
        head = file.head_text.lstrip()
        if starts_with_json_line(head):
            return "data" in json.loads(head.split("\n", 1)[0])
        # the first line is longer than the head, or no whole object
        return head.startswith(("{", "[")) and not JSON_LINES.search(path)
    finally:
        file.close()


def _document_questions(path: str, encoding: str, report: ReadReport | None) -> Iterator[tuple[str, str, TableRow]]:
    """The questions of SQuAD's one document."""
    strict = StrictReport()
    file = TextFile(path, ReadOptions(encoding=encoding), strict)
    try:
        for at, paragraph in _paragraphs(_load_json(file), path):
            context = clean(paragraph.get("context"), at, strict)
            for number, question in enumerate(_items(paragraph, "qas", at)):
                if not isinstance(question, dict) or is_missing(question.get("id")):
                    raise UserError(f"{at}.qas[{number}]: a question without an id; predictions are by id, so add one")
                identity = _read_id(question["id"], f"{at}.qas[{number}]")
                place = f"{path}: question {identity}"
                cells = {key: clean(question[key], place, strict) for key in QUESTION_COLUMNS if key in question}
                yield place, identity, TableRow(0, {**cells, "context": context})
    finally:
        file.close()
        strict.settle(report, file.encoding)


def _load_json(file: TextFile) -> Any:
    try:
        # not strict: a raw tab inside a string is against the letter of JSON and plain to read
        return json.loads("".join(file.blocks()), strict=False, object_pairs_hook=unique_keys)
    except RepeatedKey as error:  # the decoder does not say where it is: the object's beginning has to do
        raise UserError(
            f"{file.path}: {error} in the object {shorten(json.dumps(error.row, ensure_ascii=False))}; take one out"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file.path}:{error.lineno}: broken JSON ({error.msg}, column {error.colno}); {LAYOUT}"
        ) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets nested as deep
        raise UserError(f"{file.path}: JSON that cannot be read ({error}); {LAYOUT}") from None


def _paragraphs(document: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, paragraph) of every paragraph that has a context."""
    for number, article in enumerate(_items(document, "data", path)):
        inside = f"{path}: data[{number}]"
        for index, paragraph in enumerate(_items(article, "paragraphs", inside)):
            at = f"{inside}.paragraphs[{index}]"
            if not isinstance(paragraph, dict) or "context" not in paragraph:
                raise UserError(f"{at}: no 'context'; {LAYOUT}")
            yield at, paragraph


def _items(value: Any, key: str, place: str) -> list[Any]:
    items = value.get(key) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise UserError(f"{place}: no list {key!r}; {LAYOUT}")
    return items


def _read_answers(
    cells: Mapping[str, Any], context: str, place: str, account: AnswerReport
) -> tuple[Answer, ...] | None:
    """The answers of a question, () for "no answer", None where nothing is said; ValueError for what is no answer."""
    given = cells.get("answers")
    given = cells.get("answer") if given is None else given
    impossible = cells.get("is_impossible") is True
    if is_missing(given):
        return () if impossible else None
    pairs = [(text, start) for text, start in _texts_and_starts(given, cells.get("answer_start"))]
    kept = [(text, start) for text, start in pairs if text]
    if kept and impossible:
        raise ValueError("is_impossible, and yet has answers")
    account.empty_answers += len(pairs) - len(kept) if kept else 0
    return tuple(_find_answer(text, start, context, place, account) for text, start in kept)


def _texts_and_starts(given: Any, start: Any) -> Iterator[tuple[str, int | None]]:
    """(text, answer_start or None) of each answer, in any of the forms they are written in."""
    if isinstance(given, str):
        if DICTIONARY.match(given):
            raise ValueError("answers are a dictionary written as text; such a table is for .jsonl")
        given = {"text": [given], "answer_start": None if is_missing(start) or start == "" else [start]}
    if isinstance(given, dict):
        texts, starts = given.get("text"), given.get("answer_start")
        starts = [None] * len(texts) if starts is None and isinstance(texts, list) else starts
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise ValueError("answers are not two lists of one length, text and answer_start")
        given = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(given, list):
        raise ValueError(f"answers are {kind_of(given)}, not a list")
    for answer in given:
        text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (answer, None)
        if not isinstance(text, str):
            raise ValueError("an answer without a text")
        if (isinstance(start, str) and start.isdecimal()) or (isinstance(start, float) and start.is_integer()):
            start = int(start)
        if start is not None and (isinstance(start, bool) or not isinstance(start, int)):
            raise ValueError(f"answer_start {start!r} is no whole number")
        yield text, None if start is None or start < 0 else start


def _find_answer(text: str, start: int | None, context: str, place: str, account: AnswerReport) -> Answer:
    """The answer where it stands: at `start`, else at the place of its text, of several the nearest to `start`."""
    if start is not None and context.startswith(text, start):
        return Answer(text, start)
    places = []
    found = context.find(text)
    while found >= 0:
        places.append(found)
        found = context.find(text, found + 1)
    if not places:
        account.note("not_in_context", place)
        return Answer(text, -1)
    if len(places) > 1:
        account.note("moved_to_nearest", place)
    elif start is not None:
        account.note("moved", place)
    return Answer(text, min(places, key=lambda at: abs(at - (start or 0))))
