"""What `bertsmith info` says of a path: a corpus folder, a run, a checkpoint, a model folder or a tokenizer."""

from pathlib import Path
from typing import Any

from bertsmith.errors import UserError


def describe_path(path: str | Path) -> dict[str, Any]:
    """A JSON-able description; its `kind` says what the folder is. Raises UserError when it is none of ours."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path}: is no folder; name a corpus, run, checkpoint, model or tokenizer folder")
    names = {entry.name for entry in folder.iterdir()}
    if {"manifest.json", "state.json"} <= names:
        return _describe_checkpoint(folder)
    if "config.toml" in names:
        return _describe_run(folder)
    if "config.json" in names:
        return _describe_model(folder)
    if {"report.json", "tokenizer"} <= names:
        from bertsmith.corpus.shards import describe_corpus

        return describe_corpus(folder)
    from bertsmith.text.tokenizer_files import is_tokenizer_folder

    if is_tokenizer_folder(folder):
        return {"kind": "tokenizer", "folder": str(folder)} | _describe_tokenizer(folder)
    raise UserError(f"{path}: holds no corpus, run, checkpoint, model or tokenizer of bertsmith or Hugging Face")


def _describe_tokenizer(folder: Path) -> dict[str, Any]:
    from bertsmith.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return {
        "vocab_size": tokenizer.vocab_size,
        "lowercase": tokenizer.lowercase,
        "strip_accents": tokenizer.strip_accents,
        "fingerprint": tokenizer.fingerprint,
    }


def _describe_model(folder: Path) -> dict[str, Any]:
    from bertsmith.model.weights import OBJECTIVE_KEY, load_model
    from bertsmith.text.tokenizer_files import is_tokenizer_folder

    model, report, values = load_model(folder)
    heads = {"mlm": "mlm", "nsp": "nsp", "pooler": "pooler"}
    return {
        "kind": "model",
        "folder": str(folder),
        "parameters": sum(p.numel() for p in model.parameters()),
        "encoder_parameters": sum(p.numel() for p in model.bert.parameters()),
        "heads": [name for name, part in heads.items() if not report.missing_from(part)],
        "unused_tensors": report.unused,
        "objective": values.get(OBJECTIVE_KEY),
        "config": model.config.to_dict(),
        "tokenizer": _describe_tokenizer(folder) if is_tokenizer_folder(folder) else None,
    }


def _describe_checkpoint(folder: Path) -> dict[str, Any]:
    from bertsmith.training.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    return {"kind": "checkpoint", "folder": str(folder), "step": checkpoint.step, "state": checkpoint.state}


def _describe_run(folder: Path) -> dict[str, Any]:
    from bertsmith.options import load_recipe
    from bertsmith.training.checkpoint import find_newest_checkpoint
    from bertsmith.training.metrics_log import read_metrics

    checkpoint, broken = find_newest_checkpoint(folder)
    metrics = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    return {
        "kind": "run",
        "folder": str(folder),
        "settings": dict(load_recipe(folder / "config.toml")),
        "newest_checkpoint": str(checkpoint.folder) if checkpoint else None,
        "step": checkpoint.step if checkpoint else 0,
        "broken_checkpoints": broken,
        "finished_model": str(folder / "model") if (folder / "model").is_dir() else None,
        "last_metrics": metrics[-1] if metrics else None,
    }
