"""What a command prints on stdout: one JSON object, or `key: value` lines for a person.

Text leaves as UTF-8 whatever the locale says, and a path as the bytes it was typed with.
"""

import codecs
import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from bertsmith.errors import UserError

_ERRORS = "bertsmith.shown"


def use_utf8() -> None:
    """Make stdout and stderr write UTF-8; one that is closed is replaced by nowhere, so that nothing else is hit."""
    codecs.register_error(_ERRORS, _show)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=_ERRORS)


def _show(error: UnicodeError) -> tuple[str | bytes, int]:
    """A codec's error handler: bytes that the locale could not decode are written as they came, all else escaped."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def print_text(text: str) -> None:
    """Print a line. Whoever reads our output may stop reading; a full disk behind it is an error."""
    try:
        # what was no UTF-8 to begin with must not make the output invalid
        print(text.encode("utf-8", _ERRORS).decode("utf-8", "replace"), flush=True)
    except BrokenPipeError:
        _forget_stdout()
        raise SystemExit(0) from None
    except OSError as error:
        _forget_stdout()
        raise UserError(f"the output cannot be written: {error.strerror}") from error


def _forget_stdout() -> None:
    """Point stdout nowhere, so that what Python still holds back for it raises nothing at the end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_json(summary: Mapping[str, Any]) -> None:
    """One JSON object on one line; numbers that JSON cannot hold (NaN, infinity) are null."""
    print_text(json.dumps(_finite(summary), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_summary(summary: Mapping[str, Any]) -> None:
    """A summary as `key: value` lines, what is nested indented."""
    print_text("\n".join(_lines(summary, "")))


def _lines(summary: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in summary.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        elif isinstance(value, list) and len(value) > 1 and any(len(str(item)) > 20 for item in value):
            lines += [f"{indent}{key}:", *(f"{indent}  {_word(item)}" for item in value)]
        else:
            lines.append(f"{indent}{key}: {_word(value)}")
    return lines


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "none"
    if value is None or value == {}:
        return "none"
    return str(value)
