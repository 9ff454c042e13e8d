"""Training state on disk: a checkpoint is complete or absent, and the newest complete one is what a run resumes from.

RUN/checkpoints/step-00001234/ holds model.safetensors (fp32 master weights), optimizer.safetensors, state.json (what
else the loop needs) and manifest.json (size and sha256 of the three). The folder is written beside, synced and renamed,
so a kill leaves nothing half-written under that name; what a disk or a copy damaged later, the manifest shows.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.storage import PARTIAL, atomic_folder

WEIGHTS, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_FILES = (WEIGHTS, OPTIMIZER, STATE)
_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files were found to be what was written."""

    folder: Path
    step: int
    """Updates applied before it was written."""
    state: dict[str, Any]
    """What `save_checkpoint` was given as `state`."""

    def load_weights(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fp32 master weights on the CPU, bit by bit as saved; tied names share one tensor.

        `expected`: the model's own tensors by name (`model.state_dict()`). Raises UserError naming what is missing,
        not known or of another shape.
        """
        path = self.folder / WEIGHTS
        weights = self._load(path)
        problems = [f"{name} is missing" for name in expected if name not in weights]
        problems += [f"{name} is not known to the model" for name in weights if name not in expected]
        problems += [
            f"{name} has shape {tuple(weights[name].shape)}, the model {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(
                f"{path}: does not fit the model: {'; '.join(problems[:3])}{more}; resume with the model settings the "
                "run was started with"
            )
        return weights

    def load_optimizer(self) -> dict[str, Tensor]:
        """The optimizer's state tensors, bit by bit as saved; the optimizer checks their names and shapes."""
        return self._load(self.folder / OPTIMIZER)

    def _load(self, path: Path) -> dict[str, Tensor]:
        try:
            with safe_open(path, framework="pt") as file:
                tied = json.loads((file.metadata() or {}).get("tied", "{}"))
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from error
        return tensors | {name: tensors[first] for name, first in tied.items()}


def save_checkpoint(
    run: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write RUN/checkpoints/step-… and return its folder; afterwards only the newest `keep` (≥ 1) are left.

    `weights` and `optimizer`: tensors by name, on any device; tied ones (the same memory under two names) are stored
    once. `state`: anything JSON holds. Raises UserError when the disk refuses; older checkpoints are then untouched.
    """
    assert keep >= 1, "a run keeps its newest checkpoint"
    folder = _folder(run, step)
    _clean_leftovers(folder.parent)
    try:
        with atomic_folder(folder) as partial:
            (partial / STATE).write_bytes(json.dumps(state, indent=1, ensure_ascii=False).encode("utf-8"))
            for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
                distinct, tied = _distinct(tensors)
                save_file(distinct, partial / name, {"format": "pt", "tied": json.dumps(tied)})
                shutil.copymode(partial / STATE, partial / name)  # safetensors makes files only the owner can read
            files = {
                name: {"bytes": (partial / name).stat().st_size, "sha256": digest}
                for name, digest in _digests([partial / name for name in _FILES]).items()
            }
            manifest = json.dumps({"version": _VERSION, "step": step, "files": files}, indent=1)
            (partial / MANIFEST).write_bytes(manifest.encode("utf-8"))
    except UserError as error:
        earlier = [s for s in _steps(folder.parent) if _sizes_match(_folder(run, s))]
        left = f"{_folder(run, earlier[0])} is complete and will be used" if earlier else "there is no earlier one"
        raise UserError(f"{error} ({left})") from error
    _prune(run, step, keep)
    return folder


def find_newest_checkpoint(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of a run, and a sentence for each newer one that is broken (they are left there).

    (None, []) when the run has none yet. Raises UserError when there are some and all are broken: starting again from
    nothing is for the user to decide.
    """
    folder = run / "checkpoints"
    _clean_leftovers(folder)
    broken: list[str] = []
    for step in _steps(folder):
        try:
            return open_checkpoint(_folder(run, step)), broken
        except UserError as error:
            broken.append(str(error))
    if broken:
        raise UserError(f"no complete checkpoint is left: {'; '.join(broken)}. Move {folder} away to start afresh")
    return None, []


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open one checkpoint folder after checking the size and sha256 of each file.

    Raises UserError with the reason when it is not complete.
    """
    manifest = _read_json(folder, MANIFEST)
    try:
        version, step, files = manifest["version"], int(manifest["step"]), manifest["files"]
        wanted = {name: (int(files[name]["bytes"]), str(files[name]["sha256"])) for name in _FILES}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: broken checkpoint, {MANIFEST} is not a manifest ({error!r})") from error
    if version != _VERSION:
        raise UserError(
            f"{folder}: its format is {version}, this bertsmith reads {_VERSION}; resume with the one that wrote it"
        )
    try:
        for name, (size, _) in wanted.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise UserError(f"{folder}: broken checkpoint, {name} has {found:,} of {size:,} bytes")
        for name, digest in _digests([folder / name for name in _FILES]).items():
            if digest != wanted[name][1]:
                raise UserError(f"{folder}: broken checkpoint, {name} is damaged (its sha256 differs)")
    except OSError as error:
        raise UserError(f"{folder}: broken checkpoint, {error.filename}: {error.strerror}") from error
    return Checkpoint(folder, step, _read_json(folder, STATE))


def _folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def _steps(folder: Path) -> list[int]:
    """The steps that have a folder under that name, newest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{8,})", name))), reverse=True)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_bytes())
    except OSError as error:
        raise UserError(f"{folder}: broken checkpoint, {name}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{folder}: broken checkpoint, {name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{folder}: broken checkpoint, {name} is not a JSON object")
    return content


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors with each memory once, on the CPU, and for every other name of it the name it is stored under."""
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in first:
            tied[name] = first[memory]
        else:
            first[memory] = name
            distinct[name] = tensor.detach().to(torch.device("cpu")).contiguous()
    return distinct, tied


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    """sha256 by file name; the files in parallel (hashing is the greater part of opening a large checkpoint)."""

    def digest(path: Path) -> tuple[str, str]:
        with path.open("rb") as file:
            return path.name, hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(len(_FILES)) as pool:
        return dict(pool.map(digest, paths))


def _sizes_match(folder: Path) -> bool:
    """The cheap half of `open_checkpoint`: every file there with the size the manifest says."""
    try:
        files = _read_json(folder, MANIFEST)["files"]
        return all((folder / name).stat().st_size == files[name]["bytes"] for name in _FILES)
    except (UserError, OSError, KeyError, TypeError):
        return False


def _prune(run: Path, step: int, keep: int) -> None:
    """Leave the checkpoint of `step`, just written, and the `keep` - 1 complete ones before it; broken ones go too.

    Folders of later steps stay: they are broken (or the run would not be back at `step`), and until the run has passed
    them their content is the furthest there is.
    """
    kept = 1
    for earlier in _steps(run / "checkpoints"):
        if earlier >= step:
            continue
        folder = _folder(run, earlier)
        if kept < keep and _sizes_match(folder):
            kept += 1
            continue
        # out of sight in one rename, so that a kill in the middle does not leave what looks like a broken checkpoint
        aside = folder.with_name(f".{folder.name}{PARTIAL}pruned-{os.getpid()}")
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def _clean_leftovers(folder: Path) -> None:
    """Remove what killed writers left; put back a complete checkpoint that was about to be replaced by a newer copy."""
    for leftover in folder.glob(f".step-*{PARTIAL}*"):
        name, _, rest = leftover.name[1:].partition(PARTIAL)
        if rest.startswith("old-") and not (folder / name).exists() and _sizes_match(leftover):
            os.rename(leftover, folder / name)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
