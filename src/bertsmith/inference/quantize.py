"""int8 for the CPU: an exported ONNX file in, the same with 8-bit weights out, a quarter of its size.

Products of each token multiply in 8 bits: what a layer norm gives by one scale for all, as `--precision int8` does
(int8.py, where the choice is explained), the context and the activation's output by a scale a token. No number depends
on the texts beside it. Attention's own products, softmax, layer norms, the pooler and output layers stay float32. The
word table has 8 bits, a scale a row, and is dequantized as rows are looked up.

In the file 8-bit inputs are written as QuantizeLinear and DequantizeLinear in front of a plain MatMul, which runtimes
join to one product of 8-bit integers, and which one that knows no such product computes as it stands.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.inference.exported import INPUTS, Array, ExportedModel, import_optional, open_session
from bertsmith.inference.int8 import LEAST_STEP, Int8RowWeights, quantize, quantize_by_row, sample_rows, second_segments
from bertsmith.inference.products import MIDDLE, Int8Weights
from bertsmith.model.config import BertConfig
from bertsmith.progress import Progress
from bertsmith.text.tokenizer import BertTokenizer

# pieces of a protocol buffer cannot be larger than 2 GiB; what is goes into a file beside it
MOST_IN_ONE_FILE = 2_000_000_000
SPEED_SECONDS = 2.0
# on processors without VNNI the 16-bit sums of two products of 8 bits each would overflow, and a file may be run on any
WEIGHT_BITS = 7
_ROWS = 8  # of a batch that ranges are seen on


def quantize_weights(source: Path, target: Path, config: BertConfig, tokenizer: BertTokenizer | None) -> None:
    """Write the int8 form of the ONNX file `source` as `target`.

    Ranges are those of the demo's texts in the words of `tokenizer`, or of random ids where there is none.
    """
    onnx = import_optional("onnx")
    model = onnx.load(str(source))
    graph = model.graph
    _transpose_ahead(graph, onnx)
    products = _find_products(graph, onnx, config.hidden_size)
    seen = _inputs_of(products, model, source.with_name("seen.onnx"), sample_batches(config, tokenizer))
    with torch.inference_mode(), Progress("weights in 8 bits", len(products), "products") as progress:
        for number, product in enumerate(products):
            arrays = (product.weight.T, product.bias, seen[product.input])
            weight, bias, inputs = (torch.from_numpy(np.array(array, order="C")) for array in arrays)
            choose = quantize if product.of_norm else quantize_by_row
            _replace(graph, onnx, product, f"int8.{number}", choose(weight, bias, inputs, WEIGHT_BITS))
            progress.advance(1)
    _quantize_word_table(graph, onnx)
    _drop_unused(graph)
    save_onnx(model, target)


def sample_batches(config: BertConfig, tokenizer: BertTokenizer | None) -> Iterator[dict[str, Array]]:
    """The rows that ranges are seen on, in padded batches, int64 (B, L) by the inputs' names."""
    longest = config.trained_positions
    if tokenizer is not None:
        longest = min(longest, tokenizer.max_length)
    rows = sample_rows(tokenizer, config.vocab_size, longest)
    seconds = second_segments(rows)
    order = np.argsort([len(row) for row in rows], kind="stable")
    for first in range(0, len(rows), _ROWS):
        numbers = order[first : first + _ROWS]
        lengths = np.array([len(rows[number]) for number in numbers])
        place = np.arange(lengths.max())
        mask = (place < lengths[:, None]).astype(np.int64)
        ids = np.zeros_like(mask)
        ids[mask == 1] = np.concatenate([rows[number] for number in numbers])
        types = mask * (place >= np.array([seconds[number] for number in numbers])[:, None])
        yield dict(zip(INPUTS, (ids, mask, types if config.type_vocab_size > 1 else np.zeros_like(types)), strict=True))


# --- the graph


@dataclass(frozen=True)
class _Product:
    """input @ weight + bias, in the graph."""

    nodes: tuple[Any, Any]
    """The MatMul, and the Add after it."""
    input: str
    of_norm: bool
    """Whether the input is a layer norm's output."""
    weight: Array  # (K, N)
    bias: Array  # (N,)


def _find_products(graph: Any, onnx: Any, width: int) -> list[_Product]:
    """The products with a weight, for all tokens: those whose output is as wide as a hidden state, `width`, or wider.

    Narrower ones are output layers.
    """
    tables = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    found = []
    for add in graph.node:
        bias = next((name for name in add.input if name in tables), None)
        node = next((makers[name] for name in add.input if name in makers), None)
        if add.op_type != "Add" or bias is None or node is None or node.op_type != "MatMul":
            continue
        weight = tables.get(node.input[1])
        if weight is None or len(weight.dims) != 2 or weight.dims[1] < width:
            continue
        maker = makers.get(node.input[0])
        arrays = [onnx.numpy_helper.to_array(tensor) for tensor in (weight, tables[bias])]
        of_norm = maker is not None and maker.op_type == "LayerNormalization"
        found.append(_Product((node, add), node.input[0], of_norm, *arrays))
    return found


def _inputs_of(
    products: Sequence[_Product], model: Any, place: Path, batches: Iterator[dict[str, Array]]
) -> dict[str, Array]:
    """What goes into the products for all tokens of `batches`, (T, K) by name. `place`: of a file, which goes again."""
    onnx = import_optional("onnx")
    names = list(dict.fromkeys(product.input for product in products))
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    tapped.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    save_onnx(tapped, place)
    session = open_session(place)
    found: dict[str, list[Array]] = {name: [] for name in names}
    for batch in batches:
        real = batch["attention_mask"] == 1
        for name, array in zip(names, session.run(names, batch), strict=True):
            found[name].append(array[real])
    del session
    for path in place.parent.glob(f"{place.name}*"):
        path.unlink()
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


def _replace(graph: Any, onnx: Any, product: _Product, name: str, chosen: Int8Weights | Int8RowWeights) -> None:
    """Put the 8-bit form of a product in its place; its tensors and nodes are called `name`."""
    nodes: list[Any] = []

    def const(part: str, values: Any) -> str:
        array = np.array(values.numpy() if isinstance(values, Tensor) else values, order="C")
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}.{part}"))
        return f"{name}.{part}"

    def node(kind: str, inputs: list[str], part: str, **attributes: Any) -> str:
        nodes.append(onnx.helper.make_node(kind, inputs, [f"{name}.{part}"], name=f"{name}.{part}", **attributes))
        return f"{name}.{part}"

    hidden, step = product.input, None
    if isinstance(chosen, Int8Weights):
        zero = MIDDLE
        hidden = node("Mul", [hidden, const("factor", chosen.factor)], "scaled")
        hidden = node("Add", [hidden, const("offset", chosen.offset - MIDDLE)], "shifted")
    else:
        zero, axes = chosen.zero, const("axes", np.array([-1]))
        high = node("ReduceMax", [hidden, axes], "high")  # (B, L, 1)
        low = node("ReduceMin", [hidden, axes], "low")
        above = node("Mul", [high, const("above", np.float32(1 / (255 - zero)))], "step_above")
        below = node("Mul", [low, const("below", np.float32(-1 / zero))], "step_below")
        step = node("Max", [above, below, const("least", np.float32(LEAST_STEP))], "step")
        hidden = node("Div", [hidden, step], "scaled")
    codes = [const("one", np.float32(1)), const("zero", np.uint8(zero))]
    hidden = node("QuantizeLinear", [hidden, *codes], "codes")
    hidden = node("DequantizeLinear", [hidden, *codes], "rounded")
    weight = node(
        "DequantizeLinear", [const("weights", chosen.weights.T), const("scale", chosen.scale)], "near", axis=1
    )
    hidden = node("MatMul", [hidden, weight], "product")
    if step is not None:
        hidden = node("Mul", [hidden, step], "whole")
    matmul, add = product.nodes
    nodes.append(onnx.helper.make_node("Add", [hidden, const("bias", chosen.bias)], list(add.output), name=add.name))
    place = list(graph.node).index(matmul)
    for old in (matmul, add):
        graph.node.remove(old)
    for new in reversed(nodes):
        graph.node.insert(place, new)


def _drop_unused(graph: Any) -> None:
    """Remove tensors that no node takes, and what is said of those that are gone."""
    used = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
    there = used | {name for node in graph.node for name in node.output}
    for value in [value for value in graph.value_info if value.name not in there]:
        graph.value_info.remove(value)


def save_onnx(model: Any, path: Path) -> None:
    """Write a model as one file, or as two where one cannot hold it; an older data file goes."""
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)
    large = model.ByteSize() > MOST_IN_ONE_FILE
    import_optional("onnx").save(model, str(path), save_as_external_data=large, location=data.name)


def _transpose_ahead(graph: Any, onnx: Any) -> None:
    """Give products with a transposed table (the tied decoder) a weight of their own, for only such are quantized."""
    tables = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in tables]:
        table = onnx.numpy_helper.to_array(tables[node.input[0]])
        order = next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), None)
        turned = np.ascontiguousarray(table.transpose(order))
        graph.initializer.append(onnx.numpy_helper.from_array(turned, node.output[0]))
        graph.node.remove(node)


def _quantize_word_table(graph: Any, onnx: Any) -> None:
    """Store the table that token ids look up in 8 bits, symmetric, with a scale for each row."""
    tables = {tensor.name: tensor for tensor in graph.initializer}
    lookup = next(node for node in graph.node if node.op_type == "Gather" and node.input[1] == INPUTS[0])
    table = onnx.numpy_helper.to_array(tables[lookup.input[0]])  # (V, H)
    scale = np.abs(table).max(1, keepdims=True) / 127  # (V, 1)
    scale[scale == 0] = 1
    names = [f"{lookup.input[0]}_{part}" for part in ("int8", "scale")]
    rows = np.rint(table / scale).astype(np.int8)
    graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for array, name in zip((rows, scale), names, strict=True)
    )
    make, out = onnx.helper.make_node, lookup.output[0]
    place = list(graph.node).index(lookup)
    graph.node.remove(lookup)
    for node in reversed(
        [
            make("Gather", [names[0], INPUTS[0]], [f"{out}_int8"], axis=0),
            make("Gather", [names[1], INPUTS[0]], [f"{out}_scale"], axis=0),
            make("Cast", [f"{out}_int8"], [f"{out}_float"], to=onnx.TensorProto.FLOAT),
            make("Mul", [f"{out}_float", f"{out}_scale"], [out]),
        ]
    ):
        graph.node.insert(place, node)


# --- speed


def speed_batches(vocab_size: int, max_length: int, seed: int) -> list[dict[str, Array]]:
    """Four batches of eight texts of random tokens, from an eighth of the length 128 (or the model's) to all of it."""
    source = np.random.default_rng(seed)
    longest = min(128, max_length)
    batches = []
    for _ in range(4):
        lengths = source.integers(max(1, longest // 8), longest + 1, 8)
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        ids = source.integers(0, vocab_size, mask.shape) * mask
        batches.append(dict(zip(INPUTS, (ids, mask, np.zeros_like(ids)), strict=True)))
    return batches


def measure_speed(model: ExportedModel, batches: Sequence[dict[str, Array]]) -> dict[str, float]:
    """Real tokens a second of a model that has not run yet: in its very first call, and the median of those after.

    Every batch runs three times at least, then on until SPEED_SECONDS are over.
    """
    rates, begun, rounds = [], time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - begun < SPEED_SECONDS:
        for batch in batches:
            started = time.perf_counter()
            model.run(**batch)
            rates.append(float(batch["attention_mask"].sum()) / (time.perf_counter() - started))
        rounds += 1
    return {"first_call": rates[0], "steady": statistics.median(rates[1:])}
