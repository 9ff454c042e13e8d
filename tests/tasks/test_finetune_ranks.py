"""Fine-tuning on several ranks: batches, losses, scores, predictions and files are those of one process."""

import json
import shutil
import signal
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertsmith.tasks import finetune as loop
from bertsmith.tasks import glue, runs
from bertsmith.tasks.settings import FinetuneSettings
from bertsmith.training.ranks import join_ranks, share_settings, split_evenly
from made_tasks import (
    StepProbe,
    leftovers,
    log_lines,
    make_settings,
    quicken,
    reviews,
    timeless,
    tune,
    write_glue,
    write_rows,
)
from rank_runs import Ending, Patch, run_ranks

Files = dict[str, tuple[Path, Path]]
# dropout; six examples in micro-batches of which no number of ranks gets equally many
BUSY: dict[str, Any] = {"epochs": 2, "batch_size": 6, "micro_tokens": 20, "eval__every": 3, "checkpoint__every": 4}


def tune_rank(out: Path, kind: str, changes: dict[str, Any], prepare: Callable[..., None] | None = None) -> Any:
    """Fine-tune as `made_tasks.tune` does, as one of several ranks. `prepare(rank)` first."""
    patch: Any = Patch()
    quicken(patch)
    with join_ranks() as ranks:
        seen = prepare(ranks.rank) if prepare is not None else None
        settings = share_settings(FinetuneSettings, lambda: make_settings(kind, **changes), ranks)
        return {"summary": runs.finetune(settings, out, ranks), "seen": seen}


def summaries(endings: list[Ending]) -> dict[str, Any]:
    """The first rank's; the others have none and are silent."""
    assert [ending.error for ending in endings] == [None] * len(endings), endings
    for ending in endings[1:]:
        assert ending.value["summary"] == {}
        assert ending.said == ""
    found = endings[0].value["summary"]
    assert isinstance(found, dict)
    return found


def assert_alike(found: Any, expected: Any, place: str = "") -> None:
    """The same but for times, paths and the rounding of numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key in expected:
            assert_alike(found[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{place}[{number}]")
    else:
        # losses; the root of thousands of squares; figures of what was learnt in float32
        tolerance = 1e-6 if "loss" in place else 1e-5 if "grad_norm" in place else 1e-4
        assert found == (pytest.approx(expected, rel=tolerance) if isinstance(expected, float) else expected), place


def files_of(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(("kind", "sizes"), [("regress", (2, 4)), ("squad2", (2,)), ("multilabel", (3,))])
def test_any_number_of_ranks_is_the_same_fine_tuning(
    model: Path, files: Files, tmp_path: Path, kind: str, sizes: tuple[int, ...]
) -> None:
    """Losses, scores, details and predictions; of regression on 13 examples, of several labels over two seeds, of
    questions held out of the training file."""
    train, dev = files[kind]
    if kind == "regress":
        rows = [(text, number % 6) for number, (text, _) in enumerate(reviews(13))]
        assert len(dict(rows)) == 13, "equal texts would be ranked by the rounding of their scores"
        dev = write_rows(tmp_path / "dev.csv", ("text", "label"), rows)
    options = BUSY | {
        "model": model,
        "train": train,
        "dev": dev,
        "test": dev,
        "learning_rate": 1e-3,
        "squad__stride": 8,
    }
    options |= {"seeds": 2, "epochs": 1} if kind == "multilabel" else {}
    options |= {"dev": None, "dev_share": 0.25} if kind == "squad2" else {}
    whole = tune(tmp_path / "one", kind, **options)
    assert whole["runs"][0]["steps"] > 3
    for size in sizes:
        out = tmp_path / f"on {size}"
        endings = run_ranks(size, tune_rank, out, kind, options, watch_exchanges)
        assert_alike(timeless(summaries(endings)), timeless(whole))
        for ending in endings:  # once a step, and in all ranks at the same turn
            assert ending.value["seen"] == endings[0].value["seen"]
            assert ending.value["seen"].count(True) == sum(run["steps"] for run in whole["runs"])
        assert False in endings[0].value["seen"] or size > 2
        for result in (tmp_path / "one").rglob("result.json"):
            one, other = result.parent, out / result.parent.relative_to(tmp_path / "one")
            assert_alike(log_lines(other), log_lines(one))
            results = [json.loads((run / result.name).read_bytes()) for run in (other, one)]
            assert_alike(results[0]["details"], results[1]["details"], "dev")
        name = "test.predictions.jsonl"
        assert_alike(rows_of(out / name), rows_of(tmp_path / "one" / name), "dev")
        assert files_of(out) == files_of(tmp_path / "one")
        assert leftovers(out) == []


def watch_exchanges(rank: int) -> list[bool]:
    """Of every micro-batch from here on whether gradients are summed after it."""
    seen: list[bool] = []
    spread_model = loop.spread_model

    def spread_and_watched(*arguments: Any) -> Any:
        spread = spread_model(*arguments)
        micro_batch = spread.micro_batch
        spread.micro_batch = lambda last: (seen.append(last), micro_batch(last))[1]
        return spread

    loop.spread_model = spread_and_watched
    return seen


def watch_work(rank: int) -> list[int]:
    """The examples of every micro-batch that this rank computes gradients of, from here on."""
    seen: list[int] = []

    def packed(examples: Any, device: Any) -> Any:
        seen.append(len(examples))
        return pack_examples(examples, device)

    pack_examples, loop.pack_examples = loop.pack_examples, packed
    return seen


def test_every_rank_has_work(model: Path, files: Files, tmp_path: Path) -> None:
    """Without --micro-tokens each rank gets a share of every batch; with fewer examples than ranks some get none."""
    train, dev = files["classify"]
    # 24 examples in batches of 7, 7, 7 and 3; without dropout, whose masks depend on the micro-batches
    options = {"model": model, "train": train, "dev": dev, "batch_size": 7, "epochs": 1, "dropout": 0}
    tune(tmp_path / "one", "classify", **options)
    endings = run_ranks(4, tune_rank, tmp_path / "four", "classify", options, watch_work)
    summaries(endings)
    assert_alike(log_lines(tmp_path / "four"), log_lines(tmp_path / "one"))
    seen = [ending.value["seen"] for ending in endings]
    assert [len(numbers) for numbers in seen] == [4, 4, 4, 3]
    assert [sum(numbers) for numbers in zip(*(numbers[:3] for numbers in seen), strict=True)] == [7, 7, 7]
    assert min(map(min, seen)) == 1
    assert [numbers[3:] for numbers in seen] == [[1], [1], [1], []]


def test_shares_are_even() -> None:
    def lengths(sizes: list[int], parts: int) -> list[int]:
        shares = split_evenly(sizes, parts)
        assert [n for share in shares for n in range(len(sizes))[share]] == list(range(len(sizes)))
        assert len(shares) == parts
        return [len(range(len(sizes))[share]) for share in shares]

    assert lengths([1] * 13, 4) == [3, 3, 4, 3]
    assert lengths([9, 1, 1, 1], 4) == [1, 1, 1, 1]
    assert lengths([9, 1, 1, 1], 2) == [1, 3]
    assert lengths([5, 4, 3, 2, 1, 1], 2) == [2, 4]
    assert lengths([1, 1], 4) == [1, 1, 0, 0]
    assert lengths([], 3) == [0, 0, 0]
    assert lengths([7, 7], 1) == [2]


# --- resumed on other numbers of ranks


def stop_at_step_5(rank: int) -> None:
    """A SIGTERM to the second rank only."""
    if rank == 1:
        patch: Any = Patch()
        StepProbe(patch).at(5, lambda: signal.raise_signal(signal.SIGTERM))


def test_saved_on_2_and_resumed_on_1_and_4(model: Path, files: Files, tmp_path: Path) -> None:
    train, dev = files["ner"]
    options = BUSY | {"model": model, "train": train, "dev": dev, "checkpoint__every": 0}
    whole = tune(tmp_path / "whole", "ner", **options)
    assert whole["runs"][0]["steps"] == 8
    endings = run_ranks(2, tune_rank, tmp_path / "begun", "ner", options, stop_at_step_5)
    assert [ending.error for ending in endings] == ["KeyboardInterrupt: "] * 2, endings
    assert "interrupted: the run is saved at step 5" in endings[0].said
    assert endings[1].said == ""
    assert [path.name for path in (tmp_path / "begun" / "checkpoints").glob("step-*")] == ["step-00000005"]
    shutil.copytree(tmp_path / "begun", tmp_path / "again")
    alone = tune(tmp_path / "begun", "ner", **options)
    endings = run_ranks(4, tune_rank, tmp_path / "again", "ner", options)
    assert "warning: the run began otherwise (ranks 2 → 4)" in endings[0].said
    for name, summary in (("begun", alone), ("again", summaries(endings))):
        assert_alike(log_lines(tmp_path / name), log_lines(tmp_path / "whole"))
        assert_alike(timeless(summary), timeless(whole))


# --- mistakes


def test_a_mistake_in_a_file_is_told_once(model: Path, files: Files, tmp_path: Path) -> None:
    dev = write_rows(tmp_path / "dev.csv", ("text", "label"), [("a good film", "pos"), ("a dull film", "bad")])
    options = {"model": model, "train": files["classify"][0], "dev": dev}
    endings = run_ranks(2, tune_rank, tmp_path / "run", "classify", options)
    assert endings[0].error is not None
    assert endings[0].error.startswith(f"UserError: {dev}:3: label 'bad' is not one of the training file's: neg, pos")
    assert endings[1].error == endings[0].error.replace("UserError", "ToldElsewhere")
    assert not (tmp_path / "run").exists()


def other_rows_on_rank_1(rank: int) -> None:
    if rank == 1:
        open_task_data = runs.open_task_data
        runs.open_task_data = lambda settings, *more: open_task_data(
            replace(settings, train=settings.train.replace("train", "other")), *more
        )


def test_ranks_with_other_files(model: Path, tmp_path: Path) -> None:
    paths = [
        write_rows(tmp_path / name, ("text", "label"), reviews(8, seed))
        for seed, name in enumerate(("train.csv", "other.csv"))
    ]
    options = {"model": model, "train": paths[0], "dev": paths[0]}
    endings = run_ranks(2, tune_rank, tmp_path / "run", "classify", options, other_rows_on_rank_1)
    assert endings[0].error is not None
    assert "or the task's files: not the same here as on the first rank's machine" in endings[0].error
    assert endings[0].error.startswith("UserError: rank 1 of 2")


# --- glue


def glue_rank(folder: Path, out: Path, model: Path) -> Any:
    patch: Any = Patch()
    quicken(patch)
    with join_ranks() as ranks:
        return {"summary": glue_of_two(folder, out, model, ranks)}


def glue_of_two(folder: Path, out: Path, model: Path, *ranks: Any) -> dict[str, Any]:
    settings = make_settings("mnli", model, data=folder, epochs=1, micro_tokens=40)
    return glue.run_glue(settings, str(folder), out, ("cola", "ax", "mnli"), *ranks)


def test_two_glue_tasks_on_two_ranks(model: Path, tmp_path: Path) -> None:
    folder = write_glue(tmp_path / "glue")
    whole = glue_of_two(folder, tmp_path / "one", model)
    endings = run_ranks(2, glue_rank, folder, tmp_path / "two", model)
    found = summaries(endings)
    assert list(found["tasks"]) == ["cola", "mnli"]
    places = {"submission": "", "table": ""}
    assert_alike(timeless(found) | places, timeless(whole) | places, "dev")
    for run in ("one", "two"):
        with zipfile.ZipFile(tmp_path / run / "submission.zip") as archive:
            assert sorted(archive.namelist()) == ["AX.tsv", "CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv"]
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")
