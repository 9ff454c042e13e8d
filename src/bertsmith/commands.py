"""The commands: how each reads its arguments, the one function it calls, and what its `--help` says.

Nothing heavy is imported until a command runs. cli.py is the program around them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.arguments import (
    CommandParser,
    add_compute,
    add_inputs,
    add_reading,
    add_text_column,
    add_workers,
    number,
    read_options,
    typed,
    whole_number,
)
from bertsmith.convert_command import add_convert, run_convert, show_convert
from bertsmith.errors import UserError
from bertsmith.export_command import add_export, run_export, show_export
from bertsmith.finetune_commands import (
    add_evaluate,
    add_finetune,
    add_glue,
    add_predict,
    run_evaluate,
    run_finetune,
    run_glue,
    run_predict,
    show_finetune,
    show_glue,
)
from bertsmith.inference_commands import add_embed, add_score, run_embed, run_score
from bertsmith.results import print_summary, print_text

Summary = dict[str, Any]
Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Command:
    """One command: what `--help` says, how its arguments are read, what runs, and how the result is shown."""

    summary: str
    details: str
    examples: str
    add: Callable[[CommandParser], None]
    run: Callable[[argparse.Namespace, Pairs], Summary]
    show: Callable[[Summary], None] = print_summary
    usage: str | None = None


# --- vocab


def add_vocab(parser: CommandParser) -> None:
    add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="tokenizer folder to write")
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
    add_workers(parser)
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
        read_options=read_options(args),
        min_frequency=args.min_frequency,
        alphabet_limit=args.alphabet_limit,
    )


# --- prepare


def add_prepare(parser: CommandParser) -> None:
    add_inputs(parser)
    parser.add_argument(
        "--tokenizer", required=True, metavar="DIR", help="folder that `bertsmith vocab` wrote, or a model folder"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="corpus folder to write")
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
    add_workers(parser)
    add_reading(parser)


def run_prepare(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.corpus.prepare import prepare_corpus

    return prepare_corpus(
        args.inputs,
        args.tokenizer,
        args.out,
        workers=args.workers,
        language=args.language,
        read_options=read_options(args),
        dedup=args.dedup,
        held_out=args.held_out,
    )


# --- pretrain

DEFAULT_RECIPE = "laptop"


def add_pretrain(parser: CommandParser) -> None:
    from bertsmith.option_help import describe_recipes, describe_settings
    from bertsmith.options import list_recipes, list_settings, load_recipe
    from bertsmith.training.settings import PretrainSettings

    parser.add_argument("--out", required=True, metavar="RUN", help="run folder; an existing run is resumed")
    parser.add_argument(
        "--recipe", metavar="NAME|FILE", help=f"settings to start from (default {DEFAULT_RECIPE}, or RUN/config.toml)"
    )
    for setting in list_settings(PretrainSettings):
        if "." not in setting.flag:
            parser.add_argument(setting.flag, dest=f"setting:{setting.key}", help=argparse.SUPPRESS)
        parser.dotted.append(f"--{setting.key.replace('_', '-')}")
    parser.epilog = (
        f"recipes:\n{describe_recipes(list_recipes())}\n\n"
        "settings, each over the recipe's:\n"
        f"{describe_settings(PretrainSettings, load_recipe(DEFAULT_RECIPE), DEFAULT_RECIPE)}\n\n{parser.epilog}"
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
    name = args.recipe or (None if (out / CONFIG_FILE).is_file() else DEFAULT_RECIPE)
    settings = run_settings(out, None if name is None else load_recipe(name), overrides)
    return pretrain(settings, out)


# --- fill, info, demo, bench


def add_fill(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder (RUN/model, or any BERT of transformers), or RUN")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="text with [MASK] where a token is to be guessed")
    parser.add_argument(
        "--input", metavar="FILE", help="texts from a .txt (one a line), .jsonl, .csv, .tsv or .parquet file"
    )
    add_text_column(parser)
    parser.add_argument("--top", type=whole_number, default=5, metavar="N", help="guesses a mask (default 5)")
    add_compute(parser, "fp32")


def run_fill(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.text.rows import read_texts

    texts, places = [typed(text) for text in args.texts or ()], None
    if bool(texts) == (args.input is not None):
        raise UserError("fill: give texts with [MASK], or --input FILE with such texts, one of the two")
    if args.input is not None:
        texts, places = read_texts(args.input, typed(args.text_column), args.encoding)
    from bertsmith.inference.fill import fill_masks

    return fill_masks(args.model, texts, args.top, args.device, args.precision, places)


def show_fill(summary: Summary) -> None:
    for result in summary["texts"]:
        print_text(result["text"])
        for place, guesses in enumerate(result["masks"], 1):
            words = "  ".join(f"{guess['token']} {guess['probability']:.1%}" for guess in guesses)
            print_text(f"  mask {place}: {words}")


def add_info(parser: CommandParser) -> None:
    parser.add_argument("path", metavar="PATH", help="corpus, run, checkpoint, model or tokenizer folder")


def run_info(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.describe import describe_path

    return describe_path(args.path)


def add_demo(parser: CommandParser) -> None:
    parser.add_argument("--out", default="demo", metavar="DIR", help="folder for everything it makes (default demo)")
    parser.add_argument("--minutes", type=number, default=2.5, metavar="M", help="how long to pre-train (default 2.5)")
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of the pre-training (default 0)")


def run_demo(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.demo import run_demo as demo

    return demo(Path(args.out), args.minutes, args.seed)


def show_demo(summary: Summary) -> None:
    for result in summary["fill"]["texts"]:
        print_text(f"{result['text']}  →  {', '.join(guess['token'] for guess in result['masks'][0])}")
    run, tuned = summary["pretrain"], summary["finetune"]
    print_text(
        f"held-out MLM loss {run['eval_mlm_loss']:.2f} (unigram entropy {run['unigram_entropy']:.2f}, "
        f"ln V {run['ln_vocab']:.2f}), next-sentence accuracy {run['eval_nsp_accuracy']:.1%}; "
        f"the model is {run['model_dir']}, the curve loss.png beside it"
    )
    print_text(
        f"fine-tuned to tell negative from positive film reviews: accuracy {tuned['dev']['accuracy']:.1%} (guessing "
        f"50.0%); the model is {tuned['model_dir']}"
    )


def add_bench_pretrain(parser: CommandParser) -> None:
    parser.add_argument(
        "--model", default="mini", metavar="SIZE", help="tiny, mini, small, medium, base or large (default mini)"
    )
    parser.add_argument("--batch", type=whole_number, default=32, metavar="N", help="rows a step (default 32)")
    parser.add_argument("--length", type=whole_number, default=128, metavar="N", help="tokens a row (default 128)")
    parser.add_argument("--steps", type=whole_number, default=10, metavar="N", help="steps timed (default 10)")
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of weights and rows (default 0)")
    add_compute(parser, "the faster of the two here")


def run_bench_pretrain(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.training.benchmark import benchmark_pretraining

    return benchmark_pretraining(
        args.model, args.batch, args.length, args.steps, args.device, args.precision, args.seed
    )


def run_bench_finetune(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.tasks.benchmark import benchmark_finetuning

    return benchmark_finetuning(args.model, args.batch, args.length, args.steps, args.device, args.precision, args.seed)


def add_bench_embed(parser: CommandParser) -> None:
    parser.add_argument(
        "--model", default="mini", metavar="SIZE|DIR", help="tiny, mini, … (see bench pretrain) or a model folder"
    )
    parser.add_argument("--texts", type=whole_number, default=256, metavar="N", help="texts a step (default 256)")
    parser.add_argument("--length", type=whole_number, default=128, metavar="N", help="tokens at most (default 128)")
    parser.add_argument("--steps", type=whole_number, default=10, metavar="N", help="steps timed (default 10)")
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of weights and texts (default 0)")
    add_compute(parser, "as for embed; for a size the faster of the two here")


def run_bench_embed(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.inference.benchmark import benchmark_embedding

    return benchmark_embedding(args.model, args.texts, args.length, args.steps, args.device, args.precision, args.seed)


def add_bench_prepare(parser: CommandParser) -> None:
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="text to use (default: the demo's, several times)")
    add_workers(parser)


def run_bench_prepare(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.corpus.benchmark import benchmark_prepare

    return benchmark_prepare(args.inputs or (), args.workers)


_INPUTS = """INPUT is .txt, .jsonl, .csv, .tsv, .parquet, WikiExtractor output or a MediaWiki XML dump, compressed (.gz,
.bz2, .xz, .zst) or not; folders are read with everything in them. Nothing is lost silently: what is cut, dropped,
replaced or unknown is counted in the summary."""

COMMANDS: dict[str, Command] = {
    "vocab": Command(
        "train a WordPiece vocabulary on text",
        f"""Text in, a tokenizer folder out (tokenizer.json, vocab.txt, tokenizer_config.json), which transformers opens
as well. The same text gives the same vocabulary, byte for byte, in any order and for any --workers.

{_INPUTS}""",
        """  bertsmith vocab texts/ --out vocab
  bertsmith vocab wiki.jsonl.gz 'books/**/*.txt' --out vocab --size 8000 --cased""",
        add_vocab,
        run_vocab,
    ),
    "prepare": Command(
        "turn text into token shards",
        f"""Text and a tokenizer in, a corpus folder out: sentences are split, tokenized and stored at about two bytes a
token, with a held-out part and report.json. The result is the same for any --workers.

{_INPUTS}""",
        """  bertsmith prepare texts/ --tokenizer vocab --out corpus
  bertsmith prepare romans.csv --text-column texte --language fr --tokenizer vocab --out corpus""",
        add_prepare,
        run_prepare,
    ),
    "pretrain": Command(
        "pre-train BERT on token shards, or resume a run",
        """A corpus folder in, a run folder out: config.toml, metrics.jsonl, loss.png, tensorboard/, checkpoints/ and
the finished model/, which transformers opens as it is. Stopped or killed, the same command continues; a longer --steps,
--minutes or --epochs extends a finished run.""",
        """  bertsmith pretrain --data corpus --out run --model mini --minutes 30
  bertsmith pretrain --data corpus --out run --recipe paper-base --micro-batch-size 16
  bertsmith pretrain --data corpus2 --out run2 --model run/model --steps 5000 --learning-rate 1e-4
  bertsmith pretrain --recipe run/config.toml --out again""",
        add_pretrain,
        run_pretrain,
        usage="--data DIR --out RUN [--recipe NAME|FILE] [--SETTING VALUE ...] [--json]",
    ),
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
    "finetune": Command(
        "fine-tune a model on a task",
        """A pre-trained model and a task's files in, a run folder out: config.toml, metrics.jsonl, loss.png, the
confusion matrix, and model/, which `evaluate` and `predict` use and transformers opens. Stopped or killed, the same
command continues.

TASK is a GLUE task (cola, sst-2, mrpc, sts-b, qqp, mnli, qnli, rte, wnli), squad1, squad2, swag, ner, or for files of
your own: classify (a text, a label), pairs (two texts, a label), regress (a number), multilabel (labels between
semicolons), choice, ner, squad1 and squad2 in their layouts. Files are .csv, .tsv, .jsonl or .parquet (ner: CoNLL
columns too).""",
        """  bertsmith finetune classify --model run/model --train train.csv --dev dev.csv --out sentiment
  bertsmith finetune mrpc --model run/model --data glue/MRPC --out mrpc --seeds 5
  bertsmith finetune ner --model run/model --train train.conll --dev dev.conll --out ner --learning-rate 5e-5""",
        add_finetune,
        run_finetune,
        show_finetune,
        usage="TASK --model DIR --out RUN (--data DIR | --train F --dev F [--test F]) [--SETTING VALUE ...] [--json]",
    ),
    "glue": Command(
        "fine-tune on every GLUE task found: table, score, submission",
        """A pre-trained model and the folder of GLUE's tasks in; a run for each task, a table of dev results, the
score as the leaderboard averages it, and submission.zip with the predictions for the test files out.""",
        """  bertsmith glue --model run/model --data glue --out results
  bertsmith glue --model run/model --data glue --out results --tasks mrpc,rte --seeds 3""",
        add_glue,
        run_glue,
        show_glue,
        usage="--model DIR --data DIR --out DIR [--tasks NAME,…] [--SETTING VALUE ...] [--json]",
    ),
    "evaluate": Command(
        "official metrics of a fine-tuned model on a labelled file",
        """A fine-tuned run or model and a file in, the task's metrics out. Labels are matched by name.""",
        "  bertsmith evaluate sentiment --data test.csv",
        add_evaluate,
        run_evaluate,
    ),
    "predict": Command(
        "predictions of a fine-tuned model for every row of a file",
        """A fine-tuned run or model and a file in, a file of predictions out: one a row, in order, labelled or not.
What is cut is counted.""",
        """  bertsmith predict sentiment --input new.csv --output predictions.jsonl
  bertsmith predict ner --input new.conll --output tags.jsonl""",
        add_predict,
        run_predict,
    ),
    "embed": Command(
        "vectors of texts: any layers, per text, token or word",
        """A model and a file of texts in, a file of vectors out: one a text, in input order, or with --pool none one a
token ([CLS] and [SEP] among them), with --words one a word. Words are what stands between blanks, or the lists of a
.jsonl or .parquet (column tokens), or the lines of a .conll. What is cut is counted.

.npy holds an array of a row a text. .safetensors holds `vectors`, and for tokens and words `offsets`: text i has the
rows from offsets[i] to offsets[i + 1] (and for tokens `token_ids`). .parquet holds a row a text, with `vector` or
`vectors`. With --combine concat, reshaping to (rows, layers, hidden) gives the layers to weight.""",
        """  bertsmith embed run/model --input texts.txt --output vectors.npy
  bertsmith embed run/model --input sentences.jsonl --words --layers -4: --output words.safetensors
  bertsmith embed run/model --input t.csv --text-column body --normalize --output vectors.parquet""",
        add_embed,
        run_embed,
    ),
    "score": Command(
        "pseudo-log-likelihood of sentences; accuracy on minimal pairs",
        """A model with a masked-LM head and a file of sentences in, how likely it finds each out: the sum of the
log-probabilities (natural) of its tokens, each masked in turn (PLL), and the pseudo-perplexity exp(-PLL / tokens)
(Salazar et al. 2020). With --pairs a table of acceptable and unacceptable sentences in (BLiMP's .jsonl as it is), the
share of pairs out in which the acceptable one has the higher PLL.""",
        """  bertsmith score run/model --input sentences.txt --output scores.jsonl
  bertsmith score run/model --input blimp/anaphor_number_agreement.jsonl --pairs --json""",
        add_score,
        run_score,
    ),
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
is 1. With --int8 (four times smaller; faster where the processor has int8 instructions) size, speed and agreement are
measured and shown. bertsmith.inference.export.load_exported(DIR).run(input_ids, attention_mask, token_type_ids) runs
either format, and takes whole numbers of any type.""",
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
    "demo": Command(
        "the whole way on text that ships with the package",
        """Vocabulary, token shards, pre-training, fill and fine-tuning, each with the command that does it, in about
four minutes on two cores. What an earlier demo left in DIR is replaced.""",
        "  bertsmith demo --out demo",
        add_demo,
        run_demo,
        show_demo,
    ),
    "bench pretrain": Command(
        "time the real pre-training step",
        """Forward with dropout, backward, clipping and optimizer on synthetic rows of full length: tokens a second, and
utilization, the share of the matrix-product rate measured just before in the same precision.""",
        "  bertsmith bench pretrain --model mini --batch 32 --length 128",
        add_bench_pretrain,
        run_bench_pretrain,
    ),
    "bench finetune": Command(
        "time the real fine-tuning step",
        """Packing, forward with dropout, backward, clipping and optimizer on synthetic texts of mixed lengths, from a
quarter of --length to all of it: examples and tokens a second, and utilization, the share of the matrix-product rate
measured just before in the same precision.""",
        "  bertsmith bench finetune --model base --batch 32 --length 128",
        add_bench_pretrain,
        run_bench_finetune,
    ),
    "bench embed": Command(
        "time the making of vectors",
        """Tokenizing, packing, forward and mean over the tokens of synthetic texts of mixed lengths, from a quarter of
--length to all of it: the first call, then texts and tokens a second, and utilization, the share of the matrix-product
rate measured just before in the same precision.""",
        """  bertsmith bench embed --model base --length 256
  bertsmith bench embed --model run/model""",
        add_bench_embed,
        run_bench_embed,
    ),
    "bench prepare": Command(
        "time the preparation of a corpus",
        """Text through `prepare` into a temporary folder: tokens a second, and utilization, the share of the workers'
time that was spent working.""",
        """  bertsmith bench prepare
  bertsmith bench prepare texts/ --workers 4""",
        add_bench_prepare,
        run_bench_prepare,
    ),
}
