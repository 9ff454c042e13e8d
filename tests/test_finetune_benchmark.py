"""benchmarks/finetune*.py at toy size: both sides' rows, the transformers side on a tiny random BERT, the driver."""

import importlib
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from watching import wait_until

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MODULES = ("finetune", "finetune_tasks", "finetune_trainer", "pretrain_step")
WORDS = ["good", "bad", "film", "paris", "london", "the", "a", "cat", "sat", "on", "mat", "in", "likes", "where", "is"]
ALL_TASKS = ("cola", "mrpc", "sts-b", "rte", "sst-2", "ner", "squad1")

# a cell of a file of rows: anything but what ends a cell or a line; a mark at the start of a file is none of the text
CELLS = st.text(st.characters(exclude_characters="\t\n\r\ufeff", exclude_categories=("Cs",)))
ANSWERS = st.lists(st.sampled_from(["the", "a", "An", "cat", "Cat,", "mat", "-", "the-cat", "x."]), max_size=5)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's files, which are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        imported = {name: importlib.import_module(name) for name in MODULES}
        tasks = imported["finetune_tasks"]
        patch.setitem(tasks.TASKS, "squad1", tasks.SpanTask(stride=6))  # as small as all else here
        yield imported
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tasks(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["finetune_tasks"]


@pytest.fixture(scope="module")
def driver(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["finetune"]


@pytest.fixture(scope="module")
def trainer(modules: dict[str, ModuleType]) -> ModuleType:
    pytest.importorskip("accelerate", reason="the transformers Trainer needs accelerate")
    return modules["finetune_trainer"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT with random weights, saved as a bare encoder."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("tiny-bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


def made_rows(tasks: ModuleType, task: str, count: int) -> list[Any]:
    """Rows whose label the words decide."""
    draw = random.Random(task)

    def words(low: int, high: int) -> list[str]:
        return [draw.choice(WORDS[2:]) for _ in range(draw.randint(low, high))]

    rows: list[Any] = []
    for number in range(count):
        good = draw.random() < 0.5
        first, second = " ".join([*words(1, 9), WORDS[not good]]), " ".join(words(1, 5))
        if task == "cola":
            rows.append(["made", str(int(good)), "", first])
        elif task == "mrpc":
            rows.append([str(int(good)), str(number), str(number), first, f'"{second}'])
        elif task == "sts-b":
            rows.append([str(number), *["-"] * 6, first, second, str(4.5 * good)])
        elif task == "rte":
            rows.append([str(number), first, second, "entailment" if good else "not_entailment"])
        elif task == "sst-2":
            rows.append([first, str(int(good))])
        elif task == "ner":
            rows.append([[word, "B-place" if word in ("paris", "london") else "O"] for word in words(2, 9)])
        else:
            context = words(20, 40)
            answer = draw.choice([at for at, word in enumerate(context) if word not in ("the", "a")])
            start = len(" ".join([*context[:answer], ""]))
            question = tasks.Question(str(number), "where is the cat", " ".join(context), ((context[answer], start),))
            rows.append(question)
    return rows


@dataclass(frozen=True)
class MadeData:
    """A data folder as the driver expects it, and the training and dev file of each task."""

    folder: Path
    paths: dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def made_data(driver: ModuleType, tasks: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> MadeData:
    """40 training rows and 12 dev rows of each task."""
    folder = tmp_path_factory.mktemp("data")
    paths = {task: (folder / train, folder / dev) for task, (train, dev) in driver.FILES.items()}
    for task, (train, dev) in paths.items():
        rows = made_rows(tasks, task, 52)
        train.parent.mkdir(parents=True, exist_ok=True)
        tasks.TASKS[task].write(rows[:40], train)
        tasks.TASKS[task].write(rows[40:], dev)
    return MadeData(folder, paths)


# -- rows -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_files_give_back_their_rows(
    tasks: ModuleType, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Quotes, line separators and blanks inside cells included."""
    path = tmp_path_factory.getbasetemp() / "rows"
    text = tasks.TASKS["mrpc"]
    rows = data.draw(st.lists(st.lists(CELLS, min_size=5, max_size=5), max_size=4))
    text.write(rows, path)
    assert text.read(path) == rows
    words = st.tuples(CELLS, st.sampled_from(["O", "B-x"])).map(list)
    sentences = data.draw(st.lists(st.lists(words, min_size=1, max_size=4), max_size=4))
    tasks.TASKS["ner"].write(sentences, path)
    assert tasks.TASKS["ner"].read(path) == sentences
    question = st.builds(tasks.Question, CELLS, CELLS, CELLS, st.tuples(st.tuples(CELLS, st.integers(0, 9))))
    questions = data.draw(st.lists(question, max_size=4))
    tasks.TASKS["squad1"].write(questions, path)
    assert sorted(tasks.TASKS["squad1"].read(path), key=repr) == sorted(questions, key=repr)


def test_real_layout_is_read(tasks: ModuleType, tmp_path: Path) -> None:
    """A byte-order mark, no newline at the end, Windows line ends, a line with only a tab between sentences."""
    path = tmp_path / "file"
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    path.write_bytes(f'\ufeff{header}\r\n1\t2\t3\t"a\tb"'.encode())
    assert tasks.TASKS["mrpc"].read(path) == [["1", "2", "3", '"a', 'b"']]
    assert tasks.TASKS["mrpc"].targets(tasks.TASKS["mrpc"].read(path)) == [1]
    path.write_text("Paris\tB-x\n\t\n\nis\tO\n \n", encoding="utf-8")
    assert tasks.TASKS["ner"].read(path) == [[["Paris", "B-x"]], [["is", "O"]]]
    path.write_text("label\tsentence\n1\tgood\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="first line"):
        tasks.TASKS["sst-2"].read(path)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_parts_are_fixed_and_nested(tasks: ModuleType, made_data: MadeData, tmp_path: Path, task: str) -> None:
    """A part is in the task's own format, keeps the file's order, and lies within any larger part."""
    source = made_data.paths[task][0]
    everything = tasks.TASKS[task].read(source)
    parts = {}
    for rows in (7, 20, 99):
        assert tasks.write_part(task, source, rows, tmp_path / "part") == min(rows, 40)
        parts[rows] = tasks.TASKS[task].read(tmp_path / "part")
    assert parts[99] == everything
    assert len(parts[7]) == 7
    assert parts[20] != everything[:20]
    assert is_part_of(parts[7], parts[20])
    assert is_part_of(parts[20], everything)


def is_part_of(some: list[Any], more: list[Any]) -> bool:
    """Whether `more` gives `some` when rows are left out."""
    rest = iter(more)
    return all(row in rest for row in some)


# -- metrics ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(ANSWERS, min_size=1, max_size=3), ANSWERS)
def test_answers_are_scored_as_by_torchmetrics(tasks: ModuleType, golds: list[list[str]], found: list[str]) -> None:
    """But for gold answers of articles and punctuation only, which torchmetrics takes as v2.0 does."""
    assume(all(tasks.normalized(" ".join(gold)) for gold in golds))
    from torchmetrics.functional.text import squad

    listed = [" ".join(gold) for gold in golds]
    scores = {"exact_match": tasks.exact_match, "f1": tasks.word_f1}
    ours = {name: 100 * max(score(gold, " ".join(found)) for gold in listed) for name, score in scores.items()}
    target = {"answers": {"answer_start": [0] * len(listed), "text": listed}, "id": "x"}
    theirs = squad([{"prediction_text": " ".join(found), "id": "x"}], [target])
    assert ours == pytest.approx({name: float(value) for name, value in theirs.items()}, abs=1e-4)


def test_gold_spans_are_read_back_from_windows(tasks: ModuleType, model: str) -> None:
    """Logits that point at the gold tokens of each window give 100/100, with contexts of several windows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    about = tasks.TASKS["squad1"]
    rows = made_rows(tasks, "squad1", 30)
    training = about.features(tokenizer, rows, 24, training=True)
    testing = about.features(tokenizer, rows, 24, training=False)
    assert len(training) == len(testing) > 2 * len(rows)
    logits, held = [], set()
    for labelled, seen in zip(training, testing, strict=True):
        assert labelled["input_ids"] == seen["input_ids"]
        scores = np.zeros((len(labelled["input_ids"]), 2))
        first, last = labelled["start_positions"], labelled["end_positions"]
        if first:
            held.add(seen["question"])
            shown = rows[seen["question"]].context[seen["offsets"][first][0] : seen["offsets"][last][1]]
            assert shown == rows[seen["question"]].answers[0][0]
        else:
            assert last == 0
        scores[first, 0] += 9
        scores[last, 1] += 9
        logits.append(scores)
    assert held == set(range(len(rows)))
    assert about.measure(rows, testing, logits, {}) == {"exact_match": 100, "f1": 100}
    blank = [np.zeros_like(scores) for scores in logits]
    assert about.measure(rows, testing, blank, {})["exact_match"] < 60


def test_longest_answer_and_order_are_kept(tasks: ModuleType) -> None:
    """A span that is too long, backwards or outside the context is never the answer."""
    about = tasks.SpanTask(longest_answer=2)
    context = "aa bb cc dd"
    rows = [tasks.Question("1", "q", context, (("bb", 3),))]
    offsets = [None, None, None, (0, 2), (3, 5), (6, 8), (9, 11), None]
    scores = np.zeros((8, 2))
    scores[0] = 50  # [CLS]
    scores[3, 0], scores[6, 1] = 9, 9  # four tokens
    scores[6, 0] = 8  # the end before it is worth more, but lies before it
    scores[5, 1] = 5
    feature = {"question": 0, "offsets": offsets}
    assert about.answers(rows, [feature], [scores]) == ["dd"]
    assert tasks.answer_tokens(offsets, "bb cc", 3) == (4, 5)
    assert tasks.answer_tokens(offsets, "b", 4) == (4, 4)
    assert tasks.answer_tokens([None, (3, 5), (6, 8)], "aa bb", 0) == (0, 0)
    assert tasks.answer_tokens([None, (3, 5), (6, 8)], "cc dd", 6) == (0, 0)


def test_words_without_pieces_and_cut_words_are_outside(tasks: ModuleType, model: str) -> None:
    """A tag a word always: what the model did not see counts as O."""
    from transformers import AutoTokenizer

    about = tasks.TASKS["ner"]
    rows = [[["paris", "B-place"], ["\u200b", "O"], ["cat", "O"], ["london", "B-place"]]]
    features = about.features(AutoTokenizer.from_pretrained(model), rows, 4, training=False)
    assert features[0]["words"] == [None, 0, 2, None]
    names = {0: "B-place", 1: "O"}
    logits = np.array([[1, 0], [1, 0], [0, 1], [1, 0]])
    assert about.measure(rows, features, [logits], names)["f1"] == pytest.approx(2 / 3)


# -- the transformers side --------------------------------------------------------------------------------------------


def fine_tune(trainer: ModuleType, model: str, made_data: MadeData, task: str, **options: Any) -> dict[str, Any]:
    train, dev = made_data.paths[task]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertsmith.hardware.measure_matmul", lambda device, dtype: dtype.itemsize)
        return trainer.run(task, model, train, dev, **options)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_trainer_trains_on_every_row(
    trainer: ModuleType, tasks: ModuleType, model: str, made_data: MadeData, task: str
) -> None:
    """What the steps were given adds up; dev has the task's metrics."""
    from transformers import AutoTokenizer

    result = fine_tune(trainer, model, made_data, task, epochs=2, batch_size=16, max_length=40)
    rows = tasks.TASKS[task].read(made_data.paths[task][0])
    features = tasks.TASKS[task].features(AutoTokenizer.from_pretrained(model), rows, 40, training=True)
    tokens = sum(len(feature["input_ids"]) for feature in features)
    assert result["sequences"] == 2 * len(features)
    assert result["tokens"] == 2 * tokens
    assert result["padded_tokens"] >= result["tokens"]
    assert result["steps"] == 2 * math.ceil(len(features) / 16)
    assert result["examples_per_second"] == pytest.approx(2 * len(rows) / result["train_seconds"])
    assert set(result["dev"]) == set(tasks.TASKS[task].metrics)
    assert all(math.isfinite(value) or task == "sts-b" for value in result["dev"].values())
    assert result["settings"]["train_sampling_strategy"] == "group_by_length"
    assert result["settings"]["bf16"] is False


@pytest.mark.parametrize(
    ("task", "setting", "metric", "epochs"),
    [("sst-2", "defaults", "accuracy", 12), ("ner", "best", "f1", 12), ("sts-b", "best", "spearman", 25)],
)
def test_trainer_learns(
    trainer: ModuleType, model: str, made_data: MadeData, task: str, setting: str, metric: str, epochs: int
) -> None:
    """Labels that single words decide: classes, tags and scores."""
    options = {"setting": setting, "epochs": epochs, "batch_size": 8, "learning_rate": 3e-3}
    assert fine_tune(trainer, model, made_data, task, **options)["dev"][metric] > 0.8


def test_the_seed_decides(trainer: ModuleType, model: str, made_data: MadeData) -> None:
    """The new layer, the order and dropout: a score in the last digit tells two runs apart."""
    scores = [
        fine_tune(trainer, model, made_data, "sts-b", epochs=1, seed=seed)["dev"]["pearson"] for seed in (1, 1, 2)
    ]
    assert scores[0] == scores[1] != scores[2]


def test_bf16_where_it_multiplies_faster(trainer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    rates = {torch.bfloat16: 3e9, torch.float32: 2e9}
    monkeypatch.setattr("bertsmith.hardware.measure_matmul", lambda device, dtype: rates[dtype])
    arguments, measured = trainer.choose_settings("best", torch.device("cpu"))
    assert arguments["bf16"] is True
    assert measured == {"bf16": 3e9, "fp32": 2e9}
    assert trainer.choose_settings("defaults", torch.device("cpu")) == ({}, {})


def test_predictions_come_in_the_order_given(
    trainer: ModuleType, tasks: ModuleType, model: str, made_data: MadeData
) -> None:
    """Batches are made by length; each row's logits are its own, without the padding."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for task in ("sst-2", "ner", "squad1"):
        about = tasks.TASKS[task]
        rows = about.read(made_data.paths[task][1])
        features = about.features(tokenizer, rows, 40, training=False)
        built = about.model(model, rows)
        collate = transformers.DataCollatorWithPadding(tokenizer)
        together = trainer.predict(built, collate, features, 5)
        for feature, logits in zip(features, together, strict=True):
            alone = trainer.predict(built, collate, [feature], 5)[0]
            assert logits.shape == alone.shape
            np.testing.assert_allclose(logits, alone, atol=1e-5)
            assert task == "sst-2" or len(logits) == len(feature["input_ids"])


def test_trainer_command(
    trainer: ModuleType, tasks: ModuleType, model: str, made_data: MadeData, tmp_path: Path
) -> None:
    """One JSON line on stdout; with --max-steps nothing is measured; the part lies where others find it."""
    train, dev = map(str, made_data.paths["sst-2"])
    command = [sys.executable, str(BENCHMARKS / "finetune_trainer.py"), "sst-2", "--model", model, "--train", train]
    command += ["--dev", dev, "--setting", "defaults", "--max-steps", "3", "--batch-size", "4"]
    command += ["--train-rows", "9", "--part", str(tmp_path / "part.tsv")]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert (result["dev"], result["steps"], result["sequences"]) == (None, 3, 9)
    assert len(tasks.TASKS["sst-2"].read(tmp_path / "part.tsv")) == 9
    refused = subprocess.run(command[:-2], capture_output=True, text=True, encoding="utf-8", check=False)
    assert refused.returncode == 2
    assert "--part" in refused.stderr


# -- the driver -------------------------------------------------------------------------------------------------------

STUB = """
import json, sys
from pathlib import Path
log, side, task, seed, train = sys.argv[1:6]
with open(log, "a") as file:
    print(task, side, seed, Path(train).name, file=file)
if Path(log + ".fail").exists() and side == "ours":
    sys.exit("broken")
speed = {"ours": 1.0, "best": 2.0, "defaults": 4.0}[side] + int(seed) / 10
dev = {name: 0.5 + int(seed) / 10 + (side == "ours") / 10 for name in sys.argv[6:]}
print("other output")
if side == "ours":
    print(json.dumps({"dev": dev, "runs": [{"seed": int(seed), "dev": dev, "train_seconds": speed}]}))
else:
    print(json.dumps({"dev": dev, "train_seconds": speed, "settings": {"bf16": False}}))
"""


@pytest.fixture
def stubbed(driver: ModuleType, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every process is a stub that notes its call in the file returned."""
    log = tmp_path / "calls"
    (tmp_path / "stub.py").write_text(STUB, encoding="utf-8")

    def command(job: Any, model: str, train: Path, dev: Path, run: Path) -> list[str]:
        assert not run.exists()
        words = [sys.executable, str(tmp_path / "stub.py"), str(log), job.side, job.task, str(job.seed), str(train)]
        return [*words, *tasks.TASKS[job.task].metrics]

    monkeypatch.setattr(driver.Job, "command", command)
    return log


def calls(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines()


def test_driver_does_each_run_once(
    driver: ModuleType,
    stubbed: Path,
    model: str,
    made_data: MadeData,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sides take turns; a failed run is named and done again; what is there is not, nor a line that a kill cut."""
    out = tmp_path / "out"
    arguments = [
        "--model",
        model,
        "--data",
        str(made_data.folder),
        "--out",
        str(out),
        "--seeds",
        "2",
        "--tasks",
        "mrpc,squad1",
    ]
    failing = Path(f"{stubbed}.fail")
    failing.touch()
    assert driver.main(arguments) == 1
    assert "mrpc-ours-0: failed" in capsys.readouterr().err
    order = [tuple(call.split()[:3]) for call in calls(stubbed)]
    forwards, backwards = ["ours", "best", "defaults"], ["defaults", "best", "ours"]
    assert [side for _, side, _ in order] == [*forwards, *backwards, *backwards, *forwards]
    assert len(set(order)) == 12
    failing.unlink()
    results = out / "results.jsonl"
    whole = results.read_bytes()
    assert whole.count(b"\n") == 8
    results.write_bytes(whole[:-20])
    stubbed.unlink()
    assert driver.main(arguments) == 0
    assert len(calls(stubbed)) == 5
    assert results.read_bytes().count(b"\n") == 12
    printed = capsys.readouterr().out.splitlines()
    stubbed.unlink()
    assert driver.main(arguments) == 0
    assert not stubbed.exists()
    table = capsys.readouterr().out
    assert table.splitlines() == printed
    assert "| mrpc | accuracy | 65.00 ± 7.07 | 55.00 ± 7.07 | +1.4 | 114.5 | 58.6 | 29.6 | 1.95 | 3.86 |" in printed
    assert "| mrpc | f1 | 65.00 ± 7.07 | 55.00 ± 7.07 | +1.4 |  |  |  |  |  |" in printed
    assert any(line.startswith("| squad1 | exact_match | 0.65 ± 0.07 |") for line in printed)
    assert "best: bf16=False" in printed


def test_driver_makes_parts_and_other_jobs(
    driver: ModuleType,
    stubbed: Path,
    model: str,
    made_data: MadeData,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A part is a file in FOLDER/data for all sides; other rows, rates or timing are other jobs."""
    out = tmp_path / "out"
    arguments = ["--model", model, "--data", str(made_data.folder), "--out", str(out), "--seeds", "1", "--tasks", "ner"]
    assert driver.main([*arguments, "--train-rows", "10"]) == 0
    assert {call.split()[3] for call in calls(stubbed)} == {"ner-wnut17train-10.conll"}
    assert (out / "data" / "ner-wnut17train-10.conll").exists()
    assert driver.main([*arguments, "--train-rows", "10", "--learning-rate", "1e-4", "--sides", "best"]) == 0
    assert driver.main([*arguments, "--train-rows", "10", "--epochs", "2", "--sides", "ours"]) == 0
    assert len(calls(stubbed)) == 5
    capsys.readouterr()
    assert driver.main([*arguments, "--timing-only"]) == 0
    assert len(calls(stubbed)) == 8
    assert calls(stubbed)[-1].split()[3] == "wnut17train.conll"
    assert "| ner | 40.0 | 20.0 | 10.0 | 2.00 | 4.00 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        driver.main([*arguments, "--sides", "mine"])


def test_commands_are_the_documented_ones(driver: ModuleType) -> None:
    """The same files and numbers for both sides."""
    job = driver.Job("rte", "ours", 3, 40, 3.0, 5e-5, 32, 128, 12, "w", "cpu", "1")
    ours = job.command("M", Path("T"), Path("D"), Path("R"))
    assert ours[1:5] == ["-m", "bertsmith", "finetune", "rte"]
    theirs = driver.dataclasses.replace(job, side="best").command("M", Path("T"), Path("D"), Path("R"))
    shared = "--model M --train T --dev D --seed 3 --epochs 3 --batch-size 32 --learning-rate 5e-05 --max-length 128"
    assert shared in " ".join(ours)
    assert shared in " ".join(theirs)
    assert theirs[-2:] == ["--setting", "best"]


@pytest.mark.slow
def test_both_sides_for_real(
    trainer: ModuleType,
    driver: ModuleType,
    model: str,
    made_data: MadeData,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Processes as they are meant: each side takes its command, trains on all rows, and gives the task's metrics."""
    chosen = ["mrpc", "ner", "squad1"]  # one of each kind
    arguments = ["--model", model, "--data", str(made_data.folder), "--out", str(tmp_path), "--seeds", "1"]
    arguments += ["--tasks", ",".join(chosen), "--sides", "ours,best", "--epochs", "1", "--batch-size", "16"]
    code = driver.main([*arguments, "--train-rows", "20"])
    logs = "\n".join(path.read_text(encoding="utf-8")[-2000:] for path in sorted((tmp_path / "logs").iterdir()))
    assert code == 0, logs
    done = driver.read_results(tmp_path / "results.jsonl")
    assert len(done) == 2 * len(chosen)
    for job, result in done.items():
        assert set(result["dev"]) >= set(driver.TASKS[job.task].metrics), job
        # whole passes over the same rows on both sides
        claimed = result["printed"]["runs"][0] if job.side == "ours" else result["printed"]
        assert claimed["examples_per_second"] == pytest.approx(result["examples_per_second"], rel=1e-3), job
    assert not any((tmp_path / "runs").iterdir())
    assert capsys.readouterr().out.count("\n| ") == 2 + sum(len(driver.TASKS[task].metrics) for task in chosen)


def test_difference_in_deviations(driver: ModuleType) -> None:
    """Against Welch's t, which is this number."""
    from scipy import stats

    draw = np.random.default_rng(0)
    left, right = draw.normal(size=3).tolist(), draw.normal(size=4).tolist()
    expected = stats.ttest_ind(left, right, equal_var=False).statistic
    assert driver.in_deviations(left, right) == pytest.approx(expected)
    assert driver.in_deviations([1.0], [1.0, 2.0]) is None
    assert driver.in_deviations([1.0, 1.0], [1.0, 1.0]) == 0
    assert driver.in_deviations([2.0, 2.0], [1.0, 1.0]) == math.inf


def test_a_run_ends_with_the_driver(tmp_path: Path) -> None:
    """SIGTERM to the driver leaves no fine-tuning behind."""
    script = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import finetune, signal\nfrom pathlib import Path\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        'child = \'import os, time; print(os.getpid(), file=open("pid", "w")); time.sleep(60)\'\n'
        "finetune.run_process([sys.executable, '-c', child], Path('log'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    written = tmp_path / "pid"
    wait_until(lambda: written.exists() and written.read_text().strip(), "the child", process=process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)
