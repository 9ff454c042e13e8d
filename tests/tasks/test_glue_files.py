"""GLUE's official files: every row, no quoting, columns by name, labels in one order, mistakes named."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.tasks.examples import TextExample
from bertsmith.tasks.glue_files import (
    GLUE_TASKS,
    find_glue_files,
    find_glue_tasks,
    glue_name,
    read_glue,
    require_glue_files,
)
from bertsmith.text.documents import ReadReport

# (header of train.tsv, one row of it, header of test.tsv) as gluebenchmark.com's files have them
OFFICIAL = {
    "cola": ("", "gj04 1 * S0", "index sentence"),
    "sst-2": ("sentence label", "S0 1", "index sentence"),
    "mrpc": ("Quality #1_ID #2_ID #1_String #2_String", "1 7 8 S0 S1", "index #1_ID #2_ID #1_String #2_String"),
    "sts-b": (
        "index genre filename year old_index source1 source2 sentence1 sentence2 score",
        "0 g f 2012 1 none none S0 S1 3.800",
        "index genre filename year old_index source1 source2 sentence1 sentence2",
    ),
    "qqp": ("id qid1 qid2 question1 question2 is_duplicate", "7 8 9 S0 S1 1", "id question1 question2"),
    "mnli": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
        "sentence1 sentence2 label1 gold_label",
        "0 1 1n fiction ( ( ( ( S0 S1 neutral entailment",
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
        "sentence1 sentence2",
    ),
    "qnli": ("index question sentence label", "0 S0 S1 not_entailment", "index question sentence"),
    "rte": ("index sentence1 sentence2 label", "0 S0 S1 entailment", "index sentence1 sentence2"),
    "wnli": ("index sentence1 sentence2 label", "0 S0 S1 1", "index sentence1 sentence2"),
    "ax": ("", "", "index sentence1 sentence2"),
}
LABELS = {"sts-b": 3.8, "mnli": "entailment", "qnli": "not_entailment", "rte": "entailment"}


def cells(line: str) -> list[str]:
    return [cell.replace("_String", " String").replace("_ID", " ID") for cell in line.split(" ")]


def write(path: Path, rows: list[list[str]], mark: str = "", line_end: str = "\n") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((mark + "".join("\t".join(row) + line_end for row in rows)).encode())
    return str(path)


def refusal(task: str, path: str, split: str = "train", labelled: bool | None = None) -> str:
    with pytest.raises(UserError) as caught:
        list(read_glue(task, path, split, labelled))
    return str(caught.value)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("task", [name for name in OFFICIAL if name != "ax"])
def test_official_train_and_dev_files(task: str, mark: str, tmp_path: Path) -> None:
    header, row, _ = OFFICIAL[task]
    rows = [cells(header)] * bool(header) + [cells(row)] * 2
    path = write(tmp_path / "train.tsv", rows, mark, "\r\n" if mark else "\n")
    first = 1 + bool(header)
    pair = "S1" if GLUE_TASKS[task].pair else None
    label = LABELS.get(task, "1")
    for split in ("train", "dev"):
        assert list(read_glue(task, path, split)) == [
            TextExample(f"{path}:{first}", "0", "S0", pair, label),
            TextExample(f"{path}:{first + 1}", "1", "S0", pair, label),
        ]
        assert [e.label for e in read_glue(task, path, split, labelled=False)] == [None, None]
    # the columns are found by name, in any order and among others
    if header:
        order = list(range(len(cells(header)) + 1))
        random.Random(1).shuffle(order)
        path = write(tmp_path / "mixed.tsv", [[[*line, "more"][index] for index in order] for line in rows])
        assert [(e.text, e.pair, e.label) for e in read_glue(task, path, "train")] == [("S0", pair, label)] * 2


@pytest.mark.parametrize("task", OFFICIAL)
def test_official_test_files(task: str, tmp_path: Path) -> None:
    header = cells(OFFICIAL[task][2])
    path = write(tmp_path / "test.tsv", [header, *([str(7 + row), *header[1:]] for row in range(3))])
    expected = GLUE_TASKS[task]
    assert list(read_glue(task, path, "test")) == [
        TextExample(f"{path}:{row + 2}", str(7 + row), expected.text, expected.pair, None) for row in range(3)
    ]
    told = refusal(task, path, "test", labelled=True)
    assert ("AX has no labels" if task == "ax" else f"no column {expected.label!r}") in told


def test_labels_and_metrics_are_the_official_ones() -> None:
    assert list(GLUE_TASKS) == list(OFFICIAL)
    assert {name: task.labels for name, task in GLUE_TASKS.items()} == {
        **dict.fromkeys(("cola", "sst-2", "mrpc", "qqp", "wnli"), ("0", "1")),
        **dict.fromkeys(("mnli", "ax"), ("contradiction", "entailment", "neutral")),
        **dict.fromkeys(("qnli", "rte"), ("entailment", "not_entailment")),
        "sts-b": None,
    }
    first = {name: task.metrics[0] for name, task in GLUE_TASKS.items()}
    assert first == dict.fromkeys(GLUE_TASKS, "accuracy") | {
        "cola": "matthews", "mrpc": "f1", "qqp": "f1", "sts-b": "pearson", "ax": "matthews",
    }  # fmt: skip


@settings(max_examples=80)
@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\"\r\u2028\x85'\\"), max_size=15),
        max_size=9,
    ),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_no_character_splits_or_joins_rows(tmp_path: Path, texts: list[str], mark: str) -> None:
    """F6: a lone quote at a field's start, a lone carriage return, Unicode's line separators."""
    rows = [["sentence", "label"], *([text, str(number % 2)] for number, text in enumerate(texts))]
    path = write(tmp_path / "train.tsv", rows, mark)
    assert [[e.text, e.label] for e in read_glue("sst-2", path, "train")] == rows[1:]
    rows = [["index", "question", "sentence", "label"], *(["1", t, t[::-1], "entailment"] for t in texts)]
    path = write(tmp_path / "train.tsv", rows, mark)
    assert [["1", e.text, e.pair, e.label] for e in read_glue("qnli", path, "train")] == rows[1:]


def test_rows_with_a_line_end_in_a_question_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, whole = cells(OFFICIAL["qqp"][0]), cells(OFFICIAL["qqp"][1])
    # QQP's train.tsv, line 97,931, is the end of such a row
    rows = [header, whole, ["1", "2", "3", '"Who was he?'], ['"', "What is the evidence?", "0"], whole]
    path = write(tmp_path / "train.tsv", [*rows, ["4", "5", "6", "a", "b"], ["c"], ["d", "1"], whole])
    report = ReadReport()
    found = list(read_glue("qqp", path, "train", report=report))
    assert [(e.place.rsplit(":", 1)[1], e.text, e.pair, e.label) for e in found] == [
        ("2", "S0", "S1", "1"),
        ("3", '"Who was he?\n"', "What is the evidence?", "0"),
        ("5", "S0", "S1", "1"),
        ("6", "a", "b\nc\nd", "1"),
        ("9", "S0", "S1", "1"),
    ]
    assert report.skipped == {"line end inside a cell, kept": 2}
    assert not capsys.readouterr().err
    list(read_glue("qqp", path, "train"))
    assert f"2 × {path}:3: line end inside a cell, kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "rows", "told"),
    [
        ("sst-2", ["sentence label", "a 1", "b", "c 0"], "train.tsv:3: 1 cell where 2 are expected"),
        ("sst-2", ["sentence label", "a 1", "b 1 c"], "train.tsv:3: 3 cells where 2 are expected"),
        ("rte", ["index sentence1 sentence2 label", "0 a b", "1 a b entailment"], "train.tsv:2: 3 cells where 4 are"),
        ("rte", ["index sentence1 sentence2 label", "0 a"], "train.tsv:2: 2 cells where 4 are expected"),
        ("cola", ["gj04 1 * a", "index sentence"], "train.tsv:2: 2 cells where 4 are expected"),
        ("cola", ["a 2 * b", "a  * b"], "train.tsv:1: column 'label' holds '2'; "),
        ("cola", ["a 2 * b", "a  * b"], "train.tsv:2: column 'label' holds ''; CoLA's labels are 0, 1"),
        ("rte", ["index sentence1 sentence2 label", "0 a b Entailment"],
         "train.tsv:2: column 'label' holds 'Entailment'; RTE's labels are entailment, not_entailment"),
        ("sts-b", ["sentence1 sentence2 score", "a b 5.1", "a b nan", "a b x", "a b -0.1", "a b 5.0"],
         "train.tsv:5: column 'score' holds '-0.1'; STS-B's labels are numbers from 0 to 5"),
        ("mrpc", ["Quality #1_ID #1_String", "1 2 a"],
         "train.tsv:1: no column '#2 String', which MRPC's train files have; there are 'Quality', '#1 ID', '#1"),
        ("qnli", ["index sentence1 sentence2 label", "0 a b c"], "train.tsv:1: no columns 'question', 'sentence'"),
        ("qnli", [], "train.tsv: empty file"),
    ],
)  # fmt: skip
def test_rows_and_columns_that_cannot_be_used_are_named(task: str, rows: list[str], told: str, tmp_path: Path) -> None:
    assert told in refusal(task, write(tmp_path / "train.tsv", [cells(row) for row in rows]))


def test_five_unknown_labels_are_named_and_the_others_counted(tmp_path: Path) -> None:
    rows = [["sentence", "label"], *(["a", str(number)] for number in range(200))]
    told = refusal("sst-2", write(tmp_path / "train.tsv", rows))
    assert [f"train.tsv:{line}: column 'label' holds '{line - 2}'" in told for line in (3, 4, 8, 9)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert "and 193 more rows like these; SST-2's labels are 0, 1" in told


def test_rows_without_a_gold_label_are_left_out_and_counted(tmp_path: Path) -> None:
    header, row, _ = OFFICIAL["mnli"]
    path = write(tmp_path / "dev_matched.tsv", [cells(header), [*cells(row)[:-1], "-"], cells(row)])
    report = ReadReport()
    assert [(e.id, e.label) for e in read_glue("mnli", path, "dev", report=report)] == [("1", "entailment")]
    assert report.skipped_places == [f"{path}:2: no gold label"]
    assert len(list(read_glue("mnli", path, "dev", labelled=False))) == 2


@pytest.mark.parametrize(
    ("text", "name"),
    [("SST2", "sst-2"), ("stsb", "sts-b"), ("STS-B", "sts-b"), ("sts_b", "sts-b"), ("CoLA", "cola"), ("MNLI", "mnli"),
     ("ax", "ax"), ("diagnostic", "ax")],
)  # fmt: skip
def test_names_in_any_spelling(text: str, name: str) -> None:
    assert glue_name(text) == name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="'snli' is no GLUE task; use one of cola, sst-2, mrpc"):
        glue_name("snli")
    with pytest.raises(UserError, match="split: 'validation' is not known; use one of train, dev, test"):
        list(read_glue("cola", "x", "validation"))


def test_tasks_are_found_in_folders_of_any_spelling(tmp_path: Path) -> None:
    for name in ("wnli", "STSB", "SST-2", "MNLI", "diagnostic", "SNLI", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "RTE").write_text("a file")
    found = find_glue_tasks(str(tmp_path))
    assert found == {
        "sst-2": str(tmp_path / "SST-2"), "sts-b": str(tmp_path / "STSB"), "mnli": str(tmp_path / "MNLI"),
        "wnli": str(tmp_path / "wnli"), "ax": str(tmp_path / "diagnostic"),
    }  # fmt: skip
    assert list(found) == ["sst-2", "sts-b", "mnli", "wnli", "ax"]
    (tmp_path / "STS-B").mkdir()
    with pytest.raises(UserError, match="are the same task"):
        find_glue_tasks(str(tmp_path))
    with pytest.raises(UserError, match=r"no GLUE task in it; folders called CoLA, SST-2, .* it holds no folder"):
        find_glue_tasks(str(tmp_path / "MNLI"))
    with pytest.raises(UserError, match="this folder cannot be read: No such file"):
        find_glue_tasks(str(tmp_path / "absent"))


def test_files_of_a_split_and_those_that_are_absent(tmp_path: Path) -> None:
    mnli, ax = GLUE_TASKS["mnli"], GLUE_TASKS["ax"]
    folder = str(tmp_path)
    for name in ("train.tsv", "dev_matched.tsv", "diagnostic/diagnostic.tsv"):
        write(tmp_path / name, [["a"]])
    assert find_glue_files(mnli, folder, "dev") == {"dev_matched": str(tmp_path / "dev_matched.tsv")}
    assert find_glue_files(mnli, folder, "test") == {}
    assert require_glue_files(mnli, folder, "train") == {"train": str(tmp_path / "train.tsv")}
    assert require_glue_files(ax, folder, "test") == {"test": str(tmp_path / "diagnostic/diagnostic.tsv")}
    with pytest.raises(UserError, match=r"no 'dev_mismatched.tsv'; it holds 'dev_matched.tsv', 'diagnostic', 'train"):
        require_glue_files(mnli, folder, "dev")
    with pytest.raises(UserError, match="no train file, for AX has none"):
        require_glue_files(ax, folder, "train")
    with pytest.raises(UserError, match="no such folder; the folder of MNLI's files is needed"):
        find_glue_files(mnli, str(tmp_path / "absent"), "dev")


def test_every_row_of_the_real_files(shared_data: Path) -> None:
    """Rows out = lines in, each cell as a plain split at tabs gives it, no label lost."""
    folder = shared_data / "glue"
    counts: Counter[str] = Counter()
    for name, home in find_glue_tasks(str(folder)).items():
        task = GLUE_TASKS[name]
        for kind in ("train", "dev", "test"):
            for path in find_glue_files(task, home, kind).values():
                lines = Path(path).read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
                rows = [line.split("\t") for line in lines]
                header = ["", "label", "", "sentence"] if name == "cola" and kind != "test" else rows.pop(0)
                text, pair, label = (
                    header.index(column) if column and column in header else None
                    for column in (task.text, task.pair, task.label)
                )
                report = ReadReport()
                found = list(read_glue(name, path, kind, report=report))
                assert text is not None
                assert [(e.text, e.pair) for e in found] == [
                    (row[text], None if pair is None else row[pair]) for row in rows
                ], path
                if kind != "test":
                    assert label is not None
                    assert [e.label for e in found] == [
                        float(row[label]) if name == "sts-b" else row[label] for row in rows
                    ]
                    assert task.labels is None or {e.label for e in found} == set(task.labels)
                assert [e.id for e in found] == [str(index) for index in range(len(rows))]
                assert not report.skipped
                assert not report.invalid_bytes
                counts[name] += len(found)
    assert counts == {
        "cola": 8551 + 1043 + 1063, "sst-2": 67349 + 872 + 1821, "mrpc": 3668 + 408 + 1725, "sts-b": 5749 + 1500 + 1379,
        "qqp": 8999 + 1000, "mnli": 8999 + 500 + 500, "qnli": 8999 + 5463 + 5463, "rte": 2490 + 277 + 3000,
        "wnli": 635 + 71 + 146, "ax": 1104,
    }  # fmt: skip
