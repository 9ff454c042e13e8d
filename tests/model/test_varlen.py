"""Variable-length attention: the code around the GPU's kernel, run on the CPU with a plain kernel in its place."""

from typing import Any

import numpy as np
import pytest
import torch
from flash_stand_in import flash_on_cpu
from packed_batches import Packed, make_packed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bertsmith.model import varlen
from bertsmith.model.attention import AttentionPlan, attend, plan_attention
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BertConfig
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.layers import filled_length
from bertsmith.model.varlen import VarlenPlan, cover_rows

SMALL = BertConfig(
    vocab_size=301, hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
    max_position_embeddings=64,
)  # fmt: skip
MIXED = [20, 3, 17, 19, 1, 20, 5]
CPU = torch.device("cpu")


def gradients(model: BertForPreTraining, packed: Packed, masks: DropoutMasks | None = None) -> tuple[Tensor, Tensor]:
    """The loss and all gradients end to end."""
    model.zero_grad()
    loss = model(*packed.arguments(), *packed.targets(), 0.1, 0.3, masks).total
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("starts", "rows", "longest", "expected"),
    [
        ([0, 4, 9], 9, 5, [0, 4, 9]),
        ([0, 4, 9], 11, 5, [0, 4, 9, 11]),
        ([0, 4, 9], 19, 5, [0, 4, 9, 14, 19]),
        ([0, 4, 9], 20, 5, [0, 4, 9, 14, 19, 20]),
        ([0], 7, 3, [0, 3, 6, 7]),
        ([0], 0, 3, [0]),
    ],
)
def test_rows_that_are_none_s_become_sequences(starts: Any, rows: int, longest: int, expected: list[int]) -> None:
    found = cover_rows(np.array(starts), rows, longest)
    assert found.dtype == np.int32
    assert found.tolist() == expected


@pytest.mark.parametrize("lengths", [[16] * 3, MIXED, [64]])
@pytest.mark.parametrize("spare", [0, 9])
def test_context_and_gradient_are_those_of_the_grouped_kernel(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], spare: int
) -> None:
    starts, tokens = make_packed(lengths).sequence_starts, sum(lengths)
    qkv = torch.randn(tokens + spare, 3 * 48, requires_grad=True)
    towards = torch.randn(tokens, 48)
    expected = attend(qkv, plan_attention(starts), 2, 0.0, None)[:tokens]
    (expected_gradient,) = torch.autograd.grad(expected, qkv, towards)
    with flash_on_cpu(monkeypatch):
        context = attend(qkv, plan_attention(starts), 2, 0.0, None)
        (gradient,) = torch.autograd.grad(context[:tokens], qkv, towards)
    assert context.shape == (tokens + spare, 48)
    torch.testing.assert_close(context[:tokens], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)
    assert not gradient[tokens:].any(), "rows that are none's get no gradient, and no NaN either"


def test_the_operator_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are of the same masks, its masks a function of the key, and its mean context the one without."""
    starts = make_packed([5, 3, 5, 4]).sequence_starts
    qkv = torch.randn(17, 3 * 48, dtype=torch.float64, requires_grad=True)

    def context(key: int, probability: float = 0.3) -> Tensor:
        return attend(qkv, plan_attention(starts), 2, probability, DropoutMasks((4, key)))

    with flash_on_cpu(monkeypatch):
        assert torch.autograd.gradcheck(
            lambda x: attend(x, plan_attention(starts), 2, 0.3, DropoutMasks((4, 2))), qkv, fast_mode=True
        )
        first, again, other = context(1), context(1), context(2)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        mean = torch.stack([context(key) for key in range(200)]).mean(0)
        torch.testing.assert_close(mean, context(1, 0.0), atol=0.4, rtol=0)
        assert (first - context(1, 0.0)).abs().max() > 0.25


def test_layers_draw_different_masks_and_a_layer_computed_again_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    with flash_on_cpu(monkeypatch):
        monkeypatch.setattr(varlen, "seed_kernel", lambda device, seed: seeds.append(int(seed)))
        model = BertForPreTraining(SMALL).initialize(3)
        for _ in range(2):
            gradients(model, make_packed(MIXED), DropoutMasks((1, 2)))
    assert len(set(seeds)) == 2
    assert seeds[:2] == seeds[2:]


def test_the_whole_model(monkeypatch: pytest.MonkeyPatch, packed: Packed) -> None:
    """Filled-up rows, the last layer's wanted rows, both heads: loss, gradients and evaluation."""
    model = BertForPreTraining(SMALL).initialize(3)
    loss, gradient = gradients(model, packed)
    counts = model.evaluate(*packed.arguments(), *packed.targets())
    with flash_on_cpu(monkeypatch):
        found_loss, found_gradient = gradients(model, packed)
        found = model.evaluate(*packed.arguments(), *packed.targets())
        dropped = gradients(model, packed, DropoutMasks((1, 2)))[1]
    torch.testing.assert_close(found_loss, loss, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found_gradient, gradient, atol=2e-6, rtol=1e-4)
    assert found.mlm_loss == pytest.approx(counts.mlm_loss, rel=1e-5)
    assert found.nsp_loss == pytest.approx(counts.nsp_loss, rel=1e-5)
    assert torch.isfinite(dropped).all()


def test_a_plan_is_made_once_for_all_layers() -> None:
    plan = AttentionPlan(np.array([0, 4, 9]), CPU)
    assert plan.varlen(16) is plan.varlen(16)
    assert plan.varlen(16).starts.tolist() == [0, 4, 9, 14, 16]
    assert plan.varlen(9).starts.tolist() == [0, 4, 9]
    assert plan.varlen(16).longest == 5
    nothing = AttentionPlan(np.array([0]), CPU).varlen(filled_length(0))  # a rank without a share of a batch
    assert nothing.starts.tolist() == list(range(9))
    assert plan.grouped(2, torch.float32) is plan.grouped(2, torch.float32)


# --- the operator where there is no kernel: what compiled code calls on a CPU


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_the_operator_on_a_cpu(probability: float) -> None:
    starts = make_packed(MIXED).sequence_starts.numpy()
    tokens = sum(MIXED)
    pieces = np.pad(cover_rows(starts, tokens + 40, 20), (0, 3), mode="edge")  # and empty ones
    qkv = torch.randn(tokens + 40, 3 * 48, dtype=torch.float64, requires_grad=True)
    plan = VarlenPlan(torch.from_numpy(pieces), 20)

    def context(x: Tensor, key: int = 1) -> Tensor:
        return attend(x, plan, 2, probability, DropoutMasks((4, key)))

    if probability == 0:
        expected = attend(qkv, plan_attention(torch.from_numpy(starts)), 2, 0.0, None)
        torch.testing.assert_close(context(qkv)[:tokens], expected[:tokens])
    assert torch.equal(context(qkv), context(qkv))
    assert torch.equal(context(qkv), context(qkv, 2)) == (probability == 0)
    assert torch.autograd.gradcheck(lambda x: context(x)[:tokens], qkv, fast_mode=True)


def test_the_operator_keeps_the_rules_for_operators() -> None:
    starts = torch.from_numpy(cover_rows(np.array([0, 4, 9]), 16, 5))
    qkv = torch.randn(16, 3 * 48, requires_grad=True)
    arguments = (qkv, starts, 5, 2, 0.1, torch.tensor(7))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(varlen._forward, arguments, test_utils=checks)


# --- the kernel's own signature, on tensors that pretend to be on a GPU


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_types_and_devices_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """What PyTorch says its kernels give is what the operator tells the compiler, and what the next layer expects."""
    from torch.nn.attention.varlen import varlen_attn

    monkeypatch.setattr(varlen, "seed_kernel", lambda device, seed: None)
    seed = torch.tensor(7)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        qkv = torch.empty(40, 3 * 128, device="cuda", dtype=dtype)
        starts = torch.empty(5, device="cuda", dtype=torch.int32)
        told = torch.ops.bertsmith.varlen_attention(qkv, starts, 16, 2, 0.1, seed)
        given = varlen._forward._init_fn(qkv, starts, 16, 2, 0.1, seed)
        assert len(told) == len(given) == 3
        for one, other in zip(told, given, strict=True):
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert (given[0].shape, given[0].dtype, given[0].device.type) == ((40, 128), dtype, "cuda")
        assert given[0].is_contiguous()
        backward = (torch.empty_like(given[0]), qkv, *given, starts, 16, 2, 0.1, seed)
        told_gradient = torch.ops.bertsmith.varlen_attention_backward(*backward)
        gradient = varlen._backward._init_fn(*backward)
        assert told_gradient.shape == gradient.shape == qkv.shape
        assert told_gradient.dtype == gradient.dtype == dtype
        assert told_gradient.device == gradient.device == qkv.device
        context = varlen_attn(*varlen._split_heads(qkv, 2), starts, starts, 16, 16)
        assert isinstance(context, Tensor)
        assert (context.shape, context.dtype, context.device.type) == ((40, 2, 64), dtype, "cuda")
        # the branch without dropout, as it stands
        plan = VarlenPlan(starts, 16)
        assert varlen.varlen_attention(qkv, plan, 2, 0.1, None).shape == (40, 128)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "expected"),
    [
        ((9, 0), torch.bfloat16, 64, True),
        ((8, 0), torch.float16, 32, True),
        ((9, 0), torch.float32, 64, False),
        ((7, 5), torch.float16, 64, False),
        ((9, 0), torch.bfloat16, 20, False),
        ((9, 0), torch.bfloat16, 264, False),
    ],
)
def test_where_the_kernel_is_used(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, head_size: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert varlen.fits(torch.device("cuda"), dtype, head_size) is expected
    assert not varlen.fits(CPU, dtype, head_size)
