"""A model folder as a module that takes padded batches, which is what other runtimes expect.

In: `input_ids`, `attention_mask`, `token_type_ids`, each int64 (B, L), padding on the right. Out: named tensors, by
what the folder was trained for. Inside bertsmith batches are packed (model/bert.py); the weights here are the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.errors import UserError
from bertsmith.inference.exported import INPUTS, MARKER
from bertsmith.model.bert import BertForPreTraining, BertLayer, BertPooler
from bertsmith.model.config import BertConfig
from bertsmith.model.layers import LayerNorm, Linear
from bertsmith.model.names import CLASSIFIER, SPANS
from bertsmith.model.pickled import TensorSource, find_weights
from bertsmith.model.task_model import ARCHITECTURES, BertForTask
from bertsmith.model.weights import (
    OBJECTIVE_KEY,
    find_model,
    load_folder_weights,
    load_model,
    modern_names,
    read_config,
)

# how transformers names the outputs of its classes; those with an axis of tokens end in padding that means nothing
TASK_OUTPUTS = {
    "sequence": ("logits",),
    "choice": ("logits",),
    "token": ("logits",),
    "span": ("start_logits", "end_logits"),
}
ENCODER_OUTPUTS = ("last_hidden_state", "pooler_output")
PRETRAINING_OUTPUTS = ("prediction_logits", "seq_relationship_logits")
# tracing takes an axis that cannot be longer than two for a fixed size
LEAST_POSITIONS = 3
# one vector or score a sequence; every other output has one a token
_OF_SEQUENCES = ("pooler_output", "seq_relationship_logits")


@dataclass(frozen=True)
class Exportable:
    """An opened folder, and what can be computed with it."""

    folder: Path
    config: BertConfig
    values: dict[str, Any]
    """Its config.json."""
    model: BertForTask | BertForPreTraining
    head: str
    """`sequence`, `choice`, `token`, `span` (fine-tuned), `pretraining` or `encoder`."""
    outputs: tuple[str, ...]
    labels: tuple[str, ...] | None
    """Names of the classes, in the order of the logits; None where they have none."""

    def is_per_token(self, output: str) -> bool:
        """Whether `output` has an axis of tokens, (B, L, …), or not, (B, …)."""
        return output not in _OF_SEQUENCES and self.head not in ("sequence", "choice")

    def axes(self, output: str) -> str:
        """The shape of an output in words."""
        if output in ("start_logits", "end_logits"):
            return "batch, sequence"
        last = {
            **dict.fromkeys(ENCODER_OUTPUTS, str(self.config.hidden_size)),
            PRETRAINING_OUTPUTS[0]: str(self.config.vocab_size),
            PRETRAINING_OUTPUTS[1]: "2",
        }
        width = last[output] if isinstance(self.model, BertForPreTraining) else str(self.model.outputs)
        return f"batch, sequence, {width}" if self.is_per_token(output) else f"batch, {width}"


def open_exportable(folder: str | Path) -> Exportable:
    """Open a model folder or a finished run, ours or transformers'.

    What config.json calls the model decides between the fine-tuned heads; else the weights do: a pre-training head that
    is there and was trained is exported, and where there is none, the encoder's states.

    Raises UserError for what is no model folder and for one whose output layer is missing.
    """
    path = find_model(folder)
    if (path / MARKER).is_file():
        raise UserError(f"{folder}: was exported already; name the model folder that it was exported from")
    config, values = read_config(path)
    if config.max_position_embeddings < LEAST_POSITIONS:
        raise UserError(
            f"{path}: has {config.max_position_embeddings} positions; an axis of any length needs {LEAST_POSITIONS} at "
            "least"
        )
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    for head, architecture in ARCHITECTURES.items():
        if name == architecture:
            return _open_task(path, config, values, head)
    model, report, values = load_model(path)
    untrained = values.get(OBJECTIVE_KEY) == "mlm"  # which writes pooler and next-sentence head, but trains neither
    has = {part: not report.missing_from(part) for part in ("mlm", "nsp", "pooler")}
    trained = [has["mlm"], has["nsp"] and has["pooler"] and not untrained]
    outputs = tuple(output for output, there in zip(PRETRAINING_OUTPUTS, trained, strict=True) if there)
    head = "pretraining" if outputs else "encoder"
    if not outputs:
        outputs = ENCODER_OUTPUTS if has["pooler"] and not untrained else ENCODER_OUTPUTS[:1]
    return Exportable(path, config, values, model.eval(), head, outputs, None)


def _open_task(path: Path, config: BertConfig, values: dict[str, Any], head: str) -> Exportable:
    """A fine-tuned folder; the output layer is as wide as its tensor."""
    source = TensorSource(find_weights(path))
    names = modern_names(source)
    layer = SPANS if head == "span" else CLASSIFIER
    if layer not in names:
        raise UserError(
            f"{path}: config.json calls it {ARCHITECTURES[head]}, but {layer} is missing, so that its output layer was "
            "never trained; fine-tune it, or set `architectures` to what it is"
        )
    width = source.shape(names[layer])[0]
    if width != {"span": 2, "choice": 1}.get(head, width):
        raise UserError(f"{path}: {layer} gives {width} scores a position, which {ARCHITECTURES[head]} does not have")
    model = BertForTask(config, head, width)
    if missing := load_folder_weights(model, path).missing:
        raise UserError(f"{path}: {missing[0]} is missing, without which {ARCHITECTURES[head]} cannot be computed")
    return Exportable(path, config, values, model.eval(), head, TASK_OUTPUTS[head], _labels(values, width))


def _labels(values: dict[str, Any], count: int) -> tuple[str, ...] | None:
    """The names in id2label, where there is one for each of `count` outputs."""
    names = values.get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(str(number) for number in range(count)):
        return None
    return tuple(str(names[str(number)]) for number in range(count))


# --- the module


class PaddedBert(nn.Module):
    """What is exported: encoder and trained heads over padded batches, float32, no dropout.

    Returns tensors under the names in `Exportable.outputs`. Padded tokens are attended to by none; what stands at their
    own places in an output means nothing. `gelu`: how the exact GELU is computed, where the model has it.
    """

    def __init__(self, exportable: Exportable, gelu: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.gelu = gelu
        model, self.head, self.outputs = exportable.model, exportable.head, exportable.outputs
        self.embeddings = model.bert.embeddings
        self.layers = model.bert.encoder.layer
        # untrained parts must not travel along
        if self.head in ("sequence", "choice") or any(output in _OF_SEQUENCES for output in self.outputs):
            assert isinstance(model.bert.pooler, BertPooler)
            self.pooler = model.bert.pooler
        if isinstance(model, BertForTask):
            self.output_layer = model.output_layer
        else:
            if PRETRAINING_OUTPUTS[0] in self.outputs:
                self.mlm_head = model.mlm_head
            if PRETRAINING_OUTPUTS[1] in self.outputs:
                self.nsp_head = model.nsp_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        """int64 (B, L) each → named outputs."""
        tables = self.embeddings
        hidden = F.embedding(input_ids, tables.word) + tables.position[: input_ids.shape[1]]
        hidden = _norm(tables.norm, hidden + F.embedding(token_type_ids, tables.segment))  # (B, L, H)
        # the lowest number and not minus infinity: a row without a single real token gives numbers all the same
        padding = (attention_mask == 0) * torch.finfo(hidden.dtype).min
        bias = padding.unsqueeze(1).unsqueeze(1)  # (B, 1, 1, L)
        for layer in self.layers:
            assert isinstance(layer, BertLayer)
            hidden = self._apply_layer(layer, hidden, bias)
        return dict(zip(self.outputs, self._heads(hidden), strict=True))

    def _heads(self, hidden: Tensor) -> Iterator[Tensor]:
        """The outputs in order, from the last hidden states (B, L, H)."""
        if self.head in ("sequence", "choice"):
            yield _linear(self.output_layer, self._pool(hidden))
        elif self.head == "token":
            yield _linear(self.output_layer, hidden)
        elif self.head == "span":
            yield from _linear(self.output_layer, hidden).unbind(-1)
        for output in self.outputs:
            if output == "last_hidden_state":
                yield hidden
            elif output == "pooler_output":
                yield self._pool(hidden)
            elif output == "prediction_logits":
                head = self.mlm_head
                transformed = _norm(head.norm, self._activate(head.activation, _linear(head.transform, hidden)))
                yield F.linear(transformed, self.embeddings.word, head.bias)
            elif output == "seq_relationship_logits":
                yield _linear(self.nsp_head.linear, self._pool(hidden))

    def _pool(self, hidden: Tensor) -> Tensor:
        return torch.tanh(_linear(self.pooler.dense, hidden.select(1, 0)))

    def _activate(self, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return self.gelu(x) if activation is F.gelu else activation(x)

    def _apply_layer(self, layer: BertLayer, hidden: Tensor, bias: Tensor) -> Tensor:
        """One layer over a padded batch: hidden (B, L, H), `bias` (B, 1, 1, L) added to the scores → (B, L, H).

        Scores and softmax are written out, as every runtime knows them; each has its own way of joining them.
        """
        batch, length, size = hidden.shape
        width = size // layer.heads
        query, key, value = _linear(layer.qkv, hidden).view(batch, length, 3, layer.heads, width).unbind(2)
        scores = torch.matmul(query.transpose(1, 2) * width**-0.5, key.permute(0, 2, 3, 1)) + bias  # (B, heads, L, L)
        context = torch.matmul(torch.softmax(scores, -1), value.transpose(1, 2))
        context = context.transpose(1, 2).reshape(batch, length, size)
        hidden = _norm(layer.attention_norm, hidden + _linear(layer.attention_output, context))
        expanded = self._activate(layer.activation, _linear(layer.intermediate, hidden))  # (B, L, 4H)
        return _norm(layer.output_norm, hidden + _linear(layer.output, expanded))


# the layers' own forward methods cast their weights, which a traced program would do at each call


def _linear(layer: Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _norm(layer: LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, layer.weight.shape, layer.weight, layer.bias, layer.epsilon)


def written_out_gelu(x: Tensor) -> Tensor:
    """GELU in the steps, and their order, that ONNX Runtime and OpenVINO know for one operator (it is in opset 20)."""
    return 0.5 * (x * (1 + torch.erf(x / 2**0.5)))


def example_inputs(config: BertConfig) -> dict[str, Tensor]:
    """A batch to trace with; both axes are longer than one, which tracing would take for a fixed size."""
    ones = torch.ones(2, max(2, min(8, config.max_position_embeddings)), dtype=torch.int64)
    return dict(zip(INPUTS, (ones, ones.clone(), torch.zeros_like(ones)), strict=True))


# --- what is exported must equal this


@torch.inference_mode()
def expected_outputs(exportable: Exportable, token_ids: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
    """What the model itself gives for one sequence without padding: ids (T,) → outputs (T, …), or (…) of the sequence.

    By the packed path that training and prediction take.
    """
    model = exportable.model
    starts = torch.tensor([0, len(token_ids)])
    packed = (token_ids, segment_ids, torch.arange(len(token_ids)), starts)
    if isinstance(model, BertForTask):
        logits = model(*packed, starts[:-1] if exportable.head in ("sequence", "choice") else None)
        if exportable.head == "span":
            return dict(zip(exportable.outputs, logits.unbind(-1), strict=True))
        return {"logits": logits if exportable.head == "token" else logits[0]}
    if exportable.head == "encoder":
        hidden = model.bert(*packed)  # (T, H)
        found = dict(zip(ENCODER_OUTPUTS, (hidden, model.bert.pooler(hidden[:1])[0]), strict=True))
    else:
        predicted, next_sentence = model.logits(*packed, packed[2])
        found = dict(zip(PRETRAINING_OUTPUTS, (predicted, next_sentence[0]), strict=True))
    return {name: found[name] for name in exportable.outputs}
