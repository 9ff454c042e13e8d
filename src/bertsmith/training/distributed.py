"""How the model is spread over the processes (ranks) that train it, and put together again for checkpoints.

Each rank takes its share of every batch, and gradients are averaged over all: with a copy of the model on each
(DistributedDataParallel), or with a share of every tensor on each (FSDP2, `fully_shard`). The model knows nothing of
it. What ranks agree on besides: ranks.py.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from bertsmith.hardware import Machine
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.task_model import BertForTask
from bertsmith.training.checkpoint import Checkpoint
from bertsmith.training.optimizer import BertOptimizer
from bertsmith.training.ranks import Ranks, check_own_gpu

Model = TypeVar("Model", BertForPreTraining, BertForTask)


class SpreadModel(Generic[Model]):
    """The model as the loop calls it; this class is for one process.

    Gradients are averaged over the ranks: a loss that is to be summed takes a scale of `ranks.size` over its targets.
    """

    def __init__(self, model: Model, module: nn.Module) -> None:
        self.model: Model = model
        """With the parameters that the optimizer updates."""
        self._module = module

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """What the model's `forward` gives for a micro-batch: a loss, or scores."""
        return self._module(*batch, **named)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Forward and backward pass of a micro-batch belong in here; only the step's `last` one moves gradients."""
        return nullcontext()


class _Replicated(SpreadModel[Model]):
    """A copy on every rank; DistributedDataParallel sums gradients in buckets while the backward pass goes on.

    The word table's gradient comes in one piece, from the look-up (TiedGradient), so that its bucket goes off once it
    is final. Parameters that take no part (pooler and NSP head without pairs) require no gradient and are not in it.
    """

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._module.no_sync()  # type: ignore[operator]


class _Sharded(SpreadModel[Model]):
    """Each rank holds its share of every tensor (FSDP2); a layer is put together when it is needed."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self._module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()


def spread_model(model: Model, how: str, ranks: Ranks, machine: Machine) -> SpreadModel[Model]:
    """Put `model` on the machine and on all ranks, with the first rank's weights. Changes `model` in place.

    `how`: "ddp", a copy on every rank; or "fsdp", for models that do not fit: weights, gradients and optimizer state
    divided among the ranks, and what a layer computes inside not kept but computed again in the backward pass (on one
    process this second half only). The numbers are the same but for rounding.

    Raises UserError where a machine has more processes than GPUs.
    """
    device = machine.device
    check_own_gpu(device)
    if how == "fsdp":
        for layer in model.bert.encoder.layer:
            _recompute(layer)
    if ranks.size == 1:
        model = model.to(device)
        return SpreadModel(model, model)
    if how == "fsdp":
        for tensor in model.state_dict().values():
            ranks.broadcast(tensor)
        _shard(model, ranks, machine)
        return _Sharded(model, model)
    from torch.nn.parallel import DistributedDataParallel

    model = model.to(device)
    # the bucket's memory is the gradient's: no second copy of all gradients
    return _Replicated(model, DistributedDataParallel(model, gradient_as_bucket_view=True))


def _shard(model: Model, ranks: Ranks, machine: Machine) -> None:
    """Divide layer by layer, and what is left (embeddings, pooler, heads) as one more.

    Layers are put together in the type they compute in, which is what each of their parts would cast the float32
    masters to. Embeddings and heads compute with the masters themselves and stay float32. Gradients are summed in
    float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(machine.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(machine.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)  # the model itself, which is of a class of its own from here on
    register_fsdp_forward_method(model, "evaluate")


def _recompute(layer: nn.Module) -> None:
    """Keep a layer's input only and compute its inside again in the backward pass, under the same dropout masks."""
    from torch.utils.checkpoint import checkpoint

    forward = layer.forward

    def forward_again(hidden: Tensor, plan: Any, masks: DropoutMasks | None, rows: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(hidden, plan, masks, rows)
        first = 0 if masks is None else masks.drawn

        def run(hidden: Tensor) -> Tensor:
            if masks is not None:
                masks.drawn = first  # the second time too: mask k of the pass is the same
            return forward(hidden, plan, masks, rows)

        return checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)

    layer.forward = forward_again


# --- whole tensors: what checkpoints hold


def whole_tensors(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The tensors as the first rank saves them; on the others, {} where they are divided.

    Divided tensors are put together one at a time, on the first rank's host, and saved as on one process. So there is
    one checkpoint format; any number of ranks, spread in either way, goes on from it; and nothing is ever unpickled,
    which the index of torch.distributed.checkpoint would ask for. BERT-large with its moments is 4 GB: seconds.
    """
    whole: dict[str, Any] = dict(tensors)
    for name, tensor in tensors.items():
        if _is_divided(tensor):
            whole[name] = whole[name].full_tensor()
            if ranks.is_first:
                whole[name] = whole[name].detach().cpu()
            else:
                del whole[name]
    return whole


def load_optimizer(optimizer: BertOptimizer, checkpoint: Checkpoint | None, ranks: Ranks) -> None:
    """Give every rank its part of the checkpoint's optimizer state. `checkpoint`: on the first rank, None elsewhere."""
    tensors = {} if checkpoint is None else checkpoint.load_optimizer()
    if ranks.size > 1:
        if ranks.is_first:
            optimizer.check_state_tensors(tensors)
        for name, own in optimizer.state_tensors().items():
            whole = tensors[name] if ranks.is_first else torch.empty(own.shape, dtype=own.dtype)
            ranks.broadcast(whole)
            tensors[name] = _divide_as(own, whole) if _is_divided(own) else whole
    optimizer.load_state_tensors(tensors)


def _is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _divide_as(divided: Any, whole: Tensor) -> Tensor:
    """This rank's part of `whole`, as `divided` is divided."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, divided.device_mesh, divided.placements, src_data_rank=None)


def whole_model(model: BertForPreTraining, weights: Mapping[str, Tensor]) -> BertForPreTraining:
    """A model on one process with `weights`, which `whole_tensors` gave for `model`; `model` itself if that is one."""
    if not any(_is_divided(parameter) for parameter in model.parameters()):
        return model
    copy = BertForPreTraining(model.config, next_sentence=model.next_sentence)
    copy.load_state_dict(weights)
    return copy
