"""The contenders of benchmarks/embed.py: ways to turn texts into vectors, mean over the tokens, each at its best.

Ours is used as it is. The others try batch sizes (and OpenVINO streams) on a small part first and keep the best; all
get texts sorted by length. Each lives in a process of its own, which `serve` is.
"""

import contextlib
import json
import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from bertsmith.storage import atomic_file

Vectors = npt.NDArray[np.float32]
Setting = dict[str, int]

MAX_LENGTH = 256
BATCH_SIZES = (16, 32, 64, 128)
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Files:
    """What contenders load: the model folder as it is, and what `make_files` made of it in `folder`."""

    model: Path
    folder: Path

    @property
    def onnx(self) -> Path:
        """The encoder with the mean over the tokens, from transformers."""
        return self.folder / "model.onnx"

    @property
    def onnx_int8(self) -> Path:
        """The same after ONNX Runtime's dynamic quantization."""
        return self.folder / "model-int8.onnx"

    @property
    def ours_exported(self) -> Path:
        """What `bertsmith export --int8` writes."""
        return self.folder / "ours-exported"


class Contender(ABC):
    """Loaded once; `embed` as often as wanted."""

    settings: tuple[tuple[Setting, ...], ...] = (({},),)
    """What may be tried, in rows: of each row the settings up to the first that is slower than the one before."""

    @abstractmethod
    def embed(self, texts: Sequence[str], **setting: int) -> Vectors:
        """(n, H), in input order."""


class Ours(Contender):
    """bertsmith.load, which groups by length on its own."""

    def __init__(self, files: Files, threads: int, precision: str) -> None:
        import bertsmith

        self.model = bertsmith.load(files.model, "cpu", precision, threads)

    def embed(self, texts: Sequence[str], **setting: int) -> Vectors:
        return self.model.embed(texts, max_length=MAX_LENGTH)


class SentenceTransformers(Contender):
    """SentenceTransformer.encode, which sorts by length on its own; what it reports of itself is not wanted."""

    settings: tuple[tuple[Setting, ...], ...] = (tuple({"batch_size": size} for size in BATCH_SIZES),)

    def __init__(self, files: Files, threads: int, precision: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        types = {"fp32": torch.float32, "bf16": torch.bfloat16}
        self.model = SentenceTransformer(
            str(files.model), device="cpu", local_files_only=True, model_kwargs={"dtype": types[precision]}
        )
        self.model.max_seq_length = MAX_LENGTH

    def embed(self, texts: Sequence[str], **setting: int) -> Vectors:
        found = self.model.encode(list(texts), show_progress_bar=False, convert_to_tensor=True, **setting)
        return found.float().numpy()


def padded_batches(
    tokenizer: Any, texts: Sequence[str], batch_size: int, multiple: int = 1
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Numbers of the texts, sorted by length, and the inputs by name, each int64 (B, L); L is a multiple of that."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        longest = len(rows[numbers[0]])
        ids = np.zeros((len(numbers), longest + -longest % multiple), dtype=np.int64)
        mask = np.zeros_like(ids)
        for place, number in enumerate(numbers):
            ids[place, : len(rows[number])] = rows[number]
            mask[place, : len(rows[number])] = 1
        yield numbers, dict(zip(INPUTS, (ids, mask, np.zeros_like(ids)), strict=True))


class Padded(Contender):
    """Tokenized by `tokenizers`, sorted by length, in padded batches: what runtimes that only run a graph are given."""

    settings: tuple[tuple[Setting, ...], ...] = (tuple({"batch_size": size} for size in BATCH_SIZES),)

    def __init__(self, files: Files) -> None:
        self.tokenizer = open_tokenizer(files.model)

    def embed(self, texts: Sequence[str], **setting: int) -> Vectors:
        found: list[Any] = [None] * len(texts)
        for numbers, inputs in padded_batches(self.tokenizer, texts, setting["batch_size"]):
            for number, vector in zip(numbers, self.run(inputs), strict=True):
                found[number] = vector
        return np.stack(found)

    @abstractmethod
    def run(self, inputs: dict[str, Any]) -> Vectors:
        """The vectors of one batch, (B, H)."""


class OnnxRuntime(Padded):
    """Its own optimizations at load are on, which is the default."""

    def __init__(self, files: Files, threads: int, precision: str) -> None:
        import onnxruntime

        super().__init__(files)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        path = files.onnx if precision == "fp32" else files.onnx_int8
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, inputs: dict[str, Any]) -> Vectors:
        return self.session.run(None, inputs)[0]


class OursExported(Padded):
    """What `bertsmith export --int8` wrote, by `load_exported`."""

    def __init__(self, files: Files, threads: int, precision: str) -> None:
        from bertsmith.inference.exported import load_exported

        super().__init__(files)
        self.model = load_exported(files.ours_exported, threads)

    def run(self, inputs: dict[str, Any]) -> Vectors:
        mask = inputs["attention_mask"].astype(np.float32)
        hidden = self.model.run(**inputs)["last_hidden_state"]  # (B, L, H)
        return (mask[:, None, :] @ hidden)[:, 0] / mask.sum(1, keepdims=True)


class OpenVino(Contender):
    """Tries one stream of all threads, and a stream a thread with requests in flight, its guide's way to throughput."""

    multiple = 1
    """Lengths are filled up to a multiple of this."""

    def __init__(self, files: Files, threads: int, precision: str) -> None:
        import openvino

        self.tokenizer = open_tokenizer(files.model)
        self.settings = tuple(
            tuple({"batch_size": size, "streams": streams} for size in BATCH_SIZES) for streams in sorted({1, threads})
        )
        core, arithmetic = openvino.Core(), {"fp32": "f32", "bf16": "bf16"}[precision]
        hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": arithmetic}
        self.queues = {}
        for streams in sorted({1, threads}):
            compiled = core.compile_model(str(files.onnx), "CPU", hints | {"NUM_STREAMS": streams})
            self.queues[streams] = openvino.AsyncInferQueue(compiled)

    def embed(self, texts: Sequence[str], **setting: int) -> Vectors:
        queue = self.queues[setting["streams"]]
        found: list[Any] = [None] * len(texts)

        def keep(request: Any, numbers: list[int]) -> None:
            for number, vector in zip(numbers, request.get_output_tensor().data, strict=True):
                found[number] = vector.copy()

        queue.set_callback(keep)
        for numbers, inputs in padded_batches(self.tokenizer, texts, setting["batch_size"], self.multiple):
            queue.start_async(inputs, numbers)
        queue.wait_all()
        return np.stack(found)


class OpenVinoBy16(OpenVino):
    """Lengths filled up to multiples of 16: OpenVINO prepares for every shape it meets, so there should be few."""

    multiple = 16


def openvino_has_bf16() -> bool:
    """Whether OpenVINO computes in bf16 here; where it cannot it takes fp32 and says nothing."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@dataclass(frozen=True)
class Entry:
    """How a contender is made, and the packages it needs (import name, name for pip)."""

    make: Callable[[Files, int, str], Contender]
    packages: tuple[tuple[str, str], ...] = ()


_ST = (("sentence_transformers", "sentence-transformers"),)
_ONNX = (("onnx", "onnx"), ("onnxruntime", "onnxruntime"))
_OPENVINO = (("onnx", "onnx"), ("openvino", "openvino"))
ENTRIES = {
    "ours-fp32": Entry(Ours),
    "ours-bf16": Entry(Ours),
    "ours-int8": Entry(Ours),
    "ours-exported-int8": Entry(OursExported, (*_ONNX, ("onnxscript", "onnxscript"))),
    "sentence-transformers-fp32": Entry(SentenceTransformers, _ST),
    "sentence-transformers-bf16": Entry(SentenceTransformers, _ST),
    "onnxruntime-fp32": Entry(OnnxRuntime, _ONNX),
    "onnxruntime-int8": Entry(OnnxRuntime, _ONNX),
    "openvino-fp32": Entry(OpenVino, _OPENVINO),
    "openvino-bf16": Entry(OpenVino, _OPENVINO),
    "openvino-by-16-bf16": Entry(OpenVinoBy16, _OPENVINO),
}


def make_contender(name: str, files: Files, threads: int) -> Contender:
    """One of ENTRIES, loaded."""
    return ENTRIES[name].make(files, threads, name.rpartition("-")[2])


def open_tokenizer(model: Path) -> Any:
    """The folder's tokenizer by `tokenizers`, cut at MAX_LENGTH, no padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_LENGTH)
    return tokenizer


def make_files(files: Files, names: Sequence[str]) -> None:
    """Write into `files.folder` what the contenders `names` load beside the model folder, unless it is there."""
    files.folder.mkdir(parents=True, exist_ok=True)
    if "ours-exported-int8" in names and not files.ours_exported.exists():
        from bertsmith.inference.export import export_model

        export_model(files.model, files.ours_exported, "onnx", int8=True)
    if any(name.startswith(("onnxruntime", "openvino")) for name in names) and not files.onnx.exists():
        with atomic_file(files.onnx) as partial:
            _write_onnx(files.model, partial)
    if "onnxruntime-int8" in names and not files.onnx_int8.exists():
        from onnxruntime.quantization import QuantType, quantize_dynamic

        # by tensor, its fastest; without VNNI's wide sums weights of 8 bits overflow, and its guides give 7
        info = Path("/proc/cpuinfo")
        narrow = not (info.exists() and "vnni" in info.read_text(encoding="utf-8"))
        with atomic_file(files.onnx_int8) as partial:
            quantize_dynamic(files.onnx, partial, weight_type=QuantType.QInt8, reduce_range=narrow)


def _write_onnx(model: Path, path: Path) -> None:
    import torch
    from transformers import AutoModel

    # the graph of the older exporter and of attention written out is the one whose pieces the runtimes fuse best
    bert = AutoModel.from_pretrained(model, attn_implementation="eager", local_files_only=True).eval()

    class MeanPooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            hidden = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state  # (B, L, H)
            mask = attention_mask[:, :, None].to(hidden.dtype)
            return (hidden * mask).sum(1) / mask.sum(1)

    ids = torch.ones(2, 8, dtype=torch.long)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            MeanPooled(),
            (ids, ids, torch.zeros_like(ids)),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=list(INPUTS),
            output_names=["vectors"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in INPUTS} | {"vectors": {0: "batch"}},
        )


def reference_vectors(model: Path, texts: Sequence[str]) -> Vectors:
    """transformers in fp32, mean over the tokens: what the others' vectors are compared with."""
    import torch
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(model, local_files_only=True).eval()
    found: list[Any] = [None] * len(texts)
    with torch.inference_mode():
        for numbers, inputs in padded_batches(open_tokenizer(model), texts, 32):
            tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
            hidden, mask = bert(**tensors).last_hidden_state, tensors["attention_mask"][:, :, None]
            vectors = (hidden * mask).sum(1) / mask.sum(1)
            for number, vector in zip(numbers, vectors.numpy(), strict=True):
                found[number] = vector
    return np.stack(found)


# --- a contender's process


def timed(function: Callable[[], Any]) -> float:
    """Seconds that it took."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def choose_setting(
    rows: Sequence[Sequence[Setting]], take: Callable[[Setting], float]
) -> tuple[Setting, dict[str, float]]:
    """The setting with the fewest seconds (best of two), and the seconds of those tried; one alone is not tried.

    Of each row, settings are tried until one is slower than the one before.
    """
    tried: dict[str, float] = {}
    best, least = rows[0][0], float("inf")
    if sum(map(len, rows)) == 1:
        return best, tried
    for row in rows:
        before = float("inf")
        for setting in row:
            seconds = min(take(setting) for _ in range(2))
            tried[", ".join(f"{name} {value}" for name, value in setting.items())] = seconds
            if seconds < least:
                best, least = setting, seconds
            if seconds > before:
                break
            before = seconds
    return best, tried


def serve(name: str, files: Files, threads: int) -> None:
    """A contender's process. Commands are lines of JSON on stdin, answers lines of JSON on stdout.

    First command: the small part, a list of texts; the answer says how loading, first call and settings went. Then, a
    list of texts and a file for their vectors (or null): seconds.
    """
    with _private_stdout() as out:

        def reply(answer: Any) -> None:
            print(json.dumps(answer), file=out, flush=True)

        lines = map(json.loads, sys.stdin)
        small = next(lines)
        begun = time.perf_counter()
        contender = make_contender(name, files, threads)
        loading = time.perf_counter() - begun
        start = contender.settings[0][0]
        first, again = (timed(lambda: contender.embed(small, **start)) for _ in range(2))
        setting, tried = choose_setting(
            contender.settings, lambda setting: timed(lambda: contender.embed(small, **setting))
        )
        calls = {"load_seconds": loading, "first_call_seconds": first, "second_call_seconds": again}
        reply(calls | {"setting": setting, "tried_seconds": tried})
        for texts, file in lines:
            begun = time.perf_counter()
            vectors = contender.embed(texts, **setting)
            seconds = time.perf_counter() - begun
            if file is not None:
                np.save(file, vectors)
            reply(seconds)


@contextlib.contextmanager
def _private_stdout() -> Iterator[TextIO]:
    """Stdout for answers alone: what libraries print there goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out
