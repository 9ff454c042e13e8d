"""Settings: frozen dataclasses filled from a TOML recipe, then from `--section.key value` pairs of the command line.

In go a dataclass (its fields may be dataclasses: the sections), a recipe, overrides; out comes an instance. All
mistakes are reported in one UserError, each with its key and origin: found one a run, each would cost a start.
"""

import dataclasses
import difflib
import importlib.resources
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from bertsmith.errors import UserError
from bertsmith.option_values import convert, describe_type, share_hint, to_toml_value

T = TypeVar("T")
COMMAND_LINE = "command line"


class Recipe(dict[str, Any]):
    """The tables of a recipe; `source` is the name that error messages use for it."""

    def __init__(self, tables: Mapping[str, Any], source: str) -> None:
        super().__init__(tables)
        self.source = source


# --- recipes: TOML files by name or by path


def recipe_folder() -> Traversable:
    """Where the recipes that ship with the package lie."""
    return importlib.resources.files("bertsmith") / "recipes"


def list_recipes() -> dict[str, str]:
    """Name → first comment line of every recipe that ships with the package, in name order."""
    recipes = {}
    folder = recipe_folder()
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")] if folder.is_dir() else []
    for file in sorted(files, key=lambda file: file.name):
        first_line = file.read_text(encoding="utf-8").partition("\n")[0]
        recipes[file.name.removesuffix(".toml")] = first_line.removeprefix("#").strip()
    return recipes


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read the recipe NAME that ships with the package, or a TOML file (anything that ends in .toml or holds a slash).

    Raises UserError: no such recipe or file; not UTF-8; a TOML syntax error, with file, line and column.
    """
    given = os.fspath(name_or_path)
    if given.endswith(".toml") or os.sep in given or "/" in given:
        source: Traversable = Path(given)
        if source.is_dir():
            raise UserError(f"{given}: a folder, but a recipe is a TOML file; name the file in it")
    else:
        source = recipe_folder() / f"{given}.toml"
        if not source.is_file():
            known = list(list_recipes())
            raise UserError(
                f"recipe {given!r} is not known{did_you_mean(given, known)}; "
                f"use one of {', '.join(known)}, or the path of a .toml file"
            )
    try:
        text = source.read_bytes().decode("utf-8-sig")
        return Recipe(tomllib.loads(text), given)
    except OSError as error:
        raise UserError(f"{given}: the recipe cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{given}: byte {error.start + 1} is not UTF-8; save the recipe as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        # tomllib gives the place only inside its text: "… (at line 3, column 5)" or "… (at end of document)"
        what, _, place = str(error).rstrip(")").rpartition(" (at ")
        raise UserError(f"{given}, {place}: not valid TOML: {what}; mend that line") from error


# --- the command line's --section.key pairs


def parse_dotted(args: Sequence[str], known_flags: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Turn what argparse left over into (key, value) pairs: `--a.b v` and `--a.b=v`, hyphens in keys as underscores.

    `known_flags` are the flat flags argparse knows, only to suggest one for a misspelt flag.
    Raises UserError naming every argument that is not such a pair.
    """
    pairs, wrong = [], []
    queue = list(args)
    while queue:
        argument = queue.pop(0)
        flag, equals, value = argument.partition("=")
        if not flag.startswith("--") or len(flag) == 2:
            wrong.append(f"argument {argument!r} belongs to no option; quote a value that holds spaces")
            continue
        if not equals and queue and not queue[0].startswith("--"):
            equals, value = "=", queue.pop(0)
        if "." not in flag:
            wrong.append(f"option {flag} is not known{did_you_mean(flag, known_flags)}")
        elif not equals:
            wrong.append(f"option {flag} needs a value: {flag} VALUE")
        else:
            pairs.append((flag[2:].replace("-", "_"), value))
    _raise_all([f"{COMMAND_LINE}: {message}" for message in wrong])
    return pairs


# --- from recipe and overrides to settings


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of the settings: its dotted name, its annotation and its field."""

    key: str
    annotation: Any
    field: "dataclasses.Field[Any]"

    @property
    def default(self) -> Any:
        """The default value, or dataclasses.MISSING when the user must give one."""
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        return self.field.default

    @property
    def flag(self) -> str:
        """How the command line spells the key."""
        return str(self.field.metadata.get("flag", "--" + self.key.replace("_", "-")))


@dataclasses.dataclass
class _Filling:
    """What is known while settings are put together: values given, where each came from, what was wrong."""

    given: dict[str, Any]
    origins: dict[str, str]
    refused: set[str]
    errors: list[str]


def load_settings(
    cls: type[T], recipe: Mapping[str, Any] | None = None, overrides: Iterable[tuple[str, str]] = ()
) -> T:
    """Build `cls` from its defaults, then the recipe, then the overrides (the later wins).

    A field's `metadata` may hold `"help"` and `"flag"`, the flat flag that the command line has for the same setting. A
    dataclass may have `problems() -> list[str]`, each entry `"key: what is wrong"` or `"key, key: why they contradict"`
    with keys relative to that dataclass; so may a section within it.

    Raises one UserError holding every mistake: unknown keys, wrong types, keys given twice on the command line, missing
    values, and what `problems()` says.
    """
    settings = {setting.key: setting for setting in list_settings(cls)}
    filling = _Filling({}, {}, set(), [])
    if recipe is not None:
        _take_table(settings, recipe, "", getattr(recipe, "source", "recipe"), filling)
    _take_overrides(settings, overrides, filling)
    built = _build(cls, "", filling)
    _raise_all(filling.errors)
    return typing.cast(T, built)


def list_settings(cls: type, prefix: str = "") -> list[Setting]:
    """Every key of `cls`, sections flattened, in the order of the fields."""
    hints = typing.get_type_hints(cls)
    settings: list[Setting] = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation):
            settings += list_settings(typing.cast(type, annotation), f"{prefix}{field.name}.")
        else:
            settings.append(Setting(prefix + field.name, annotation, field))
    return settings


def _take_table(
    settings: Mapping[str, Setting], table: Mapping[str, Any], prefix: str, source: str, filling: _Filling
) -> None:
    """Take the values of one TOML table (and the tables in it)."""
    for name, value in table.items():
        key = prefix + name
        if key in settings:
            _take_value(settings[key], value, False, source, f"{source}: {key}", filling)
        elif not any(known.startswith(key + ".") for known in settings):
            filling.errors.append(f"{source}: {_unknown_key(key, settings)}")
        elif isinstance(value, Mapping):
            _take_table(settings, value, key + ".", source, filling)
        else:
            filling.errors.append(f"{source}: {key} is a section, not a value; write [{key}] and its keys below")


def _take_overrides(settings: Mapping[str, Setting], overrides: Iterable[tuple[str, str]], filling: _Filling) -> None:
    """Take the command line's pairs; text is converted by the field's annotation."""
    seen: dict[str, str] = {}
    for key, text in overrides:
        if key not in settings:
            filling.errors.append(f"{COMMAND_LINE}: {_unknown_key(key, settings)}")
            continue
        setting = settings[key]
        if key in seen:
            filling.errors.append(
                f"{COMMAND_LINE}: {key} ({setting.flag}) is given twice, as {seen[key]!r} and {text!r}; give it once"
            )
            filling.refused.add(key)
            continue
        seen[key] = text
        name = key if setting.flag == "--" + key.replace("_", "-") else f"{key} ({setting.flag})"
        _take_value(setting, text, True, COMMAND_LINE, f"{COMMAND_LINE}: {name}", filling)


def _take_value(setting: Setting, value: Any, is_text: bool, origin: str, place: str, filling: _Filling) -> None:
    """Convert one value and note it, or note what is wrong with it."""
    try:
        filling.given[setting.key] = convert(value, setting.annotation, is_text)
        filling.origins[setting.key] = origin
        filling.refused.discard(setting.key)
    except ValueError:
        filling.errors.append(f"{place} = {value!r} is not allowed; give {describe_type(setting.annotation)}"
                              f"{share_hint(value, setting.annotation)}")  # fmt: skip
        filling.refused.add(setting.key)


def _build(cls: type, prefix: str, filling: _Filling) -> Any:
    """Instantiate `cls` with its sections and gather its problems; None when a value is missing."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    complete = True
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        key = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _build(typing.cast(type, hints[field.name]), key + ".", filling)
            complete = complete and values[field.name] is not None
            continue
        setting = Setting(key, hints[field.name], field)
        value = filling.given.get(key, setting.default)
        if value is dataclasses.MISSING:
            complete = False
            if key not in filling.refused:
                filling.errors.append(f"{key} is missing: give {setting.flag} or write it in the recipe")
        else:
            values[field.name] = value
    if not complete:
        return None
    try:
        instance = cls(**values)
    except UserError as error:  # a dataclass that is used outside settings too checks itself when it is made
        filling.errors.append(f"{prefix}{error}")
        return None
    for problem in instance.problems() if hasattr(instance, "problems") else []:
        _take_problem(problem, prefix, filling)
    return instance


def _take_problem(problem: str, prefix: str, filling: _Filling) -> None:
    """Note a `problems()` entry with full keys and origins, unless it follows from a value that was refused already."""
    names, colon, what = problem.partition(": ")
    if not colon or not re.fullmatch(r"[a-z_0-9.]+(, [a-z_0-9.]+)*", names):
        filling.errors.append(f"{prefix.rstrip('.')}: {problem}" if prefix else problem)
        return
    keys = [prefix + name for name in names.split(", ")]
    if not filling.refused.isdisjoint(keys):
        return
    origins = [filling.origins.get(key, "default") for key in keys]
    if set(origins) == {"default"}:
        filling.errors.append(f"{', '.join(keys)}: {what}")
    elif len(set(origins)) == 1:
        filling.errors.append(f"{origins[0]}: {', '.join(keys)}: {what}")
    else:
        where = ", ".join(f"{key} ({origin})" for key, origin in zip(keys, origins, strict=True))
        filling.errors.append(f"{where}: {what}")


def _unknown_key(key: str, settings: Mapping[str, Setting]) -> str:
    inside = [known for known in settings if known.startswith(key + ".")]
    if inside:
        return f"{key} is a section, not a value; give one of its keys: {', '.join(inside)}"
    leaf = key.rpartition(".")[2]
    elsewhere = [known for known in settings if known.rpartition(".")[2] == leaf]
    if elsewhere:  # the right name in the wrong section
        return f"{key} is not known{did_you_mean(key, elsewhere, cutoff=0.0)}"
    sections = {known.rpartition(".")[0] for known in settings if "." in known}
    return f"{key} is not known{did_you_mean(key, [*settings, *sorted(sections)])}"


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6, show: Callable[[str], str] = str) -> str:
    """`"; did you mean X?"` for the nearest of `known`, or nothing when none is near; capitals make nothing far.

    The initials of a name are near it: lr means learning-rate.
    """
    # all flags have the two hyphens, which would bring short ones near to each other: --lr to --help
    folded = {name.lower().removeprefix("--"): name for name in known}
    wanted = given.lower().removeprefix("--")
    near = [name for name in folded if len(wanted) > 1 and wanted == _initials(name)]
    near = near or difflib.get_close_matches(wanted, list(folded), n=1, cutoff=cutoff)
    return f"; did you mean {show(folded[near[0]])}?" if near else ""


def _initials(name: str) -> str:
    return "".join(word[:1] for word in re.split("[-_]", name.rpartition(".")[2]))


def _raise_all(errors: Sequence[str]) -> None:
    if len(errors) == 1:
        raise UserError(errors[0])
    if errors:
        raise UserError(f"{len(errors)} options are wrong:\n  " + "\n  ".join(errors))


# --- settings to text


def settings_to_toml(settings: Any) -> str:
    """Write settings as TOML that `load_settings` turns into equal settings; None is left out where it is the default.

    Raises UserError for a text that is no valid Unicode (a path in another encoding), naming its key.
    """
    return tomli_w.dumps(_to_table(settings, ""))


def _to_table(settings: Any, prefix: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not field.init:
            continue
        if dataclasses.is_dataclass(value):
            table[field.name] = _to_table(value, f"{prefix}{field.name}.")
        elif value is not None:
            table[field.name] = _toml_value(value, prefix + field.name)
        elif Setting(prefix + field.name, None, field).default is not None:
            table[field.name] = "none"  # TOML has no null, and leaving it out would bring the default back
    return table


def _toml_value(value: Any, key: str) -> Any:
    try:
        return to_toml_value(value)
    except ValueError as error:
        raise UserError(f"{key}: {error}; it cannot be written to a recipe") from error
