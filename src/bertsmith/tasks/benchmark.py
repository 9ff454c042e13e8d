"""How fast this machine takes a real fine-tuning step, as examples and tokens a second and as a share of its limit.

Synthetic texts of mixed lengths through the loop's own parts: packing, forward with dropout, backward, clipping, step.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch

from bertsmith.corpus.random_bits import derive_key, hash_bits, scale_to_integers, to_uniform
from bertsmith.errors import UserError
from bertsmith.hardware import prepare_machine
from bertsmith.model.config import BertConfig, encoder_flops
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.task_model import BertForTask
from bertsmith.tasks.batches import TOKENS_AT_ONCE, pack_examples, split_by_tokens
from bertsmith.tasks.examples import EncodedSequence
from bertsmith.tasks.losses import class_loss
from bertsmith.training.benchmark import VOCAB_SIZE
from bertsmith.training.optimizer import BertOptimizer, OptimizerSettings, clip_gradients


def synthetic_examples(batch: int, length: int, seed: int) -> list[list[EncodedSequence]]:
    """`batch` texts of random tokens, one of two labels each, lengths uniform from a quarter of `length` up to it."""
    key = derive_key(seed, "bench finetune")
    uniform = to_uniform(hash_bits(key, np.arange(batch)))
    lengths = length - scale_to_integers(uniform, length - length // 4)
    examples = []
    for number, size in enumerate(lengths.tolist()):
        ids = 5 + scale_to_integers(to_uniform(hash_bits(derive_key(key, number), np.arange(size))), VOCAB_SIZE - 5)
        sequence = EncodedSequence(
            ids.astype(np.int32), size, np.zeros(1, np.int32), np.array([number % 2], dtype=np.int64)
        )
        examples.append([sequence])
    return examples


def benchmark_finetuning(
    size: str, batch: int, length: int, steps: int = 10, device: str = "auto", precision: str = "auto", seed: int = 0
) -> dict[str, Any]:
    """The median of `steps` timed steps after two that warm up: the JSON summary of `bertsmith bench finetune`.

    Raises UserError, before anything is timed, for sizes and numbers that make no sense.
    """
    config = BertConfig.of_size(size, VOCAB_SIZE)
    if not 4 <= length <= config.max_position_embeddings or batch < 1:
        raise UserError(
            f"--batch {batch} --length {length}: at least one text, of 4 to {config.max_position_embeddings} tokens, "
            "is needed"
        )
    if steps < 1:
        raise UserError(f"--steps {steps}: at least one is needed")
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed}: a number from 0 to 2^63 - 1 is needed")
    machine = prepare_machine(device, precision)
    model = BertForTask(config, "sequence", 2).initialize(seed).to(machine.device)
    model.bert.compute_dtype = machine.dtype
    optimizer = BertOptimizer(model.named_parameters(), OptimizerSettings(learning_rate=3e-5))
    examples = synthetic_examples(batch, length, seed)
    times, flops = [], 0.0
    for step in range(steps + 2):
        begun = time.perf_counter()
        parts = split_by_tokens(examples, TOKENS_AT_ONCE[machine.device.type])
        batches = [pack_examples(part, machine.device) for part in parts]
        for number, packed in enumerate(batches):
            loss = class_loss(model(*packed.inputs(), DropoutMasks((seed, step, number))), packed, None) / batch
            loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step(1.0)
        optimizer.zero_grad()
        if machine.device.type == "cuda":
            torch.cuda.synchronize(machine.device)
        times.append(time.perf_counter() - begun)
        flops = sum(encoder_flops(config, len(b.token_ids), b.squared_lengths, len(b.rows)) for b in batches)
    seconds = statistics.median(times[2:])
    return {
        "model": size,
        "batch": batch,
        "length": length,
        "device": machine.device.type,
        "precision": machine.precision,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "seconds_per_step": seconds,
        "examples_per_second": batch / seconds,
        "tokens_per_second": sum(len(sequence) for (sequence,) in examples) / seconds,
        "gflops": flops / seconds / 1e9,
        "matmul_gflops": machine.matmul_flops / 1e9,
        "utilization": flops / seconds / machine.matmul_flops,
    }
