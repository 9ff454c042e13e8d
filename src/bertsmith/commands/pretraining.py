"""Pre-training, and the whole way in small: pretrain, demo."""

import argparse
from pathlib import Path

from bertsmith.arguments import (
    CommandParser,
    number,
    whole_number,
)
from bertsmith.commands.command import Command, Pairs, Summary
from bertsmith.results import print_text

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
    from bertsmith.training.ranks import join_ranks, share_settings
    from bertsmith.training.settings import PretrainSettings
    from bertsmith.training.setup import CONFIG_FILE, run_settings

    flat = {key.partition(":")[2]: value for key, value in vars(args).items() if key.startswith("setting:")}
    overrides = [(key, value) for key, value in flat.items() if value is not None] + pairs
    lengths = ("steps", "minutes", "epochs")
    if any(key in lengths for key, _ in overrides):  # a length on the command line replaces the recipe's
        overrides += [(key, "none") for key in lengths if key not in dict(overrides)]
    out = Path(args.out)

    def chosen_settings() -> PretrainSettings:
        name = args.recipe or (None if (out / CONFIG_FILE).is_file() else DEFAULT_RECIPE)
        return run_settings(out, None if name is None else load_recipe(name), overrides)

    with join_ranks() as ranks:
        return pretrain(share_settings(PretrainSettings, chosen_settings, ranks), out, ranks)


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


COMMANDS: dict[str, Command] = {
    "pretrain": Command(
        "pre-train BERT on token shards, or resume a run",
        """A corpus folder in, a run folder out: config.toml, metrics.jsonl, loss.png, tensorboard/, checkpoints/ and
the finished model/, which transformers opens as it is. Stopped or killed, the same command continues; a longer --steps,
--minutes or --epochs extends a finished run.""",
        """  bertsmith pretrain --data corpus --out run --model mini --minutes 30
  bertsmith pretrain --data corpus --out run --recipe paper-base --micro-batch-size 16
  bertsmith pretrain --data corpus2 --out run2 --model run/model --steps 5000 --learning-rate 1e-4
  bertsmith pretrain --recipe run/config.toml --out again
  torchrun --nproc-per-node 4 -m bertsmith pretrain --data corpus --out run --recipe paper-base""",
        add_pretrain,
        run_pretrain,
        several_processes=True,
        usage="--data DIR --out RUN [--recipe NAME|FILE] [--SETTING VALUE ...] [--json]",
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
}
