"""The command `convert`: its arguments, and the table it shows a person. commands.py holds it beside the others."""

import argparse
from typing import Any

from bertsmith.arguments import CommandParser
from bertsmith.results import print_text

Summary = dict[str, Any]
_NAMES_SHOWN = 5
_PART_NAMES = {
    "encoder": "encoder",
    "pooler": "pooler",
    "mlm": "masked-LM head",
    "nsp": "next-sentence head",
    "output": "output layer",
}


def add_convert(parser: CommandParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="folder of a BERT, Google's or Hugging Face's; or a checkpoint's prefix; or RUN"
    )
    parser.add_argument("target", metavar="DST", help="new folder to write")
    parser.add_argument(
        "--to",
        choices=("bertsmith", "google"),
        default="bertsmith",
        help="layout of DST: bertsmith (default), which is Hugging Face's, or google",
    )
    parser.add_argument(
        "--lowercase",
        choices=("yes", "no"),
        help="whether text is lower-cased, where SRC does not say (default: as its vocabulary suggests)",
    )


def run_convert(args: argparse.Namespace, pairs: list[tuple[str, str]]) -> Summary:
    from bertsmith.convert import convert_model

    lowercase = None if args.lowercase is None else args.lowercase == "yes"
    return convert_model(args.source, args.target, args.to, lowercase)


def show_convert(summary: Summary) -> None:
    for part, tensors in summary["parts"].items():
        missing = [name for name in summary["missing"] if _part_of(name) == part]
        if tensors or missing:
            print_text(f"{_PART_NAMES[part]:<20}{tensors:>5} tensors{_listed(', missing', missing)}")
    print_text(f"{'unused':<20}{summary['tensors_unused']:>5} tensors{_listed('', summary['unused'])}")
    if summary["tensors_of_optimizer"]:
        print_text(f"{'of the optimizer':<20}{summary['tensors_of_optimizer']:>5} tensors, left out")
    for note in summary["notes"]:
        print_text(f"note: {note}")
    print_text(f"{summary['architecture']} of {summary['parameters']:,} parameters: {summary['model_dir']}")


def _part_of(name: str) -> str:
    from bertsmith.model.names import PARTS, is_part

    return next(part for part in PARTS if is_part(name, part))


def _listed(before: str, names: list[str]) -> str:
    """`names` behind what stands before them, the first few."""
    if not names:
        return ""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{before}: {', '.join(names[:_NAMES_SHOWN])}{more}"
