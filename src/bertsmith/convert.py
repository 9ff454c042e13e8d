"""`bertsmith convert`: a BERT from elsewhere into a folder of ours, or into Google's layout.

In: a checkpoint of Google's, or a Hugging Face folder of any age. Out: a folder with the same tensors, all of them in
float32 under the names of the layout, or none at all. Nothing is invented: a head the source lacks is absent from the
target too, and said. Every tensor that was used, not used, or missed is named.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bertsmith.errors import UserError, one_of
from bertsmith.model.bert import BertModel
from bertsmith.model.config import BertConfig
from bertsmith.model.google import CHECKPOINT, find_checkpoint, open_google, write_google
from bertsmith.model.heads import MaskedLanguageModelHead, NextSentenceHead
from bertsmith.model.layers import Linear
from bertsmith.model.names import CLASSIFIER, PARTS, SPANS, is_part
from bertsmith.model.pickled import PYTORCH_BIN, SAFETENSORS, TensorSource, find_weights
from bertsmith.model.task_model import ARCHITECTURES
from bertsmith.model.weights import (
    OBJECTIVE_KEY,
    Source,
    find_model,
    is_tied,
    load_weights,
    modern_names,
    read_config,
    require_encoder,
    to_hugging_face,
    vocabulary_note,
    write_tensors,
)
from bertsmith.storage import atomic_folder, check_out, write_text
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer

LAYOUTS = ("bertsmith", "google")
# transformers' class → the parts it is made of; without a pooler a model cannot be fine-tuned on whole texts as it was
# pre-trained, so that one is missed wherever the class can use it
_PARTS_OF = {
    "BertModel": ("encoder", "pooler"),
    "BertForPreTraining": ("encoder", "pooler", "mlm", "nsp"),
    "BertForMaskedLM": ("encoder", "pooler", "mlm"),
    "BertForNextSentencePrediction": ("encoder", "pooler", "nsp"),
    ARCHITECTURES["sequence"]: ("encoder", "pooler", "output"),
    ARCHITECTURES["choice"]: ("encoder", "pooler", "output"),
    ARCHITECTURES["token"]: ("encoder", "output"),
    ARCHITECTURES["span"]: ("encoder", "output"),
}
# of a config.json: what is true of the source's files only
_NOT_CARRIED = ("_name_or_path", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings")


class _EveryPart(nn.Module):
    """A BERT with all heads, as a place for the tensors of any; output layers as wide as the source's (0: none)."""

    def __init__(self, config: BertConfig, classes: int, spans: int) -> None:
        super().__init__()
        self.bert = BertModel(config)
        self.mlm_head = MaskedLanguageModelHead(config)
        self.nsp_head = NextSentenceHead(config)
        if classes:
            self.classifier = Linear(config.hidden_size, classes)
        if spans:
            self.qa_outputs = Linear(config.hidden_size, spans)


@dataclass(frozen=True)
class _Origin:
    """What is to be converted."""

    layout: str
    folder: Path
    """Where its tokenizer is."""
    config: BertConfig
    source: Source
    values: dict[str, Any]
    """What its configuration says beyond `config`."""
    tied: bool
    skipped: int
    """Tensors that an optimizer left."""


def convert_model(
    source: str | Path, target: str | Path, to: str = "bertsmith", lowercase: bool | None = None
) -> dict[str, Any]:
    """Convert `source` (a folder, a run, or a checkpoint's prefix) into the new folder `target`; the command's summary.

    `to`: one of LAYOUTS. `lowercase`: whether text is lower-cased, for a source that does not say (Google's; the
    vocabulary then tells). Raises UserError, and leaves no folder, when the source is not a whole BERT with its
    tokenizer or `target` exists.
    """
    one_of("to", to, LAYOUTS)
    out = Path(target)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{target}: exists already; name a new folder, or remove it first")
    check_out(out, folder=True)
    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        raise UserError(f"{target}: lies inside {source}; name a folder elsewhere")
    origin = _open(Path(source))
    tokenizer, notes = _open_tokenizer(origin, lowercase)
    names = modern_names(origin.source)
    model = _EveryPart(origin.config, _rows(origin, names, CLASSIFIER), _rows(origin, names, SPANS))
    report = load_weights(model, origin.source, tied=origin.tied)
    require_encoder(report, origin.source.path)
    if origin.values.get(OBJECTIVE_KEY) == "mlm":
        notes.append(f"{source}: pooler and next-sentence head were not trained (objective mlm)")
    used = set(report.used)
    tensors = {name: tensor for name, tensor in to_hugging_face(model).items() if name in used}
    more = _describe(origin, report.used, {name: tensor.shape[0] for name, tensor in tensors.items()})
    architecture = more["architectures"][0]
    parts = _PARTS_OF.get(architecture, _PARTS_OF["BertForPreTraining"])
    missing = [name for name in report.missing if is_part(name, *parts)]
    output = SPANS if architecture == ARCHITECTURES["span"] else CLASSIFIER
    if "output" in parts and output not in used:
        missing += [output, output.replace("weight", "bias")]
    with atomic_folder(out) as partial:
        if to == "google":
            write_google(partial, tensors, origin.config, more)
            notes += _google_notes(tokenizer, missing)
        else:
            write_tensors(partial, tensors, origin.config, more)
        tokenizer.save(partial)
        if to == "google":  # Google's tokenizer knows lines, and no tokens beside them
            write_text(partial / "vocab.txt", "".join(f"{token}\n" for token in tokenizer.tokens))
    return {
        "source": str(source),
        "source_layout": origin.layout,
        "layout": to,
        "model_dir": str(target),
        "architecture": architecture,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "tensors_used": len(report.used),
        "tensors_unused": len(report.unused),
        "tensors_missing": len(missing),
        "tensors_of_optimizer": origin.skipped,
        "parts": {part: sum(is_part(name, part) for name in report.used) for part in PARTS},
        "used": report.used,
        "unused": report.unused,
        "missing": missing,
        "lowercase": tokenizer.lowercase,
        "strip_accents": tokenizer.normalization.strips_accents,
        "notes": [*report.notes, *notes],
    }


def _open(path: Path) -> _Origin:
    """Find out what `path` is and open it."""
    weights = (f"{name}{index}" for name in (SAFETENSORS, PYTORCH_BIN) for index in ("", ".index.json"))
    folder = find_model(path)
    prefix = None if any((folder / name).is_file() for name in weights) else find_checkpoint(path)
    if prefix is not None:
        config, checkpoint, values = open_google(prefix)
        return _Origin("google", prefix.parent, config, checkpoint, values, True, len(checkpoint.skipped))
    if not folder.is_dir():
        raise UserError(
            f"{path}: no such folder or checkpoint; name a Hugging Face folder, or one of Google's or its checkpoint's "
            f"prefix ({CHECKPOINT})"
        )
    config, values = read_config(folder)
    rest = {key: value for key, value in values.items() if key not in config.to_dict() and key not in _NOT_CARRIED}
    source = TensorSource(find_weights(folder))
    return _Origin("hugging-face", folder, config, source, rest, is_tied(values), 0)


def _open_tokenizer(origin: _Origin, lowercase: bool | None) -> tuple[BertTokenizer, list[str]]:
    """The source's tokenizer, and what is to be said of it."""
    folder = origin.folder
    if not any((folder / name).is_file() for name in ("vocab.txt", "tokenizer.json")):
        raise UserError(f"{folder}: no tokenizer here; copy the model's vocab.txt (or tokenizer.json) into it")
    tokenizer = load_tokenizer(folder, lowercase)
    tokenizer.max_length = min(tokenizer.max_length, origin.config.max_position_embeddings)
    note = vocabulary_note(folder, tokenizer.vocab_size, origin.config)
    notes = [] if note is None else [note]
    said = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if not said and lowercase is None:
        case = "lower-cased" if tokenizer.lowercase else "left as it is"
        notes.append(
            f"{folder}: says nothing of case; text is {case}, as its vocabulary suggests; --lowercase yes or no decides"
        )
    return tokenizer, notes


def _rows(origin: _Origin, names: dict[str, str], weight: str) -> int:
    """How many outputs the output layer called `weight` has; 0 where there is none."""
    if weight not in names:
        return 0
    shape = origin.source.shape(names[weight])
    if len(shape) != 2 or not shape[0]:
        raise UserError(
            f"{origin.source.file(names[weight])}: tensor {names[weight]} has shape {list(shape)}; an output layer has "
            "a row for each class"
        )
    return shape[0]


def _describe(origin: _Origin, used: list[str], rows: dict[str, int]) -> dict[str, Any]:
    """What the target's config.json says beyond the encoder's shape: all that the source's did, architecture, labels.

    `rows`: those of each tensor.
    """
    more = dict(origin.values)
    kinds = more.get("architectures")
    if not isinstance(kinds, list) or not kinds or not isinstance(kinds[0], str):
        kinds = [_guess_architecture(used)]
    more["architectures"] = kinds[:1]
    classes = rows.get(CLASSIFIER, 0)
    if kinds[0] in (ARCHITECTURES["sequence"], ARCHITECTURES["token"]) and classes:
        labels = more.get("id2label")
        if not isinstance(labels, dict) or len(labels) != classes:
            labels = {str(number): f"LABEL_{number}" for number in range(classes)}
            more |= {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}
        more.pop("num_labels", None)  # transformers counts the labels
    return more


def _guess_architecture(used: list[str]) -> str:
    """transformers' class for the parts there are, where nobody says: Google's checkpoints, and the oldest folders."""
    found = {part for part in PARTS if any(is_part(name, part) for name in used)}
    if SPANS in used:
        return ARCHITECTURES["span"]
    if CLASSIFIER in used:
        return ARCHITECTURES["sequence" if "pooler" in found else "token"]
    if "mlm" in found:
        return "BertForPreTraining" if "nsp" in found else "BertForMaskedLM"
    return "BertForNextSentencePrediction" if "nsp" in found else "BertModel"


def _google_notes(tokenizer: BertTokenizer, missing: list[str]) -> list[str]:
    """What somebody who runs Google's scripts on the result has to know."""
    notes = [f"Google's scripts are to be given --do_lower_case={tokenizer.lowercase}"]
    if tokenizer.lowercase != tokenizer.normalization.strips_accents:
        notes.append("Google's tokenizer strips accents where it lower-cases, and only there; this one does not")
    if tokenizer.added:
        notes.append(f"{len(tokenizer.added)} added tokens are words like others to Google's tokenizer")
    if any(is_part(name, "pooler") for name in missing):
        notes.append("Google's model always has a pooler; it starts from random values")
    return notes
