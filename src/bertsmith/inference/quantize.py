"""int8 for the CPU: an exported ONNX file in, the same with 8-bit weights out, a quarter of its size.

Products: dynamic quantization by ONNX Runtime, weights by output channel ahead of time, activations by tensor at each
call (one scale for the whole batch, so that a text's numbers depend a little on those beside it). The word table: by
row, dequantized as rows are looked up. Attention's own products, softmax and layer norms stay float32. PyTorch has no
such path of its own: torch.ao.quantization.quantize_dynamic is deprecated in 2.13 in favour of a package beside it.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.inference.exported import INPUTS, Array, ExportedModel, import_optional, quietly

# pieces of a protocol buffer cannot be larger than 2 GiB; what is goes into a file beside it
MOST_IN_ONE_FILE = 2_000_000_000
SPEED_SECONDS = 2.0


def quantize_weights(source: Path, target: Path) -> None:
    """Write the int8 form of the ONNX file `source` as `target`.

    Weights have 7 bits: on processors without VNNI the 16-bit sums of two products of 8 bits each would overflow, and
    the file may be run on any.
    """
    onnx = import_optional("onnx")
    quantization = import_optional("onnxruntime.quantization")
    model = onnx.load(str(source))
    _transpose_ahead(model.graph, onnx)
    with quietly():
        quantization.quantize_dynamic(
            model,
            str(target),
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=True,
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=model.ByteSize() > MOST_IN_ONE_FILE,
        )
    quantized = onnx.load(str(target))
    _quantize_word_table(quantized.graph, onnx)
    save_onnx(quantized, target)


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
    if not any(lookup.input[0] in node.input for node in graph.node):
        graph.initializer.remove(tables[lookup.input[0]])


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
