"""Training on several processes (ranks): what they agree on, and how the model is spread over them.

`torchrun --nproc-per-node N -m bertsmith pretrain …` starts N processes that run the same loop. Each takes its share of
every batch; gradients are summed over all. What the loop decides (when to stop, to log, to save) is agreed on here, so
that every rank takes the same steps; the first rank alone reads the run folder, writes, and talks. On one process all
of this is nothing: no process group is made and torch.distributed is not asked for anything.
"""

import contextlib
import gc
import json
import math
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.corpus.batches import Batch
from bertsmith.errors import ToldElsewhere, UserError
from bertsmith.hardware import Machine
from bertsmith.model.bert import BertForPreTraining, PretrainingLoss
from bertsmith.model.dropout import DropoutMasks
from bertsmith.options import Recipe, load_settings, settings_to_toml
from bertsmith.progress import say, silenced
from bertsmith.rank import describe_rank, local_rank, own_rank, world_size
from bertsmith.training.checkpoint import Checkpoint
from bertsmith.training.optimizer import BertOptimizer
from bertsmith.training.settings import PretrainSettings

# how long a rank whose work was ended by another one waits to be ended too, so that torchrun names the one that failed
LINGER_SECONDS = 3.0


class Ranks:
    """This process among those that train one model; this class is the process that trains alone.

    Every method but `even_out` is to be called by all ranks at the same point.
    """

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reads the run folder, writes and talks."""
        return self.rank == 0

    def agree(self, sums: Sequence[float], of_first: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        """`sums` added up over all ranks, and `of_first` as the first rank has them (a clock is one rank's)."""
        return list(sums), list(of_first)

    def share(self, value: Any) -> Any:
        """The first rank's `value` (anything JSON holds) on every rank; what the others give is not looked at."""
        return value

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, on the CPU, with the first rank's."""

    def alike(self) -> AbstractContextManager[None]:
        """What the user is to be told of in here ends every rank, and is told once; no other method may be called."""
        return nullcontext()

    def even_out(self, micro_batches: list[Batch], examples: int, micro_batch_size: int) -> list[Batch]:
        """This rank's micro-batches of a batch of `examples`, and empty ones until all ranks have the same number.

        Ranks wait for each other in the forward pass (fsdp) and at the end of the backward pass.
        """
        runs = math.ceil(examples / micro_batch_size)
        rounds = math.ceil(runs / self.size)
        return micro_batches + [micro_batches[-1].rows(0, 0)] * (rounds - len(micro_batches))


ALONE = Ranks()


class ProcessGroupRanks(Ranks):
    """Ranks of the default process group. What is agreed on goes over the host's network (gloo), gradients over nccl
    where they are on GPUs."""

    def __init__(self) -> None:
        self.rank, self.size = own_rank(), world_size()

    def agree(self, sums: Sequence[float], of_first: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        import torch.distributed as dist

        own = [*sums, *(of_first if self.is_first else [0.0] * len(of_first))]
        values = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(values)
        agreed = values.tolist()
        return agreed[: len(sums)], agreed[len(sums) :]

    def share(self, value: Any, source: int = 0) -> Any:
        import torch.distributed as dist

        content = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor(len(content))
        dist.broadcast(length, source)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(buffer, source)
        return json.loads(bytes(buffer.tolist()))

    def broadcast(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        dist.broadcast(tensor, 0)

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        import torch.distributed as dist

        error: UserError | None = None
        try:
            yield
        except UserError as found:
            error = found
        failing = torch.tensor(self.size if error is None else self.rank)
        dist.all_reduce(failing, dist.ReduceOp.MIN)
        if (source := int(failing)) == self.size:
            return
        message = self.share(f"{describe_rank()}: {error}" if source else str(error), source)
        raise (UserError if self.is_first else ToldElsewhere)(message) from error


@contextlib.contextmanager
def join_ranks() -> Iterator[Ranks]:
    """`with join_ranks() as ranks:` where torchrun (or its like) started several processes; else ranks is ALONE.

    In here only the first rank talks. What `spread_model` gave must be gone when the block ends. A rank that is lost
    ends the others with a UserError (ToldElsewhere, with the reason said) as soon as they need it. Raises UserError
    when the processes cannot reach each other.
    """
    if world_size() == 1:
        yield ALONE
        return
    import torch.distributed as dist

    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        if local_rank() < torch.cuda.device_count():
            torch.cuda.set_device(local_rank())
    try:
        dist.init_process_group(backend)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the {world_size()} processes of this job do not reach each other ({str(error).splitlines()[0]}); start "
            "them with torchrun, and where a machine has several networks name the right one in GLOO_SOCKET_IFNAME "
            "(and NCCL_SOCKET_IFNAME)"
        ) from error
    ranks = ProcessGroupRanks()
    with nullcontext() if ranks.is_first else silenced():
        try:
            yield ranks
        except (ToldElsewhere, KeyboardInterrupt):
            if not ranks.is_first:
                _linger()
            raise
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            say(
                "bertsmith: another process of this job ended in the middle of the work; if it could say why, it did "
                "above or in its machine's log. The same command goes on from the last checkpoint"
            )
            _linger()
            raise ToldElsewhere("another process of this job ended in the middle of the work") from error
    # A model on the ranks holds the group; were it the last to do so, its end would wait for threads that wait for it.
    gc.collect()
    dist.destroy_process_group()


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective operation failed for want of another rank."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _linger() -> None:
    with contextlib.suppress(KeyboardInterrupt):  # SIGTERM: torchrun has seen the failure and ends the rest
        time.sleep(LINGER_SECONDS)


def share_settings(make: Callable[[], PretrainSettings], ranks: Ranks) -> PretrainSettings:
    """What `make` gives on the first rank, on every rank: recipe and run folder need be on its machine only."""
    if ranks.size == 1:
        return make()
    text = ranks.share(settings_to_toml(make()) if ranks.is_first else None)
    return load_settings(PretrainSettings, Recipe(tomllib.loads(text), "the first rank's settings"))


# --- the model on the ranks


class SpreadModel:
    """The model as the loop calls it; this class is for one process.

    Gradients are averaged over the ranks: a loss that is to be summed takes a scale of `ranks.size` over its targets.
    """

    def __init__(self, model: BertForPreTraining, module: nn.Module) -> None:
        self.model = model
        """With the parameters that the optimizer updates."""
        self._module = module

    def __call__(self, **batch: Any) -> PretrainingLoss:
        """The loss of a micro-batch; see BertForPreTraining.forward."""
        return self._module(**batch)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Forward and backward pass of a micro-batch belong in here; only the step's `last` one moves gradients."""
        return nullcontext()


class _Replicated(SpreadModel):
    """A copy on every rank; DistributedDataParallel sums gradients in buckets while the backward pass goes on.

    The word table's gradient comes in one piece, from the look-up (TiedGradient), so that its bucket goes off once it
    is final. Parameters that take no part (pooler and NSP head without pairs) require no gradient and are not in it.
    """

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._module.no_sync()  # type: ignore[operator]


class _Sharded(SpreadModel):
    """Each rank holds its share of every tensor (FSDP2); a layer is put together when it is needed."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self._module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()


def spread_model(model: BertForPreTraining, how: str, ranks: Ranks, machine: Machine) -> SpreadModel:
    """Put `model` on the machine and on all ranks, with the first rank's weights. Changes `model` in place.

    `how`: "ddp", a copy on every rank; or "fsdp", for models that do not fit: weights, gradients and optimizer state
    divided among the ranks, and what a layer computes inside not kept but computed again in the backward pass (on one
    process this second half only). The numbers are the same but for rounding.

    Raises UserError where a machine has more processes than GPUs.
    """
    device = machine.device
    if device.type == "cuda" and local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"{describe_rank()}: this machine has {torch.cuda.device_count()} GPUs, too few for its processes; lower "
            "--nproc-per-node, or use --device cpu"
        )
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


def _shard(model: BertForPreTraining, ranks: Ranks, machine: Machine) -> None:
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
