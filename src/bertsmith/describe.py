"""What `bertsmith info` says of a path: a corpus folder, a run, a checkpoint, a model folder or a tokenizer.

It only reads: a run may be training while it is described. What is broken in a run is part of its description.
"""

import json
import re
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.object_storage import is_url

_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")
# a file that only a folder of that kind holds
_KINDS = {"manifest.json": "checkpoint", "corpus.json": "corpus", "config.toml": "run", "export.json": "export"}
# a file that stands for the folder it is in
_TELLING_FILES = ("corpus.json", "config.toml", "config.json", "bert_config.json", "manifest.json", *_TOKENIZER_FILES)


def describe_path(path: str | Path) -> dict[str, Any]:
    """A JSON-able description; its `kind` says what the folder is. Raises UserError when it is none of ours."""
    if is_url(str(path)):
        raise UserError(f"{path}: only what is on this machine is described; copy the folder here first")
    folder = Path(path)
    if folder.is_file() and folder.name in _TELLING_FILES:
        folder = folder.parent
    if not folder.is_dir() and Path(f"{folder}.index").is_file():
        return {"kind": "google", "folder": str(folder.parent)} | _describe_google(folder)
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise UserError(f"{path}: {what}; name a corpus, run, checkpoint, model or tokenizer folder")
    kind = _kind_of(folder)
    if kind is None:
        inside = sorted(str(entry) for entry in folder.iterdir() if entry.is_dir() and _kind_of(entry))
        hint = f"; name one of {', '.join(inside[:5])}" if inside else ""
        raise UserError(f"{folder}: is no corpus, run, checkpoint, model or tokenizer folder{hint}")
    describe = {
        "corpus": _describe_corpus,
        "run": _describe_run,
        "checkpoint": _describe_checkpoint,
        "export": _describe_export,
        "model": _describe_model,
        "google": _describe_google,
        "tokenizer": _describe_tokenizer,
    }[kind]
    return {"kind": kind, "folder": str(folder)} | describe(folder)


def _kind_of(folder: Path) -> str | None:
    names = {entry.name for entry in folder.iterdir()}
    for name, kind in _KINDS.items():
        if name in names:
            return kind
    if "config.json" in names:
        return "model"
    if any(name.endswith(".index") for name in names):
        return "google"
    if "bert_config.json" in names:  # a PyTorch folder of the first year
        return "model"
    return "tokenizer" if names.intersection(_TOKENIZER_FILES) else None


def _describe_corpus(folder: Path) -> dict[str, Any]:
    from bertsmith.corpus.shards import describe_corpus

    return describe_corpus(folder)


def _describe_export(folder: Path) -> dict[str, Any]:
    from bertsmith.inference.exported import read_marker

    return read_marker(folder)


def _describe_tokenizer(folder: Path) -> dict[str, Any]:
    from bertsmith.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return {
        "vocab_size": tokenizer.vocab_size,
        "lowercase": tokenizer.lowercase,
        "strip_accents": tokenizer.normalization.strips_accents,
        "max_length": tokenizer.max_length,
        "fingerprint": tokenizer.fingerprint,
    }


def _describe_model(folder: Path) -> dict[str, Any]:
    from bertsmith.model.weights import load_model

    return _describe_weights(folder, *load_model(folder))


def _describe_google(path: Path) -> dict[str, Any]:
    """A folder or a checkpoint's prefix; opened only to be described, for every other command wants it converted."""
    from bertsmith.model.google import find_checkpoint, load_google_model

    prefix = find_checkpoint(path)
    assert prefix is not None
    described = _describe_weights(prefix.parent, *load_google_model(prefix))
    return {"checkpoint": prefix.name, "to_use_it": f"bertsmith convert {path} DST"} | described


def _describe_weights(folder: Path, model: Any, report: Any, values: dict[str, Any]) -> dict[str, Any]:
    """What was found in the files of a model; `values`: its config.json."""
    from bertsmith.model.weights import OBJECTIVE_KEY, vocabulary_note
    from bertsmith.tasks.spec import TASK_KEY, TaskSpec

    missing = {name: report.missing_from(name) for name in ("mlm", "nsp", "pooler")}
    absent = {name for names in missing.values() for name in names}
    # `mlm` trains neither, but writes both: transformers wants the folder of a pre-trained BERT whole
    untrained = ("nsp", "pooler") if values.get(OBJECTIVE_KEY) == "mlm" else ()
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    tokenizer = _describe_tokenizer(folder) if has_tokenizer else None
    note = vocabulary_note(folder, tokenizer["vocab_size"], model.config) if tokenizer else None
    task = TaskSpec.from_dict(values[TASK_KEY], str(folder)) if TASK_KEY in values else None
    # the task's own layer, which the model that is described here, a pre-trained one, has no use for
    own = [name for name in report.unused if task and name.startswith(("classifier.", "qa_outputs."))]
    return {
        "parameters": _count_parameters(model, absent),
        "encoder_parameters": _count_parameters(model.bert, absent, "bert."),
        "heads": [
            *(name for name, tensors in missing.items() if not tensors and name not in untrained),
            *([task.name] if task and own else []),
        ],
        "untrained_heads": [name for name, tensors in missing.items() if not tensors and name in untrained],
        "unused_tensors": [name for name in report.unused if name not in own],
        "notes": report.notes if note is None else [*report.notes, note],
        "objective": values.get(OBJECTIVE_KEY),
        "task": None if task is None else task.as_dict(),
        "trained_positions": model.config.trained_positions,
        "config": model.config.to_dict(),
        "tokenizer": tokenizer,
    }


def _count_parameters(module: Any, absent: set[str], prefix: str = "") -> int:
    """Parameters of the tensors that the file holds."""
    from bertsmith.model.weights import hugging_face_names

    return sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if not absent.intersection(hugging_face_names(prefix + name))
    )


def _describe_checkpoint(folder: Path) -> dict[str, Any]:
    from bertsmith.training.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    return {"step": checkpoint.step, "state": checkpoint.state}


def _describe_run(folder: Path) -> dict[str, Any]:
    from bertsmith.options import load_recipe
    from bertsmith.training.metrics_log import read_metrics

    settings = dict(load_recipe(folder / "config.toml"))
    # of several runs of a fine-tuning, the one that was last at work
    logs = [folder / "metrics.jsonl", *sorted(folder.glob("runs/*/metrics.jsonl"))]
    log = max((log for log in logs if log.is_file()), key=lambda log: log.stat().st_mtime_ns, default=logs[0])
    metrics = read_metrics(log.parent) if log.is_file() else []
    training = [line for line in metrics if line.get("loss") is not None]
    evaluations = [
        line for line in metrics if line.get("eval_loss") is not None or any(name.startswith("dev_") for name in line)
    ]
    newest, broken = _find_checkpoint(log.parent / "checkpoints")
    results = _read_results(folder)
    # a fine-tuning that is finished keeps no checkpoint
    finished = metrics[-1]["step"] if metrics and (log.parent / "result.json").is_file() else 0
    return {
        "step": finished if newest is None else newest.step,
        "newest_checkpoint": None if newest is None else str(newest.folder),
        "broken_checkpoints": broken,
        "finished_model": str(folder / "model") if (folder / "model").is_dir() else None,
        "results": {name: result["dev"] for name, result in results.items()},
        "kept_steps": {name: result["best_step"] for name, result in results.items()},
        "last_metrics": training[-1] if training else None,
        "last_evaluation": evaluations[-1] if evaluations else None,
        "settings": settings,
    }


def _read_results(folder: Path) -> dict[str, Any]:
    """Name → result of each finished run of a fine-tuning; nothing for a pre-training."""
    files = [*folder.glob("result.json"), *sorted(folder.glob("runs/*/result.json"))]
    return {file.parent.name: json.loads(file.read_bytes()) for file in files}


def _find_checkpoint(folder: Path) -> tuple[Any, list[str]]:
    """The newest complete checkpoint, or None, and a sentence for each newer one that is broken.

    Unlike `find_newest_checkpoint`, which a run calls for itself, this tidies nothing: the run may be writing there.
    """
    from bertsmith.training.checkpoint import open_checkpoint

    steps = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    broken: list[str] = []
    for path in sorted(steps, key=lambda path: int(path.name.partition("-")[2]), reverse=True):
        try:
            return open_checkpoint(path), broken
        except UserError as error:
            if path.exists():  # the run may have removed it while it was read
                broken.append(str(error))
    return None, broken
