"""The command `export`: its arguments, what it shows a person, and exit code 1 for a file that was not kept."""

import argparse
from typing import Any

from bertsmith.arguments import CommandParser, whole_number
from bertsmith.progress import say
from bertsmith.results import print_text

Summary = dict[str, Any]


def add_export(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder, ours or transformers', or RUN")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; an earlier export is replaced")
    parser.add_argument("--format", required=True, choices=("onnx", "torch"), help="ONNX, or a torch.export program")
    parser.add_argument("--int8", action="store_true", help="8-bit weights, for the CPU (onnx only)")
    parser.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="of the texts it is compared on (default 0)"
    )


def run_export(args: argparse.Namespace, pairs: list[tuple[str, str]]) -> Summary:
    from bertsmith.inference.export import ExportMismatch, export_model

    try:
        return export_model(args.model, args.out, args.format, args.int8, args.seed)
    except ExportMismatch as error:
        say(f"bertsmith: {error}")
        raise SystemExit(1) from error


def show_export(summary: Summary) -> None:
    kind = "a torch.export program" if summary["opset"] is None else f"ONNX, opset {summary['opset']}"
    print_text(f"{summary['path']}/{summary['file']}: {kind}, {summary['precision']}, {summary['size_mb']:,.1f} MB")
    for part in ("inputs", "outputs"):
        for name, shape in summary[part].items():
            print_text(f"  {part[:-1]:<7}{name}: {shape}")
    print_text(f"  up to {summary['max_length']} tokens a row; padding on the right")
    print_text(f"compared with the model on {', '.join(summary['compared_on'])} random tokens:")
    print_text(f"  largest difference {summary['max_difference']:.2g}")
    agreement = summary["agreement"]
    if agreement["cosine"] is not None:
        print_text(f"  cosine {agreement['cosine']:.6f} in the mean, {agreement['least_cosine']:.6f} at least")
    if agreement["equal_labels"] is not None:
        print_text(f"  {agreement['equal_labels']:.2%} of the decisions are the same")
    if "tokens_per_second" in summary:
        print_text(f"fp32 was {summary['size_mb_before']:,.1f} MB; tokens a second, first call and after:")
        for name, rates in summary["tokens_per_second"].items():
            print_text(f"  {name}: {rates['first_call']:,.0f}, {rates['steady']:,.0f}")
