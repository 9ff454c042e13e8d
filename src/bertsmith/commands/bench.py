"""This machine's speed: bench pretrain, finetune, embed, prepare."""

import argparse

from bertsmith.arguments import (
    CommandParser,
    add_compute,
    add_workers,
    whole_number,
)
from bertsmith.commands.command import Command, Pairs, Summary


def add_bench_pretrain(parser: CommandParser) -> None:
    add_bench_finetune(parser)
    parser.add_argument(
        "--compile", choices=("auto", "on", "off"), default="auto", help="as for pretrain (default auto: on GPUs)"
    )


def add_bench_finetune(parser: CommandParser) -> None:
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
        args.model, args.batch, args.length, args.steps, args.device, args.precision, args.seed, args.compile
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
    add_compute(parser, "as for embed; for a size the faster of the two here", int8=True)


def run_bench_embed(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.inference.benchmark import benchmark_embedding

    return benchmark_embedding(args.model, args.texts, args.length, args.steps, args.device, args.precision, args.seed)


def add_bench_prepare(parser: CommandParser) -> None:
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="text to use (default: the demo's, several times)")
    add_workers(parser)


def run_bench_prepare(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.corpus.benchmark import benchmark_prepare

    return benchmark_prepare(args.inputs or (), args.workers)


COMMANDS: dict[str, Command] = {
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
        add_bench_finetune,
        run_bench_finetune,
    ),
    "bench embed": Command(
        "time the making of vectors",
        """Tokenizing, packing, forward and mean over the tokens of synthetic texts of mixed lengths, from a quarter of
--length to all of it: the first call, then texts and tokens a second, and utilization, the share of the matrix-product
rate measured just before in the same precision (with int8: in that of the rest of the arithmetic).""",
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
