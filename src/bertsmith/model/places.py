"""Paths that hold no model: what to say of them, what was found there instead, and which folder to name.

A path in, half a sentence out. Looked into only when opening has failed, and no deeper than the layouts that are known:
runs, sentence-transformers' folders, Hugging Face's cache.
"""

import os
import re
import reprlib
from pathlib import Path

from bertsmith.errors import UserError

_CORPUS, _ADAPTER, _TOKENIZER = "corpus.json", "adapter_config.json", ("vocab.txt", "tokenizer.json")
# a run inside a demo's folder, a checkpoint in Hugging Face's cache, sentence-transformers' 0_Transformer
_BELOW = ("model/{}", "*/{}", "*/model/{}", "snapshots/*/{}")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LONGEST_SHOWN = 300  # characters of a path


def as_path(folder: str | Path) -> Path:
    """The folder as a Path. Raises UserError for what names none (a number, bytes, None, a model) or cannot be one."""
    try:
        path = Path(folder)
        (path / "x").exists()  # names that are too long and folders that may not be entered are told of here
        return path
    except OSError as error:
        shown = str(folder) if len(str(folder)) <= _LONGEST_SHOWN else f"{str(folder)[:_LONGEST_SHOWN]}…"
        raise UserError(f"{shown}: cannot be opened ({error.strerror}); name a model folder") from error
    except TypeError:
        raise UserError(
            f"folder: {reprlib.repr(folder)} is not a path; name the model folder by a text or a Path"
        ) from None


def why_no_file(path: Path) -> str | None:
    """What stands in the place of the file `path`: a link to nowhere, a folder, a pipe; None where nothing does."""
    if not os.path.lexists(path) or path.is_file():
        return None
    if not path.exists():
        return (
            f"is a link that points nowhere ({os.readlink(path)} is not there); copy the file that it stands for as "
            "well (cp -L does)"
        )
    kind = "folder" if path.is_dir() else "pipe or a device"
    return f"is a {kind} where a file is needed; copy the model folder again"


def why_no_model(folder: Path, name: str) -> str:
    """Why the file `name` is not found in `folder`, and what to name instead, where that can be seen."""
    if folder.is_file():
        return f"is a file; name the model folder that it lies in, as in {folder.parent}"
    if not folder.exists():
        if os.path.lexists(folder):
            return "is a link that points nowhere; name a model folder"
        if _HUB_NAME.fullmatch(str(folder)):
            return (
                "no such folder; only folders on this machine are opened: download a model of Hugging Face's hub "
                "first, then name its folder"
            )
        return "no such folder; name a model folder"
    if found := next((file.parent for pattern in _BELOW for file in sorted(folder.glob(pattern.format(name)))), None):
        return f"no {name} here; did you mean {found}?"
    if (folder / _CORPUS).is_file():
        return f"no {name} here, for this is a corpus (it holds {_CORPUS}); name a model folder"
    if (folder / _ADAPTER).is_file():
        return (
            f"no {name} here, only an adapter ({_ADAPTER}); merge it into its model (merge_and_unload in peft), save "
            "that, and name its folder"
        )
    if any((folder / file).is_file() for file in _TOKENIZER):
        return f"no {name} here, only a tokenizer; name a model folder"
    return f"no {name} here; name a model folder"
