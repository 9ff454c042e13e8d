"""Fine-tuned model folders: Hugging Face folders whose config.json also says what the task is.

transformers opens them with the class of the head; labels, lengths and columns come back with them here. A folder
without a trained output layer is refused where a prediction is wanted.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertsmith.errors import UserError
from bertsmith.model.config import BertConfig
from bertsmith.model.task_model import ARCHITECTURES, BertForTask
from bertsmith.model.weights import CONFIG, draw_missing, find_model, load_folder_weights, read_config, write_folder
from bertsmith.progress import say, say_once
from bertsmith.storage import atomic_folder
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.spec import TASK_KEY, TaskSpec
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer

# rows of a word table without a token that nobody wonders about
MOST_SPARE_ROWS = 1024


def save_task_model(folder: Path, model: BertForTask, task: Task) -> None:
    """Write the model, its tokenizer and its task, complete or not at all."""
    more = {"architectures": [ARCHITECTURES[model.head]], TASK_KEY: task.spec.as_dict()} | task.folder_keys()
    with atomic_folder(folder) as partial:
        write_folder(partial, model, model.config, more)
        task.tokenizer.save(partial)


def read_spec(folder: str | Path) -> TaskSpec:
    """The task of a fine-tuned folder or run, as it was learnt. Raises UserError for one that has none."""
    path = find_model(folder)
    _, values = read_config(path)
    if TASK_KEY not in values:
        raise UserError(why_no_task(path, values))
    return TaskSpec.from_dict(values[TASK_KEY], str(path / CONFIG))


def why_no_task(path: Path, values: dict[str, Any]) -> str:
    """What is to be said where a folder without TASK_KEY in its config.json, `values`, is to predict."""
    kinds = values.get("architectures")
    if isinstance(kinds, list) and kinds and kinds[0] in ARCHITECTURES.values():
        return (
            f"{path}: is a {kinds[0]} that was not fine-tuned for a task by bertsmith, so that nothing says what its "
            f"rows look like; predict with transformers, or run `bertsmith finetune TASK --model {path}` for an output "
            "layer of the task on its encoder"
        )
    return (
        f"{path}: was not fine-tuned for a task, so that it has no trained output layer to predict with; run "
        f"`bertsmith finetune TASK --model {path}` first"
    )


def load_task_model(folder: str | Path, **columns: str | None) -> tuple[Task, BertForTask]:
    """Open a fine-tuned folder or run. `columns` (text_column, …, encoding) replace those it was trained with.

    Raises UserError for a folder that was not fine-tuned by bertsmith, and for one whose output layer is missing.
    """
    task, config = open_task(folder, **columns)
    path = find_model(folder)
    model = BertForTask(config, task.head, task.outputs)
    report = load_folder_weights(model, path)
    if report.missing:
        raise UserError(
            f"{path}: {report.missing[0]} is missing, so that the {task.spec.name} output layer was never trained; "
            "fine-tune again"
        )
    return task, model


def open_task(folder: str | Path, **columns: str | None) -> tuple[Task, BertConfig]:
    """The task of a fine-tuned folder, run or export, and the model's shape, without its weights.

    `columns`: see `load_task_model`. Raises UserError for a folder that was not fine-tuned by bertsmith.
    """
    learnt = read_spec(folder)
    path = find_model(folder)
    config, values = read_config(path)
    spec = learnt.with_columns(**columns)
    if spec.two_texts and not learnt.two_texts:
        raise UserError(f"text_pair_column: {path} takes one text; leave it out")
    task = make_task(spec, open_tokenizer(path, config))
    if spec.max_length > config.max_position_embeddings or task.outputs < 1:
        raise UserError(
            f"{path / CONFIG}: {TASK_KEY} does not belong to this model (max_length {spec.max_length}, "
            f"{config.max_position_embeddings} positions, {task.outputs} outputs); copy the folder again"
        )
    named = task.folder_keys().get("id2label")
    if values.get("id2label", named) != named:
        raise UserError(
            f"{path / CONFIG}: id2label and {TASK_KEY}.labels do not name the same labels in the same order; one was "
            "changed by hand: change both, or copy the folder again"
        )
    return task, config


def start_model(folder: Path, task: Task, seed: int, dropout: float | None, random_init: bool) -> BertForTask:
    """The pre-trained encoder of a folder under a new output layer, drawn from `seed`.

    What the folder lacks (a pooler) starts from the seed as well, and is said; `random_init` leaves all of it random.
    """
    model = empty_model(folder, task, dropout)
    if random_init:
        return model.initialize(seed)
    report = load_folder_weights(model, folder, skip=("output",))
    draw_missing(model, report, seed)
    if missing := report.missing_from("pooler"):
        say(f"warning: {folder}: {', '.join(missing)} not in it; they start from random values")
    return model


def empty_model(folder: Path, task: Task, dropout: float | None) -> BertForTask:
    """A model of the folder's shape under the task's output layer, its weights still to be filled."""
    config, _ = read_config(folder)
    if dropout is not None:
        changed = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = BertConfig.from_dict(config.to_dict() | changed)
    return BertForTask(config, task.head, task.outputs)


def say_random_positions(folder: Path, config: BertConfig, asked: int | None, default: int) -> None:
    """Say, once a process, where sequences of `asked` tokens come to positions that pre-training left random, or where
    `default`, which is for None, is as short as it is lest they do."""
    trained, positions = config.trained_positions, config.max_position_embeddings
    found = f"{folder}: pre-training came to {trained} of the model's {positions} positions, the others are random"
    if asked is not None and asked > trained:
        say_once(f"warning: {found}; sequences of {asked} tokens use them", (folder, asked))
    elif asked is None and default == trained < positions:
        say_once(f"note: {found}; of a longer text {trained} tokens at a time are used", (folder, asked))


def weights_sha256(model: nn.Module, begun: bytes = b"") -> str:
    """Of all tensors with their names, however they are stored; after `begun`."""
    digest = hashlib.sha256(begun)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def open_tokenizer(folder: Path, config: BertConfig) -> BertTokenizer:
    """The folder's tokenizer. Raises UserError when it has ids past the model's word table.

    Rows that stand for no token are usual (tables are filled up to multiples of 8 or 64, or keep room for new words);
    where they are many, it is said, once a process: the vocabulary may be another model's.
    """
    tokenizer = load_tokenizer(folder)
    spare = config.vocab_size - tokenizer.vocab_size
    if spare > MOST_SPARE_ROWS and 10 * spare > config.vocab_size:
        # not by folder: the models that a command fine-tunes have the vocabulary and the rows of the one it began with
        say_once(
            f"warning: {folder}: its tokenizer has {tokenizer.vocab_size:,} entries, its word table "
            f"{config.vocab_size:,} rows; is vocab.txt this model's?",
            (tokenizer.fingerprint, config.vocab_size),
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} entries, its word table {config.vocab_size}; they do "
            "not belong together"
        )
    return tokenizer
