"""Settings in `--help`: every key, its value by default and in the default recipe, readable in 100 columns."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from bertsmith.option_help import HELP_COLUMN, WIDTH, describe_recipes, describe_settings
from bertsmith.options import list_recipes, list_settings, load_recipe
from bertsmith.training.settings import PretrainSettings


@dataclass(frozen=True)
class Optimizer:
    """The update rule. More about it."""

    name: Literal["adamw", "muon"] = field(default="adamw", metadata={"help": "which optimizer"})
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata={"help": "decay of the two moments"})
    clip: float | None = field(default=1.0, metadata={"help": "norm that gradients are cut to\nNone: never."})


@dataclass(frozen=True)
class Settings:
    data: str = field(metadata={"help": "folder"})
    steps: int | None = field(default=None, metadata={"help": "how many", "flag": "--steps"})
    lengths: tuple[int, ...] = (128, 512)
    cased: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch_size: int = field(default=32, metadata={"help": " ".join(["word"] * 40), "flag": "-b"})


def test_each_key_has_its_place_its_values_and_its_default() -> None:
    text = describe_settings(Settings, {"steps": 5, "optimizer": {"name": "muon", "clip": 1.0}}, "laptop")
    assert text.split("\n") == [
        "  --data TEXT                 folder (required)",
        "  --steps N                   how many (laptop: 5)",
        "  --lengths N,…               (default 128,512)",
        "  --cased true|false          (default false)",
        "  -b, --batch-size N          word word word word word word word word word word word word word word",
        "                              word word word word word word word word word word word word word word",
        "                              word word word word word word word word word word word word (default",
        "                              32)",
        "",
        "optimizer: The update rule",
        "  --optimizer.name adamw|muon",
        "                              which optimizer (default adamw; laptop: muon)",
        "  --optimizer.betas X,X       decay of the two moments (default 0.9,0.999)",
        "  --optimizer.clip X          norm that gradients are cut to (default 1.0)",
    ]


def test_the_help_of_pretraining_names_every_key_within_its_width() -> None:
    lines = describe_settings(PretrainSettings, load_recipe("laptop"), "laptop").split("\n")
    assert max(map(len, lines)) <= WIDTH
    flags = {part for line in lines for part in line[: HELP_COLUMN + 20].replace(",", "").split() if part[:2] == "--"}
    assert {f"--{setting.key.replace('_', '-')}" for setting in list_settings(PretrainSettings)} <= flags
    for setting in list_settings(PretrainSettings):
        assert setting.field.metadata.get("help"), f"{setting.key} has no help"


def test_recipes_are_listed_within_the_width() -> None:
    lines = describe_recipes(list_recipes()).split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert [line.split()[0] for line in lines if not line.startswith("    ")] == list(list_recipes())


def test_a_field_type_that_settings_cannot_hold_is_a_fault_of_ours() -> None:
    broken: Any = dataclasses.make_dataclass("broken", [("x", dict, field(default_factory=dict))])
    with pytest.raises(TypeError, match="settings cannot hold"):
        describe_settings(broken)
