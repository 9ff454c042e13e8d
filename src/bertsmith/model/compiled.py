"""The encoder in compiled code: norms, activations, residuals, dropout and casts fused with each other (torch.compile).

Layer by layer, not the whole model: one piece of code serves all layers and is compiled in seconds, and what spreads a
model over processes or computes activations again works with layers. Shapes are static, so that nothing is compiled
again: a batch that has not the shape of all others (VarlenPlan.static) goes through the same layers as they are.
Dropout is by HashedMasks, whose arithmetic is compiled in; numbers from a generator could not be.
"""

import os
import shutil
import subprocess
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.model import varlen
from bertsmith.model.attention import Plan
from bertsmith.model.bert import BertEmbeddings, BertLayer, BertModel
from bertsmith.model.config import BertConfig
from bertsmith.model.dropout import DropoutMasks, HashedMasks
from bertsmith.model.varlen import VarlenPlan

# masks that a layer draws: of the attention, after its output, after the feed-forward
MASKS_A_LAYER = 3
# pieces of code at once in a process: a layer for all tokens and for the wanted ones, for each length and each model
_MOST_PIECES = 64


def compiler_problem(device: torch.device, dtype: torch.dtype, config: BertConfig) -> str | None:
    """Why an encoder that computes in `dtype` cannot be compiled for `device` here, in words; None when it can."""
    if device.type == "cuda" and not varlen.fits(device, dtype, config.hidden_size // config.num_attention_heads):
        name, size = str(dtype).removeprefix("torch."), config.hidden_size // config.num_attention_heads
        return f"PyTorch has no flash attention on this GPU for {name} and heads of {size}"
    if device.type == "cuda" and find_spec("triton") is None:
        return "the package triton is not installed"
    # Triton takes the first that is there, Inductor what CXX names or g++ and nothing else
    named, *usual = ("CC", "gcc", "clang") if device.type == "cuda" else ("CXX", "g++")
    chosen = os.environ.get(named) or next(filter(shutil.which, usual), None)
    if chosen is None:
        return f"no compiler is found ({' nor '.join(usual)}, and {named} names none)"
    try:
        subprocess.run([chosen, "--version"], capture_output=True, check=True, timeout=60)
    except (OSError, ValueError, subprocess.SubprocessError):
        return f"the compiler {chosen} does not run"
    return None


def hashed_masks(config: BertConfig, seed: tuple[int, ...], device: torch.device) -> HashedMasks:
    """The masks of one forward pass for compiled code: a function of `seed`, the step's key."""
    return HashedMasks.of(seed, 1 + MASKS_A_LAYER * config.num_hidden_layers, device)


def compile_encoder(bert: BertModel, backend: Any = "inductor") -> None:
    """Let the layers of `bert`, and the end of its embeddings, run as compiled code where gradients are wanted.

    Changes `bert` in place; parameters and their names stay. To be called before layers are wrapped in anything else.
    `backend`: see torch.compile.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_PIECES)
    # DistributedDataParallel would have a layer cut where its buckets end; a layer is a small piece already
    torch._dynamo.config.optimize_ddp = False
    run = torch.compile(_run_layer, dynamic=False, fullgraph=True, backend=backend)
    for layer in bert.encoder.layer:
        assert isinstance(layer, BertLayer)
        layer.forward = _CompiledLayer(layer, run)  # type: ignore[method-assign]
    finish = torch.compile(_run_finish, dynamic=True, fullgraph=True, backend=backend)
    bert.embeddings.finish = _CompiledFinish(bert.embeddings, finish)  # type: ignore[method-assign]


def _run_layer(
    layer: BertLayer,
    hidden: Tensor,
    starts: Tensor,
    longest: int,
    seeds: tuple[Tensor, Tensor] | None,
    rows: Tensor | None,
) -> Tensor:
    # objects that hold tensors are made inside, where they cost nothing and are not compared from call to call
    masks = None if seeds is None else HashedMasks(*seeds)
    return BertLayer.forward(layer, hidden, VarlenPlan(starts, longest), masks, rows)


def _run_finish(
    embeddings: BertEmbeddings, total: Tensor, dtype: torch.dtype, seeds: tuple[Tensor, Tensor] | None
) -> Tensor:
    return BertEmbeddings.finish(embeddings, total, dtype, None if seeds is None else HashedMasks(*seeds))


def _seeds(masks: DropoutMasks | None, count: int) -> tuple[Tensor, Tensor] | None:
    """The seeds of the next `count` masks, on the host and on the device."""
    if masks is None:
        return None
    assert isinstance(masks, HashedMasks), "compiled code draws hashed masks"
    part = masks.part(count)
    return part.on_host, part.on_device


def _call(run: Any, *arguments: Any) -> Any:
    """`run` with these arguments. Raises UserError where its code cannot be made (a compiler without its headers)."""
    try:
        return run(*arguments)
    except RuntimeError as error:
        from torch._dynamo.exc import BackendCompilerFailed

        if not isinstance(error, BackendCompilerFailed):
            raise
        cause = error.inner_exception
        reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise UserError(f"compile: PyTorch could not compile the encoder here ({reason}); use --compile off") from error


class _CompiledLayer:
    """In place of a layer's `forward`."""

    def __init__(self, layer: BertLayer, run: Any) -> None:
        self.layer, self.run = layer, run

    def __call__(self, hidden: Tensor, plan: Plan, masks: DropoutMasks | None, rows: Tensor | None = None) -> Tensor:
        if not (isinstance(plan, VarlenPlan) and plan.static and torch.is_grad_enabled()):
            if isinstance(masks, HashedMasks):
                masks = masks.part(MASKS_A_LAYER)  # as many as there, whatever the kernel draws
            return BertLayer.forward(self.layer, hidden, plan, masks, rows)
        return _call(self.run, self.layer, hidden, plan.starts, plan.longest, _seeds(masks, MASKS_A_LAYER), rows)


class _CompiledFinish:
    """In place of the embeddings' `finish`, for any number of tokens."""

    def __init__(self, embeddings: BertEmbeddings, finish: Any) -> None:
        self.embeddings, self.finish = embeddings, finish

    def __call__(self, total: Tensor, dtype: torch.dtype, masks: DropoutMasks | None) -> Tensor:
        if not torch.is_grad_enabled():
            return BertEmbeddings.finish(self.embeddings, total, dtype, masks)
        return _call(self.finish, self.embeddings, total, dtype, _seeds(masks, 1))
