"""`bertsmith predict` and `bertsmith evaluate`: a fine-tuned model over a file, streamed, rows in = rows out.

Predictions are written in input order to .jsonl, .csv, .tsv or .parquet (tags of words also to .conll), complete or not
at all; memory is that of a chunk of rows, whatever the file's size.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.errors import UserError
from bertsmith.hardware import choose_device
from bertsmith.inference.conll_writer import (
    CONLL,
    ConllLayout,
    check_conll,
    check_sentences,
    is_conll,
    open_conll_writer,
    with_words,
)
from bertsmith.inference.embed import check_input, check_output, check_rows, is_word_file, say_empty
from bertsmith.inference.exported import FILE_NAMES
from bertsmith.inference.exported_task import ExportedTask, is_exported, load_exported_task
from bertsmith.inference.int8 import INT8, check_int8
from bertsmith.inference.kept_columns import KeptColumns, count_rows
from bertsmith.inference.loaded import use_bert
from bertsmith.inference.predictor import predict_examples
from bertsmith.inference.row_writer import find_ending, open_row_writer
from bertsmith.model.task_model import BertForTask
from bertsmith.model.weights import find_model
from bertsmith.progress import Progress
from bertsmith.tasks.classification import ClassifyTask, RegressTask
from bertsmith.tasks.data import warn_of_losses
from bertsmith.tasks.examples import (
    ChoiceExample,
    EncodingReport,
    Example,
    QuestionExample,
    TaggedExample,
    TextExample,
)
from bertsmith.tasks.model_folder import load_task_model, read_spec, weights_sha256
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.running_text import make_running, read_running_text
from bertsmith.tasks.task import Row, Task
from bertsmith.training.ranks import ALONE, Ranks, check_same, make_alike, prepare_machines

# what computes a task's metrics takes seconds to import: before the bar, which would else stand still at its end
_METRIC_MODULES: tuple[tuple[type[Task], str], ...] = (
    (ClassifyTask, "sklearn.metrics"),
    (RegressTask, "scipy.stats"),
)
# an example of each kind, whose prediction tells the columns where a file has no rows
_MADE_UP: dict[str, Example] = {
    "sequence": TextExample("", "0", "a", None, None),
    "choice": ChoiceExample("", "0", "a", ("a", "a"), None),
    "token": TaggedExample("", "0", ("a",), None),
    "span": QuestionExample("", "0", "a", "a", None),
}


def predict_file(
    model_folder: str | Path,
    input_path: str,
    output_path: str | Path,
    device: str = "auto",
    precision: str = "auto",
    part_of: str | None = None,
    score: bool = False,
    ranks: Ranks = ALONE,
    keep: Sequence[str] = (),
    raw_text: bool = False,
    **columns: str | None,
) -> dict[str, Any]:
    """Predict every row of a file, labelled or not; returns the JSON summary.

    Several processes (`ranks`) call it together and share the rows; the first one writes, the others return {}.

    `part_of`: read the file as the GLUE task of that name lays it out (AX, for a model of MNLI). `score`: where every
    row is labelled, the summary's `metrics` are those of the task. `keep`: columns of the input that are written before
    the prediction's own, see kept_columns.py. `raw_text`: of a model that tags words, the input holds texts, which are
    cut into words (see running_text.py); a prediction has `words`, `tags` and `entities`. `columns`:
    text_column, text_pair_column, label_column and encoding, where they differ from the training file's.

    Raises UserError for a model without a trained output layer, and for rows that cannot be read, naming the line.
    """
    output = Path(output_path)
    to_conll = is_conll(output)
    with ranks.alike():
        learnt = read_spec(model_folder)
        if raw_text and learnt.name != "ner":
            raise UserError(f"--raw-text: is for models that tag words; {learnt.name} takes its files as they are")
        if raw_text and is_word_file(input_path):
            raise UserError(f"{input_path}: holds a word a line, as its name says; leave --raw-text out")
        if to_conll:
            check_conll(output, learnt, keep)
        else:
            find_ending(output, (CONLL,) if learnt.name == "ner" else ())
        check_input(input_path, ranks)
        if ranks.is_first:
            check_output(input_path, output)

    def rows_of(task: Task, report: EncodingReport) -> Iterator[Any]:
        if raw_text:
            return read_running_text(input_path, columns.get("text_column") or "text", task.spec.encoding, report)
        reader = make_task(replace(task.spec, name=part_of), task.tokenizer) if part_of else task
        return reader.read(input_path, "test", None if score else False, report)

    def made_up(task: Task) -> Row:
        return _made_up_prediction(task, make_running("", "0", "a") if raw_text else _MADE_UP[task.head])

    def open_kept(task: Task) -> KeptColumns:
        names = keep if ranks.is_first else ()
        is_table = task.is_table if not raw_text else lambda path: True
        return KeptColumns(input_path, names, output, made_up(task), task.spec.encoding, is_table, ranks.is_first)

    def check(task: Task) -> None:
        open_kept(task)
        check_rows(input_path, rows_of(task, EncodingReport()))

    task, model, device_ = open_for_prediction(model_folder, device, precision, columns, ranks, check)
    with ranks.alike():
        kept = open_kept(task)
    report, scorer, begun = EncodingReport(), task.scorer(), time.monotonic()
    rows = labelled = 0
    layout = ConllLayout(learnt) if to_conll else None

    def read(report: EncodingReport) -> Iterator[Any]:
        examples = kept.follow(rows_of(task, report), attrgetter("place"))
        return examples if layout is None else check_sentences(examples, input_path, layout)

    with ranks.alike():
        total, types = kept.count(read(EncodingReport())), kept.arrow_types()
    if raw_text and output.suffix.lower() == ".parquet":
        types |= _entity_types()
    opened = open_row_writer(output, types) if layout is None else open_conll_writer(output, layout)
    with (
        opened if ranks.is_first else nullcontext() as writer,
        Progress("predicting", total, "rows") as bar,
    ):
        examples = read(report)
        for chunk, predictions in predict_examples(task, model, examples, device_, report, bar.advance, ranks):
            assert writer is not None, "only the first rank gets predictions"
            writer.write(with_words(chunk, predictions) if layout is not None else kept.beside(predictions))
            rows += len(predictions)
            if score:
                pairs = [pair for pair in zip(chunk, predictions, strict=True) if task.is_labelled(pair[0])]
                labelled += len(pairs)
                scorer.add([example for example, _ in pairs], [row for _, row in pairs])
        if writer is not None and not rows:  # the columns are known all the same
            writer.expect(dict.fromkeys(kept.names) | made_up(task))
    if not ranks.is_first:
        return {}
    say_empty(rows, input_path, output)
    warn_of_losses(Path(input_path).name, report.as_dict(), task)
    return {
        "rows": rows,
        "truncated": report.truncated,
        "truncated_tokens": report.truncated_tokens,
        "windowed": report.windowed,
        "unknown_rate": report.as_dict()["unknown_rate"],
        **({"empty_texts": report.notes.get("empty_texts", 0)} if task.head == "sequence" else {}),
        **({"questions_cut": report.notes.get("questions_cut", 0)} if task.head == "span" else {}),
        "seconds": time.monotonic() - begun,
        "output": str(output),
        **({"metrics": scorer.compute() if labelled == rows else None} if score else {}),
    }


def _made_up_prediction(task: Task, example: Example) -> Row:
    """A row such as predictions are, from scores that are all 0."""
    (encoded,) = task.encode([example], EncodingReport(), train=False)
    return task.decode(example, encoded, [np.zeros((len(s.positions), task.outputs), np.float32) for s in encoded])


def _entity_types() -> dict[str, Any]:
    """The Arrow type of the column `entities`: the first texts may have none."""
    import pyarrow as pa

    fields = {"type": pa.string(), "text": pa.string(), "start": pa.int64(), "end": pa.int64()}
    return {"entities": pa.list_(pa.struct(fields))}


def open_for_prediction(
    model_folder: str | Path,
    device: str,
    precision: str,
    columns: dict[str, str | None],
    ranks: Ranks = ALONE,
    check: Callable[[Task], None] = lambda task: None,
) -> tuple[Task, BertForTask | ExportedTask, torch.device]:
    """A fine-tuned model on its device, in the arithmetic asked for, or an export of one; on every rank the same.

    `check`: raises UserError for files that do not suit the task, before 8 bits are chosen, which takes its time.
    """
    folder = find_model(model_folder)
    if is_exported(folder):
        with ranks.alike():
            task, exported = load_exported_task(folder, device, precision, None, **columns)
            check(task)
        if ranks.size > 1:
            written = (folder / FILE_NAMES[exported.exported.format]).read_bytes()
            check_same(weights_sha256(exported, written), str(model_folder), ranks)
        return task, exported, torch.device("cpu")
    with ranks.alike():
        task, model = load_task_model(model_folder, **columns)
        check(task)
    if ranks.size > 1:
        check_same(weights_sha256(model), str(model_folder), ranks)
    if precision in INT8:
        with ranks.alike():
            where = choose_device(device)
            check_int8(where)
        path, exact = find_model(model_folder), model.bert
        model.bert = make_alike(lambda each: use_bert(path, exact, task.tokenizer, where, each), precision, ranks).bert
        return task, model.eval(), where
    machine = prepare_machines(device, precision, ranks)
    model = model.to(machine.device).eval()
    # the training's own attention: on the dev file `evaluate` gives the very numbers that the run reported
    model.bert.compute_dtype = machine.dtype
    return task, model, machine.device


def evaluate_file(
    model_folder: str | Path,
    input_path: str,
    device: str = "auto",
    precision: str = "auto",
    ranks: Ranks = ALONE,
    **columns: str | None,
) -> dict[str, Any]:
    """Official metrics of a fine-tuned model on a labelled file; returns the JSON summary.

    Several processes (`ranks`) call it together and share the rows; the first one counts, the others return {}.
    Labels are matched by name, whatever their order in the file. Raises UserError for a row without a label and for a
    label the model does not know, naming the line.
    """
    with ranks.alike():
        check_input(input_path, ranks)

    def rows_of(task: Task, report: EncodingReport) -> Iterator[Any]:
        return task.read(input_path, "dev", True, report)

    task, model, device_ = open_for_prediction(
        model_folder,
        device,
        precision,
        columns,
        ranks,
        lambda task: check_rows(input_path, rows_of(task, EncodingReport())),
    )
    report, scorer, begun = EncodingReport(), task.scorer(), time.monotonic()
    for kind, module in _METRIC_MODULES:
        if ranks.is_first and isinstance(task, kind):
            importlib.import_module(module)
    with ranks.alike():
        total = count_rows(input_path, rows_of(task, EncodingReport())) if ranks.is_first else None
    rows = 0
    with Progress("evaluating", total, "rows") as bar:
        for chunk, predictions in predict_examples(
            task, model, rows_of(task, report), device_, report, bar.advance, ranks
        ):
            scorer.add(chunk, predictions)
            rows += len(chunk)
    with ranks.alike():
        if ranks.is_first and not rows:
            raise UserError(f"{input_path}: holds no example to score")
    if not ranks.is_first:
        return {}
    warn_of_losses(Path(input_path).name, report.as_dict(), task)
    details = scorer.details()
    return {
        "task": task.spec.name,
        "metrics": scorer.compute(),
        "f1_label": task.f1_label,
        "one_class_only": scorer.one_class_only,
        "per_class": details.get("per_class"),
        "confusion": details.get("confusion"),
        "labels": list(task.spec.labels),
        "rows": rows,
        "data_report": report.as_dict(),
        "seconds": time.monotonic() - begun,
    }
