"""`bertsmith demo`: the real way through every stage, again over an earlier one, and never over anything else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith import options
from bertsmith.demo import MARK, STAGES, clear
from bertsmith.errors import UserError
from bertsmith.options import Recipe, load_recipe
from bertsmith.tasks import runs
from command_line import Outcome, bertsmith, bertsmith_process


@pytest.fixture
def tiny_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's recipe with a model, an evaluation and a fine-tuning that take no time."""

    def load_tiny(name: str) -> Recipe:
        recipe = load_recipe(name)
        assert recipe["model"] == "mini"
        return Recipe(recipe | {"model": "tiny", "eval": {"every": 0, "examples": 16}}, recipe.source)

    finetune = runs.finetune
    monkeypatch.setattr(options, "load_recipe", load_tiny)
    monkeypatch.setattr(runs, "finetune", lambda settings, out: finetune(replace(settings, epochs=0.1), out))


def check(outcome: Outcome, out: Path) -> None:
    summary = outcome.json
    assert list(summary) == ["vocab", "prepare", "pretrain", "fill", "finetune"]
    assert summary["vocab"]["size"] == 8000
    assert summary["prepare"]["documents"] > 200
    assert summary["prepare"]["unknown_rate"] < 0.01
    assert summary["pretrain"]["steps"] >= 1
    assert summary["pretrain"]["eval_nsp_accuracy"] is not None
    assert summary["pretrain"]["eval_mlm_loss"] < summary["pretrain"]["ln_vocab"]
    assert [len(text["masks"]) for text in summary["fill"]["texts"]] == [1, 1, 1]
    assert summary["finetune"]["labels"] == ["negative", "positive"]
    assert summary["finetune"]["data_report"]["train"]["rows"] == 3000
    assert json.loads((out / MARK).read_text(encoding="utf-8")) == summary
    assert {path.name for path in out.iterdir()} == {*STAGES, MARK}
    for number, command in enumerate(("vocab TEXT", "prepare TEXT", "pretrain --data", "fill", "finetune classify"), 1):
        assert f"{number}/5 " in outcome.err
        assert f"bertsmith {command}" in outcome.err


@pytest.mark.usefixtures("tiny_recipe")
def test_the_whole_way_twice(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    check(bertsmith("demo", "--out", out, "--minutes", 0.005, "--json"), out)
    (out / "run" / "left over").write_bytes(b"")
    (out / ".corpus.partial-1").mkdir()
    shown = bertsmith("demo", "--out", out, "--minutes", 0.005, "--seed", 7)
    assert shown.code == 0
    assert not (out / "run" / "left over").exists()
    assert "seed = 7\n" in (out / "run" / "config.toml").read_text(encoding="utf-8")
    *texts, last, tuned = shown.out.splitlines()
    assert len(texts) == 3
    assert texts[0].startswith("She opened the [MASK] and looked out of the window.  →  ")
    assert last.startswith("held-out MLM loss ")
    assert last.endswith(f"the model is {out}/run/model, the curve loss.png beside it")
    assert tuned.startswith("fine-tuned to tell negative from positive film reviews: accuracy ")
    assert tuned.endswith(f"the model is {out}/sentiment/model")


@pytest.mark.slow
def test_the_demo_as_it_ships(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    check(bertsmith_process("demo", "--out", out, "--minutes", 0.1, "--json", timeout=500), out)


# --- what it clears, and what it does not


def test_only_an_earlier_demo_is_cleared(tmp_path: Path) -> None:
    for name in (*STAGES, ".run.partial-7", MARK):
        (tmp_path / name).mkdir() if name != MARK else (tmp_path / name).write_bytes(b"{}")
    (tmp_path / "run" / "model").mkdir()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MARK]


@pytest.mark.parametrize("stranger", ["notes.txt", "runs", ".git", "vocabulary"])
def test_a_folder_with_anything_else_is_refused_and_left(stranger: str, tmp_path: Path) -> None:
    (tmp_path / MARK).write_bytes(b"{}")
    (tmp_path / "run").mkdir()
    (tmp_path / stranger).write_bytes(b"mine")
    with pytest.raises(UserError, match=rf"holds something else than an earlier demo \({stranger}\)"):
        clear(tmp_path)
    assert (tmp_path / "run").is_dir()
    assert (tmp_path / stranger).read_bytes() == b"mine"


def test_a_users_own_run_is_no_demo(tmp_path: Path) -> None:
    for name in STAGES:  # the names that the README uses
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"there is no {MARK}\); choose another --out"):
        clear(tmp_path)
    assert (tmp_path / "run").is_dir()


def test_a_link_is_no_folder_of_a_demo(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "model").mkdir(parents=True)
    out = tmp_path / "demo"
    out.mkdir()
    (out / MARK).write_bytes(b"{}")
    (out / "run").symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(UserError, match=r"holds something else than an earlier demo \(run\)"):
        clear(out)
    assert (elsewhere / "model").is_dir()


def test_wrong_settings_are_told_before_anything_is_cleared(tmp_path: Path) -> None:
    (tmp_path / MARK).write_bytes(b"{}")
    (tmp_path / "run").mkdir()
    assert "minutes" in bertsmith("demo", "--out", tmp_path, "--minutes", -1).mistake
    assert (tmp_path / "run").is_dir()
