"""`bertsmith export`: a model folder in, a folder for deployment out, compared with the model before it is kept.

The folder holds the model as one file (ONNX, or a torch.export program), config.json with the labels, the tokenizer and
export.json, which says what the file is. `load_exported` opens it again.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith import __version__
from bertsmith.errors import UserError, one_of
from bertsmith.inference import quantize
from bertsmith.inference.export_model import (
    Exportable,
    PaddedBert,
    example_inputs,
    expected_outputs,
    open_exportable,
    written_out_gelu,
)
from bertsmith.inference.exported import (
    FILE_NAMES,
    FORMATS,
    INPUTS,
    MARKER,
    PACKAGES,
    Array,
    ExportedModel,
    import_optional,
    load_exported,
    quietly,
)
from bertsmith.inference.torch_program import trace, write_program
from bertsmith.model.config import BertConfig
from bertsmith.model.weights import CONFIG, vocabulary_note
from bertsmith.progress import say
from bertsmith.storage import atomic_folder, check_out, write_text
from bertsmith.tasks.spec import TASK_KEY
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer

__all__ = ["ExportMismatch", "ExportedModel", "export_model", "load_exported"]

# the lowest that PyTorch's exporter writes without converting; runtimes of 2023 and later know it, and all that BERT
# needs, layer normalization among it, has an operator there
OPSET = 18
TOLERANCE = 1e-4
SHAPES = ((1, 1), (1, 7), (3, 40), (8, 512))
_LEAST_COSINE = 0.99
_LEAST_EQUAL = 0.9
# of export.json, what the summary tells as well
_SHOWN = ("format", "precision", "file", "head", "opset", "inputs", "outputs", "max_length", "cut_at", "labels")


class ExportMismatch(Exception):
    """The exported file does not compute what the model does; it was not kept. Not the user's fault."""


@dataclass(frozen=True)
class Agreement:
    """How an exported model's outputs compare with the model's, over random texts."""

    max_difference: float
    cosine: float | None
    """Mean over the output vectors; None where outputs are single numbers."""
    least_cosine: float | None
    equal_labels: float | None
    """Share of decisions (classes, tags, tokens, answers' ends) that are the same; None where nothing is decided."""


def export_model(
    folder: str | Path, out: str | Path, format: str = "onnx", int8: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Export the model (or run) `folder` into `out`; returns the JSON summary of the command.

    `seed`: of the random texts it is compared on. An earlier export in `out` is replaced.

    Raises UserError for what cannot be exported, ExportMismatch when the file differs from the model by more than
    TOLERANCE (int8: before quantization); nothing is kept then.
    """
    begun = time.monotonic()
    one_of("format", format, FORMATS)
    if seed < 0:
        raise UserError(f"--seed {seed}: a number from 0 up is needed")
    if int8 and format != "onnx":
        raise UserError(
            "--int8: needs --format onnx; PyTorch's int8 for the CPU is deprecated, and its successor another package"
        )
    target = Path(out)
    _check_target(target)
    exportable = open_exportable(folder)
    for package in PACKAGES if format == "onnx" else ():  # which takes seconds, and is in vain for a wrong name
        import_optional(package)
    batches = list(random_batches(exportable.config, seed))
    more: dict[str, Any] = {}
    with atomic_folder(target) as partial:
        first = partial / "fp32" if int8 else partial
        first.mkdir(exist_ok=True)
        tokenizer = _write_companions(partial, exportable)
        opset = _write_model(exportable, format, first / FILE_NAMES[format])
        marker = _write_marker(first, _describe(first, exportable, format, "fp32", opset))
        say(f"export: comparing it with the model on {len(batches)} batches")
        agreement = compare(load_exported(first), exportable, batches)
        if not agreement.max_difference <= TOLERANCE:
            raise ExportMismatch(
                f"{target}: the exported file differs from the model by {agreement.max_difference:.2g}, more than "
                f"{TOLERANCE:g}; it was not kept"
            )
        if int8:
            more = {"fp32_max_difference": agreement.max_difference, "size_mb_before": _megabytes(marker)}
            say("export: quantizing its weights to int8")
            quantize.quantize_weights(first / marker["file"], partial / marker["file"], exportable.config, tokenizer)
            marker = _write_marker(partial, _describe(partial, exportable, format, "int8", opset))
            say(f"export: comparing the int8 file with the model on {len(batches)} batches")
            agreement = compare(load_exported(partial), exportable, batches)
            if not math.isfinite(agreement.max_difference):
                raise ExportMismatch(f"{target}: the int8 file gives NaN or infinity; it was not kept")
            say("export: timing fp32 and int8")
            speed_texts = quantize.speed_batches(marker["vocab_size"], marker["max_length"], seed)
            more["tokens_per_second"] = {
                name: quantize.measure_speed(load_exported(place), speed_texts)
                for name, place in (("fp32", first), ("int8", partial))
            }
            shutil.rmtree(first)
        _write_marker(partial, marker | {"agreement": asdict(agreement)})
    if int8 and (changed := _what_changed(agreement, exportable)):
        say(
            f"warning: int8 changes what this model gives for random tokens: {changed}; "
            f"{_how_to_compare(exportable, target)}, or leave --int8 out"
        )
    agreed = asdict(agreement)
    return {
        "model": str(folder),
        "path": str(target),
        **{key: marker[key] for key in _SHOWN},
        "compared_on": [f"{rows}x{length}" for rows, length in (batch[INPUTS[0]].shape for batch in batches)],
        "max_difference": agreed.pop("max_difference"),
        "agreement": agreed,
        "size_mb": _megabytes(marker),
        **more,
        "seconds": time.monotonic() - begun,
    }


def _what_changed(agreement: Agreement, exportable: Exportable) -> str | None:
    """By how much less the outputs agree than they may. Scores of a few classes may turn, if the highest stays so."""
    if exportable.head in ("encoder", "pretraining"):
        if agreement.cosine is not None and agreement.cosine < _LEAST_COSINE:
            return f"mean cosine {agreement.cosine:.4f} with fp32"
    elif agreement.equal_labels is not None and agreement.equal_labels < _LEAST_EQUAL:
        return f"{agreement.equal_labels:.1%} of the decisions are the same"
    return None


def _how_to_compare(exportable: Exportable, target: Path) -> str:
    if TASK_KEY in exportable.values:
        return f"see by `bertsmith evaluate {target} --data FILE` what that means on your own texts"
    return "compare both on your own texts"


def _check_target(target: Path) -> None:
    """Raise UserError unless `target` can be made, or holds an earlier export, which may go."""
    check_out(target, folder=True)
    if target.is_dir() and any(target.iterdir()) and not (target / MARKER).is_file():
        raise UserError(f"{target}: exists already and is no export; name a new folder, or remove it first")


# --- writing


def _write_model(exportable: Exportable, format: str, path: Path) -> int | None:
    """Write the model's file; its opset, where it has one."""
    inputs = example_inputs(exportable.config)
    say(f"export: tracing {exportable.folder}")
    module = PaddedBert(exportable, written_out_gelu) if format == "onnx" else PaddedBert(exportable)
    program = trace(module, inputs, exportable.config.max_position_embeddings)
    say(f"export: writing {path.name}")
    if format == "torch":
        write_program(program, path)
        return None
    with quietly():
        made = torch.onnx.export(
            program,
            kwargs=inputs,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(INPUTS),
            output_names=list(exportable.outputs),
            dynamic_shapes={name: {0: "batch", 1: "sequence"} for name in INPUTS},
            verbose=False,
        )
        assert made is not None
        model = made.model_proto
    for piece in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.initializer):
        del piece.metadata_props[:]  # stack traces, with the paths of this machine
    quantize.save_onnx(model, path)
    return next(int(entry.version) for entry in model.opset_import if not entry.domain)


def _write_companions(folder: Path, exportable: Exportable) -> BertTokenizer | None:
    """Write config.json and the tokenizer, so that the folder can be deployed alone; the tokenizer, if there is one."""
    values = {"model_type": "bert"} | exportable.values
    write_text(folder / CONFIG, json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    if not any((exportable.folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        say(f"note: {exportable.folder}: has no tokenizer, so that none is exported")
        return None
    tokenizer = load_tokenizer(exportable.folder)
    if note := vocabulary_note(exportable.folder, tokenizer.vocab_size, exportable.config):
        say(f"note: {note}")
    tokenizer.save(folder)
    return tokenizer


def _describe(folder: Path, exportable: Exportable, format: str, precision: str, opset: int | None) -> dict[str, Any]:
    """What export.json says of the model's file in `folder`."""
    config, name, task = exportable.config, FILE_NAMES[format], exportable.values.get(TASK_KEY)
    return {
        "bertsmith": __version__,
        "torch": torch.__version__,
        "format": format,
        "precision": precision,
        "head": exportable.head,
        "file": name,
        "files": {path.name: path.stat().st_size for path in sorted(folder.glob(f"{name}*"))},
        "opset": opset,
        "inputs": dict.fromkeys(INPUTS, "int64 (batch, sequence)"),
        "outputs": {output: f"float32 ({exportable.axes(output)})" for output in exportable.outputs},
        "labels": None if exportable.labels is None else list(exportable.labels),
        "max_length": config.max_position_embeddings,
        # what `predict` cuts texts at, as fine-tuning did; null: no task
        "cut_at": task.get("max_length") if isinstance(task, dict) else None,
        "vocab_size": config.vocab_size,
        "segments": config.type_vocab_size,
        "pad_token_id": config.pad_token_id,
    }


def _write_marker(folder: Path, marker: dict[str, Any]) -> dict[str, Any]:
    """Write export.json; what it holds."""
    write_text(folder / MARKER, json.dumps(marker, indent=2, ensure_ascii=False) + "\n")
    return marker


def _megabytes(marker: dict[str, Any]) -> float:
    return sum(marker["files"].values()) / 1e6


# --- comparing


def random_batches(config: BertConfig, seed: int) -> Iterator[dict[str, Array]]:
    """Random texts of SHAPES and two more, cut to the model's positions: padded, every other one in two segments."""
    source = np.random.default_rng(seed)
    longest = config.max_position_embeddings
    chosen = [(int(source.integers(2, 6)), int(source.integers(2, 97))) for _ in range(2)]
    number = 0
    for rows, length in (*SHAPES, *chosen):
        length = min(length, longest)
        lengths = source.integers(1, length + 1, rows)
        lengths[source.integers(rows)] = length
        place = np.arange(length)
        mask = (place < lengths[:, None]).astype(np.int64)
        ids = np.where(mask, source.integers(0, config.vocab_size, (rows, length)), 0)
        types = np.zeros_like(ids)
        for row in range(rows):
            number += 1
            if number % 2 == 0 and config.type_vocab_size > 1 and lengths[row] > 1:
                types[row] = (place >= source.integers(1, lengths[row])) & (place < lengths[row])
        yield dict(zip(INPUTS, (ids, mask, types), strict=True))


def compare(exported: ExportedModel, exportable: Exportable, batches: list[dict[str, Array]]) -> Agreement:
    """Run padded batches through the exported file, and each of their texts alone through the model."""
    difference, cosines, equal = 0.0, [], []
    multilabel = exportable.values.get("problem_type") == "multi_label_classification"
    for batch in batches:
        outputs = exported.run(**batch)
        for row, tokens in enumerate(batch["attention_mask"].sum(1)):
            ids, types = (torch.from_numpy(batch[name][row, :tokens]) for name in (INPUTS[0], INPUTS[2]))
            for name, tensor in expected_outputs(exportable, ids, types).items():
                wanted = tensor.numpy()
                found = outputs[name][row, :tokens] if exportable.is_per_token(name) else outputs[name][row]
                if found.shape != wanted.shape or found.dtype != wanted.dtype or not np.isfinite(found).all():
                    return Agreement(float("inf"), None, None, None)
                difference = max(difference, float(np.abs(found - wanted).max()))
                if wanted.shape[-1] > 1:
                    lengths = [np.linalg.norm(array, axis=-1) for array in (found, wanted)]
                    both = lengths[0] * lengths[1]
                    alike = np.where(
                        both > 0, (found * wanted).sum(-1) / np.maximum(both, 1e-30), lengths[0] == lengths[1]
                    )
                    cosines.append(np.ravel(alike))
                    if exportable.head != "encoder":
                        same = (found > 0) == (wanted > 0) if multilabel else found.argmax(-1) == wanted.argmax(-1)
                        equal.append(np.ravel(same))
    cosine = np.concatenate(cosines) if cosines else None
    return Agreement(
        difference,
        None if cosine is None else float(cosine.mean()),
        None if cosine is None else float(cosine.min()),
        float(np.concatenate(equal).mean()) if equal else None,
    )
