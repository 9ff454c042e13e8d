"""From text to token shards: vocab, prepare."""

import argparse

from bertsmith.arguments import (
    CommandParser,
    add_inputs,
    add_reading,
    add_workers,
    number,
    read_options,
    whole_number,
)
from bertsmith.commands.command import Command, Pairs, Summary


def add_vocab(parser: CommandParser) -> None:
    add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="tokenizer folder to write, here or s3://…")
    parser.add_argument(
        "--size", type=whole_number, default=30_000, metavar="N", help="entries, never more (default 30000)"
    )
    parser.add_argument("--cased", action="store_true", help="keep upper case and accents (default: neither)")
    parser.add_argument(
        "--strip-accents", choices=("yes", "no"), help="é becomes e or not, apart from case (default: unless --cased)"
    )
    parser.add_argument(
        "--min-frequency",
        type=whole_number,
        default=2,
        metavar="N",
        help="least occurrences of a piece (default 2)",
    )
    parser.add_argument(
        "--alphabet-limit",
        type=whole_number,
        metavar="N",
        help="most distinct characters with an entry (default: those of 99.99 %% of the text, as far as --size allows)",
    )
    add_workers(parser, ray=True)
    add_reading(parser)


def run_vocab(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.text.vocabulary import build_vocabulary

    return build_vocabulary(
        args.inputs,
        args.out,
        size=args.size,
        lowercase=not args.cased,
        strip_accents=None if args.strip_accents is None else args.strip_accents == "yes",
        workers=args.workers,
        ray=args.ray,
        read_options=read_options(args),
        min_frequency=args.min_frequency,
        alphabet_limit=args.alphabet_limit,
    )


def add_prepare(parser: CommandParser) -> None:
    add_inputs(parser)
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="folder that `bertsmith vocab` wrote, or a model folder; here or s3://…",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="corpus folder to write, here or s3://…")
    parser.add_argument("--language", default="en", metavar="xx", help="language of the sentences (default en)")
    parser.add_argument(
        "--dedup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="drop exact copies of a document (default), or keep them",
    )
    parser.add_argument(
        "--held-out",
        type=number,
        default=0.02,
        metavar="SHARE",
        help="documents kept for evaluation, chosen by their hash (default 0.02)",
    )
    add_workers(parser, ray=True)
    add_reading(parser)


def run_prepare(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.corpus.prepare import prepare_corpus

    return prepare_corpus(
        args.inputs,
        args.tokenizer,
        args.out,
        workers=args.workers,
        ray=args.ray,
        language=args.language,
        read_options=read_options(args),
        dedup=args.dedup,
        held_out=args.held_out,
    )


_INPUTS = """INPUT is .txt, .jsonl, .csv, .tsv, .parquet, WikiExtractor output or a MediaWiki XML dump, compressed (.gz,
.bz2, .xz, .zst) or not; folders are read with everything in them. Nothing is lost silently: what is cut, dropped,
replaced or unknown is counted in the summary."""

COMMANDS: dict[str, Command] = {
    "vocab": Command(
        "train a WordPiece vocabulary on text",
        f"""Text in, a tokenizer folder out (tokenizer.json, vocab.txt, tokenizer_config.json), which transformers opens
as well. The same text gives the same vocabulary, byte for byte, in any order and for any --workers, on one machine or
many.

{_INPUTS}""",
        """  bertsmith vocab texts/ --out vocab
  bertsmith vocab wiki.jsonl.gz 'books/**/*.txt' --out vocab --size 8000 --cased""",
        add_vocab,
        run_vocab,
        remote_out=True,
    ),
    "prepare": Command(
        "turn text into token shards",
        f"""Text and a tokenizer in, a corpus folder out: sentences are split, tokenized and stored at about two bytes a
token, with a held-out part and report.json. The result is the same for any --workers, on one machine or many. A run
that was stopped goes on after its last finished shard when the same command is given again.

{_INPUTS}""",
        """  bertsmith prepare texts/ --tokenizer vocab --out corpus
  bertsmith prepare romans.csv --text-column texte --language fr --tokenizer vocab --out corpus
  bertsmith prepare s3://bucket/texts --tokenizer vocab --out s3://bucket/corpus --ray 10.0.0.5:6379""",
        add_prepare,
        run_prepare,
        remote_out=True,
    ),
}
