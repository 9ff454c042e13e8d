"""GLUE's leaderboard: predictions in, the .tsv files and the zip it takes out; a check of such a zip; the scores.

The rules are those of gluebenchmark.com: a flat zip of one file a task, named as in GLUE_FILES, with a header and a row
for each test example in order, labels spelled as in the training files. A wrong file costs one of few submissions.
"""

import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.storage import atomic_file

HEADER = "index\tprediction"
LOWEST, HIGHEST = 0.0, 5.0
"""The range of STS-B's similarities."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)

_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_INFERENCE = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class TaskFile:
    """One file of a submission."""

    rows: int
    """Test examples of the real benchmark."""
    labels: tuple[str, ...]
    """As the leaderboard spells them; () where the prediction is a number from 0 to 5."""


GLUE_FILES: dict[str, TaskFile] = {
    "CoLA": TaskFile(1_063, _BINARY),
    "SST-2": TaskFile(1_821, _BINARY),
    "MRPC": TaskFile(1_725, _BINARY),
    "STS-B": TaskFile(1_379, ()),
    "MNLI-m": TaskFile(9_796, _INFERENCE),
    "MNLI-mm": TaskFile(9_847, _INFERENCE),
    "QNLI": TaskFile(5_463, _ENTAILMENT),
    "QQP": TaskFile(390_965, _BINARY),
    "RTE": TaskFile(3_000, _ENTAILMENT),
    "WNLI": TaskFile(146, _BINARY),
    "AX": TaskFile(1_104, _INFERENCE),
}
"""By task; the file is named task.tsv."""

GLUE_METRICS: dict[str, tuple[str, ...]] = {
    "CoLA": ("matthews",),
    "SST-2": ("accuracy",),
    "MRPC": ("f1", "accuracy"),
    "STS-B": ("pearson", "spearman"),
    "QQP": ("f1", "accuracy"),
    "MNLI-m": ("accuracy",),
    "MNLI-mm": ("accuracy",),
    "QNLI": ("accuracy",),
    "RTE": ("accuracy",),
    "WNLI": ("accuracy",),
}
"""What the leaderboard scores each task by; the diagnostic set AX counts for nothing."""

_PAPER_METRICS = {task: metrics[0] for task, metrics in GLUE_METRICS.items() if task != "WNLI"} | {"STS-B": "spearman"}
"""The one metric a column of the BERT paper's table 1 holds."""

Rows = Iterable[tuple[str, str]]


def format_similarity(value: float) -> str:
    """An STS-B prediction as it is submitted: within 0 to 5, which a regression may leave, to six decimals.

    Raises ValueError for NaN.
    """
    if math.isnan(value):
        raise ValueError("a similarity is not a number")
    return f"{min(max(value, LOWEST), HIGHEST):.6f}"


def write_task_file(path: Path, task: str, rows: Rows) -> list[str]:
    """Write one task's (index, prediction) rows as a .tsv. Returns remarks, such as a count that differs from GLUE's.

    Raises UserError, and leaves nothing behind, for an unknown task or a row the leaderboard would refuse.
    """
    content, remarks = _task_content(task, rows)
    with atomic_file(path) as partial:
        partial.write_bytes(content)
    return remarks


def write_submission(path: Path, predictions: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """Write a zip of each task's (index, prediction) rows, by task name. Returns remarks as `write_task_file` does.

    The same predictions give the same bytes, on any day and machine: names are sorted, times fixed, nothing is
    compressed (versions of zlib differ; the largest file has 4 MB). Raises UserError as `write_task_file` does.
    """
    remarks: list[str] = []
    with atomic_file(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for task in sorted(predictions):
            content, more = _task_content(task, predictions[task])
            remarks += more
            entry = zipfile.ZipInfo(f"{task}.tsv", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # Unix, whatever this system is
            archive.writestr(entry, content)
    return remarks


def _task_content(task: str, rows: Rows) -> tuple[bytes, list[str]]:
    if task not in GLUE_FILES:
        raise UserError(f"{task}: not a task of the GLUE leaderboard; its tasks are {', '.join(GLUE_FILES)}")
    lines = [HEADER]
    for number, (index, prediction) in enumerate(rows):
        for fault in _row_faults(task, number, index, prediction):
            raise UserError(f"{task}.tsv:{number + 2}: {fault}")
        lines.append(f"{index}\t{prediction}")
    return ("\n".join(lines) + "\n").encode("utf-8"), _count_remarks(task, len(lines) - 1)


def check_submission(path: Path) -> list[str]:
    """Every fault of a zip that the leaderboard would refuse, as `file:line: what`; [] when it is well.

    Files that are not there and counts of rows are told apart, by `missing_files` and `count_remarks`. Raises UserError
    where `path` cannot be read or is no zip.
    """
    faults = []
    with _open_zip(path) as archive:
        seen: set[str] = set()
        for entry in archive.infolist():
            name = entry.filename
            task = name.removesuffix(".tsv")
            if name in seen:
                faults.append(f"{name}: there twice")
            elif not name.endswith(".tsv") or task not in GLUE_FILES:
                inside = "; files lie in no folder" if Path(name).stem in GLUE_FILES and "/" in name else ""
                faults.append(f"{name}: not a file of the leaderboard{inside}")
            else:
                faults += [f"{name}{fault}" for fault in _file_faults(archive, entry, task)]
            seen.add(name)
    return faults


def missing_files(path: Path) -> list[str]:
    """Names of the files a whole submission has and this zip has not, in the leaderboard's order."""
    with _open_zip(path) as archive:
        names = set(archive.namelist())
    return [f"{task}.tsv" for task in GLUE_FILES if f"{task}.tsv" not in names]


def count_remarks(path: Path) -> list[str]:
    """Which of a zip's files have another number of rows than GLUE's test sets; the leaderboard would refuse them."""
    remarks = []
    with _open_zip(path) as archive:
        for entry in archive.infolist():
            task = entry.filename.removesuffix(".tsv")
            if entry.filename.endswith(".tsv") and task in GLUE_FILES:
                content = _read(archive, entry)
                lines = content.count(b"\n") + (not content.endswith(b"\n"))
                remarks += _count_remarks(task, lines - 1)
    return remarks


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise UserError(f"{path}: not a zip file; give the one that `bertsmith glue` wrote") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; give the zip file of a submission") from None


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    try:
        return archive.read(entry)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError, ValueError) as error:
        # RuntimeError: encrypted; NotImplementedError: a compression unknown here
        raise UserError(f"{archive.filename}: {entry.filename} cannot be read ({error}); write the zip again") from None


def _file_faults(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, task: str) -> Iterator[str]:
    """`:line: what` for each fault of one file."""
    try:
        text = _read(archive, entry).decode("utf-8")
    except UnicodeDecodeError as error:
        yield f": not UTF-8 (byte {error.start:,})"
        return
    if not text:
        yield ": empty; a header and a row a test example are expected"
        return
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if any(line.endswith("\r") for line in lines):
        first = next(number for number, line in enumerate(lines, 1) if line.endswith("\r"))
        yield f":{first}: line ends in CR LF; LF alone is expected"
        lines = [line.removesuffix("\r") for line in lines]
    if lines[0] != HEADER:
        yield f":1: the header is {lines[0]!r}, not {HEADER!r}"
    expected = 0
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) == 2:
            yield from (f":{number}: {fault}" for fault in _row_faults(task, expected, *cells))
        else:
            yield f":{number}: {len(cells)} columns, not 2"
        # counting goes on from what is written: of a row that is left out one fault is told, not one a row after it
        expected = 1 + (int(cells[0]) if re.fullmatch("[0-9]{1,9}", cells[0]) else expected)


def _row_faults(task: str, expected: int, index: str, prediction: str) -> Iterator[str]:
    """What is wrong with a row of a task's file that should have the index `expected`."""
    if index != str(expected):
        yield f"the index is {index!r}, not {expected}: rows are numbered from 0 in the test file's order"
    labels = GLUE_FILES[task].labels
    if labels:
        if prediction not in labels:
            yield f"{prediction!r} is not a label of {task}; use one of {', '.join(labels)}"
    elif not _NUMBER.fullmatch(prediction):
        yield f"{prediction!r} is not a number"
    elif not LOWEST <= float(prediction) <= HIGHEST:
        yield f"{prediction} is not from {LOWEST:g} to {HIGHEST:g}"


def _count_remarks(task: str, rows: int) -> list[str]:
    expected = GLUE_FILES[task].rows
    return [] if rows == expected else [f"{task}.tsv: {rows:,} rows; GLUE's test set has {expected:,}"]


def glue_score(results: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """GLUE's averages of `results`: metrics from 0 to 1 (see GLUE_METRICS) by task; MNLI is MNLI-m and MNLI-mm.

    All in percent, and over the tasks that are there:

    - tasks: each task's own score, the mean of its metrics, MNLI that of both files.
    - score: the leaderboard's, the mean over `tasks`. score_without_wnli: the same without WNLI.
    - paper_average: the BERT paper's table 1, which has no WNLI, takes one metric a task (F1 of MRPC and QQP, Spearman
      of STS-B) and counts MNLI-m and MNLI-mm as two. BERT base has 79.6 there.
    - missing: tasks of the leaderboard that are not there; an average with any missing compares with no published one.

    AX is scored by the leaderboard but in no average, and passed over. An average of no task is None. Raises ValueError
    for an unknown task, a missing metric or a value out of range.
    """
    for task, metrics in results.items():
        if task == "AX":
            continue
        if task not in GLUE_METRICS:
            raise ValueError(f"{task!r} is not a task of GLUE; its tasks are {', '.join(GLUE_METRICS)}")
        for name in GLUE_METRICS[task]:
            if name not in metrics:
                raise ValueError(f"{task}: no {name}; there are {', '.join(metrics) or 'none'}")
            if not -1 <= metrics[name] <= 1:
                raise ValueError(f"{task}: {name} is {metrics[name]}, not a share; percentages are made here")
    tasks: dict[str, float] = {}
    missing = []
    for task in ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI"):
        parts = ("MNLI-m", "MNLI-mm") if task == "MNLI" else (task,)
        there = [results[part][name] for part in parts if part in results for name in GLUE_METRICS[part]]
        if there:
            tasks[task] = 100 * sum(there) / len(there)
        missing += [part for part in parts if part not in results]
    paper = [100 * results[task][name] for task, name in _PAPER_METRICS.items() if task in results]
    return {
        "score": _mean(list(tasks.values())),
        "score_without_wnli": _mean([score for task, score in tasks.items() if task != "WNLI"]),
        "paper_average": _mean(paper),
        "tasks": tasks,
        "missing": missing,
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
