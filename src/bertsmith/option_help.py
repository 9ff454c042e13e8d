"""Settings as `--help` shows them: a flag, what it takes, what it does, and its value when nothing is said.

In go a settings dataclass and the recipe that applies when none is named; out come lines of at most 100 columns, the
sections one after the other. Nothing heavy is imported: help is there at once.
"""

import dataclasses
import textwrap
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from bertsmith.option_values import placeholder, show_value
from bertsmith.options import Setting, list_settings

WIDTH = 100
HELP_COLUMN = 30


def describe_settings(
    cls: type,
    recipe: Mapping[str, Any] | None = None,
    recipe_name: str = "recipe",
    left_out: Sequence[str] = (),
) -> str:
    """Help for every key of `cls`: top-level keys first, then each section under the first sentence of its docstring.

    `recipe`: tables of a recipe that applies when the user names none; its values are shown beside the defaults.
    `left_out`: keys that the command has no flag for.
    """
    of_recipe = dict(_flatten(recipe or {}, ""))
    blocks: dict[str, list[str]] = {}
    for setting in list_settings(cls):
        if setting.key in left_out:
            continue
        section = setting.key.rpartition(".")[0]
        blocks.setdefault(section, []).append(_describe(setting, of_recipe, recipe_name))
    parts = []
    for section in sorted(blocks, key=lambda name: name != ""):
        heading = textwrap.fill(f"{section}: {_first_sentence(_section_class(cls, section))}", WIDTH) if section else ""
        parts.append("\n".join([heading] * bool(section) + blocks[section]))
    return "\n\n".join(parts)


def _describe(setting: Setting, of_recipe: Mapping[str, Any], recipe_name: str) -> str:
    dotted = "--" + setting.key.replace("_", "-")
    flags = dotted if setting.flag == dotted else f"{setting.flag}, {dotted}"
    left = f"  {flags} {placeholder(setting.annotation)}"
    values = []
    if setting.default is dataclasses.MISSING:
        values.append("required")
    elif setting.default is not None:
        values.append(f"default {show_value(setting.default)}")
    if setting.key in of_recipe and of_recipe[setting.key] != setting.default:
        values.append(f"{recipe_name}: {show_value(of_recipe[setting.key])}")
    text = str(setting.field.metadata.get("help", "")).partition("\n")[0]
    if values:
        text = f"{text} ({'; '.join(values)})".lstrip()
    lines = textwrap.wrap(text, WIDTH - HELP_COLUMN, break_on_hyphens=False)
    if lines and len(left) <= HELP_COLUMN - 2:
        left = f"{left:<{HELP_COLUMN}}{lines.pop(0)}"
    return "\n".join([left, *(" " * HELP_COLUMN + line for line in lines)])


def _flatten(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Dotted key and value of everything in the tables of a recipe."""
    pairs: list[tuple[str, Any]] = []
    for name, value in table.items():
        pairs += _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return pairs


def _section_class(cls: type, section: str) -> type:

    for name in section.split("."):
        cls = typing.get_type_hints(cls)[name]
    return cls


def _first_sentence(cls: type) -> str:
    """The first sentence of a docstring; nothing where dataclass made one up."""
    documented = cls.__doc__ or ""
    sentence = documented.partition("\n")[0].partition(". ")[0].rstrip(".")
    return "" if documented.startswith(f"{cls.__name__}(") else sentence


def describe_recipes(recipes: Mapping[str, str]) -> str:
    """Name and description of each recipe, for `--help`."""
    width = max(map(len, recipes), default=0) + 4
    blocks = (
        textwrap.fill(f"  {name:<{width - 2}}{text}", WIDTH, subsequent_indent=" " * width, break_on_hyphens=False)
        for name, text in recipes.items()
    )
    return "\n".join(blocks)
