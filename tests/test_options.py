"""Settings from recipe and command line: types, precedence, and every mistake reported at once with its origin."""

import argparse
import dataclasses
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith import options
from bertsmith.errors import UserError
from bertsmith.options import (
    Recipe,
    list_recipes,
    load_recipe,
    load_settings,
    parse_dotted,
    settings_to_toml,
)


@dataclass(frozen=True)
class Optimizer:
    name: Literal["adamw", "muon"] = field(default="adamw", metadata={"help": "Which optimizer."})
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata={"help": "Decay of the two moments."})
    clip: float | None = field(default=1.0, metadata={"help": "Norm that gradients are cut to.\nNone: never."})

    def problems(self) -> list[str]:
        return [] if self.clip is None or self.clip > 0 else [f"clip: must be above 0, got {self.clip}"]


@dataclass(frozen=True)
class Train:
    batch_size: int = field(default=32, metadata={"help": "Sequences a step.", "flag": "--batch-size"})
    steps: int | None = field(default=None, metadata={"help": "Steps to train."})
    minutes: float | None = None
    lengths: tuple[int, ...] = (128, 512)
    dropout: bool = True
    optimizer: Optimizer = field(default_factory=Optimizer)

    def problems(self) -> list[str]:
        problems = []
        if self.batch_size < 1:
            problems.append(f"batch_size: must be at least 1, got {self.batch_size}")
        if self.steps is not None and self.minutes is not None:
            problems.append("steps, minutes: give one of the two")
        return problems


@dataclass(frozen=True)
class Settings:
    seed: int = 1
    objective: Literal["mlm+nsp", "mlm"] = "mlm+nsp"
    note: str | None = "plain"
    workers: int | Literal["auto"] = "auto"
    train: Train = field(default_factory=Train)

    def problems(self) -> list[str]:
        if self.objective == "mlm" and self.train.lengths == ():
            return ["objective, train.lengths: mlm needs a length"]
        return []


@dataclass(frozen=True)
class WithRequired:
    data: str
    train: Train = field(default_factory=Train)


@dataclass(frozen=True)
class SelfChecking:
    layers: int = 2

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UserError(f"layers: must be at least 1, got {self.layers}")


@dataclass(frozen=True)
class WithSelfChecking:
    model: SelfChecking = field(default_factory=SelfChecking)
    seed: int = 1


def errors_of(cls: type, recipe: Any = None, overrides: Any = ()) -> list[str]:
    """The mistakes that the one UserError lists."""
    with pytest.raises(UserError) as caught:
        load_settings(cls, recipe, overrides)
    lines = str(caught.value).split("\n  ")
    if len(lines) > 1:
        assert lines[0] == f"{len(lines) - 1} options are wrong:"
        return lines[1:]
    return lines


# --- precedence and types


def test_defaults_then_recipe_then_overrides() -> None:
    assert load_settings(Settings) == Settings()
    recipe = {"seed": 2, "train": {"batch_size": 64, "optimizer": {"name": "muon"}}}
    overrides = [("train.batch_size", "16"), ("train.optimizer.betas", "0.8,0.95")]
    settings = load_settings(Settings, recipe, overrides)
    assert settings.seed == 2
    assert settings.train.batch_size == 16
    assert settings.train.optimizer == Optimizer("muon", (0.8, 0.95))
    assert settings.train.lengths == (128, 512)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "-7", -7),
        ("seed", "1_000", 1000),
        ("seed", "1e6", 1_000_000),
        ("seed", "2.0", 2),
        ("seed", "1e23", 10**23),
        ("train.minutes", "0.5", 0.5),
        ("train.minutes", "3", 3.0),
        ("train.minutes", "None", None),
        ("train.steps", "none", None),
        ("train.dropout", "No", False),
        ("train.dropout", "on", True),
        ("train.dropout", "TRUE", True),
        ("objective", "mlm", "mlm"),
        ("note", "", ""),
        ("note", "none", None),
        ("note", "a = b, c", "a = b, c"),
        ("workers", "4", 4),
        ("workers", "auto", "auto"),
        ("train.lengths", "64", (64,)),
        ("train.lengths", "64,1e3", (64, 1000)),
        ("train.lengths", "", ()),
        ("train.optimizer.clip", "inf", float("inf")),
    ],
)
def test_command_line_text_becomes_the_annotated_type(key: str, text: str, value: object) -> None:
    got: Any = load_settings(Settings, None, [(key, text)])
    for name in key.split("."):
        got = getattr(got, name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "asked"),
    [
        ("seed", "ten", "a whole number"),
        ("seed", "1.5", "a whole number"),
        ("seed", "inf", "a whole number"),
        ("seed", "nan", "a whole number"),
        ("seed", "1e999999999", "a whole number"),
        ("seed", "", "a whole number"),
        ("seed", "none", "a whole number"),
        ("train.minutes", "5 min", "a number or none"),
        ("train.minutes", "nan", "a number or none"),
        ("train.minutes", "50%", "a number or none: 50% is 0.5"),
        ("train.minutes", "2.5 %", "a number or none: 2.5 % is 0.025"),
        ("train.minutes", "150%", "a number or none"),
        ("seed", "50%", "a whole number"),
        ("train.dropout", "1", "true or false"),
        ("objective", "MLM", "one of mlm+nsp, mlm"),
        ("workers", "many", "a whole number or one of auto"),
        ("train.optimizer.betas", "0.9", "2 values: a number, a number (command line: separated by commas)"),
        ("train.optimizer.betas", "0.9,", "2 values: a number, a number (command line: separated by commas)"),
        ("train.lengths", "64;128", "any count of values, each a whole number (command line: separated by commas)"),
    ],
)
def test_wrong_command_line_text_names_key_value_and_what_to_give(key: str, text: str, asked: str) -> None:
    assert errors_of(Settings, None, [(key, text)]) == [f"command line: {key} = {text!r} is not allowed; give {asked}"]


def test_recipe_values_keep_their_toml_types() -> None:
    tables = tomllib.loads(
        "seed = 1e3\nnote = 'none'\n[train]\nminutes = 6\nlengths = [64]\ndropout = false\noptimizer.clip = 2\n"
    )
    settings = load_settings(Settings, tables)
    assert (settings.seed, settings.note) == (1000, None)
    assert settings.train == Train(minutes=6.0, lengths=(64,), dropout=False, optimizer=Optimizer(clip=2.0))
    assert type(settings.train.minutes) is float


@pytest.mark.parametrize(
    "line",
    [
        "seed = '1'",
        "seed = true",
        "seed = 1.5",
        "seed = nan",
        "seed = 2024-01-01",
        "note = 1",
        "objective = 1",
        "train.dropout = 1",
        "train.dropout = 'true'",
        "train.minutes = true",
        "train.minutes = nan",
        f"train.minutes = 1{'0' * 400}",
        "train.lengths = 64",
        "train.lengths = '64,128'",
        "train.lengths = ['64']",
        "train.optimizer.betas = [0.9]",
        "train.steps = {many = 1}",
    ],
)
def test_wrong_recipe_types_are_refused_by_name(line: str) -> None:
    (error,) = errors_of(Settings, Recipe(tomllib.loads(line), "mine.toml"))
    assert error.startswith(f"mine.toml: {line.split(' = ')[0]} = ")
    assert " is not allowed; give " in error


# --- mistakes, all at once


def test_every_mistake_is_reported_at_once_with_its_origin() -> None:
    recipe = Recipe(
        {"sead": 1, "train": {"batch_size": "many", "steps": 5, "optimizer": {"clip": -1.0}}, "objective": "clm"},
        "mine.toml",
    )
    overrides = [("train.minutes", "3"), ("train.dropout", "maybe"), ("model.sedd", "2"), ("seed", "1"), ("seed", "2")]
    assert errors_of(Settings, recipe, overrides) == [
        "mine.toml: sead is not known; did you mean seed?",
        "mine.toml: train.batch_size = 'many' is not allowed; give a whole number",
        "mine.toml: objective = 'clm' is not allowed; give one of mlm+nsp, mlm",
        "command line: train.dropout = 'maybe' is not allowed; give true or false",
        "command line: model.sedd is not known",
        "command line: seed (--seed) is given twice, as '1' and '2'; give it once",
        "mine.toml: train.optimizer.clip: must be above 0, got -1.0",
        "train.steps (mine.toml), train.minutes (command line): give one of the two",
    ]


def test_problems_name_their_keys_in_full_and_their_origin() -> None:
    assert errors_of(Settings, None, [("train.batch_size", "0")]) == [
        "command line: train.batch_size: must be at least 1, got 0"
    ]
    assert errors_of(Settings, {"objective": "mlm"}, [("train.lengths", "")]) == [
        "objective (recipe), train.lengths (command line): mlm needs a length"
    ]


def test_an_override_mends_what_the_recipe_contradicts() -> None:
    recipe = {"train": {"minutes": 6}}
    settings = load_settings(Settings, recipe, [("train.steps", "10"), ("train.minutes", "none")])
    assert (settings.train.steps, settings.train.minutes) == (10, None)


def test_a_refused_value_is_not_blamed_a_second_time() -> None:
    assert len(errors_of(Settings, {"train": {"steps": 5}}, [("train.minutes", "soon")])) == 1


def test_the_flat_flag_is_named_beside_the_key() -> None:
    (error,) = errors_of(Settings, None, [("train.batch_size", "big")])
    assert error.startswith("command line: train.batch_size (--batch-size) = 'big'")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train.batchsize", "train.batch_size"),
        ("batch_size", "train.batch_size"),
        ("model.clip", "train.optimizer.clip"),
        ("trian", "train"),
        ("TRAIN.BATCHSIZE", "train.batch_size"),
        ("train.optimiser.name", "train.optimizer.name"),
    ],
)
def test_unknown_keys_get_the_nearest_known_one(key: str, near: str) -> None:
    assert errors_of(Settings, None, [(key, "1")]) == [f"command line: {key} is not known; did you mean {near}?"]


def test_a_section_is_not_a_value() -> None:
    assert errors_of(Settings, None, [("train.optimizer", "muon")]) == [
        "command line: train.optimizer is a section, not a value; give one of its keys: "
        "train.optimizer.name, train.optimizer.betas, train.optimizer.clip"
    ]
    assert errors_of(Settings, Recipe({"train": 3}, "x.toml")) == [
        "x.toml: train is a section, not a value; write [train] and its keys below"
    ]


def test_a_missing_value_is_reported_with_the_other_mistakes() -> None:
    assert errors_of(WithRequired, {"train": {"batch_size": 0}}) == [
        "data is missing: give --data or write it in the recipe",
        "recipe: train.batch_size: must be at least 1, got 0",
    ]
    # a required value that was given, but wrong, is not called missing as well
    assert errors_of(WithRequired, {"data": 5}) == ["recipe: data = 5 is not allowed; give text"]
    assert load_settings(WithRequired, None, [("data", "x")]).data == "x"


def test_a_dataclass_that_checks_itself_is_reported_with_the_rest() -> None:
    assert errors_of(WithSelfChecking, {"model": {"layers": 0}}, [("sed", "2")]) == [
        "command line: sed is not known; did you mean seed?",
        "model.layers: must be at least 1, got 0",
    ]


# --- --section.key pairs


def test_parse_dotted_takes_both_spellings() -> None:
    args = ["--train.batch-size", "8", "--a.b=x=y", "--a.c", "-1", "--a.d=", "--eval.every", "1e3"]
    assert parse_dotted(args) == [
        ("train.batch_size", "8"),
        ("a.b", "x=y"),
        ("a.c", "-1"),
        ("a.d", ""),
        ("eval.every", "1e3"),
    ]


def test_parse_dotted_reports_every_wrong_argument() -> None:
    with pytest.raises(UserError) as caught:
        parse_dotted(["stray", "--stps", "5", "--a.b", "--c.d", "1", "-x", "--e.f"], known_flags=["--steps", "--out"])
    assert str(caught.value).split("\n  ") == [
        "5 options are wrong:",
        "command line: argument 'stray' belongs to no option; quote a value that holds spaces",
        "command line: option --stps is not known; did you mean --steps?",
        "command line: option --a.b needs a value: --a.b VALUE",
        "command line: argument '-x' belongs to no option; quote a value that holds spaces",
        "command line: option --e.f needs a value: --e.f VALUE",
    ]


def test_parse_dotted_fits_what_argparse_leaves_over() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int)
    known, rest = parser.parse_known_args(["--a.b", "-1", "--steps", "5", "--c.d", "x y", "--e.f=2"])
    assert known.steps == 5
    assert parse_dotted(rest) == [("a.b", "-1"), ("c.d", "x y"), ("e.f", "2")]


# --- recipes


def test_recipes_that_ship_are_listed_and_load() -> None:
    for name, description in list_recipes().items():
        assert description
        assert load_recipe(name).source == name


def test_recipe_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "laptop.toml").write_text("# Six minutes on two cores.\nseed = 3\n", encoding="utf-8")
    (tmp_path / "demo.toml").write_text("# The demo.\n", encoding="utf-8")
    monkeypatch.setattr(options, "recipe_folder", lambda: tmp_path)
    assert list_recipes() == {"demo": "The demo.", "laptop": "Six minutes on two cores."}
    assert load_settings(Settings, load_recipe("laptop")).seed == 3
    with pytest.raises(UserError, match=r"'labtop' is not known; did you mean laptop\?; use one of demo, laptop"):
        load_recipe("labtop")


def test_recipe_by_path_with_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    file = tmp_path / "é.toml"
    file.write_bytes("\ufeffnote = 'é'\r\n[train]\r\nsteps = 1_000\r\n".encode())
    recipe = load_recipe(file)
    assert recipe.source == str(file)
    settings = load_settings(Settings, recipe)
    assert (settings.note, settings.train.steps) == ("é", 1000)


def test_broken_recipes_name_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("seed = 1\n[train\nsteps = 2\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.toml, line 2, column 7: not valid TOML: "):
        load_recipe(file)
    file.write_text("seed = 1\nseed = 2\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.toml, line 2, column 9: not valid TOML: Cannot overwrite a value"):
        load_recipe(file)
    file.write_text("seed = ", encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.toml, end of document: not valid TOML: Invalid value"):
        load_recipe(file)
    file.write_bytes(b"note = '\xe9'\n")
    with pytest.raises(UserError, match=r"broken\.toml: byte 9 is not UTF-8"):
        load_recipe(file)
    with pytest.raises(UserError, match=r"absent\.toml: the recipe cannot be read"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(UserError, match=r"a folder, but a recipe is a TOML file"):
        load_recipe(tmp_path)


# --- writing settings down

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
finite = st.floats(allow_nan=False)
settings_strategy = st.builds(
    Settings,
    seed=st.integers(),
    objective=st.sampled_from(["mlm+nsp", "mlm"]),
    note=st.none() | texts.filter(lambda text: text != "none"),
    workers=st.integers() | st.just("auto"),
    train=st.builds(
        Train,
        batch_size=st.integers(min_value=1, max_value=10**20),
        steps=st.none() | st.integers(),
        lengths=st.lists(st.integers(), min_size=1, max_size=4).map(tuple),
        dropout=st.booleans(),
        optimizer=st.builds(
            Optimizer,
            name=st.sampled_from(["adamw", "muon"]),
            betas=st.tuples(finite, finite),
            clip=st.none() | st.floats(min_value=0, exclude_min=True, allow_nan=False),
        ),
    ),
)


@given(settings_strategy)
def test_settings_written_and_loaded_again_are_equal(settings: Settings) -> None:
    again = load_settings(Settings, tomllib.loads(settings_to_toml(settings)))
    assert again == settings
    assert repr(again) == repr(settings)  # 1 and 1.0 are equal, but not the same setting


def test_none_is_left_out_only_where_it_is_the_default() -> None:
    text = settings_to_toml(Settings(note=None, train=Train(optimizer=Optimizer(clip=None))))
    tables = tomllib.loads(text)
    assert "steps" not in tables["train"]
    assert (tables["note"], tables["train"]["optimizer"]["clip"]) == ("none", "none")


def test_text_that_is_not_unicode_is_refused_by_key() -> None:
    with pytest.raises(UserError, match=r"^note: .* is not valid Unicode; it cannot be written to a recipe$"):
        settings_to_toml(Settings(note=os.fsdecode(b"caf\xe9") if sys.getfilesystemencoding() == "utf-8" else "\ud800"))


def test_paths_survive_a_locale_without_unicode(tmp_path: Path) -> None:
    """A path typed under LC_ALL=C is written as UTF-8, and read back as something that opens the same file."""
    program = """
import sys, tomllib
from dataclasses import dataclass
from bertsmith.options import load_settings, settings_to_toml
@dataclass(frozen=True)
class S:
    data: str = ""
settings = load_settings(S, None, [("data", sys.argv[1])])
written = settings_to_toml(settings)
assert load_settings(S, tomllib.loads(written)) == settings
open(load_settings(S, tomllib.loads(written)).data, "rb").close()
sys.stdout.buffer.write(written.encode("utf-8"))
"""
    file = tmp_path / "中é.txt"
    file.write_bytes(b"")
    outputs = []
    for locale in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONUTF8": "1"}):
        environment = {**os.environ, **locale}
        done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] == f'data = "{file}"\n'.encode()


def test_a_field_type_that_settings_cannot_hold_is_a_fault_of_ours() -> None:
    broken = dataclasses.make_dataclass("broken", [("x", dict, field(default_factory=dict))])
    with pytest.raises(TypeError, match="settings cannot hold"):
        load_settings(broken, {"x": {}})
