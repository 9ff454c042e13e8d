"""Model folders in Hugging Face's layout: config.json and model.safetensors, one reversible table of names.

Ours keeps query, key and value as one matrix; theirs keeps three. Everything else is a renaming. Nothing is unpickled:
only safetensors files are read, and every tensor's shape is checked against the configuration first.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.storage import atomic_file, write_text

CONFIG, WEIGHTS = "config.json", "model.safetensors"
RUN_SETTINGS = "config.toml"  # what tells a run folder
OBJECTIVE_KEY = "bertsmith_objective"

# ours → theirs, outside the layers
_NAMES = {
    "bert.embeddings.word": "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.position": "bert.embeddings.position_embeddings.weight",
    "bert.embeddings.segment": "bert.embeddings.token_type_embeddings.weight",
    "bert.embeddings.norm": "bert.embeddings.LayerNorm",
    "bert.pooler.dense": "bert.pooler.dense",
    "mlm_head.transform": "cls.predictions.transform.dense",
    "mlm_head.norm": "cls.predictions.transform.LayerNorm",
    "mlm_head.bias": "cls.predictions.bias",
    "nsp_head.linear": "cls.seq_relationship",
    "classifier": "classifier",
    "qa_outputs": "qa_outputs",
}
# ours → theirs, after "bert.encoder.layer.N."
_LAYER_NAMES = {
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
_PARTS = ("query", "key", "value")
# in other people's files, rightly absent from ours: fixed numbers, and second copies of tied tensors
_IGNORED = ("position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias")


def hugging_face_names(name: str) -> list[str]:
    """The names transformers gives to our parameter `name`: one, or three for a joined query/key/value."""
    if name in _NAMES:
        return [_NAMES[name]]
    stem, _, leaf = name.rpartition(".")
    if stem in _NAMES:
        return [f"{_NAMES[stem]}.{leaf}"]
    encoder, _, rest = stem.partition("layer.")
    number, _, part = rest.partition(".")
    prefix = f"{encoder}layer.{number}."
    if part == "qkv":
        return [f"{prefix}attention.self.{which}.{leaf}" for which in _PARTS]
    return [f"{prefix}{_LAYER_NAMES[part]}.{leaf}"]


def to_hugging_face(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters under transformers' names; tied tensors once."""
    tensors = {}
    for name, parameter in model.named_parameters():
        theirs = hugging_face_names(name)
        for their_name, piece in zip(theirs, parameter.detach().chunk(len(theirs)), strict=True):
            tensors[their_name] = piece.cpu().contiguous()
    return tensors


@dataclass
class LoadReport:
    """Names of tensors: `used` and `missing` as transformers calls them, `unused` as the file calls them."""

    used: list[str]
    missing: list[str]
    unused: list[str]

    def missing_from(self, *parts: str) -> list[str]:
        """Missing tensors of the named parts: encoder, pooler, mlm, nsp, output (a task's own layer)."""
        prefixes = {
            "encoder": ("bert.embeddings", "bert.encoder"),
            "pooler": ("bert.pooler",),
            "mlm": ("cls.predictions",),
            "nsp": ("cls.seq_relationship",),
            "output": ("classifier", "qa_outputs"),
        }
        return [name for name in self.missing if any(name.startswith(p) for part in parts for p in prefixes[part])]


def _normalized_name(name: str) -> str:
    """A name as transformers writes it today: gamma/beta of old layer norms renamed, a bare encoder prefixed."""
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            name = name[: -len(old)] + new
    return name


@torch.no_grad()
def load_weights(model: nn.Module, path: Path, skip: tuple[str, ...] = ()) -> LoadReport:
    """Fill `model` from a safetensors file under transformers' names. Raises UserError on a broken or ill-fitting one.

    Parameters the file lacks keep their values and are reported as missing; so do those of the parts `skip` (see
    LoadReport.missing_from), which are not looked at.
    """
    report = LoadReport([], [], [])
    try:
        with safe_open(str(path), framework="pt") as file:
            names = {_normalized_name(name): name for name in file.keys()}  # noqa: SIM118 (not a dict)
            for name, parameter in model.named_parameters():
                wanted = hugging_face_names(name)
                if LoadReport([], wanted, []).missing_from(*skip):
                    report.missing += wanted
                    continue
                for their_name, piece in zip(wanted, parameter.chunk(len(wanted)), strict=True):
                    if their_name not in names:
                        report.missing.append(their_name)
                        continue
                    shape = list(file.get_slice(names[their_name]).get_shape())
                    if shape != list(piece.shape):
                        raise UserError(
                            f"{path}: tensor {names[their_name]} has shape {shape}, config.json asks for "
                            f"{list(piece.shape)}; the two files do not belong together"
                        )
                    piece.copy_(file.get_tensor(names[their_name]))
                    report.used.append(their_name)
            used = set(report.used)
            report.unused = [old for new, old in names.items() if new not in used and not new.endswith(_IGNORED)]
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); copy the model folder again") from error
    return report


def find_model(folder: str | Path) -> Path:
    """The model folder itself, or that of a finished run. Raises UserError for a run that has no model yet."""
    path = Path(folder)
    if (path / RUN_SETTINGS).is_file() and not (path / CONFIG).is_file():
        if not (path / "model").is_dir():
            raise UserError(f"{folder}: this run has no finished model yet; let the command that makes it end first")
        return path / "model"
    return path


def read_config(folder: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The folder's BertConfig and its raw config.json. Raises UserError when there is none or it is broken."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder}: no {CONFIG} here; name a model folder")
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object")
    try:
        return BertConfig.from_dict(values), values
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def load_model(folder: Path | str, next_sentence: bool = True) -> tuple[BertForPreTraining, LoadReport, dict[str, Any]]:
    """Open a BERT folder (ours or transformers'). Returns the model, what was found in its file, and config.json.

    Raises UserError when encoder weights are missing; heads may be missing (see LoadReport.missing_from).
    """
    folder = Path(folder)
    config, values = read_config(folder)
    model = BertForPreTraining(config, next_sentence).initialize(0)
    return model, load_folder_weights(model, folder), values


def load_folder_weights(model: nn.Module, folder: Path, skip: tuple[str, ...] = ()) -> LoadReport:
    """Fill `model` from a model folder. Parameters that the folder lacks keep their values and are reported, and those
    of the parts `skip` as well.

    Raises UserError when there are no weights, they are broken or ill-fitting, or encoder weights are missing.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no weights"
        raise UserError(f"{folder}: no {WEIGHTS} here (found {found}); save the model as safetensors")
    report = load_weights(model, path, skip)
    absent = report.missing_from("encoder")
    if absent:
        raise UserError(f"{path}: {len(absent)} encoder tensors are missing, the first is {absent[0]}")
    return report


def save_model(folder: Path, model: BertForPreTraining, objective: str) -> None:
    """Write config.json and model.safetensors into `folder` so that transformers opens it as it is.

    `objective` is recorded, for it says whether pooler and next-sentence head were trained.
    """
    write_folder(folder, model, model.config, {"architectures": ["BertForPreTraining"], OBJECTIVE_KEY: objective})


def write_folder(folder: Path, model: nn.Module, shape: BertConfig, more: dict[str, Any]) -> None:
    """Write config.json (`shape`, and `more`, what the model's kind adds) and model.safetensors into `folder`."""
    config = shape.to_dict() | {"dtype": "float32", "tie_word_embeddings": True} | more
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    with atomic_file(folder / WEIGHTS) as partial:
        save_file(to_hugging_face(model), str(partial), metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, partial)  # safetensors makes files only the owner can read
