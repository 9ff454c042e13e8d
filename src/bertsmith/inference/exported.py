"""Exported folders as they are used: load once, run padded batches, in ONNX Runtime or PyTorch.

In: token ids of any whole-number type. Out: named float32 arrays. What the runtimes would take in silence (mask and
types in each other's place, negative ids) is refused here in a sentence.
"""

import contextlib
import importlib
import io
import json
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertsmith.errors import UserError, one_of

MARKER = "export.json"
FORMATS = ("onnx", "torch")
FILE_NAMES = {"onnx": "model.onnx", "torch": "model.pt2"}
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
PACKAGES = ("onnx", "onnxscript", "onnxruntime")

Array = npt.NDArray[Any]


def import_optional(name: str) -> Any:
    """A module of the packages for export. Raises UserError when they are not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name != package:
            raise
        raise UserError(
            f"ONNX needs {', '.join(PACKAGES)}, and {package} is not installed; run `pip install 'bertsmith[export]'`"
        ) from error


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what exporters and quantizers tell of their own workings off the terminal; errors are still raised."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class ExportedModel(ABC):
    """An exported folder, loaded. `load_exported` makes one.

    `outputs`: the names `run` gives. `labels`: names of the classes in the order of `logits`, or None. `max_length`:
    the most tokens a row may have. `precision`: fp32 or int8.
    """

    def __init__(self, folder: Path, marker: dict[str, Any]) -> None:
        self.folder = folder
        self.format: str = marker["format"]
        self.precision: str = marker["precision"]
        self.head: str = marker["head"]
        self.outputs: tuple[str, ...] = tuple(marker["outputs"])
        self.labels: tuple[str, ...] | None = None if marker["labels"] is None else tuple(marker["labels"])
        self.max_length: int = marker["max_length"]
        self._limits = {"input_ids": marker["vocab_size"], "attention_mask": 2, "token_type_ids": marker["segments"]}

    def run(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> dict[str, Array]:
        """Padded batches (B, L), arrays, tensors or lists of any whole-number type → named float32 arrays.

        Without a mask every token counts, without types all are of the first segment. Padding stands on the right; what
        outputs hold at its places means nothing. Raises UserError for shapes and numbers the model has no place for.
        """
        ids = _whole_numbers("input_ids", input_ids)
        given = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids)
            if attention_mask is None
            else _whole_numbers(INPUTS[1], attention_mask),
            "token_type_ids": np.zeros_like(ids)
            if token_type_ids is None
            else _whole_numbers(INPUTS[2], token_type_ids),
        }
        self._check(given)
        return self._compute(given)

    @abstractmethod
    def _compute(self, given: dict[str, Array]) -> dict[str, Array]:
        """The outputs for checked int64 inputs."""

    def _check(self, given: dict[str, Array]) -> None:
        shape = given["input_ids"].shape
        for name, array in given.items():
            if array.shape != shape:
                raise UserError(f"{name}: has shape {array.shape}, input_ids {shape}; give one number a token")
            if array.min() < 0 or array.max() >= self._limits[name]:
                worst = array.min() if array.min() < 0 else array.max()
                raise UserError(f"{name}: {worst} is not from 0 to {self._limits[name] - 1}, as this model's are")
        if shape[1] > self.max_length:
            raise UserError(f"input_ids: {shape[1]} tokens a row are more than the model's {self.max_length}; cut them")
        headless = np.flatnonzero(given["attention_mask"][:, 0] == 0)
        if len(headless):
            raise UserError(
                f"attention_mask: row {headless[0] + 1} begins with padding, but [CLS] stands there; pad on the right, "
                "and give the mask before the types, or each by its name"
            )


def _whole_numbers(name: str, values: Any) -> Array:
    """`values` as int64 (B, L), neither empty."""
    try:
        array = np.asarray(values.detach() if hasattr(values, "detach") else values)
    except ValueError:
        raise UserError(f"{name}: the rows are of unlike length; pad them to one length") from None
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "iub":
        raise UserError(
            f"{name}: whole numbers of shape (rows, tokens) are needed, at least one of each, not {array.dtype} of "
            f"shape {array.shape}"
        )
    # a copy, where it is not: of turned-round or write-protected arrays PyTorch makes no tensor
    return np.require(array, np.int64, ("C", "W"))


class OnnxModel(ExportedModel):
    """In ONNX Runtime, on the CPU. `session` is its InferenceSession."""

    def __init__(self, folder: Path, marker: dict[str, Any], threads: int | None) -> None:
        super().__init__(folder, marker)
        path = folder / marker["file"]
        try:
            self.session = open_session(path, threads)
        except UserError:  # the runtime is not installed
            raise
        except Exception as error:  # its exceptions have no common class but Exception
            raise UserError(_why_unreadable(path, error)) from error

    def _compute(self, given: dict[str, Array]) -> dict[str, Array]:
        return dict(zip(self.outputs, self.session.run(list(self.outputs), given), strict=True))


def open_session(path: Path, threads: int | None = None) -> Any:
    """ONNX Runtime's session of a file, on the CPU. `threads` None: as many as PyTorch's."""
    runtime = import_optional("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or _default_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; they are raised as well
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class TorchModel(ExportedModel):
    """In PyTorch, on the CPU. `module` takes the inputs by name, and gives tensors by name."""

    def __init__(self, folder: Path, marker: dict[str, Any], threads: int | None) -> None:
        super().__init__(folder, marker)
        from bertsmith.inference.torch_program import load_program

        self.module = load_program(folder / marker["file"])
        self._threads = threads

    def _compute(self, given: dict[str, Array]) -> dict[str, Array]:
        import torch

        before = torch.get_num_threads()
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            with torch.inference_mode():
                outputs = self.module(**{name: torch.from_numpy(array) for name, array in given.items()})
        finally:
            torch.set_num_threads(before)
        return {name: outputs[name].numpy() for name in self.outputs}


def load_exported(folder: str | Path, threads: int | None = None, format: str | None = None) -> ExportedModel:
    """Load what `bertsmith export` wrote, in the runtime it was exported for.

    `threads`: at most that many compute (default: as many as PyTorch would use, which heeds OMP_NUM_THREADS). `format`:
    onnx or torch, for a caller that can use one of the two only.

    Raises UserError for a folder that holds no export, a damaged one, or one of the other format.
    """
    from bertsmith.hardware import check_threads
    from bertsmith.model.weights import as_path

    if threads is not None:
        threads = check_threads("threads", threads)
    path = as_path(folder)
    marker = read_marker(path)
    if format is not None:
        one_of("format", format, FORMATS)
        if marker["format"] != format:
            raise UserError(
                f"{path}: was exported for {marker['format']}, not for {format}; export it again for {format}"
            )
    return (OnnxModel if marker["format"] == "onnx" else TorchModel)(path, marker, threads)


def read_marker(folder: Path) -> dict[str, Any]:
    """What export.json says of an exported folder.

    Raises UserError when there is none, it is not what `bertsmith export` writes, or a file is absent or cut short.
    """
    path = folder / MARKER
    if not path.is_file():
        what = "is no exported model" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {what} (no {MARKER} here); run `bertsmith export MODEL --out DIR` first")
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); export the model again") from error
    if not _is_marker(marker):
        raise UserError(f"{path}: is not what this version of bertsmith writes; export the model again")
    for name, size in marker["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found:,} bytes"
            raise UserError(f"{folder / name}: {has} where {size:,} bytes were exported; copy the folder again")
    return dict(marker)


def _is_marker(marker: Any) -> bool:
    wanted = {
        "format": str, "precision": str, "head": str, "file": str, "files": dict, "outputs": dict, "max_length": int,
        "vocab_size": int, "segments": int,
    }  # fmt: skip
    if not isinstance(marker, dict) or any(type(marker.get(key)) is not kind for key, kind in wanted.items()):
        return False
    labels, files = marker.get("labels"), marker["files"]
    return (
        marker["format"] in FORMATS
        and marker["file"] == FILE_NAMES[marker["format"]]
        and marker["file"] in files
        and all(name == Path(name).name and type(size) is int for name, size in files.items())
        and (labels is None or (isinstance(labels, list) and all(isinstance(label, str) for label in labels)))
    )


def _default_threads() -> int:
    import torch

    return torch.get_num_threads()


def _why_unreadable(path: Path, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"{path}: cannot be loaded ({reason[:200]}); copy the folder again, or export it again with these versions"
