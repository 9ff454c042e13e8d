"""Everything around tasks: finetune, glue, evaluate, predict."""

import argparse
from pathlib import Path
from typing import Any

from bertsmith.arguments import CommandParser, add_compute, add_keep, kept_names, typed
from bertsmith.commands.command import Command, Pairs, Summary
from bertsmith.progress import format_seconds
from bertsmith.results import print_text

_METRICS_SHOWN = 8
# classes up to which a confusion matrix fits a terminal
_CONFUSION_SHOWN = 12
_NAME_SHOWN = 20
_NOT_OF_GLUE = (
    "task", "train", "dev", "dev_share", "test", "grid", "text_column", "text_pair_column", "label_column",
    "label_separator", "encoding", "squad.stride", "squad.max_question", "squad.n_best", "squad.max_answer",
    "ner.token_column", "ner.tag_column", "ner.separator", "ner.strip_digit",
)  # fmt: skip


def add_settings(parser: CommandParser, left_out: tuple[str, ...] = ()) -> None:
    """A hidden flag for every setting of a fine-tuning, and their description below the others."""
    from bertsmith.option_help import describe_settings
    from bertsmith.options import list_settings
    from bertsmith.tasks.settings import FinetuneSettings

    for setting in list_settings(FinetuneSettings):
        if setting.key in left_out:
            continue
        if "." not in setting.flag and setting.flag.startswith("--"):
            parser.add_argument(setting.flag, dest=f"setting:{setting.key}", help=argparse.SUPPRESS)
        parser.dotted.append(f"--{setting.key.replace('_', '-')}")
    parser.epilog = f"settings:\n{describe_settings(FinetuneSettings, left_out=left_out)}\n\n{parser.epilog}"


def overrides(args: argparse.Namespace, pairs: Pairs) -> Pairs:
    """What the flags of `add_settings` were given."""
    flat = {key.partition(":")[2]: value for key, value in vars(args).items() if key.startswith("setting:")}
    return [(key, value) for key, value in flat.items() if value is not None] + pairs


def add_finetune(parser: CommandParser) -> None:
    parser.add_argument("task", metavar="TASK", help="what to learn, see above")
    parser.add_argument("--out", required=True, metavar="RUN", help="run folder; an existing run is resumed")
    add_settings(parser, ("task",))


def run_finetune(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.tasks.runs import finetune
    from bertsmith.tasks.settings import FREE_TO_CHANGE, FinetuneSettings
    from bertsmith.training.ranks import join_ranks, share_settings
    from bertsmith.training.setup import settings_of_run

    given = [("task", args.task), *overrides(args, pairs)]
    out = Path(args.out)

    def chosen_settings() -> FinetuneSettings:
        return settings_of_run(FinetuneSettings, FREE_TO_CHANGE, out, None, given)

    with join_ranks() as ranks:
        return finetune(share_settings(FinetuneSettings, chosen_settings, ranks), out, ranks)


def show_finetune(summary: Summary) -> None:
    for run in summary["runs"]:
        print_text(f"seed {run['seed']}, rate {run['learning_rate']:g}: {_metrics(run['dev'])}")
    if summary["std"] is not None:
        print_text(
            f"{summary['metric']}: mean {summary['mean']:.4g}, standard deviation {summary['std']:.2g}, best "
            f"{summary['best']:.4g}, worst {summary['worst']:.4g}, degenerate runs {summary['degenerate_runs']}"
        )
    if (largest := summary["largest_class"]) is not None:
        print_text(f"always {largest['label']!r}: accuracy {largest['accuracy']:.4g}")
    _show_f1_label(summary)
    _show_classes(summary)
    if (held_out := summary["held_out_predictions"]) is not None:
        print_text(f"what it predicts for the examples held out: {held_out}")
    for name, test in summary["test"].items():
        scored = "" if test["metrics"] is None else f"{_metrics(test['metrics'])}, "
        print_text(f"{name}: {scored}predictions: {test['output']}")
    print_text(f"the model is {summary['model_dir']}")


def _show_f1_label(summary: Summary) -> None:
    """Which of two classes `f1` is of: that of the other one is another number."""
    if summary["f1_label"] is not None:
        print_text(f"f1 is that of label {summary['f1_label']!r}")


def _show_classes(summary: Summary) -> None:
    """A line a class, where the task has any."""
    for row in summary["per_class"] or ():
        print_text(
            f"  {row['label']:<20} precision {row['precision']:.3f}  recall {row['recall']:.3f}  f1 {row['f1']:.3f}  "
            f"({row['support']:,})"
        )


def _metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:_METRICS_SHOWN])


def add_glue(parser: CommandParser) -> None:
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the runs, the table and the zip")
    parser.add_argument("--tasks", metavar="NAME,…", help="tasks to run (default: all found)")
    add_settings(parser, _NOT_OF_GLUE)


def run_glue(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.errors import UserError
    from bertsmith.options import load_settings
    from bertsmith.tasks.glue import run_glue as glue
    from bertsmith.tasks.settings import FinetuneSettings
    from bertsmith.training.ranks import join_ranks

    if alien := [key for key, _ in pairs if key in _NOT_OF_GLUE]:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in alien)
        raise UserError(f"{flags}: means nothing to GLUE's tasks; leave it out")
    settings = load_settings(FinetuneSettings, None, [("task", "mnli"), *overrides(args, pairs)])
    if settings.data is None:
        raise UserError("--data: name the folder that holds the tasks' folders")
    tasks = [name for name in (args.tasks or "").split(",") if name]
    with join_ranks() as ranks:
        return glue(settings, settings.data, Path(args.out), tasks, ranks)


def show_glue(summary: Summary) -> None:
    print_text(Path(summary["table"]).read_text(encoding="utf-8").rstrip())
    print_text(f"submission: {summary['submission']}")
    for name, why in summary["left_out_of_submission"].items():
        print_text(f"  without {name}: {why}")


def add_columns(parser: CommandParser) -> None:
    """Where columns are called otherwise than in the training file."""
    group = parser.add_argument_group("how the file is read (default: as the training file was)")
    group.add_argument("--text-column", metavar="NAME", help="column of the text")
    group.add_argument("--text-pair-column", metavar="NAME", help="column of the second text")
    group.add_argument("--label-column", metavar="NAME", help="column of the label")
    group.add_argument("--encoding", metavar="CODEC", help="of text files; a byte-order mark wins")


def columns(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_columns` was given."""
    names = ("text_column", "text_pair_column", "label_column", "encoding")
    return {name: None if (value := getattr(args, name)) is None else typed(value) for name in names}


def add_evaluate(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a fine-tuned run or model folder, or an export of one")
    parser.add_argument("--data", required=True, metavar="FILE", help="labelled file")
    add_columns(parser)
    add_compute(parser, "the faster of bf16 and fp32 here", int8=True)


def run_evaluate(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.errors import UserError
    from bertsmith.inference.predict import evaluate_file
    from bertsmith.tasks.examples import NoLabels
    from bertsmith.training.ranks import join_ranks

    with join_ranks() as ranks:
        try:
            return evaluate_file(args.model, args.data, args.device, args.precision, ranks, **columns(args))
        except NoLabels as error:
            raise UserError(f"{error}; a file without labels is for `bertsmith predict`") from None


def show_evaluate(summary: Summary) -> None:
    print_text(f"task: {summary['task']}")
    for name, value in summary["metrics"].items():
        print_text(f"{name}: {value:.4g}")
    _show_f1_label(summary)
    if summary["one_class_only"]:
        print_text("every prediction is one and the same")
    _show_classes(summary)
    _show_confusion(summary["labels"], summary["confusion"])
    report = summary["data_report"]
    print_text(
        f"{summary['rows']:,} rows in {format_seconds(summary['seconds'])}: {report['truncated']:,} cut, "
        f"{report['windowed']:,} in windows, {report['unknown_rate']:.1%} of the tokens [UNK]"
    )


def _show_confusion(labels: list[str], matrix: list[list[int]] | None) -> None:
    """A row a true class, a column a predicted one."""
    if not matrix or len(labels) > _CONFUSION_SHOWN:
        return
    names = [label if len(label) <= _NAME_SHOWN else f"{label[: _NAME_SHOWN - 1]}…" for label in labels]
    side = max(map(len, ["true \\ predicted", *names]))
    widths = [max(len(name), *(len(f"{row[place]:,}") for row in matrix)) for place, name in enumerate(names)]
    lines = [("true \\ predicted", names), *zip(names, ([f"{n:,}" for n in row] for row in matrix), strict=True)]
    for first, cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        print_text(f"  {first:<{side}}  {'  '.join(padded)}")


def add_predict(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a fine-tuned run or model folder, or an export of one")
    parser.add_argument("--input", required=True, metavar="FILE", help="rows to predict, labelled or not")
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help=".jsonl, .csv, .tsv or .parquet, a prediction a row, in order; of ner also .conll: a word, its tag",
    )
    parser.add_argument(
        "--raw-text",
        action="store_true",
        help="of ner: the input holds texts, one a row, which are cut into words; gives words, tags, entities",
    )
    add_keep(parser)
    add_columns(parser)
    add_compute(parser, "the faster of bf16 and fp32 here", int8=True)


def run_predict(args: argparse.Namespace, pairs: Pairs) -> Summary:
    from bertsmith.inference.predict import predict_file
    from bertsmith.training.ranks import join_ranks

    with join_ranks() as ranks:
        return predict_file(
            args.model,
            args.input,
            args.output,
            args.device,
            args.precision,
            ranks=ranks,
            keep=kept_names(args),
            raw_text=args.raw_text,
            **columns(args),
        )


COMMANDS: dict[str, Command] = {
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
  bertsmith finetune classify --model run/model --train all.csv --dev-share 0.1 --out sentiment
  bertsmith finetune mrpc --model run/model --data glue/MRPC --out mrpc --seeds 5
  bertsmith finetune ner --model run/model --train train.conll --dev dev.conll --out ner
  torchrun --nproc-per-node 4 -m bertsmith finetune mrpc --model run/model --data MRPC --out mrpc""",
        add_finetune,
        run_finetune,
        show_finetune,
        several_processes=True,
        usage="TASK --model DIR --out RUN\n"
        "                          (--data DIR | --train F (--dev F | --dev-share X)) [SETTINGS ...]",
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
        several_processes=True,
        usage="--model DIR --data DIR --out DIR [--tasks NAME,…] [--SETTING VALUE ...]",
    ),
    "evaluate": Command(
        "official metrics of a fine-tuned model on a labelled file",
        """A fine-tuned run or model and a file in, the task's metrics out. Labels are matched by name.""",
        "  bertsmith evaluate sentiment --data test.csv",
        add_evaluate,
        run_evaluate,
        show_evaluate,
        several_processes=True,
    ),
    "predict": Command(
        "predictions of a fine-tuned model for every row of a file",
        """A fine-tuned run or model and a file in, a file of predictions out: one a row, in order, labelled or not.
What is cut is counted.""",
        """  bertsmith predict sentiment --input new.csv --output predictions.jsonl
  bertsmith predict sentiment --input new.csv --output labelled.csv --keep id,text
  bertsmith predict ner --input new.conll --output tagged.conll
  bertsmith predict ner --input letters.txt --raw-text --output entities.jsonl
  torchrun --nproc-per-node 4 -m bertsmith predict sentiment --input new.csv --output out.jsonl""",
        add_predict,
        run_predict,
        several_processes=True,
    ),
}
