"""A pre-trained model at work: fill, embed, score."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from bertsmith.arguments import (
    CommandParser,
    add_compute,
    add_keep,
    add_text_column,
    kept_names,
    typed,
    whole_number,
)
from bertsmith.commands.command import Command, Pairs, Summary
from bertsmith.errors import UserError
from bertsmith.results import print_text


def add_fill(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder (RUN/model, or any BERT of transformers), or RUN")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="text with [MASK] where a token is to be guessed")
    parser.add_argument(
        "--input", metavar="FILE", help="texts from a .txt (one a line), .jsonl, .csv, .tsv or .parquet file"
    )
    parser.hints["--output"] = "fill prints its guesses: --json prints them as JSON, and > FILE keeps what is printed"
    add_text_column(parser)
    parser.add_argument("--top", type=whole_number, default=5, metavar="N", help="guesses a mask (default 5)")
    add_compute(parser, "fp32")


def run_fill(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.text.rows import read_texts

    texts, places = [typed(text) for text in args.texts or ()], None
    if bool(texts) == (args.input is not None):
        raise UserError("fill: give texts with [MASK], or --input FILE with such texts, one of the two")
    _check_quotes(texts)
    if args.input is not None:
        texts, places = read_texts(args.input, typed(args.text_column), args.encoding)
    from bertsmith.inference.fill import fill_masks

    return fill_masks(args.model, texts, args.top, args.device, args.precision, places)


def _check_quotes(texts: Sequence[str]) -> None:
    """Raise UserError where some of the texts typed hold a mask and others none: they are one text, without quotes."""
    without = [text for text in texts if "[MASK]" not in text]
    if 0 < len(without) < len(texts):
        raise UserError(
            f"fill: of {len(texts)} texts {len(without)} without [MASK], such as {without[0]!r}; if all are one text, "
            f'put quotes around it: "{" ".join(texts)}"'
        )


def show_fill(summary: Summary) -> None:
    for result in summary["texts"]:
        print_text(result["text"])
        for place, guesses in enumerate(result["masks"], 1):
            words = "  ".join(f"{guess['token']} {guess['probability']:.1%}" for guess in guesses)
            print_text(f"  mask {place}: {words}")


_PRECISION = "bf16 where it is faster here and measures alike, else fp32"


def _add_threads(parser: CommandParser) -> None:
    parser.add_argument(
        "--threads", type=whole_number, metavar="N", help="of the CPU (default: one a core, or OMP_NUM_THREADS)"
    )


def _check_model(args: argparse.Namespace) -> None:
    """Raise UserError for what is seen of MODEL and --threads without looking into it."""
    path = Path(args.model)
    if path.is_file():
        raise UserError(f"{args.model}: is a file; name the model folder, as in {path.parent}")
    if not path.exists():
        raise UserError(f"{args.model}: no such folder; name a model folder or a run")
    if args.threads is not None:
        from bertsmith.hardware import check_threads

        check_threads("--threads", args.threads)


def add_embed(parser: CommandParser) -> None:
    # `--layers -4:` and `--layers -4,-3` are values although they begin with a hyphen, as numbers do
    parser._negative_number_matcher = re.compile(r"-\d[-\d,:]*$")
    parser.add_argument("model", metavar="MODEL", help="model folder (ours, or any BERT of transformers), or RUN")
    parser.add_argument(
        "--input", required=True, metavar="FILE", help="texts: .txt (one a line), .jsonl, .csv, .tsv or .parquet"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help=".npy, .parquet or .safetensors, see above")
    add_keep(parser)
    group = parser.add_argument_group("what a vector is")
    group.add_argument(
        "--layers",
        default="-1",
        metavar="N|N,…|N:N",
        help="0 the embeddings, 1 … the layers, -1 the last (default); several: -4,-3 or -4: (the last four)",
    )
    group.add_argument(
        "--combine",
        choices=("concat", "sum", "mean"),
        default="concat",
        help="what becomes of several layers (default concat, in the order named)",
    )
    group.add_argument(
        "--pool",
        choices=("mean", "cls", "none", "pooler"),
        default="mean",
        help="mean of all tokens (default), [CLS], none (a vector a token), or the pooler of next-sentence prediction",
    )
    group.add_argument("--words", action="store_true", help="a vector a word, the mean of its pieces")
    group.add_argument("--normalize", action="store_true", help="vectors of length 1")
    group = parser.add_argument_group("how text is read")
    add_text_column(group)
    group.add_argument(
        "--max-length",
        type=whole_number,
        metavar="N",
        help="tokens at most (default: as many as the model was trained on)",
    )
    group.add_argument(
        "--long",
        choices=("cut", "window", "refuse"),
        help="longer texts: cut and counted (default), shown in overlapping windows (default for --words), or refused",
    )
    group.add_argument("--allow-special", action="store_true", help="[SEP] and the like in a text are that token")
    _add_threads(parser)
    add_compute(parser, _PRECISION, int8=True)


def run_embed(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.inference.embed import check_embedding, choose_text_column, embed_file
    from bertsmith.inference.features import FeatureOptions
    from bertsmith.inference.loaded import LoadedModel, load
    from bertsmith.progress import say
    from bertsmith.tasks.model_folder import weights_sha256
    from bertsmith.training.ranks import check_own_gpu, check_same, join_ranks, make_alike

    def open_model(precision: str) -> LoadedModel:
        model = load(args.model, args.device, precision, args.threads)
        check_own_gpu(model.encoder.device)
        return model

    names = ("layers", "combine", "pool", "words", "normalize", "max_length", "long", "allow_special")
    options = FeatureOptions(**{name: getattr(args, name) for name in names})
    keep = kept_names(args)
    with join_ranks() as ranks:
        with ranks.alike():
            _check_model(args)
            column = choose_text_column(args.model, args.input, typed(args.text_column), args.encoding)
            reading = column, args.encoding
            # told before the model is loaded
            check_embedding(args.input, Path(args.output), options, *reading, ranks, keep)
        model = make_alike(open_model, args.precision, ranks)
        if ranks.size > 1:
            check_same(weights_sha256(model.encoder.bert), args.model, ranks)
        with ranks.alike():
            extractor = model.features(options)
        processes = f"{ranks.size} processes, each on " if ranks.size > 1 else ""
        say(f"embedding: {extractor.dimension} numbers a vector; {processes}{model.describe()}")
        return embed_file(extractor, args.input, args.output, *reading, ranks, keep)


def add_score(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder with a masked-LM head, or RUN")
    parser.add_argument(
        "--input", required=True, metavar="FILE", help="sentences: .txt (one a line), .jsonl, .csv, .tsv or .parquet"
    )
    parser.add_argument("--output", metavar="FILE", help="a row a sentence or pair: .jsonl, .csv, .tsv or .parquet")
    add_keep(parser)
    add_text_column(parser)
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="the file holds minimal pairs; how often does the good one score higher? (a tie counts as wrong)",
    )
    parser.add_argument(
        "--good-column", metavar="NAME", help="of the acceptable sentence (default sentence_good, or good)"
    )
    parser.add_argument("--bad-column", metavar="NAME", help="of the other (default sentence_bad, or bad)")
    parser.add_argument(
        "--within-word",
        choices=("visible", "mask"),
        default="visible",
        help="the pieces after the masked one in its word: visible (default), or masked too (PLL-word-l2r)",
    )
    _add_threads(parser)
    add_compute(parser, _PRECISION, int8=True)


def run_score(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.inference.embed import read_text_rows
    from bertsmith.inference.loaded import load
    from bertsmith.inference.scoring import check_scoring, read_pairs, score_file, score_pairs_file
    from bertsmith.progress import say

    if not args.pairs and (args.good_column or args.bad_column):
        raise UserError("--good-column and --bad-column are for --pairs; name the column of single sentences with "
                        "--text-column")  # fmt: skip
    if args.pairs and args.text_column != "text":
        raise UserError("--text-column is for single sentences; name those of --pairs with --good-column, --bad-column")
    _check_model(args)
    output = None if args.output is None else Path(args.output)
    good, bad = (None if name is None else typed(name) for name in (args.good_column, args.bad_column))
    reading, keep = (typed(args.text_column), args.encoding), kept_names(args)
    rows = read_pairs(args.input, good, bad, args.encoding) if args.pairs else read_text_rows(args.input, *reading)
    check_scoring(args.input, output, rows, keep, args.pairs, args.encoding)  # told before the model is loaded
    model = load(args.model, args.device, args.precision, args.threads)
    scorer = model.scorer(args.within_word)
    say(f"scoring: {model.describe()}")
    if not args.pairs:
        return score_file(scorer, args.input, output, *reading, keep)
    return score_pairs_file(scorer, args.input, output, good, bad, args.encoding, keep)


COMMANDS: dict[str, Command] = {
    "fill": Command(
        "fill [MASK] in texts",
        """A model and texts in, the likeliest tokens for each [MASK] out, with their probabilities. Only [MASK] is
special in a text; [SEP] and the like are plain text.""",
        """  bertsmith fill run/model "The capital of France is [MASK]."
  bertsmith fill run/model --input questions.jsonl --text-column question --top 1 --json""",
        add_fill,
        run_fill,
        show_fill,
    ),
    "embed": Command(
        "vectors of texts: any layers, per text, token or word",
        """A model and a file of texts in, a file of vectors out: one a text, in input order, or with --pool none one a
token ([CLS] and [SEP] among them), with --words one a word. Words are what stands between blanks, or the lists of a
.jsonl or .parquet (column tokens), or the lines of a .conll. What is cut is counted.

.npy holds an array of a row a text. .safetensors holds `vectors`, and for tokens and words `offsets`: text i has the
rows from offsets[i] to offsets[i + 1] (and for tokens `token_ids`). .parquet holds a row a text, with `vector` or
`vectors` after the columns that --keep names. With --combine concat, reshaping to (rows, layers, hidden) gives the
layers to weight.""",
        """  bertsmith embed run/model --input texts.txt --output vectors.npy
  bertsmith embed run/model --input sentences.jsonl --words --layers -4: --output words.safetensors
  bertsmith embed run/model --input t.csv --text-column body --keep id --output vectors.parquet
  torchrun --nproc-per-node 4 -m bertsmith embed run/model --input texts.txt --output vectors.npy""",
        add_embed,
        run_embed,
        several_processes=True,
    ),
    "score": Command(
        "pseudo-log-likelihood of sentences; accuracy on minimal pairs",
        """A model with a masked-LM head and a file of sentences in, how likely it finds each out: the sum of the
log-probabilities (natural) of its tokens, each masked in turn (PLL), and the pseudo-perplexity exp(-PLL / tokens)
(Salazar et al. 2020). With --pairs a table of acceptable and unacceptable sentences in (BLiMP's .jsonl as it is), the
share of pairs out in which the acceptable one has the higher PLL: one of equal PLLs counts as wrong, and in `ties`. A
text of which no token is left has no PLL: it is counted apart, and so is its pair.""",
        """  bertsmith score run/model --input sentences.txt --output scores.jsonl
  bertsmith score run/model --input sentences.csv --keep id --output scores.csv
  bertsmith score run/model --input blimp/anaphor_number_agreement.jsonl --pairs --json""",
        add_score,
        run_score,
    ),
}
