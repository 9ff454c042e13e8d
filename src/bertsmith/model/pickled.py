"""PyTorch's weight files of any age: model.safetensors, the older pytorch_model.bin, either whole or in shards.

A model folder in, its tensors by name out, read one at a time where the format allows it. A `.bin` file is a pickle,
and pickles can hold code: torch's restricted reader is used, which knows tensors and plain containers and nothing else.
"""

import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.model.places import why_no_file

SAFETENSORS, PYTORCH_BIN = "model.safetensors", "pytorch_model.bin"
# what other weights are called, for the message when there are none that are read
EXPORTED = "export.json"  # what `bertsmith export` marks its folders with
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.index", "*.onnx", "*.gguf")


@dataclass(frozen=True)
class WeightFiles:
    """Where a folder's weights are."""

    path: Path
    """The weights, or the index of their shards: what messages name."""
    shards: tuple[Path, ...]
    """The files that hold tensors; `path` itself where there is no index."""
    index: Mapping[str, str]
    """File name by tensor name, as the index says; empty where there is none."""


def find_weights(folder: Path | str) -> WeightFiles:
    """The weights of a model folder: model.safetensors, else its shards, else pytorch_model.bin, else its shards.

    Raises UserError when there are none, or an index is broken, names files elsewhere or files that are not there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a model folder")
    for name in (SAFETENSORS, PYTORCH_BIN):
        path, index = folder / name, folder / f"{name}.index.json"
        if path.is_file():
            return WeightFiles(path, (path,), {})
        if index.is_file():
            return _read_index(index, path.suffix)
    if (folder / EXPORTED).is_file():
        raise UserError(
            f"{folder}: is an exported model, which only bertsmith.load_exported opens; name the "
            "folder it was exported from"
        )
    for name in (SAFETENSORS, PYTORCH_BIN):
        for path in (folder / name, folder / f"{name}.index.json"):
            if reason := why_no_file(path):
                raise UserError(f"{path}: {reason}")
    found = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
    advice = "convert TensorFlow's checkpoint first" if any(n.endswith(".index") for n in found) else "save it as such"
    raise UserError(
        f"{folder}: no {SAFETENSORS} or {PYTORCH_BIN} here, whole or in shards with their .index.json (found "
        f"{', '.join(found) or 'no weights'}); {advice}"
    )


def read_pytorch_bin(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a file made by torch.save, in today's format (mapped, not read) or that before PyTorch 1.6.

    The file holds tensors by name, or a dictionary that has such a one as "state_dict". Raises UserError, having run
    nothing, when it holds code or anything else, or is damaged.
    """
    path = Path(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: what does not work is an error below
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UserError:
        raise
    except Exception as error:  # the reader raises nearly everything on damaged bytes
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(
                f"{path}: holds more than tensors ({named[1]}), which could be code and was not run; save the weights "
                f"alone, as {SAFETENSORS}"
            ) from error
        raise UserError(
            f"{path}: damaged or no PyTorch weights ({type(error).__name__}); copy the model folder again"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not tensors by name; save model.state_dict()")
    return {name: _plain(path, name, value) for name, value in content.items()}


class TensorSource:
    """The tensors of a folder by name, whatever files they are in; one is read when it is asked for.

    (Files of the format before PyTorch 1.6 can only be read whole, when the source is made.) Raises UserError, from any
    method, when a file is damaged or lacks a tensor.
    """

    def __init__(self, files: WeightFiles) -> None:
        self.path = files.path
        self._shards = {
            path.name: _Safetensors(path) if path.suffix == ".safetensors" else _Pickled(path) for path in files.shards
        }
        self._places: dict[str, _Safetensors | _Pickled] = {}
        for file_name, shard in self._shards.items():
            # a tensor that is in two shards is taken from where the index says
            self._places |= {name: shard for name in shard.names() if files.index.get(name, file_name) == file_name}
        for name, file_name in files.index.items():
            if name not in self._places:
                raise UserError(
                    f"{self._shards[file_name].path}: has no tensor {name!r}, though {self.path.name} says it has; "
                    "copy the whole model folder"
                )

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read for it."""
        return self._place(name).shape(name)

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU, in the file's type. It may be mapped from the file: copy it, do not write to it."""
        return self._place(name).get(name)

    def file(self, name: str) -> Path:
        """The file a tensor is in, for messages."""
        return self._place(name).path

    def _place(self, name: str) -> "_Safetensors | _Pickled":
        if name not in self._places:
            raise UserError(f"{self.path}: has no tensor {name!r}")
        return self._places[name]


class _Pickled:
    """The tensors of one .bin file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = read_pytorch_bin(path)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


class _Safetensors:
    """The tensors of one .safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._unreadable(error) from error

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        try:
            return self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(f"{self.path}: not a readable safetensors file ({error}); copy the model folder again")


def _read_index(index: Path, suffix: str) -> WeightFiles:
    """The shards an index file names, all of which are there."""
    try:
        places: Any = json.loads(index.read_text(encoding="utf-8-sig")).get("weight_map")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: not a JSON object ({type(error).__name__}); copy the model folder again") from error
    except OSError as error:
        raise UserError(f"{index}: cannot be read ({error.strerror})") from error
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index}: has no weight_map from tensors to files; copy the model folder again")
    names = sorted(set(places.values()))
    for name in names:
        if PureWindowsPath(name).name != name or not name.endswith(suffix):  # as Windows reads it: both slashes, drives
            raise UserError(f"{index}: names {name!r} in its weight_map, which is no {suffix} file of this folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(
            f"{index}: {len(missing)} of the {len(names)} files it names are not there, the first is {missing[0]}; "
            "copy the whole model folder"
        )
    return WeightFiles(index, tuple(index.parent / name for name in names), places)


def _is_zip(path: Path) -> bool:
    """Whether the file is in the format of PyTorch 1.6 and later, a zip archive; raises when it is a harmful one."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    # torch.save never compresses; what claims more bytes than the file has would unfold in memory
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise UserError(f"{path}: its zip archive is compressed, which torch.save never does; save the model again")
    if sum(record.file_size for record in records) > path.stat().st_size:
        raise UserError(f"{path}: damaged, it claims to hold more than its size; copy the model folder again")
    return True


def _plain(path: Path, name: object, value: object) -> Tensor:
    """`value` without its gradient flag, if it is an ordinary tensor that the file really holds."""
    if not isinstance(name, str) or not isinstance(value, Tensor):
        raise UserError(f"{path}: {name!r} is a {type(value).__name__}, no tensor; save model.state_dict() alone")
    if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        raise UserError(f"{path}: tensor {name!r} is sparse, quantized or without numbers; save it as a dense one")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise UserError(f"{path}: damaged, tensor {name!r} claims more numbers than it holds; copy the file again")
    return value.detach()
