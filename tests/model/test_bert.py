"""The model against transformers and plain PyTorch: parameter counts, logits, losses and every gradient."""

import itertools
import math

import pytest
import torch
from packed_batches import Packed, make_packed
from torch.nn import functional as F

from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import SIZES, BertConfig
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.heads import linear_cross_entropy
from bertsmith.model.weights import to_hugging_face

SMALL = BertConfig.of_size(
    "tiny", vocab_size=301, num_hidden_layers=3, hidden_size=48, num_attention_heads=3, intermediate_size=96
)


def theirs(model: BertForPreTraining, dropout: bool = False):
    from transformers import BertConfig as TheirConfig
    from transformers import BertForPreTraining as TheirModel

    values = model.config.to_dict()
    if not dropout:
        values |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    other = TheirModel(TheirConfig(**values))
    missing, unexpected = other.load_state_dict(to_hugging_face(model), strict=False)
    assert not unexpected
    assert all(name.startswith("cls.predictions.decoder") or "position_ids" in name for name in missing), missing
    other.tie_weights()
    return other


@pytest.mark.parametrize(("size", "expected"), [("base", 109_482_240), ("large", 335_141_888)])
def test_parameter_counts_are_the_published_ones(size: str, expected: int) -> None:
    with torch.device("meta"):
        model = BertForPreTraining(BertConfig.of_size(size))
    assert sum(p.numel() for p in model.bert.parameters()) == expected


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_published_shape(size: str) -> None:
    config = BertConfig.of_size(size)
    assert config.hidden_size // config.num_attention_heads == 64
    assert config.intermediate_size == 4 * config.hidden_size


def test_a_bad_configuration_names_every_fault() -> None:
    with pytest.raises(UserError, match=r"hidden_dropout_prob.*") as error:
        BertConfig(vocab_size=0, hidden_dropout_prob=1.5)
    assert "vocab_size" in str(error.value)


def test_logits_equal_transformers(packed: Packed) -> None:
    model = BertForPreTraining(SMALL).initialize(3)
    other = theirs(model).eval()
    with torch.no_grad():
        output = other(
            input_ids=packed.pad(packed.token_ids),
            token_type_ids=packed.pad(packed.segment_ids),
            attention_mask=packed.attention_mask(),
        )
    positions = torch.arange(len(packed.token_ids))
    mlm, nsp = model.logits(*packed.arguments(), positions)
    expected = torch.cat([output.prediction_logits[i, :n] for i, n in enumerate(packed.lengths)])
    torch.testing.assert_close(mlm, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(nsp, output.seq_relationship_logits, atol=1e-5, rtol=1e-5)


def test_loss_and_gradients_equal_transformers(packed: Packed) -> None:
    model = BertForPreTraining(SMALL).initialize(3)
    other = theirs(model)
    expected = other(
        input_ids=packed.pad(packed.token_ids),
        token_type_ids=packed.pad(packed.segment_ids),
        attention_mask=packed.attention_mask(),
        labels=packed.padded_labels(),
        next_sentence_label=packed.next_sentence_labels,
    ).loss
    expected.backward()
    loss = model(
        *packed.arguments(),
        *packed.targets(),
        1 / len(packed.masked_labels),
        1 / len(packed.lengths),
    )
    loss.total.backward()
    torch.testing.assert_close(loss.total, expected, atol=1e-5, rtol=1e-6)
    their_gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.grad  # let the table of names rename gradients
        assert parameter.grad is not None, name
    for name, gradient in to_hugging_face(model).items():
        torch.testing.assert_close(gradient, their_gradients[name], atol=2e-6, rtol=1e-4, msg=name)


def test_gradients_of_micro_batches_add_up_to_the_batch() -> None:
    """P3: a batch of sequences with unlike numbers of targets, whole or in pieces, gives one gradient."""
    whole = make_packed([12, 30, 7, 25])
    gradients = []
    for pieces in ([slice(0, 4)], [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]):
        model = BertForPreTraining(SMALL).initialize(1)
        total = 0.0
        for piece in pieces:
            start, end = int(whole.sequence_starts[piece.start]), int(whole.sequence_starts[piece.stop])
            inside = (whole.masked_positions >= start) & (whole.masked_positions < end)
            loss = model(
                whole.token_ids[start:end],
                whole.segment_ids[start:end],
                whole.position_ids[start:end],
                whole.sequence_starts[piece.start : piece.stop + 1] - start,
                whole.masked_positions[inside] - start,
                whole.masked_labels[inside],
                whole.next_sentence_labels[piece],
                1 / len(whole.masked_labels),
                1 / 4,
            )
            loss.total.backward()
            total += loss.total.item()
        gradients.append(([p.grad for p in model.parameters()], total))
    assert gradients[0][1] == pytest.approx(gradients[1][1], rel=1e-6)
    for one, many in zip(gradients[0][0], gradients[1][0], strict=True):
        torch.testing.assert_close(one, many, atol=1e-6, rtol=1e-5)


def test_a_batch_without_targets_has_loss_zero_and_zero_gradients() -> None:
    batch = make_packed([10, 12], masked_share=0.0)
    model = BertForPreTraining(SMALL, next_sentence=False).initialize(1)
    loss = model(*batch.arguments(), batch.masked_positions, batch.masked_labels, None, 1.0, 0.0)
    loss.total.backward()
    assert loss.total.item() == 0
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("rows", [1, 255, 256, 600])
def test_linear_cross_entropy_equals_the_plain_one(rows: int) -> None:
    source = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 24, generator=source, requires_grad=True)
    weight = torch.randn(97, 24, generator=source, requires_grad=True)
    bias = torch.randn(97, generator=source, requires_grad=True)
    labels = torch.randint(0, 97, (rows,), generator=source)
    leaves = (hidden, weight, bias)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), labels, reduction="sum") / rows * 3, leaves)
    loss = linear_cross_entropy(hidden, weight, bias, labels, 1 / rows)
    for ours, plain in zip(torch.autograd.grad(loss * 3, leaves), expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, bias, labels, 1 / rows), loss.detach())
    # rows past the labels count for nothing
    more = torch.cat([hidden.detach(), torch.randn(9, 24, generator=source)]).requires_grad_()
    longer = linear_cross_entropy(more, weight, bias, labels, 1 / rows)
    torch.testing.assert_close(longer, loss)
    grads = torch.autograd.grad(longer * 3, (more, weight, bias))
    torch.testing.assert_close(grads[0][:rows], expected[0], atol=1e-5, rtol=1e-5)
    assert not grads[0][rows:].any()
    for ours, plain in zip(grads[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_rows_past_the_tokens_get_no_context_and_no_gradient() -> None:
    from bertsmith.model.attention import attend, plan_attention

    for lengths in ([4, 4], [5, 3, 6]):
        plan = plan_attention(make_packed(lengths).sequence_starts)
        qkv = torch.randn(sum(lengths) + 7, 24, requires_grad=True)
        context = attend(qkv, plan, 2, 0.3, DropoutMasks((4, 2)))
        same = attend(qkv[: sum(lengths)], plan, 2, 0.3, DropoutMasks((4, 2)))
        assert torch.equal(context[: sum(lengths)], same)
        assert not context[sum(lengths) :].any()
        (gradient,) = torch.autograd.grad(context.sum(), qkv)
        assert gradient[: sum(lengths)].any()
        assert not gradient[sum(lengths) :].any()


def test_attention_gradients_with_dropout_equal_finite_differences() -> None:
    """The masks are drawn again in the backward pass: gradients must belong to the same masks."""
    from bertsmith.model.attention import attend, plan_attention

    batch = make_packed([5, 3, 5, 4])
    qkv = torch.randn(17, 24, dtype=torch.float64, requires_grad=True)
    plan = plan_attention(batch.sequence_starts)
    assert torch.autograd.gradcheck(lambda x: attend(x, plan, 2, 0.3, DropoutMasks((4, 2))), (qkv,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_signs_that_dropout_turns_are_those_of_its_mask(dtype: torch.dtype) -> None:
    values = torch.rand(3, 50, 7).to(dtype)
    turned = values.clone()
    DropoutMasks((7, 1)).turn_signs(4, 0.3, turned)
    mask = DropoutMasks((7, 1)).draw(4, 0.3, values.shape, values)
    assert torch.equal(turned, torch.where(mask > 0, -values, values))


def test_attention_in_bfloat16_is_that_in_float32_up_to_rounding() -> None:
    """Forward and backward, with and without dropout and padding; lengths that have as many keys in both types."""
    from bertsmith.model.attention import attend, plan_attention

    source = torch.Generator().manual_seed(5)
    for lengths, probability in itertools.product(([32, 32], [32, 27, 64, 58]), (0.0, 0.3)):
        starts = make_packed(lengths).sequence_starts
        values = torch.randn(sum(lengths), 96, generator=source)
        direction = torch.randn(sum(lengths), 32, generator=source)
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            qkv = values.to(torch.bfloat16).to(dtype).requires_grad_()
            context = attend(qkv, plan_attention(starts), 2, probability, DropoutMasks((4, 2)))
            context.backward(direction.to(dtype))
            assert qkv.grad is not None
            found.append((context.detach().float(), qkv.grad.float()))
        for exact, rounded in zip(*found, strict=True):
            assert float((exact - rounded).norm() / exact.norm()) < 0.01


def test_dropout_masks_have_the_right_mean_and_repeat_by_key() -> None:
    like = torch.empty(0)
    masks = DropoutMasks((7, 1))
    mask = masks.draw(1, 0.1, (200_000,), like)
    assert sorted(mask.unique().tolist()) == [0.0, pytest.approx(1 / 0.9)]
    share = float((mask == 0).float().mean())
    assert abs(share - 0.1) < 5 * math.sqrt(0.09 / 200_000)
    assert torch.equal(mask, DropoutMasks((7, 1)).draw(1, 0.1, (200_000,), like))
    assert not torch.equal(mask, masks.draw(2, 0.1, (200_000,), like))
    assert not torch.equal(mask, DropoutMasks((7, 2)).draw(1, 0.1, (200_000,), like))


def test_dropout_leaves_the_expectation_of_the_loss_about_right_and_differs_by_step() -> None:
    batch = make_packed([16, 16])
    model = BertForPreTraining(SMALL).initialize(5)
    arguments = (
        *batch.arguments(),
        batch.masked_positions,
        batch.masked_labels,
        batch.next_sentence_labels,
        1 / 5,
        0.5,
    )
    losses = [model(*arguments, DropoutMasks((1, step))).total.item() for step in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] == pytest.approx(model(*arguments).total.item(), rel=0.05)


def test_bf16_arithmetic_is_close_and_gradients_reach_the_float32_masters() -> None:
    batch = make_packed([30, 20, 30])
    losses, gradients = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = BertForPreTraining(SMALL).initialize(3)
        model.bert.compute_dtype = dtype
        loss = model(
            *batch.arguments(), batch.masked_positions, batch.masked_labels, batch.next_sentence_labels, 0.1, 0.3
        )
        loss.total.backward()
        losses.append(loss.total.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert F.cosine_similarity(*gradients, dim=0) > 0.999


def test_mlm_only_leaves_pooler_and_next_sentence_head_out() -> None:
    batch = make_packed([10, 12])
    model = BertForPreTraining(SMALL, next_sentence=False).initialize(1)
    model(*batch.arguments(), batch.masked_positions, batch.masked_labels, None, 0.1, 0.0).total.backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {
        f"{part}.{leaf}" for part in ("bert.pooler.dense", "nsp_head.linear") for leaf in ("weight", "bias")
    }


def test_initialization_is_truncated_normal_and_depends_on_the_seed_alone() -> None:
    one, two, other = (BertForPreTraining(SMALL).initialize(seed) for seed in (1, 1, 2))
    word = one.bert.embeddings.word
    assert float(word.abs().max()) <= 0.04
    assert float(word.std()) == pytest.approx(0.0176, rel=0.03)  # a normal of 0.02 cut at two deviations
    assert torch.equal(word, two.bert.embeddings.word)
    assert not torch.equal(word, other.bert.embeddings.word)
    assert float(one.mlm_head.norm.weight.detach().sum()) == SMALL.hidden_size
