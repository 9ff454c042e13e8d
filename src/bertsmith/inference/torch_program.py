"""torch.export programs (.pt2): traced, written without what only the tracing machine knows, and read with care.

A .pt2 archive can hold pickles and Python source, both of which torch.export.load would run. Ours hold neither: an
archive is looked through first, and one that holds more than tensors and torch's own operators is refused.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from bertsmith.errors import UserError
from bertsmith.inference.exported import quietly

# an archive's files, below its one folder
_FILES = re.compile(
    r"data/weights/weight_\d+|data/weights/model_weights_config\.json|data/constants/model_constants_config\.json|"
    r"models/model\.json|data/sample_inputs/model\.pt|archive_format|archive_version|byteorder|\.data/\w+"
)
# texts in models/model.json, all of which torch makes Python objects of, by their keys: names of operators, sizes (read
# by sympy), checks of the inputs' sizes (compiled as they stand), nests of inputs and outputs; anything else is a name
_TEXTS = {
    "target": re.compile(r"torch\.ops\.aten\.\w+\.\w+"),
    "expr_str": re.compile(r"(?:Symbol\('s\d+', positive=True, integer=True\)|(?:Mul|Add|Pow|Integer)\(|[\d\s,()-])*"),
    "guards_code": re.compile(r"L\['\w+'\]\.size\(\)\[\d\] (?:==|<=|>=) (?:L\['\w+'\]\.size\(\)\[\d\]|\d+)"),
    **dict.fromkeys(
        ("in_spec", "out_spec"),
        re.compile(
            r'(?:"type": (?:null|"builtins\.(?:tuple|list|dict)")|"children_spec": |[][{}, 1]|'
            r'"context": (?:null|"null"|"\[(?:\\"\w+\\"(?:, )?)*\]"))*'
        ),
    ),
}
_NAME = re.compile(r"[\w.+-]*")
# keys of a node's `meta` that the program needs; the rest are stack traces with the paths of this machine
_KEPT = ("val", "tensor_meta")


def trace(module: nn.Module, inputs: dict[str, Tensor], max_length: int) -> ExportedProgram:
    """The program of `module` for any batch and up to `max_length` tokens a row; it takes `inputs` by name."""
    batch, sequence = Dim("batch", min=1), Dim("sequence", min=1, max=max_length)
    with quietly(), torch.no_grad():
        program = torch.export.export(
            module.eval(), (), inputs, dynamic_shapes={name: {0: batch, 1: sequence} for name in inputs}, strict=False
        )
    for node in program.graph.nodes:
        for key in [key for key in node.meta if key not in _KEPT]:
            del node.meta[key]
    return program


def write_program(program: ExportedProgram, path: Path) -> None:
    """Write the archive `path`, whose name ends in .pt2."""
    program._example_inputs = None  # they would be pickled, and nobody needs them (the setter knows no None)
    with quietly():
        torch.export.save(program, str(path))


def load_program(path: Path) -> nn.Module:
    """The program as a module: inputs by name, a dictionary of outputs.

    Raises UserError, having run nothing of it, for an archive that is damaged or holds what could be code.
    """
    _look_through(path)
    try:
        with quietly():
            return torch.export.load(str(path)).module()
    except Exception as error:  # nearly everything is raised for an archive of another version
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: PyTorch {torch.__version__} cannot load it ({reason[:200]}); export the model again with it"
        ) from error


def _look_through(path: Path) -> None:
    """Raise UserError unless the archive holds what `write_program` writes and nothing more."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = {name.partition("/")[2]: name for name in archive.namelist()}
            strange = next((name for name in files if not _FILES.fullmatch(name)), None)
            if strange is None and archive.getinfo(files["data/sample_inputs/model.pt"]).file_size:
                strange = "data/sample_inputs/model.pt"
            payloads = [
                json.loads(archive.read(files[f"data/{part}/model_{part}_config.json"]))
                for part in ("weights", "constants")
            ]
            model = json.loads(archive.read(files["models/model.json"]))
    except (OSError, KeyError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path}: is no exported program, or a damaged one ({error}); export the model again"
        ) from error
    if strange is None:
        strange = next(_pickles(payloads), None) or next(_code(model), None)
    if strange is not None:
        raise UserError(
            f"{path}: holds {strange[:80]!r}, which could be code and was not run; export the model yourself"
        )


def _pickles(payloads: list[Any]) -> Iterator[str]:
    for payload in payloads:
        for name, entry in payload["config"].items():
            if entry.get("use_pickle") is not False or not re.fullmatch(r"weight_\d+", entry.get("path_name", "")):
                yield name


def _code(value: Any, key: str = "") -> Iterator[str]:
    """Texts in models/model.json that are not of the harmless kinds."""
    if isinstance(value, str):
        if not _TEXTS.get(key, _NAME).fullmatch(value):
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _code(item, key)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _code(name)
            yield from _code(inner, name)
