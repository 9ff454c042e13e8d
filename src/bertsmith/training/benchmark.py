"""How fast this machine takes a real pre-training step, as tokens a second and as a share of its measured limit.

Synthetic full-length rows through the loop's own parts: forward with dropout, backward, clipping, optimizer; on a GPU
compiled, as the loop does it.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch

from bertsmith.errors import UserError
from bertsmith.hardware import prepare_machine
from bertsmith.model.attention import AttentionPlan
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.compiled import compile_encoder, hashed_masks
from bertsmith.model.config import BertConfig, useful_flops
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.layers import filled_length
from bertsmith.model.varlen import VarlenPlan, cover_rows
from bertsmith.training.optimizer import BertOptimizer, OptimizerSettings, clip_gradients
from bertsmith.training.setup import choose_compiled

VOCAB_SIZE = 30522


def synthetic_batch(batch: int, length: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """`batch` rows of `length` random tokens, 15 % of them masked, as the model's keyword arguments."""
    source = torch.Generator().manual_seed(seed)
    total = batch * length
    masked = torch.randperm(total, generator=source)[: max(1, round(0.15 * total))].sort().values
    tensors = {
        "token_ids": torch.randint(5, VOCAB_SIZE, (total,), generator=source),
        "segment_ids": (torch.arange(length) >= length // 2).long().repeat(batch),
        "position_ids": torch.arange(length).repeat(batch),
        "sequence_starts": torch.arange(0, total + 1, length),
        "masked_positions": masked,
        "masked_labels": torch.randint(5, VOCAB_SIZE, masked.shape, generator=source),
        "next_sentence_labels": torch.randint(0, 2, (batch,), generator=source),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


class StepTimer:
    """A model and an optimizer that take steps on one synthetic batch; `take()` times one."""

    def __init__(
        self,
        size: str,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        self.config = BertConfig.of_size(size, VOCAB_SIZE)
        self.model = BertForPreTraining(self.config).initialize(seed).to(device)
        self.model.bert.compute_dtype = dtype
        self.compiled = compiled
        if compiled:
            compile_encoder(self.model.bert)
        self.optimizer = BertOptimizer(self.model.named_parameters(), OptimizerSettings())
        self.batch, self.device, self.steps = synthetic_batch(batch, length, device, seed), device, 0
        masked = len(self.batch["masked_labels"])
        self.scales = {"mlm_scale": 1 / masked, "nsp_scale": 1 / batch}
        self.tokens = batch * length
        starts = np.arange(0, self.tokens + 1, length)
        self.plan: AttentionPlan | VarlenPlan = AttentionPlan(starts, device)
        if compiled:
            pieces = torch.from_numpy(cover_rows(starts, filled_length(self.tokens), length))
            self.plan = VarlenPlan(pieces.to(device), length, static=True)
        self.flops = useful_flops(self.config, self.tokens, batch * length**2, masked, batch)

    def take(self) -> float:
        """Seconds of one step: forward (dropout on), backward, clipping, update."""
        begun = time.perf_counter()
        key = (0, self.steps)
        masks = hashed_masks(self.config, key, self.device) if self.compiled else DropoutMasks(key)
        loss = self.model(**self.batch, **self.scales, masks=masks, plan=self.plan)
        loss.total.backward()
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step(1.0)
        self.optimizer.zero_grad()
        self.steps += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun


def benchmark_pretraining(
    size: str,
    batch: int,
    length: int,
    steps: int = 10,
    device: str = "auto",
    precision: str = "auto",
    seed: int = 0,
    compile: str = "auto",
) -> dict[str, Any]:
    """The median of `steps` timed steps after two that warm up: the JSON summary of `bertsmith bench pretrain`.

    Raises UserError, before anything is timed, for sizes and numbers that make no sense.
    """
    longest = BertConfig.of_size(size, VOCAB_SIZE).max_position_embeddings
    if not 2 <= length <= longest or batch < 1:
        raise UserError(f"--batch {batch} --length {length}: at least one row, of 2 to {longest} tokens, is needed")
    if steps < 1:
        raise UserError(f"--steps {steps}: at least one is needed")
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed}: a number from 0 to 2^63 - 1 is needed")
    machine = prepare_machine(device, precision)
    compiled = choose_compiled(compile, machine, BertConfig.of_size(size, VOCAB_SIZE))
    timer = StepTimer(size, batch, length, machine.device, machine.dtype, seed, compiled)
    for _ in range(2):
        timer.take()
    seconds = statistics.median(timer.take() for _ in range(steps))
    return {
        "model": size,
        "batch": batch,
        "length": length,
        "device": machine.device.type,
        "precision": machine.precision,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "steps": steps,
        "seconds_per_step": seconds,
        "tokens_per_second": timer.tokens / seconds,
        "gflops": timer.flops / seconds / 1e9,
        "matmul_gflops": machine.matmul_flops / 1e9,
        "utilization": timer.flops / seconds / machine.matmul_flops,
    }
