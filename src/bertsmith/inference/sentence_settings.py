"""What a folder of sentence-transformers says of its vectors, where it is not what ours are made of.

Such a folder is a BERT's, with a few files beside it: modules.json (which steps follow the encoder),
1_Pooling/config.json and sentence_bert_config.json. Vectors here are what the options say; that they differ from what
the folder was trained to give must not stay unsaid.
"""

import json
from pathlib import Path
from typing import Any

from bertsmith.inference.features import FeatureOptions

MODULES, SENTENCE_CONFIG, POOLING_CONFIG = "modules.json", "sentence_bert_config.json", "config.json"
_POOLED_HERE = {"mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
_PREFIX = "pooling_mode"


def other_settings(folder: Path, options: FeatureOptions, max_length: int) -> list[str]:
    """In what vectors of `options`, of at most `max_length` tokens, are not those that the folder was made for.

    Half a sentence each, with the flag that brings it about where there is one; none for a folder of another kind.
    """
    modules = _read(folder / MODULES)
    if not isinstance(modules, list) or options.several:
        return []
    steps = {_kind(module): module for module in modules if isinstance(module, dict)}
    found = []
    if "Pooling" in steps:
        pooling = _pooling_modes(_read(folder / str(steps["Pooling"].get("path", "")) / POOLING_CONFIG))
        if pooling and [_POOLED_HERE.get(mode) for mode in pooling] != [options.pool]:
            flags = [f"--pool {_POOLED_HERE[mode]}" for mode in pooling if mode in _POOLED_HERE]
            found.append(f"pools by {', '.join(pooling)}{_in_brackets(flags if len(pooling) == 1 else [])}")
    if "Dense" in steps:
        found.append("ends in a Dense layer, which is not computed here")
    if "Normalize" in steps and not options.normalize:
        found.append("brings vectors to length 1 (--normalize)")
    config = _read(folder / SENTENCE_CONFIG)
    cut = config.get("max_seq_length") if isinstance(config, dict) else None
    if isinstance(cut, int) and 3 <= cut < max_length:
        found.append(f"cuts texts at {cut} tokens (--max-length {cut})")
    return found


def _kind(module: dict[str, Any]) -> str:
    """The class that a step is of: `sentence_transformers.models.Pooling` is Pooling."""
    return str(module.get("type", "")).rpartition(".")[2]


def _pooling_modes(config: Any) -> list[str]:
    """The ways of pooling, of which several are joined: older files have a switch for each, newer ones a name."""
    if not isinstance(config, dict):
        return []
    named = config.get(_PREFIX)
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [str(name) for name in named]
    return [
        key.removeprefix(f"{_PREFIX}_") for key, value in config.items() if key.startswith(_PREFIX) and value is True
    ]


def _in_brackets(flags: list[str]) -> str:
    return f" ({', '.join(flags)})" if flags else ""


def _read(path: Path) -> Any:
    """The JSON in a file; None where there is none: a note must not stop anybody's work."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
