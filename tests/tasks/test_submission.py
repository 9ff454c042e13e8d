"""A submission passes a checker written from the leaderboard's rules; each fault is named; scores are the published."""

import csv
import hashlib
import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.tasks.submission import (
    GLUE_FILES,
    GLUE_METRICS,
    check_submission,
    count_remarks,
    format_similarity,
    glue_score,
    missing_files,
    write_submission,
    write_task_file,
)

# The rules as gluebenchmark.com's FAQ and sample submission have them: one zip, eleven files at its root, each a header
# "index<TAB>prediction" and a row for each test example, the index being that of the test file, labels as in training.
RULES = """
CoLA.tsv     1063   0 1
SST-2.tsv    1821   0 1
MRPC.tsv     1725   0 1
STS-B.tsv    1379   number
MNLI-m.tsv   9796   entailment neutral contradiction
MNLI-mm.tsv  9847   entailment neutral contradiction
QNLI.tsv     5463   entailment not_entailment
QQP.tsv      390965 0 1
RTE.tsv      3000   entailment not_entailment
WNLI.tsv     146    0 1
AX.tsv       1104   entailment neutral contradiction
"""


def leaderboard_accepts(path: Path) -> bool:
    """What the leaderboard would say of a whole submission, by the rules above and nothing of bertsmith's."""
    rules = {name: (int(rows), allowed) for name, rows, *allowed in map(str.split, RULES.strip().splitlines())}
    with zipfile.ZipFile(path) as archive:
        if sorted(archive.namelist()) != sorted(rules) or archive.testzip() is not None:
            return False
        for name, (rows, allowed) in rules.items():
            text = archive.read(name).decode("ascii")
            table = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE))
            if table[0] != ["index", "prediction"] or len(table) != rows + 1 or "\r" in text or not text.endswith("\n"):
                return False
            for number, (index, prediction) in enumerate(table[1:]):
                if index != f"{number}":
                    return False
                if allowed == ["number"]:
                    if not 0 <= float(prediction) <= 5:
                        return False
                elif prediction not in allowed:
                    return False
    return True


def predictions_of(task: str, rows: int, seed: int = 3) -> list[tuple[str, str]]:
    """Predictions as a model might make them."""
    generator, labels = random.Random(f"{task} {seed}"), GLUE_FILES[task].labels
    make = (lambda: generator.choice(labels)) if labels else (lambda: format_similarity(generator.gauss(2.5, 2)))
    return [(str(number), make()) for number in range(rows)]


def write_zip(path: Path, files: dict[str, bytes | str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def small() -> dict[str, list[tuple[str, str]]]:
    """Five rows a task."""
    return {task: predictions_of(task, 5) for task in GLUE_FILES}


def test_a_whole_submission_passes_the_leaderboards_rules(tmp_path: Path) -> None:
    predictions = {task: predictions_of(task, file.rows) for task, file in GLUE_FILES.items()}
    path = tmp_path / "submission.zip"
    assert write_submission(path, predictions) == []
    assert leaderboard_accepts(path)
    assert (check_submission(path), missing_files(path), count_remarks(path)) == ([], [], [])


@pytest.mark.shared_data
def test_row_counts_are_those_of_the_real_test_files(shared_data: Path) -> None:
    files = {task: shared_data / "glue" / task / "test.tsv" for task in GLUE_FILES}
    files["AX"] = shared_data / "glue" / "AX" / "diagnostic.tsv"
    there = {task: path for task, path in files.items() if path.exists()}
    assert len(there) == 8  # MNLI's and QQP's are not in the shared data
    for task, path in there.items():
        lines = path.read_bytes().decode("utf-8").rstrip("\n").split("\n")
        assert len(lines) - 1 == GLUE_FILES[task].rows, task


def test_same_predictions_same_bytes(tmp_path: Path, small: dict[str, list[tuple[str, str]]]) -> None:
    first, second = tmp_path / "a.zip", tmp_path / "deeper" / "b.zip"
    write_submission(first, small)
    mask = os.umask(0o077)
    try:
        write_submission(second, dict(reversed(small.items())))
    finally:
        os.umask(mask)
    assert first.read_bytes() == second.read_bytes()
    one = tmp_path / "one.zip"
    write_submission(one, {"WNLI": [("0", "1"), ("1", "0")]})
    digest = hashlib.sha256(one.read_bytes()).hexdigest()
    assert digest == "3a3b7f9943399fb9b555f448369c260887a62c9c5fff3aca1d8d7871f5e3e7f6"  # on any machine and Python


def test_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "RTE.tsv"
    remarks = write_task_file(path, "RTE", iter([("0", "entailment"), ("1", "not_entailment")]))
    assert path.read_bytes() == b"index\tprediction\n0\tentailment\n1\tnot_entailment\n"
    assert remarks == ["RTE.tsv: 2 rows; GLUE's test set has 3,000"]


def test_a_count_that_differs_is_said_and_written_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "part.zip"
    predictions = {task: predictions_of(task, 7) for task in ("QQP", "CoLA")} | {"WNLI": predictions_of("WNLI", 146)}
    remarks = ["CoLA.tsv: 7 rows; GLUE's test set has 1,063", "QQP.tsv: 7 rows; GLUE's test set has 390,965"]
    assert write_submission(path, predictions) == remarks
    assert count_remarks(path) == remarks
    assert check_submission(path) == []
    assert missing_files(path) == [
        *("SST-2.tsv", "MRPC.tsv", "STS-B.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "QNLI.tsv", "RTE.tsv", "AX.tsv")
    ]
    assert not leaderboard_accepts(path)


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("MNLI", [("0", "neutral")], "MNLI: not a task of the GLUE leaderboard; its tasks are CoLA, "),
        (
            "RTE",
            [("0", "entailment"), ("1", "1")],
            "RTE.tsv:3: '1' is not a label of RTE; use one of entailment, not_e",
        ),
        ("MNLI-m", [("0", "not_entailment")], "MNLI-m.tsv:2: 'not_entailment' is not a label"),
        ("SST-2", [("0", "positive")], "SST-2.tsv:2: 'positive' is not a label"),
        ("SST-2", [("1", "1")], "SST-2.tsv:2: the index is '1', not 0"),
        ("SST-2", [("0", "1\n1\t1")], "SST-2.tsv:2: "),
        ("STS-B", [("0", "nan")], "STS-B.tsv:2: 'nan' is not a number"),
        ("STS-B", [("0", "5.01")], "STS-B.tsv:2: 5.01 is not from 0 to 5"),
    ],
)
def test_what_the_leaderboard_refuses_is_not_written(
    tmp_path: Path, task: str, rows: list[tuple[str, str]], message: str
) -> None:
    path = tmp_path / "s.zip"
    path.write_bytes(b"before")
    for write in (lambda: write_submission(path, {"CoLA": [], task: rows}), lambda: write_task_file(path, task, rows)):
        with pytest.raises(UserError) as error:
            write()
        assert str(error.value).startswith(message)
        assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("s.zip", b"before")]


GOOD = "index\tprediction\n0\t1\n1\t0\n2\t1\n"


@pytest.mark.parametrize(
    ("name", "content", "faults"),
    [
        ("CoLA.tsv", GOOD, []),
        ("CoLA.tsv", GOOD.rstrip("\n"), []),
        ("STS-B.tsv", "index\tprediction\n0\t1\n1\t0.25\n2\t5.\n3\t2e-1\n", []),
        ("cola.tsv", GOOD, ["cola.tsv: not a file of the leaderboard"]),
        ("CoLA.csv", GOOD, ["CoLA.csv: not a file of the leaderboard"]),
        ("out/CoLA.tsv", GOOD, ["out/CoLA.tsv: not a file of the leaderboard; files lie in no folder"]),
        ("MNLI.tsv", GOOD, ["MNLI.tsv: not a file of the leaderboard"]),
        ("CoLA.tsv", "", ["CoLA.tsv: empty"]),
        ("CoLA.tsv", b"\xff\xfei\x00n\x00", ["CoLA.tsv: not UTF-8 (byte 0)"]),
        ("CoLA.tsv", "\ufeff" + GOOD, ["CoLA.tsv:1: the header is '\\ufeffindex\\tprediction', not"]),
        ("CoLA.tsv", GOOD.replace("prediction", "label"), ["CoLA.tsv:1: the header is 'index\\tlabel', not"]),
        ("CoLA.tsv", "0\t1\n1\t0\n", ["CoLA.tsv:1: the header", "CoLA.tsv:2: the index is '1', not 0"]),
        ("CoLA.tsv", GOOD.replace("\n", "\r\n"), ["CoLA.tsv:1: line ends in CR LF"]),
        ("CoLA.tsv", GOOD.replace("\t", ","), ["CoLA.tsv:1: ", *(f"CoLA.tsv:{i}: 1 columns" for i in (2, 3, 4))]),
        ("CoLA.tsv", GOOD + "\n", ["CoLA.tsv:5: 1 columns, not 2"]),
        ("CoLA.tsv", GOOD.replace("1\t0\n", ""), ["CoLA.tsv:3: the index is '2', not 1"]),  # told once
        ("CoLA.tsv", GOOD.replace("1\t0\n", "1\t0\n1\t0\n"), ["CoLA.tsv:4: the index is '1', not 2"]),
        ("CoLA.tsv", GOOD.replace("1\t0\n", "01\t0\n"), ["CoLA.tsv:3: the index is '01', not 1"]),
        ("CoLA.tsv", GOOD.replace("1\t0\n", "x\t 0\n"), ["CoLA.tsv:3: the index is 'x'", "CoLA.tsv:3: ' 0' is not a"]),
        ("STS-B.tsv", GOOD.replace("1\t0\n", "1\t1_0\n"), ["STS-B.tsv:3: '1_0' is not a number"]),
        ("STS-B.tsv", GOOD.replace("1\t0\n", "1\t-0.01\n"), ["STS-B.tsv:3: -0.01 is not from 0 to 5"]),
        ("STS-B.tsv", GOOD.replace("1\t0\n", "1\tinf\n"), ["STS-B.tsv:3: 'inf' is not a number"]),
        ("AX.tsv", "index\tprediction\n0\tEntailment\n", ["AX.tsv:2: 'Entailment' is not a label of AX; use one of"]),
    ],
)  # fmt: skip
def test_every_fault_is_named_with_its_line(tmp_path: Path, name: str, content: Any, faults: list[str]) -> None:
    found = check_submission(write_zip(tmp_path / "s.zip", {name: content, "WNLI.tsv": GOOD}))
    assert len(found) == len(faults), found
    for ours, expected in zip(found, faults, strict=True):
        assert ours.startswith(expected)


def test_faults_of_several_files_and_a_file_that_is_there_twice(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "s.zip", {"RTE.tsv": GOOD, "QQP.tsv": GOOD.replace("1\t0\n", "1\ttrue\n"), "x/": b""})
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("QQP.tsv", GOOD)
    assert [fault.split(";")[0] for fault in check_submission(path)] == [
        *(f"RTE.tsv:{i}: {label!r} is not a label of RTE" for i, label in ((2, "1"), (3, "0"), (4, "1"))),
        "QQP.tsv:3: 'true' is not a label of QQP",
        "x/: not a file of the leaderboard",
        "QQP.tsv: there twice",
    ]


@given(st.data())
def test_checker_and_rules_agree_on_a_damaged_file(data: st.DataObject) -> None:
    """Any byte of WNLI.tsv changed: we find a fault, or see another count, where the rules see one."""
    rows = predictions_of("WNLI", 146)
    content = bytearray("index\tprediction\n" + "".join(f"{a}\t{b}\n" for a, b in rows), "ascii")
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b"\t\n\r01289xi "))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("WNLI.tsv", bytes(content))
    try:
        table = [line.split("\t") for line in content.decode("ascii").removesuffix("\n").split("\n")]
        accepted = table[0] == ["index", "prediction"] and [row[0] for row in table[1:]] == [str(i) for i in range(146)]
        accepted = accepted and all(row[1:] in (["0"], ["1"]) for row in table[1:])
    except IndexError:
        accepted = False
    file: Any = buffer  # zipfile takes either
    assert (check_submission(file) == [] and count_remarks(file) == []) == accepted


def test_no_zip_no_file_and_a_damaged_one(tmp_path: Path, small: dict[str, list[tuple[str, str]]]) -> None:
    text, damaged = tmp_path / "s.tsv", tmp_path / "damaged.zip"
    text.write_text(GOOD, encoding="utf-8")
    write_submission(damaged, small)
    damaged.write_bytes(damaged.read_bytes().replace(b"0\tneutral", b"0\tneutraL").replace(b"0\tent", b"0\tEnt"))
    for path, message in (
        (text, "not a zip file"),
        (tmp_path / "none.zip", "No such file"),
        (tmp_path, "Is a directory"),
        (damaged, "cannot be read"),
    ):
        for check in (check_submission, count_remarks) if path == damaged else (check_submission, missing_files):
            with pytest.raises(UserError, match=message) as error:
                check(path)
            assert str(error.value).startswith(str(path))


def test_similarities_are_within_the_range() -> None:
    values = (-0.3, 0.0, 2.34567891, 5.0, 5.7, float("inf"), 1e-30)
    assert [format_similarity(value) for value in values] == [
        *("0.000000", "0.000000", "2.345679", "5.000000", "5.000000", "5.000000", "0.000000")
    ]
    with pytest.raises(ValueError, match="not a number"):
        format_similarity(float("nan"))


# Table 1 of the BERT paper, test results: MNLI-m, MNLI-mm, QQP, QNLI, SST-2, CoLA, STS-B, MRPC, RTE, and the average.
PAPER = {
    "OpenAI GPT": (82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0, 75.1),
    "BERT base": (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4, 79.6),
    "BERT large": (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1, 82.1),
}
COLUMNS = (
    *(("MNLI-m", "accuracy"), ("MNLI-mm", "accuracy"), ("QQP", "f1"), ("QNLI", "accuracy"), ("SST-2", "accuracy")),
    *(("CoLA", "matthews"), ("STS-B", "spearman"), ("MRPC", "f1"), ("RTE", "accuracy")),
)


@pytest.mark.parametrize("model", PAPER)
def test_paper_average_is_the_papers(model: str) -> None:
    *columns, average = PAPER[model]
    results = {task: dict.fromkeys(GLUE_METRICS[task], 0.5) for task, _ in COLUMNS}
    for (task, metric), value in zip(COLUMNS, columns, strict=True):
        results[task][metric] = value / 100
    assert glue_score(results)["paper_average"] == pytest.approx(average, abs=0.051)


# BERT large's own line on gluebenchmark.com: every metric of every task, and the score shown.
BERT_LARGE = {
    "CoLA": {"matthews": 0.605},
    "SST-2": {"accuracy": 0.949},
    "MRPC": {"f1": 0.893, "accuracy": 0.854},
    "STS-B": {"pearson": 0.876, "spearman": 0.865},
    "QQP": {"f1": 0.721, "accuracy": 0.893},
    "MNLI-m": {"accuracy": 0.867},
    "MNLI-mm": {"accuracy": 0.859},
    "QNLI": {"accuracy": 0.927},
    "RTE": {"accuracy": 0.701},
    "WNLI": {"accuracy": 0.651},
    "AX": {"matthews": 0.396},
}


def test_score_is_the_leaderboards() -> None:
    scores = glue_score(BERT_LARGE)
    assert scores["score"] == pytest.approx(80.5, abs=0.051)
    assert scores["tasks"] == pytest.approx(
        {
            "CoLA": 60.5,
            "SST-2": 94.9,
            "MRPC": 87.35,
            "STS-B": 87.05,
            "QQP": 80.7,
            "MNLI": 86.3,
            "QNLI": 92.7,
            "RTE": 70.1,
            "WNLI": 65.1,
        }
    )
    assert list(scores["tasks"]) == ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI"]
    assert scores["score_without_wnli"] == pytest.approx((scores["score"] * 9 - 65.1) / 8)
    assert scores["missing"] == []


def test_averages_are_over_the_tasks_that_are_there() -> None:
    scores = glue_score({"MRPC": {"accuracy": 0.8, "f1": 0.9, "matthews": 0.1}, "MNLI-m": {"accuracy": 0.6}})
    assert scores == {
        "score": pytest.approx((85 + 60) / 2),
        "score_without_wnli": pytest.approx((85 + 60) / 2),
        "paper_average": pytest.approx((90 + 60) / 2),
        "tasks": {"MRPC": pytest.approx(85), "MNLI": pytest.approx(60)},
        "missing": ["CoLA", "SST-2", "STS-B", "QQP", "MNLI-mm", "QNLI", "RTE", "WNLI"],
    }
    only = glue_score({"WNLI": {"accuracy": 0.563}})
    assert (only["score"], only["score_without_wnli"], only["paper_average"]) == (pytest.approx(56.3), None, None)
    nothing = glue_score({})
    assert (nothing["score"], nothing["tasks"], len(nothing["missing"])) == (None, {}, 10)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"MNLI": {"accuracy": 0.8}}, "'MNLI' is not a task"),
        ({"MRPC": {"accuracy": 0.8}}, "MRPC: no f1; there are accuracy"),
        ({"CoLA": {}}, "CoLA: no matthews; there are none"),
        ({"RTE": {"accuracy": 70.1}}, "RTE: accuracy is 70.1, not a share"),
        ({"RTE": {"accuracy": float("nan")}}, "RTE: accuracy is nan"),
    ],
)
def test_results_are_checked(results: dict[str, dict[str, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glue_score(results)
