"""Model folders: convert, export, info."""

import argparse

from bertsmith.arguments import CommandParser, whole_number
from bertsmith.commands.command import Command, Pairs, Summary
from bertsmith.progress import say
from bertsmith.results import print_text

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


def add_export(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder, ours or transformers', or RUN")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; an earlier export is replaced")
    parser.add_argument("--format", required=True, choices=("onnx", "torch"), help="ONNX, or a torch.export program")
    parser.add_argument("--int8", action="store_true", help="8-bit weights, for the CPU (onnx only)")
    parser.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="of the texts it is compared on (default 0)"
    )


def run_export(args: argparse.Namespace, pairs: Pairs) -> Summary:
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
    cut_at = summary["cut_at"]
    cut = "" if cut_at is None else f", {cut_at} as it was fine-tuned, at which `predict` cuts"
    print_text(f"  up to {summary['max_length']} tokens a row{cut}; padding on the right")
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


def add_info(parser: CommandParser) -> None:
    parser.add_argument("path", metavar="PATH", help="corpus, run, checkpoint, model or tokenizer folder")


def run_info(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.describe import describe_path

    return describe_path(args.path)


COMMANDS: dict[str, Command] = {
    "convert": Command(
        "a BERT of Google's or Hugging Face's into a folder of ours, or into Google's layout",
        """A checkpoint of Google's (bert_config.json, bert_model.ckpt, vocab.txt) or a Hugging Face folder of any age
in, a new folder of ours out, which transformers opens as well. Nothing in a file is run. What was used, not used or
missing is listed by name; what an optimizer left is passed over.

--to google writes Google's layout, for Google's own scripts: they find encoder, heads and vocabulary, and classifiers
under the names of run_classifier.py and run_squad.py. Labels, task and tokenizer settings, which they do not look at,
travel beside these, so that the way back loses nothing.""",
        """  bertsmith convert uncased_L-12_H-768_A-12 bert
  bertsmith convert multilingual/bert_model.ckpt bert --lowercase no
  bertsmith convert run/model for-google --to google""",
        add_convert,
        run_convert,
        show_convert,
    ),
    "export": Command(
        "a model as a deployable file, checked against the model before it is kept",
        """A model folder in; a folder for deployment out: the model for ONNX Runtime and its like, or as a torch.export
program, with config.json, labels and tokenizer. What it computes depends on MODEL: a fine-tuned head's logits (spans:
start and end), a pre-trained model's prediction and next-sentence logits, else the encoder's last hidden states and
pooled vector. Inputs are input_ids, attention_mask and token_type_ids, each int64 (batch, sequence) of any size up to
the model's positions, padded on the right.

The file is run beside the model on random texts; if the two differ by more than 1e-4 it is not kept and the exit code
is 1. With --int8 (four times smaller and faster: products in 8 bits, whose scales come from the demo's texts and go
with each token, so that no text's numbers depend on those beside it) size, speed and agreement are measured and shown.

An export of a fine-tuned model takes the model's place in `bertsmith evaluate` and `predict` and in bertsmith.load,
which is how to see what it does to your own rows. bertsmith.load_exported(DIR).run(input_ids, attention_mask,
token_type_ids) runs any export on padded batches, of whole numbers of any type.""",
        """  bertsmith export sentiment --out deployed --format onnx
  bertsmith export run/model --out small --format onnx --int8
  bertsmith export run/model --out program --format torch""",
        add_export,
        run_export,
        show_export,
    ),
    "info": Command(
        "describe a corpus, run, checkpoint, model or tokenizer folder",
        "A folder in, what it is and what it holds out. Nothing is changed; a run may be under way.",
        """  bertsmith info corpus
  bertsmith info run --json""",
        add_info,
        run_info,
    ),
}
