"""What the GPU path must not change, checked on small inputs: losses, gradients, logits, dropout, and no waiting.

The reference is the same model on the CPU in float32. On the CPU (the dry run) the same checks compare the compiled
encoder, whose attention goes through the variable-length operator, with the plain one.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.corpus.batches import Batch, StreamPosition
from bertsmith.model.attention import attend, plan_attention
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.compiled import compile_encoder, hashed_masks
from bertsmith.model.config import BertConfig
from bertsmith.training.device_batches import BatchShape, batch_tensors
from bertsmith.training.optimizer import BertOptimizer, OptimizerSettings, clip_gradients

CONFIG = BertConfig(
    vocab_size=1000, hidden_size=128, num_hidden_layers=3, num_attention_heads=2, intermediate_size=256,
)  # fmt: skip
LENGTHS = (128, 77, 128, 5, 64, 101, 33)
SHAPE = BatchShape(tokens=640, sequences=8, masked=96, longest=128)
CPU = torch.device("cpu")


def make_batch(seed: int = 0) -> Batch:
    """Random tokens in sequences of LENGTHS."""
    source = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    tokens = int(starts[-1])
    places = np.arange(tokens) - np.repeat(starts[:-1], LENGTHS)
    masked = np.sort(source.permutation(tokens)[: round(0.15 * tokens)])
    return Batch(
        token_ids=source.integers(5, CONFIG.vocab_size, tokens),
        segment_ids=(places >= np.repeat(LENGTHS, LENGTHS) // 2).astype(np.int64),
        position_ids=places,
        sequence_starts=starts,
        masked_positions=masked,
        masked_labels=source.integers(5, CONFIG.vocab_size, len(masked)),
        next_sentence_labels=source.integers(0, 2, len(LENGTHS)),
        example_ids=np.arange(len(LENGTHS)),
        position=StreamPosition(),
    )


def build(device: torch.device, dtype: torch.dtype, backend: str | None = None) -> BertForPreTraining:
    """The same weights always; with `backend` compiled."""
    model = BertForPreTraining(CONFIG).initialize(3).to(device)
    model.bert.compute_dtype = dtype
    if backend is not None:
        compile_encoder(model.bert, backend)
    return model


def take(model: BertForPreTraining, shape: BatchShape | None, key: int | None = None) -> tuple[float, Tensor]:
    """Loss and gradients, end to end, on the host. `key`: of dropout."""
    batch, device = make_batch(), model.mlm_head.bias.device
    model.zero_grad()
    masks = None if key is None else hashed_masks(CONFIG, (1, key), device)
    scales = {"mlm_scale": 1 / len(batch.masked_labels), "nsp_scale": 1 / len(batch)}
    loss = model(**batch_tensors(batch, device, shape), **scales, masks=masks)
    loss.total.backward()
    gradients = [p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None]
    return float(loss.total.detach()), torch.cat(gradients)


def run_checks(device_name: str, backend: str) -> dict[str, Any]:
    """All checks; {"ok": …, "checks": [{name, found, limit, ok}]}. `found` is a distance, at most `limit`."""
    device = torch.device(device_name)
    # a GPU's own arithmetic; a CPU has the variable-length operator in any
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    loose = device.type == "cuda"
    checks: list[dict[str, Any]] = []

    def check(name: str, found: float, limit: float) -> None:
        checks.append({"name": name, "found": float(found), "limit": limit, "ok": bool(found <= limit)})

    def compare(name: str, found: tuple[float, Tensor], expected: tuple[float, Tensor], limits: Any) -> None:
        check(f"{name}: loss, relative", abs(found[0] / expected[0] - 1), limits[0])
        cosine = torch.nn.functional.cosine_similarity(found[1].double(), expected[1].double(), dim=0)
        check(f"{name}: gradients, 1 - cosine", 1 - float(cosine), limits[1])
        check(f"{name}: gradients, length", abs(float(found[1].norm() / expected[1].norm()) - 1), limits[1] ** 0.5)

    exact, rounded = (1e-5, 1e-8), (3e-3, 2e-3) if loose else (1e-5, 1e-8)
    reference = build(CPU, torch.float32)
    expected = take(reference, None)
    plain, fast = build(device, half), build(device, half, backend)
    compare("float32, grouped attention", take(build(device, torch.float32), None), expected, exact)
    compare("16 bits, variable-length attention", take(plain, SHAPE), expected, rounded)
    compare("compiled", take(fast, SHAPE), expected, rounded)

    # dropout: the step's key decides, compiled or not
    with_dropout = take(fast, SHAPE, 4)
    again, other, uncompiled = take(fast, SHAPE, 4), take(fast, SHAPE, 5), take(plain_encoder(fast), SHAPE, 4)
    check("dropout: the same key gives the same loss", abs(with_dropout[0] - again[0]), 0.0)
    check("dropout: another key, another loss (1: equal)", float(with_dropout[0] == other[0]), 0.0)
    compare("dropout: compiled beside not compiled", with_dropout, uncompiled, rounded)
    like = torch.empty(0, device=device)
    masks = [hashed_masks(CONFIG, (1, 2), where).draw(3, 0.1, (512, 128), like.to(where)) for where in (device, CPU)]
    check("dropout: masks that differ from the CPU's", float((masks[0].cpu() != masks[1]).sum()), 0.0)
    check("dropout: mean context of 200 keys beside none", mean_context_error(device, half), 0.1)

    # held-out logits
    batch = make_batch()
    places = torch.arange(len(batch.token_ids))
    found, wanted = (logits(model, batch, places) for model in (plain, reference))
    for name, one, two in zip(("MLM logits", "NSP logits"), found, wanted, strict=True):
        check(
            f"{name}: largest difference over their deviation",
            (one - two).abs().max() / two.std(),
            0.1 if loose else 1e-4,
        )
    counts = [model.evaluate(**batch_tensors(batch, model.mlm_head.bias.device)) for model in (plain, reference)]
    check("evaluation: loss, relative", abs(counts[0].mlm_loss / counts[1].mlm_loss - 1), rounded[0])

    check("waits of the host within a step", count_waits(fast, device), 0.0)
    return {"ok": all(each["ok"] for each in checks), "checks": checks}


def plain_encoder(model: BertForPreTraining) -> BertForPreTraining:
    """A copy whose layers are not compiled; their numbers of masks are those of compiled ones."""
    copy = build(model.mlm_head.bias.device, model.bert.compute_dtype, "eager")
    copy.load_state_dict(model.state_dict())
    return copy


def logits(model: BertForPreTraining, batch: Batch, places: Tensor) -> tuple[Tensor, Tensor]:
    """MLM and NSP logits on the host."""
    device = model.mlm_head.bias.device
    packed = (batch.token_ids, batch.segment_ids, batch.position_ids, batch.sequence_starts)
    mlm, nsp = model.logits(*(torch.from_numpy(array).to(device) for array in packed), places.to(device))
    return mlm.cpu(), nsp.cpu()


def mean_context_error(device: torch.device, dtype: torch.dtype) -> float:
    """How far the mean of attention's output under 200 masks is from the one without dropout, beside its deviation."""
    from bertsmith.model.dropout import DropoutMasks

    qkv = torch.randn(sum(LENGTHS), 3 * 128, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    plan = plan_attention(torch.from_numpy(make_batch().sequence_starts).to(device)).varlen(len(qkv))
    without = attend(qkv, plan, 2, 0.0, None).float()
    total = sum(attend(qkv, plan, 2, 0.1, DropoutMasks((1, key))).float() for key in range(200))
    return float((total / 200 - without).square().mean().sqrt() / without.std())


def count_waits(model: BertForPreTraining, device: torch.device) -> float:
    """1 if anything of a step but the reading of its losses makes the host wait for the GPU, else 0."""
    optimizer = BertOptimizer(model.named_parameters(), OptimizerSettings())
    batch = make_batch()

    def step(number: int) -> Tensor:
        masks = hashed_masks(CONFIG, (1, number), device)
        loss = model(**batch_tensors(batch, device, SHAPE), mlm_scale=0.01, nsp_scale=0.1, masks=masks)
        loss.total.backward()
        norm = clip_gradients(model.parameters(), 1.0)
        optimizer.step(1.0)
        optimizer.zero_grad()
        return norm

    step(0)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        step(1)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return 1.0
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return 0.0
