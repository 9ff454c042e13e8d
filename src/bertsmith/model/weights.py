"""Model folders in Hugging Face's layout, ours and others' of any age: files in, a model out, and back.

Nothing is unpickled but tensors, nothing is allocated that the files cannot fill, every tensor's shape is checked
against the configuration, and what was used, unused and missing is reported. Tied weights are stored once.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining, initialize_parameters
from bertsmith.model.config import BertConfig
from bertsmith.model.names import (
    DECODER,
    DECODER_BIAS,
    MLM_BIAS,
    WORD_TABLE,
    hugging_face_names,
    is_part,
    modern_name,
)
from bertsmith.model.pickled import TensorSource, find_weights
from bertsmith.model.places import as_path, why_no_file, why_no_model
from bertsmith.model.task_model import BertForTask
from bertsmith.progress import say
from bertsmith.storage import atomic_file, write_text

CONFIG, WEIGHTS = "config.json", "model.safetensors"
GOOGLE_CONFIG = "bert_config.json"  # also what the first PyTorch folders called it
RUN_SETTINGS = "config.toml"  # what tells a run folder
OBJECTIVE_KEY = "bertsmith_objective"

_LAYER = re.compile(r"(?:^|[./])encoder[./]layer[._](\d+)[./]")
# in other people's files, rightly absent from ours: fixed numbers, and second copies of tied tensors
_IGNORED = ("position_ids", "embeddings.token_type_ids", DECODER, DECODER_BIAS)
# other floating types (float8) are those of quantized files, whose numbers mean nothing without the scales beside them
_PLAIN_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Word tables are padded to a multiple of 8 to 1,024 for the chip's sake; more rows are another vocabulary's.
_PADDING_UNIT, _MOST_PADDING = 128, 1024
# parameters: an encoder that is made before its weights turn out not to fit; what a layer counts for at least
_HARMLESS, _LEAST_LAYER = 10_000_000, 10_000


class Source(Protocol):
    """Tensors by name: a TensorSource, or whatever else gives them under transformers' names, old or new."""

    path: Path

    def names(self) -> list[str]:
        """All names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, which is not read for it."""

    def get(self, name: str) -> Tensor:
        """A tensor, on the CPU, in the file's type."""

    def file(self, name: str) -> Path:
        """The file it is in, for messages."""


@dataclass
class LoadReport:
    """Names of tensors: `used` and `missing` as transformers calls them, `unused` as the file calls them."""

    used: list[str]
    missing: list[str]
    unused: list[str]
    notes: list[str] = field(default_factory=list)
    """Sentences about what was read otherwise than it stands in the files."""

    def missing_from(self, *parts: str) -> list[str]:
        """Missing tensors of the named parts: encoder, pooler, mlm, nsp, output (a task's own layer)."""
        return [name for name in self.missing if is_part(name, *parts)]


def to_hugging_face(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters under transformers' names; tied tensors once."""
    tensors = {}
    for name, parameter in model.named_parameters():
        theirs = hugging_face_names(name)
        for their_name, piece in zip(theirs, parameter.detach().chunk(len(theirs)), strict=True):
            tensors[their_name] = piece.cpu().contiguous()
    return tensors


# --- reading


def modern_names(source: Source) -> dict[str, str]:
    """The names of a source's tensors by what transformers calls them today.

    Raises UserError when a tensor stands there under two names.
    """
    names: dict[str, str] = {}
    for name in source.names():
        known = names.setdefault(modern_name(name), name)
        if known != name:
            raise UserError(
                f"{source.file(name)}: {known} and {name} are two names of one tensor; remove the wrong one"
            )
    return names


@torch.no_grad()
def load_weights(model: nn.Module, source: Source, skip: tuple[str, ...] = (), tied: bool = True) -> LoadReport:
    """Fill the float32 masters of `model` from a source, whatever floating type it has.

    Parameters the source lacks keep their values and are reported as missing; so do those of the parts `skip` (see
    LoadReport.missing_from), which are not looked at. Rows of a padded word table past the vocabulary are left out with
    a note. `tied` False: the source's masked-LM decoder may be a matrix of its own (`tie_word_embeddings` of
    config.json), which our model does not have; if it is one, that head counts as missing.

    Raises UserError on a broken or ill-fitting source.
    """
    report = LoadReport([], [], [])
    names = modern_names(source)
    if DECODER_BIAS in names and not (tied and MLM_BIAS in names):
        names[MLM_BIAS] = names[DECODER_BIAS]
    has_head = any(
        is_part(wanted, "mlm") for name, _ in model.named_parameters() for wanted in hugging_face_names(name)
    )
    if has_head and not _decoder_is_word_table(source, names):
        which = "the decoder of its masked-LM head is not the word table"
        if tied:
            report.notes.append(f"{source.path}: {which}, though config.json does not say so; the word table is used")
        else:
            report.notes.append(f"{source.path}: {which}, which bertsmith does not have; that head is left out")
            skip = (*skip, "mlm")
    taken = set()
    for name, parameter in model.named_parameters():
        wanted = hugging_face_names(name)
        for their_name, piece in zip(wanted, parameter.chunk(len(wanted)), strict=True):
            if their_name not in names or is_part(their_name, *skip):
                report.missing.append(their_name)
                continue
            rows = _check_shape(source, names[their_name], their_name, tuple(piece.shape))
            if rows > piece.shape[0] and their_name == WORD_TABLE:
                report.notes.append(
                    f"{source.path}: the word table has {rows:,} rows for a vocabulary of {piece.shape[0]:,}; the last "
                    f"{rows - piece.shape[0]} are padding and were left out"
                )
            tensor = source.get(names[their_name])
            if tensor.dtype not in _PLAIN_TYPES:
                advice = "use the checkpoint before quantization" if tensor.is_floating_point() else "save fp32"
                _refuse(source, names[their_name], f"is of type {str(tensor.dtype).removeprefix('torch.')}; {advice}")
            piece.copy_(tensor[: piece.shape[0]])
            report.used.append(their_name)
            taken.add(names[their_name])
    report.unused = [old for new, old in names.items() if old not in taken and not new.endswith(_IGNORED)]
    return report


def _check_shape(source: Source, name: str, modern: str, wanted: tuple[int, ...]) -> int:
    """The tensor's rows. Raises UserError unless it has the `wanted` shape, or that of a padded word table."""
    shape = source.shape(name)
    if shape == wanted:
        return wanted[0]
    if modern in (WORD_TABLE, MLM_BIAS) and shape[1:] == wanted[1:] and len(shape) == len(wanted):
        padding = shape[0] - wanted[0]
        if 0 < padding < _PADDING_UNIT or (0 < padding < _MOST_PADDING and shape[0] % _PADDING_UNIT == 0):
            return shape[0]
        _refuse(
            source,
            name,
            f"has shape {list(shape)}, that is {shape[0]:,} rows, but the configuration says vocab_size "
            f"{wanted[0]:,}; the two do not belong together",
        )
    _refuse(
        source,
        name,
        f"has shape {list(shape)}, the configuration asks for {list(wanted)}; the two do not belong together",
    )


def _refuse(source: Source, name: str, what: str) -> NoReturn:
    raise UserError(f"{source.file(name)}: tensor {name} {what}")


def _decoder_is_word_table(source: Source, names: Mapping[str, str]) -> bool:
    if DECODER not in names or WORD_TABLE not in names:
        return True
    pair = names[DECODER], names[WORD_TABLE]
    return source.shape(pair[0]) == source.shape(pair[1]) and torch.equal(source.get(pair[0]), source.get(pair[1]))


def draw_missing(model: BertForPreTraining | BertForTask, report: LoadReport, seed: int) -> None:
    """Draw from `seed` what the source lacked. To draw everything first would take longer than to read it."""
    missing = set(report.missing)
    names = [name for name, _ in model.named_parameters() if missing.intersection(hugging_face_names(name))]
    initialize_parameters(model, model.config.initializer_range, seed, names)


def require_encoder(report: LoadReport, place: Path) -> None:
    """Raise UserError unless the encoder is whole and ours: when weights are missing, when there are layers that
    config.json does not know of, or parts (adapters, scales) that are not computed here, so that it is another model.
    """
    if absent := report.missing_from("encoder"):
        raise UserError(f"{place}: {len(absent)} encoder tensors are missing, the first is {absent[0]}")
    known = set(_layers([*report.used, *report.missing]).values())
    if above := [name for name, number in _layers(report.unused).items() if number not in known]:
        raise UserError(
            f"{place}: {above[0]} is of a layer past num_hidden_layers in {CONFIG}; the two do not belong together"
        )
    if foreign := [name for name in report.unused if is_part(modern_name(name.replace("/", ".")), "encoder")]:
        raise UserError(
            f"{place}: {len(foreign)} tensors of the encoder are of parts that BERT does not have (adapters, scales of "
            f"quantization), the first is {foreign[0]}; merge them into the weights where they come from, or use the "
            "model without them"
        )


def _layers(names: Iterable[str]) -> dict[str, int]:
    """The number of the layer that a tensor is of, by its name, for those of layers."""
    found = {name: _LAYER.search(name) for name in names}
    return {name: int(match[1]) for name, match in found.items() if match}


def find_model(folder: str | Path) -> Path:
    """The model folder itself, or that of a finished run. Raises UserError for a run that has no model yet."""
    path = as_path(folder)
    if (path / RUN_SETTINGS).is_file() and not (path / CONFIG).is_file():
        if not (path / "model").is_dir():
            raise UserError(f"{folder}: this run has no finished model yet; let the command that makes it end first")
        return path / "model"
    return path


def read_config(folder: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The folder's BertConfig and its raw config.json (bert_config.json in the oldest folders).

    Raises UserError when there is none, it is broken or another architecture's, or describes an encoder that the
    folder's weights are too small for (so that nothing of that size is allocated).
    """
    path = folder / CONFIG
    if not path.is_file() and (folder / GOOGLE_CONFIG).is_file():
        path = folder / GOOGLE_CONFIG
    values = read_config_file(path)
    try:
        config = BertConfig.from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    kinds = values.get("architectures")
    if "model_type" not in values and isinstance(kinds, list) and kinds and not str(kinds[0]).startswith("Bert"):
        raise UserError(f"{path}: architectures names {kinds[0]!r}; only BERT can be opened")
    if values.get("is_decoder") is True:
        raise UserError(f"{path}: is_decoder is true: each token sees those before it only; BERT's see all")
    if isinstance(quantization := values.get("quantization_config"), dict):
        raise UserError(
            f"{path}: quantization_config (quant_method {quantization.get('quant_method')!r}): its weights are "
            "quantized; use the checkpoint that it was made from, or dequantize it first"
        )
    weights = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin") and file.is_file()]
    if weights:
        check_size(config, path, sum(file.stat().st_size for file in weights))
    return config, values


def read_config_file(path: Path) -> dict[str, Any]:
    """The JSON object in a configuration file. Raises UserError when there is none."""
    if reason := why_no_file(path):
        raise UserError(f"{path}: {reason}")
    if not path.is_file():
        raise UserError(f"{path.parent}: {why_no_model(path.parent, path.name)}")
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_no_number)
    except (
        ValueError,
        RecursionError,
    ) as error:  # json's, UnicodeDecodeError and absurdly long numbers are ValueErrors
        raise UserError(f"{path}: not valid JSON ({error})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object")
    return values


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def check_size(config: BertConfig, place: Path, available: int) -> None:
    """Raise UserError for a large encoder with more parameters than its files have bytes: far more than they can hold.

    Lesser differences show, tensor by tensor, when the weights are read.
    """
    hidden = config.hidden_size
    rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    layer = 4 * hidden * hidden + 2 * hidden * config.intermediate_size
    wanted = rows * hidden + config.num_hidden_layers * layer
    # a layer takes memory and time however few its parameters are
    if max(wanted, config.num_hidden_layers * _LEAST_LAYER) > max(available, _HARMLESS):
        raise UserError(
            f"{place}: describes an encoder of {config.num_hidden_layers:,} layers and {wanted:,} parameters, but the "
            f"weights beside it have {available:,} bytes; one of the two is damaged or of another model"
        )


def vocabulary_note(place: Path | str, entries: int, config: BertConfig) -> str | None:
    """What is to be said where the tokenizer has fewer `entries` than the word table has rows; None where all is even.

    Raises UserError when it has more: an id would lie past the table.
    """
    if entries > config.vocab_size:
        raise UserError(
            f"{place}: its tokenizer has {entries} entries, its word table {config.vocab_size}; they do not belong "
            "together"
        )
    if entries == config.vocab_size:
        return None
    return (
        f"{place}: its word table has {config.vocab_size:,} rows, its tokenizer {entries:,} entries; the last "
        f"{config.vocab_size - entries} rows stand for no token"
    )


def load_model(folder: Path | str, next_sentence: bool = True) -> tuple[BertForPreTraining, LoadReport, dict[str, Any]]:
    """Open a BERT folder (ours or transformers'). Returns the model, what was found in its file, and config.json.

    Raises UserError when encoder weights are missing; heads may be missing (see LoadReport.missing_from).
    """
    folder = as_path(folder)
    config, values = read_config(folder)
    source = TensorSource(find_weights(folder))
    model = BertForPreTraining(config, next_sentence)
    report = load_weights(model, source, tied=is_tied(values))
    require_encoder(report, source.path)
    draw_missing(model, report, 0)
    _say_notes(report)
    return model, report, values


def load_folder_weights(model: nn.Module, folder: Path, skip: tuple[str, ...] = ()) -> LoadReport:
    """Fill `model` from a model folder. Parameters that the folder lacks keep their values and are reported, and those
    of the parts `skip` as well.

    Raises UserError when there are no weights, they are broken or ill-fitting, or encoder weights are missing.
    """
    source = TensorSource(find_weights(folder))
    report = load_weights(model, source, skip, is_tied(read_config(folder)[1]))
    require_encoder(report, source.path)
    _say_notes(report)
    return report


def is_tied(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the masked-LM decoder is the word table, which is the default."""
    return values.get("tie_word_embeddings") is not False


def _say_notes(report: LoadReport) -> None:
    for note in report.notes:
        say(f"note: {note}")


# --- writing


def save_model(folder: Path, model: BertForPreTraining, objective: str) -> None:
    """Write config.json and model.safetensors into `folder` so that transformers opens it as it is.

    `objective` is recorded, for it says whether pooler and next-sentence head were trained.
    """
    write_folder(folder, model, model.config, {"architectures": ["BertForPreTraining"], OBJECTIVE_KEY: objective})


def write_folder(folder: Path, model: nn.Module, shape: BertConfig, more: dict[str, Any]) -> None:
    """Write config.json (`shape`, and `more`, what the model's kind adds) and model.safetensors into `folder`."""
    write_tensors(folder, to_hugging_face(model), shape, more)


def write_tensors(folder: Path, tensors: dict[str, Tensor], shape: BertConfig, more: dict[str, Any]) -> None:
    """As `write_folder`, from float32 tensors under transformers' names."""
    config = shape.to_dict() | {"dtype": "float32", "tie_word_embeddings": True} | more
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    with atomic_file(folder / WEIGHTS) as partial:
        save_file(tensors, str(partial), metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, partial)  # safetensors makes files only the owner can read
