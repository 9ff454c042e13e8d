"""Values of settings: from TOML's typed values or the command line's text to what a field's annotation asks for.

One small set of types (whole number, number, true/false, text, choices, none, tuples) is enough for every setting, so
that each has one spelling, one description for messages and `--help`, and one check.
"""

import math
import os
import re
import types
import typing
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on"), ("false", "no", "off")


def convert(value: Any, annotation: Any, is_text: bool) -> Any:
    """Turn a TOML value, or a text typed on the command line (`is_text`), into what `annotation` asks for.

    A whole number may be written 1_000 or 1e6; `none` means None where the annotation allows None.
    Raises ValueError when the value is not of that type.
    """
    arguments = typing.get_args(annotation)
    if _is_union(annotation):
        return _convert_union(value, arguments, is_text)
    if typing.get_origin(annotation) is Literal:
        for choice in arguments:
            if value == str(choice) if is_text else type(value) is type(choice) and value == choice:
                return choice
        raise ValueError
    if typing.get_origin(annotation) is tuple:
        return _convert_tuple(value, arguments, is_text)
    if annotation is bool:
        return _convert_bool(value, is_text)
    if annotation is int:
        return _convert_int(value, is_text)
    if annotation is float:
        if not is_text and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError
        return _convert_float(value)
    if annotation is str:
        if not isinstance(value, str):
            raise ValueError
        return value if is_text else typed_text(value)
    raise TypeError(f"settings cannot hold {annotation!r}")


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (types.UnionType, typing.Union)


def _convert_union(value: Any, members: Sequence[Any], is_text: bool) -> Any:
    none = type(None)
    if none in members and isinstance(value, str) and (value.lower() if is_text else value) == "none":
        return None
    # any text is a str, so str is tried last
    for member in sorted((member for member in members if member is not none), key=lambda member: member is str):
        try:
            return convert(value, member, is_text)
        except ValueError:
            continue
    raise ValueError


def _convert_tuple(value: Any, arguments: Sequence[Any], is_text: bool) -> tuple[Any, ...]:
    if is_text:
        items = value.split(",") if value else []
    elif isinstance(value, list | tuple):
        items = list(value)
    else:
        raise ValueError
    any_length = len(arguments) == 2 and arguments[1] is ...
    kinds = [arguments[0]] * len(items) if any_length else list(arguments)
    if len(kinds) != len(items):
        raise ValueError
    return tuple(convert(item, kind, is_text) for item, kind in zip(items, kinds, strict=True))


def _convert_bool(value: Any, is_text: bool) -> bool:
    if is_text and value.lower() in TRUE_WORDS + FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    if not is_text and isinstance(value, bool):
        return value
    raise ValueError


def _convert_float(value: Any) -> float:
    try:
        number = float(value)
    except OverflowError as error:  # a whole number of 400 digits
        raise ValueError from error
    if math.isnan(number):
        raise ValueError
    return number


def _convert_int(value: Any, is_text: bool) -> int:
    if not is_text and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError
    if isinstance(value, int):
        return value
    try:
        number = Decimal(value)  # exact where float(…) would round 1e23
    except InvalidOperation as error:
        raise ValueError from error
    if not number.is_finite() or number.adjusted() > 30 or number != number.to_integral_value():
        raise ValueError
    return int(number)


def describe_type(annotation: Any) -> str:
    """What may be given for `annotation`, in words: `a whole number`, `one of tiny, mini`, `text or none`."""
    arguments = typing.get_args(annotation)
    if _is_union(annotation):
        words = [describe_type(member) for member in arguments if member is not type(None)]
        return " or ".join(words + ["none"] * (type(None) in arguments))
    if typing.get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if typing.get_origin(annotation) is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return f"any count of values, each {describe_type(arguments[0])} (command line: separated by commas)"
        each = ", ".join(describe_type(argument) for argument in arguments)
        return f"{len(arguments)} values: {each} (command line: separated by commas)"
    words_of = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if annotation not in words_of:
        raise TypeError(f"settings cannot hold {annotation!r}")
    return words_of[annotation]


def share_hint(value: Any, annotation: Any) -> str:
    """`": 50% is 0.5"` for a share that is written so where a number is to be given, else nothing."""
    found = isinstance(value, str) and re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]+)?) ?%", value)
    if not found or float not in (annotation, *typing.get_args(annotation)):
        return ""
    return f": {value} is {Decimal(found[1]).scaleb(-2).normalize():f}"


def placeholder(annotation: Any) -> str:
    """What stands for the value in a usage line: `N`, `X`, `true|false`, `tiny|mini`, `N,N`."""
    arguments = typing.get_args(annotation)
    if _is_union(annotation):
        return "|".join(placeholder(member) for member in arguments if member is not type(None))
    if typing.get_origin(annotation) is Literal:
        return "|".join(map(str, arguments))
    if typing.get_origin(annotation) is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return f"{placeholder(arguments[0])},…"
        return ",".join(map(placeholder, arguments))
    names = {bool: "true|false", int: "N", float: "X", str: "TEXT"}
    if annotation not in names:
        raise TypeError(f"settings cannot hold {annotation!r}")
    return names[annotation]


def to_toml_value(value: Any) -> Any:
    """The TOML value that `convert` turns into `value` again. Raises ValueError for a text that is not Unicode."""
    if isinstance(value, tuple):
        return [to_toml_value(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        # under a locale that is not UTF-8, Python hands over an "é" typed in a path as two escaped bytes
        return value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"{value!r} is not valid Unicode") from error


def typed_text(text: str) -> str:
    """The inverse of the escape above: `text` as this process would have got it typed, so that a path in it opens."""
    return os.fsdecode(text.encode("utf-8"))


def show_value(value: Any) -> str:
    """A value as one would type it on the command line."""
    if isinstance(value, tuple):
        return ",".join(show_value(item) for item in value) or "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
