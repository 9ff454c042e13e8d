"""The command line's grammar: argparse with our messages, each option once, values by the rules that settings have.

Wrong arguments raise UserError with one sentence; flags that several commands share are added here, so that they are
spelled and explained the same everywhere.
"""

import argparse
import csv
import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from bertsmith.errors import UserError
from bertsmith.option_values import convert
from bertsmith.options import did_you_mean, parse_dotted

WIDTH = 100


class CommandParser(argparse.ArgumentParser):
    """One command's arguments. Options and inputs may come in any order; flags are never guessed from abbreviations."""

    def __init__(self, name: str, summary: str, details: str, examples: str, usage: str | None = None) -> None:
        width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
        paragraphs = [f"{summary[0].upper()}{summary[1:]}.", *details.split("\n\n")]
        filled = [textwrap.fill(paragraph, width, break_on_hyphens=False) for paragraph in paragraphs]
        super().__init__(
            prog=f"bertsmith {name}",
            usage=usage and f"bertsmith {name} {usage}",
            description="\n\n".join(filled),
            epilog=f"examples:\n{examples.rstrip()}",
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=width),
            allow_abbrev=False,
        )
        self.dotted: list[str] = []
        """`--section.key` flags that are for `options.parse_dotted`, not for argparse."""
        self.hints: dict[str, str] = {}
        """What to do instead of flags that other commands have and this one has not."""

    def error(self, message: str) -> Any:
        message = message.removeprefix("argument ")
        message = re.sub(r"ignored explicit argument .*", "takes no value", message)
        message = message.replace("expected one argument", "needs a value")
        raise UserError(f"{message} (see `{self.prog} --help`)")

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
        """The values, and the pairs that dotted flags gave. Raises UserError for whatever is odd."""
        self._refuse_repeats(arguments)
        values, rest = self.parse_known_intermixed_args(arguments)
        if rest and not self.dotted:
            flag = rest[0].partition("=")[0]
            if flag.startswith("-"):
                hint = f"; {self.hints[flag]}" if flag in self.hints else did_you_mean(flag, self.flags)
                hint = hint or "; put -- before a text or name that begins with a hyphen"
                self.error(f"option {flag} is not known{hint}")
            named = self._has_flag_only("--model")
            hint = "name a model with --model" if named else "quote a text that holds spaces"
            self.error(f"{rest[0]!r} is one argument too many; {hint}")
        return values, parse_dotted(rest, self.flags + self.dotted)

    def _has_flag_only(self, flag: str) -> bool:
        """Whether this is named by its flag, and nothing by its place."""
        return flag in self._option_string_actions and not self._get_positional_actions()

    @property
    def flags(self) -> list[str]:
        """Every `--flag` that a misspelt one may have meant: not --help, which every message names anyway."""
        return [flag for flag in self._option_string_actions if flag.startswith("--") and flag != "--help"]

    def _refuse_repeats(self, arguments: Sequence[str]) -> None:
        """argparse takes the last of several silently; two values for one option are a slip."""
        seen: dict[str, str] = {}
        for argument in arguments:
            if argument == "--":
                return
            flag = argument.partition("=")[0]
            action = self._option_string_actions.get(flag)
            if action is None or (action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)):
                continue  # --json twice says the same
            if before := seen.get(action.dest):
                self.error(f"option {flag} {'is given twice' if before == flag else f'contradicts {before}'}")
            seen[action.dest] = flag


def whole_number(text: str) -> int:
    """For argparse: `300`, `30_000`, `1e6`."""
    try:
        return int(convert(text, int, True))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """For argparse: any number but NaN."""
    try:
        return float(convert(text, float, True))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def typed(text: str) -> str:
    """An argument as the user typed it: UTF-8, whatever the locale made of it."""
    return os.fsencode(text).decode("utf-8", "replace")


# --- flags that several commands share


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """INPUT …"""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, globs or fsspec URLs (s3://…)")


def add_workers(parser: argparse.ArgumentParser, ray: bool = False) -> None:
    """--workers N, and --ray where it makes sense"""
    with_ray = "; with --ray: tasks at a time (default: one a processor of the cluster)" if ray else ""
    parser.add_argument("--workers", type=whole_number, metavar="N", help=f"processes (default: one a core){with_ray}")
    if ray:
        parser.add_argument(
            "--ray",
            metavar="ADDRESS",
            help="work on a Ray cluster, with the same result: HOST:PORT of its head, or local for one on this machine"
            " (pip install 'bertsmith[ray]')",
        )


def add_reading(parser: argparse.ArgumentParser) -> None:
    """How text files become documents."""
    group = parser.add_argument_group("how text is read")
    group.add_argument(
        "--documents",
        choices=("file", "blank-line"),
        default="file",
        help=".txt: a document is a file, or ends at a blank line as in Google's layout (default file)",
    )
    add_text_column(group)
    group.add_argument(
        "--on-invalid",
        choices=("replace", "error"),
        default="replace",
        help="bytes that the encoding does not allow: replaced and counted, or an error (default replace)",
    )


def add_text_column(parser: Any) -> None:
    """--text-column and --encoding."""
    parser.add_argument(
        "--text-column",
        default="text",
        metavar="NAME",
        help="column or key that holds the text in .jsonl, .csv, .tsv and .parquet (default text)",
    )
    parser.add_argument(
        "--encoding", default="utf-8", metavar="CODEC", help="of the files; a byte-order mark wins (default utf-8)"
    )


def add_keep(parser: argparse.ArgumentParser) -> None:
    """--keep"""
    parser.add_argument(
        "--keep",
        metavar="NAME,…",
        help="columns of a .csv, .tsv, .jsonl or .parquet input, such as an id, that are written first in each row as "
        "they are; quotes around a name that holds a comma, as in a .csv",
    )


def kept_names(args: argparse.Namespace) -> list[str]:
    """The columns that `add_keep` was given."""
    try:
        return [] if args.keep is None else next(csv.reader([typed(args.keep)])) or [""]
    except csv.Error as error:
        raise UserError(f"--keep: {args.keep!r} is no list of names as a .csv has it: {error}") from None


def read_options(args: argparse.Namespace) -> Any:
    """The ReadOptions of `add_reading`'s flags."""
    from bertsmith.text.documents import ReadOptions

    return ReadOptions(args.documents, typed(args.text_column), args.encoding, args.on_invalid)


def add_compute(parser: argparse.ArgumentParser, auto: str, int8: bool = False) -> None:
    """--device and --precision; `auto`: what automatic precision does in this command, `int8`: which it can."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto (default): cuda where there is one"
    )
    choices: tuple[str, ...] = ("auto", "bf16", "fp32")
    more = ""
    if int8:
        choices += ("int8",)
        more = "; int8, on CPUs: that, but half of the products in 8 bits"
    parser.add_argument(
        "--precision", choices=choices, default="auto", help=f"arithmetic; auto (default): {auto}{more}"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json"""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout at the end")
