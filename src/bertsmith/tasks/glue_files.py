"""GLUE's folders and files (Wang et al., 2019; gluebenchmark.com) → TextExample, for all nine tasks and AX.

The official .tsv files have no quoting: a quote is a character like any other, and rows out = rows in. Columns are
found by the names in the header; labels are in one fixed order, which is the order of a model's classes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bertsmith.errors import UserError, one_of
from bertsmith.tasks.examples import Label, TextExample
from bertsmith.tasks.table import Problems, StrictReport, read_label, shorten
from bertsmith.text.documents import ReadOptions, ReadReport, join_names
from bertsmith.text.tables import RowFile, count_cells, tsv_rows

SPLIT_KINDS = ("train", "dev", "test")
NO_GOLD_LABEL = "-"
"""MultiNLI's annotators did not agree; such rows are left out everywhere (GLUE's own files hold none)."""
SCORES = (0.0, 5.0)
MOST_LINES = 20
"""Lines that one row may run over."""


@dataclass(frozen=True)
class GlueTask:
    """How one task's files are laid out, and what it is judged by."""

    name: str
    """As on the command line: `sst-2`."""
    title: str
    """As the official folder is called: `SST-2`."""
    text: str
    pair: str | None
    label: str | None
    """Names of the columns; None: there is none."""
    labels: tuple[str, ...] | None
    """Class names in the order of a model's classes; None: a score (regression)."""
    metrics: tuple[str, ...]
    """The official one first. Where GLUE has two, a task's score is their mean. F1 is that of the label "1"."""
    files: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
    )
    """Split → names the file may have. The splits are train, dev and test; MNLI's dev and test come in two."""
    columns: tuple[str, ...] | None = None
    """Of train and dev where these have no header (CoLA)."""


ENTAILMENT = ("entailment", "not_entailment")
MNLI_FILES = {
    name: (f"{name}.tsv",) for name in ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
}
AX_FILES = {"test": ("diagnostic.tsv", "AX.tsv", "diagnostic/diagnostic.tsv")}

# The columns' official order (train.tsv; test.tsv has index first, no label):
#   CoLA   source, label, the author's mark, sentence     MRPC   Quality, #1 ID, #2 ID, #1 String, #2 String
#   SST-2  sentence, label                                QQP    id, qid1, qid2, question1, question2, is_duplicate
#   STS-B  index, genre, filename, year, old_index, source1, source2, sentence1, sentence2, score
#   MNLI   index, promptID, pairID, genre, four parses, sentence1, sentence2, label1 (dev: … label5), gold_label
#   QNLI   index, question, sentence, label               RTE, WNLI   index, sentence1, sentence2, label
# AX is predicted with the model of MNLI, whose labels it has.
_TASKS = (
    GlueTask("cola", "CoLA", "sentence", None, "label", ("0", "1"), ("matthews", "accuracy"),
             columns=("source", "label", "mark", "sentence")),
    GlueTask("sst-2", "SST-2", "sentence", None, "label", ("0", "1"), ("accuracy",)),
    GlueTask("mrpc", "MRPC", "#1 String", "#2 String", "Quality", ("0", "1"), ("f1", "accuracy")),
    GlueTask("sts-b", "STS-B", "sentence1", "sentence2", "score", None, ("pearson", "spearman")),
    GlueTask("qqp", "QQP", "question1", "question2", "is_duplicate", ("0", "1"), ("f1", "accuracy")),
    GlueTask("mnli", "MNLI", "sentence1", "sentence2", "gold_label", ("contradiction", "entailment", "neutral"),
             ("accuracy",), MNLI_FILES),
    GlueTask("qnli", "QNLI", "question", "sentence", "label", ENTAILMENT, ("accuracy",)),
    GlueTask("rte", "RTE", "sentence1", "sentence2", "label", ENTAILMENT, ("accuracy",)),
    GlueTask("wnli", "WNLI", "sentence1", "sentence2", "label", ("0", "1"), ("accuracy",)),
    GlueTask("ax", "AX", "sentence1", "sentence2", None, ("contradiction", "entailment", "neutral"), ("matthews",),
             AX_FILES),
)  # fmt: skip
GLUE_TASKS = {task.name: task for task in _TASKS}
"""By the name on the command line, in the order of GLUE's own table."""


def glue_name(text: str) -> str:
    """The command-line name of a task in any spelling (`SST2`, `sts_b`, `diagnostic`); UserError for none of them."""
    key = _squeeze(text)
    key = "ax" if key == "diagnostic" else key
    for name in GLUE_TASKS:
        if _squeeze(name) == key:
            return name
    raise UserError(f"{text!r} is no GLUE task; use one of {', '.join(GLUE_TASKS)}")


def _squeeze(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def find_glue_tasks(folder: str) -> dict[str, str]:
    """Task name → its folder, of every task that `folder` holds, in GLUE's order; names may be spelled in any way.

    Raises UserError where the folder is absent, holds no task, or holds one twice.
    """
    found: dict[str, list[str]] = {}
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise UserError(f"{folder}: this folder cannot be read: {error.strerror or error}") from error
    for name in names:
        try:
            found.setdefault(glue_name(name), []).append(os.path.join(folder, name))
        except UserError:
            continue  # whatever else people keep beside them
    if twice := next((folders for folders in found.values() if len(folders) > 1), None):
        raise UserError(f"{' and '.join(twice)} are the same task; move one of them away")
    if not found:
        titles = ", ".join(task.title for task in _TASKS)
        raise UserError(f"{folder}: no GLUE task in it; folders called {titles} are looked for; it holds "
                        f"{join_names(names) or 'no folder'}")  # fmt: skip
    return {name: found[name][0] for name in GLUE_TASKS if name in found}


def find_glue_files(task: GlueTask, folder: str, split_kind: str) -> dict[str, str]:
    """Split → path of the task's files of a kind that are there: one, but two of MNLI's dev and test; {} for none.

    Raises UserError where the folder is absent.
    """
    one_of("split", split_kind, SPLIT_KINDS)
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder; the folder of {task.title}'s files is needed")
    paths = {
        split: next((path for name in names if os.path.isfile(path := os.path.join(folder, name))), None)
        for split, names in task.files.items()
        if split.startswith(split_kind)
    }
    return {split: path for split, path in paths.items() if path}


def require_glue_files(task: GlueTask, folder: str, split_kind: str) -> dict[str, str]:
    """`find_glue_files`, all of them; UserError names those that are absent and what the folder holds."""
    found = find_glue_files(task, folder, split_kind)
    wanted = [names[0] for split, names in task.files.items() if split.startswith(split_kind) and split not in found]
    if wanted or not found:
        what = join_names(wanted) if wanted else f"{split_kind} file, for {task.title} has none"
        raise UserError(f"{folder}: no {what}; it holds {join_names(sorted(os.listdir(folder))) or 'nothing'}")
    return found


def read_glue(
    task: str | GlueTask,
    path: str,
    split_kind: str,
    labelled: bool | None = None,
    report: ReadReport | None = None,
) -> Iterator[TextExample]:
    """The examples of one official file, in order. The id is what the column `index` (or `id`) of a test file says,
    else the row from 0.

    labelled: whether labels are read; None: where the split is not test. report: counts invalid bytes, rows whose text
    has a line end in it (some of QQP's; they are put together again) and MultiNLI's rows without a gold label, which
    are left out.

    Raises UserError (file, line, column, the labels allowed) for absent files and columns, a row with more or fewer
    cells than the header and, at the end of the file, naming the first five of them, unknown labels.
    """
    task = GLUE_TASKS[glue_name(task)] if isinstance(task, str) else task
    one_of("split", split_kind, SPLIT_KINDS)
    labelled = split_kind != "test" if labelled is None else labelled
    if labelled and task.label is None:
        raise UserError(f"{path}: {task.title} has no labels; it can be predicted only")
    strict, kept = StrictReport(), ReadReport()
    file = RowFile(path, ReadOptions(), strict)
    try:
        if not file.head[file.mark :]:
            raise UserError(f"{path}: empty file; rows of {task.title} are expected")
        yield from _read_rows(task, file, split_kind, labelled, kept)
    finally:
        file.close()
        strict.merge(kept)
        strict.settle(report, file.encoding)


def _read_rows(
    task: GlueTask, file: RowFile, split_kind: str, labelled: bool, kept: ReadReport
) -> Iterator[TextExample]:
    path, lines = file.path, tsv_rows(file)
    header: Sequence[str] = task.columns or () if split_kind != "test" else ()
    if not header:
        header = next(lines, (1, []))[1]
    label = task.label if labelled else None
    columns = [name for name in (task.text, task.pair, label) if name]
    if missing := [name for name in columns if name not in header]:
        raise UserError(
            f"{path}:1: no column{'s' * (len(missing) > 1)} {join_names(missing)}, which {task.title}'s {split_kind} "
            f"files have; there are {join_names(map(shorten, header))}"
        )
    places = {name: header.index(name) for name in (*columns, "index", "id") if name in header}
    number = places.get("index", places.get("id")) if split_kind == "test" else None
    problems = Problems(f"{task.title}'s labels are {', '.join(task.labels or ()) or 'numbers from 0 to 5'}")
    for row, (line, cells) in enumerate(_whole_rows(path, lines, len(header), kept)):
        place = f"{path}:{line}"
        value: Label | None = None
        if label:
            cell = cells[places[label]]
            if cell == NO_GOLD_LABEL and task.name == "mnli":
                kept.skip("no gold label", place)
                continue
            value = _read_glue_label(task, cell)
            if value is None:
                problems.add(place, f"column {label!r} holds {shorten(cell)!r}")
        if not problems:
            pair = cells[places[task.pair]] if task.pair else None
            identity = str(row) if number is None else cells[number]
            yield TextExample(place, identity, cells[places[task.text]], pair, value)
    problems.check()


def _read_glue_label(task: GlueTask, cell: str) -> Label | None:
    """The label in a cell; None where it is none of the task's."""
    if task.labels:
        return cell if cell in task.labels else None
    try:
        score = read_label("regress", cell, "")
    except ValueError:
        return None
    return score if isinstance(score, float) and SCORES[0] <= score <= SCORES[1] else None


def _whole_rows(
    path: str, lines: Iterator[tuple[int, list[str]]], width: int, kept: ReadReport
) -> Iterator[tuple[int, list[str]]]:
    """(first line, cells) of each row; lines of too few cells are put together where they make one row.

    QQP's train.tsv holds questions with a line end in them: such a row's lines have, together, one cell more for each
    line end than a row has. A line of one cell begins no row, so that no whole row is ever taken for the rest of
    another. UserError for a row that comes out too long or stays too short.
    """
    for line, cells in lines:
        first, read = line, 1
        row = cells
        while 1 < len(row) < width and read < MOST_LINES:
            following = next(lines, None)
            if following is None or len(row) + len(following[1]) - 1 > width:
                break
            row = [*row[:-1], f"{row[-1]}\n{following[1][0]}", *following[1][1:]]
            read += 1
        if len(row) != width:
            raise UserError(
                f"{path}:{first}: {count_cells(cells)} where {width} are expected; the columns are separated by tabs, "
                "and nothing is quoted"
            )
        if read > 1:
            kept.skip("line end inside a cell, kept", f"{path}:{first}")
        yield first, row
