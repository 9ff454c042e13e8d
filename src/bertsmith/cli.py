"""Every command: parse, call one function, print. No work of its own, and nothing heavy imported until it is needed.

Exit codes: 0 done; 2 the user's input or options are wrong (one sentence on stderr); 1 a fault of ours; 130 stopped.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertsmith import __version__
from bertsmith.errors import UserError

Summary = dict[str, Any]
Pairs = list[tuple[str, str]]


# --- vocab


def add_vocab(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="tokenizer folder to write")
    parser.add_argument("--size", type=int, default=30_000, help="entries at most (default 30000)")
    parser.add_argument("--cased", action="store_true", help="keep upper case (and accents)")
    parser.add_argument("--strip-accents", choices=("yes", "no"), help="default: stripped unless --cased")
    parser.add_argument("--min-frequency", type=int, default=2, help="a piece occurs at least so often (default 2)")
    parser.add_argument("--alphabet-limit", type=int, help="distinct characters kept at most (default: by size)")
    _add_workers(parser)
    _add_reading(parser)


def run_vocab(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.text.vocabulary import build_vocabulary

    return build_vocabulary(
        args.inputs,
        args.out,
        size=args.size,
        lowercase=not args.cased,
        strip_accents=None if args.strip_accents is None else args.strip_accents == "yes",
        workers=args.workers,
        read_options=_read_options(args),
        min_frequency=args.min_frequency,
        alphabet_limit=args.alphabet_limit,
    )


# --- prepare


def add_prepare(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="folder that `bertsmith vocab` wrote")
    parser.add_argument("--out", required=True, metavar="DIR", help="corpus folder to write")
    parser.add_argument("--language", default="en", metavar="xx", help="language of the sentences (default en)")
    parser.add_argument(
        "--dedup", action=argparse.BooleanOptionalAction, default=True, help="drop exact copies of a document"
    )
    parser.add_argument("--held-out", type=float, default=0.01, metavar="SHARE", help="documents kept for evaluation")
    _add_workers(parser)
    _add_reading(parser)


def run_prepare(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.corpus.prepare import prepare_corpus

    return prepare_corpus(
        args.inputs,
        args.tokenizer,
        args.out,
        workers=args.workers,
        language=args.language,
        read_options=_read_options(args),
        dedup=args.dedup,
        held_out=args.held_out,
    )


# --- pretrain


def add_pretrain(parser: argparse.ArgumentParser) -> None:
    from bertsmith.options import describe_settings, list_recipes, list_settings
    from bertsmith.training.settings import PretrainSettings

    parser.add_argument("--out", required=True, metavar="RUN", help="run folder; an existing run is resumed")
    recipes = "; ".join(f"{name}: {line}" for name, line in list_recipes().items()).replace("%", "%%")
    parser.add_argument("--recipe", metavar="NAME|FILE", help=f"default laptop, or RUN/config.toml. {recipes}")
    for setting in list_settings(PretrainSettings):
        if "." not in setting.flag:
            parser.add_argument(setting.flag, dest=f"setting:{setting.key}", help=argparse.SUPPRESS)
    parser.epilog = (
        "settings (over the recipe's):\n"
        f"{describe_settings(PretrainSettings)}\n\n"
        "examples:\n"
        "  bertsmith pretrain --data corpus --out run --model mini --minutes 30\n"
        "  bertsmith pretrain --data corpus --out run --recipe paper-base --micro-batch-size 16\n"
        "  bertsmith pretrain --data corpus --out run --recipe run/config.toml --optimizer.learning-rate 5e-4"
    )


def run_pretrain(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.options import load_recipe
    from bertsmith.training.loop import pretrain
    from bertsmith.training.setup import CONFIG_FILE, run_settings

    flat = {key.partition(":")[2]: value for key, value in vars(args).items() if key.startswith("setting:")}
    overrides = [(key, value) for key, value in flat.items() if value is not None] + pairs
    lengths = ("steps", "minutes", "epochs")
    if any(key in lengths for key, _ in overrides):  # a length on the command line replaces the recipe's
        overrides += [(key, "none") for key in lengths if key not in dict(overrides)]
    out = Path(args.out)
    name = args.recipe or (None if (out / CONFIG_FILE).is_file() else "laptop")
    settings = run_settings(out, None if name is None else load_recipe(name), overrides)
    return pretrain(settings, out)


# --- fill, info, demo, bench


def add_fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder, e.g. RUN/model")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="text with [MASK] where a token is to be guessed")
    parser.add_argument("--top", type=int, default=5, help="guesses a mask (default 5)")
    _add_compute(parser)


def run_fill(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.inference.fill import fill_masks

    texts = [_typed(text) for text in args.texts]
    return fill_masks(args.model, texts, args.top, args.device, args.precision)


def show_fill(summary: Summary) -> None:
    for result in summary["texts"]:
        print(result["text"])
        for number, guesses in enumerate(result["masks"], 1):
            words = "  ".join(f"{guess['token']} {guess['probability']:.1%}" for guess in guesses)
            print(f"  mask {number}: {words}")


def add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="corpus, run, checkpoint, model or tokenizer folder")


def run_info(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.describe import describe_path

    return describe_path(args.path)


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="demo", metavar="DIR", help="folder for everything the demo makes")
    parser.add_argument("--minutes", type=float, default=2.5, help="how long to pre-train (default 2.5)")


def run_demo(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.demo import run_demo as demo

    return demo(Path(args.out), args.minutes)


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("pretrain", "prepare"), help="which part to time")
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="prepare: text to use (default: the demo's)")
    parser.add_argument("--model", default="mini", help="pretrain: size (default mini)")
    parser.add_argument("--batch", type=int, default=32, help="pretrain: rows a step (default 32)")
    parser.add_argument("--length", type=int, default=128, help="pretrain: tokens a row (default 128)")
    parser.add_argument("--steps", type=int, default=10, help="pretrain: steps timed (default 10)")
    _add_workers(parser)
    _add_compute(parser)


def run_bench(args: argparse.Namespace, pairs: Pairs) -> Summary:
    if args.what == "prepare":
        from bertsmith.corpus.benchmark import benchmark_prepare

        return benchmark_prepare(args.inputs, args.workers)
    from bertsmith.training.benchmark import benchmark_pretraining

    return benchmark_pretraining(args.model, args.batch, args.length, args.steps, args.device, args.precision)


# --- shared flags


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, globs or URLs")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how text is read")
    group.add_argument("--documents", choices=("file", "blank-line"), default="file", help=".txt: what a document is")
    group.add_argument("--text-column", default="text", help="column or key of tables and JSON lines (default text)")
    group.add_argument("--encoding", default="utf-8", help="codec of the files (default utf-8)")
    group.add_argument("--on-invalid", choices=("replace", "error"), default="replace", help="bytes that are not text")


def _read_options(args: argparse.Namespace) -> Any:
    from bertsmith.text.documents import ReadOptions

    return ReadOptions(args.documents, _typed(args.text_column), args.encoding, args.on_invalid)


def _add_compute(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where present")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="arithmetic")


def _typed(text: str) -> str:
    """An argument as the user typed it, UTF-8 whatever the locale makes of it."""
    return os.fsencode(text).decode("utf-8", "replace")


# --- the program

Add = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace, Pairs], Summary]
COMMANDS: dict[str, tuple[str, Add, Run, Callable[[Summary], None] | None]] = {
    "vocab": ("train a WordPiece vocabulary on text", add_vocab, run_vocab, None),
    "prepare": ("turn text into token shards", add_prepare, run_prepare, None),
    "pretrain": ("pre-train BERT on token shards, or resume", add_pretrain, run_pretrain, None),
    "fill": ("fill [MASK] in texts", add_fill, run_fill, show_fill),
    "info": ("describe a corpus, run, checkpoint, model or tokenizer folder", add_info, run_info, None),
    "demo": ("the whole way on text that ships with the package", add_demo, run_demo, None),
    "bench": ("measure this machine's speed", add_bench, run_bench, None),
}
# commands whose settings tree has `--section.key` flags
_DOTTED = ("pretrain",)


class _Parser(argparse.ArgumentParser):
    """argparse, with our exit code and message form."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _overview() -> str:
    lines = "\n".join(f"  {name:<10}{entry[0]}" for name, entry in COMMANDS.items())
    return (
        "usage: bertsmith COMMAND …\n\nBERT from raw text to a pre-trained model.\n\n"
        f"commands:\n{lines}\n\n"
        "  bertsmith COMMAND --help   what a command takes\n"
        "  bertsmith --version\n\n"
        "the usual way:\n"
        "  bertsmith vocab texts/ --out vocab\n"
        "  bertsmith prepare texts/ --tokenizer vocab --out corpus\n"
        "  bertsmith pretrain --data corpus --out run --model mini --minutes 30\n"
        '  bertsmith fill run/model "The capital of France is [MASK]."'
    )


def _parse(argv: Sequence[str]) -> tuple[str, argparse.Namespace, Pairs]:
    from bertsmith.options import did_you_mean, parse_dotted

    name = argv[0]
    if name not in COMMANDS:
        raise UserError(f"{name!r} is no command{did_you_mean(name, COMMANDS)} (see `bertsmith --help`)")
    description, add, _, _ = COMMANDS[name]
    parser = _Parser(
        prog=f"bertsmith {name}",
        description=f"{description[0].upper()}{description[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout at the end")
    args, rest = parser.parse_known_args(argv[1:])
    flags = [flag for action in parser._actions for flag in action.option_strings]
    if rest and name not in _DOTTED:
        wrong = [
            f"option {flag} is not known{did_you_mean(flag, flags)}"
            if flag.startswith("--")
            else f"{flag!r} is too much"
            for flag in rest[:1]
        ]
        raise UserError(f"{wrong[0]} (see `bertsmith {name} --help`)")
    return name, args, parse_dotted(rest, flags)


def show_summary(summary: Summary, indent: str = "") -> None:
    """A summary as `key: value` lines."""
    for key, value in summary.items():
        if isinstance(value, dict):
            print(f"{indent}{key}:")
            show_summary(value, indent + "  ")
        elif isinstance(value, float):
            print(f"{indent}{key}: {value:,.4f}" if abs(value) < 1000 else f"{indent}{key}: {value:,.0f}")
        elif isinstance(value, int) and not isinstance(value, bool):
            print(f"{indent}{key}: {value:,}")
        else:
            print(f"{indent}{key}: {value if value is not None else '-'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(_overview(), flush=True)
            return 0
        if argv[0] == "--version":
            print(f"bertsmith {__version__}")
            return 0
        name, args, pairs = _parse(argv)
        _, _, run, show = COMMANDS[name]
        summary = run(args, pairs)
        if args.json:
            print(json.dumps(summary, ensure_ascii=False))
        else:
            (show or show_summary)(summary)
        sys.stdout.flush()
        return 0
    except UserError as error:
        print(f"bertsmith: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bertsmith: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
