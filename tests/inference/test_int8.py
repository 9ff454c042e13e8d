"""Products in 8 bits: the arithmetic they claim, rounding that makes up for itself, and models that hardly differ."""

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import SMALL, TOKENS, make_bert, save_pretrained

from bertsmith.errors import UserError
from bertsmith.inference import int8, loaded
from bertsmith.inference.benchmark import benchmark_embedding
from bertsmith.inference.encoder import Encoder, InferenceBert, Sequences
from bertsmith.inference.int8 import choose_int8, quantize, quantize_by_row, round_together
from bertsmith.inference.loaded import LoadedModel, load
from bertsmith.inference.products import MIDDLE, Int8Linear, Int8Weights, can_multiply_int8, can_pack
from bertsmith.model.bert import BertModel, initialize_parameters
from bertsmith.model.layers import Linear
from bertsmith.tasks.model_folder import weights_sha256
from bertsmith.text.tokenizer import BertTokenizer

BITS = int8.int8_weight_bits() or 0
multiplies = pytest.mark.skipif(not BITS or not can_multiply_int8(), reason="no 8-bit products on this machine")
TEXTS = [
    "The treaty was signed in 1648, after three years of negotiations between the parties.",
    "A cell's membrane lets water through, but hardly any ions.",
    "rain",
    "She asked him twice; he did not answer, and the train left without either of them. " * 4,
    "中国的首都是北京,它在北方。",
]


def make_linear(inputs: int = 48, outputs: int = 80, seed: int = 0) -> Linear:
    source = torch.Generator().manual_seed(seed)
    linear = Linear(inputs, outputs).requires_grad_(False)
    linear.weight.copy_(torch.randn(outputs, inputs, generator=source) / inputs**0.5)
    linear.bias.copy_(torch.randn(outputs, generator=source))
    return linear


def make_inputs(rows: int, channels: int = 48, seed: int = 1) -> torch.Tensor:
    """Channels that go together, one that reaches ten times as far as others and one that never changes."""
    source = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, channels // 2, generator=source) @ torch.randn(channels // 2, channels, generator=source)
    inputs = mixed / mixed.std()
    inputs[:, 3] = 10 + 10 * inputs[:, 3].abs()
    inputs[:, 5] = 0.25
    return inputs


def by_hand(x: torch.Tensor, weights: Int8Weights) -> torch.Tensor:
    codes = (x.double() * weights.factor + weights.offset).round().clamp(0, 255) - MIDDLE
    return codes @ weights.weights.double().T * weights.scale + weights.bias


@multiplies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_the_product_is_that_of_the_codes(rows: int, dtype: torch.dtype) -> None:
    linear = make_linear()
    weights = quantize(linear.weight, linear.bias, make_inputs(500), BITS)
    used = Int8Linear(copy.deepcopy(linear).to(dtype), weights)
    x = make_inputs(rows, seed=2).to(dtype)
    x[0, 7] = 1000.0  # far beyond what was seen: cut off, not wrapped around
    near = {"rtol": 1e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 3e-5}
    expected = by_hand(x, weights)
    assert used(x).dtype == used.gelu(x).dtype == dtype
    torch.testing.assert_close(used(x).double(), expected, **near)
    torch.testing.assert_close(used.gelu(x).double(), torch.nn.functional.gelu(expected), **near)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.008), (7, 0.014)])
def test_it_is_near_the_exact_product(bits: int, error: float) -> None:
    linear, x = make_linear(), make_inputs(400, seed=2)
    exact = linear(x)
    weights = quantize(linear.weight, linear.bias, make_inputs(500), bits)
    assert weights.weights.dtype == torch.int8
    assert weights.weights.abs().amax() == 2 ** (bits - 1) - 1
    # 7-bit weights and 8-bit inputs: the sum of two products fits 16 bits, which is all that AVX2 has
    assert bits == 8 or 2 * 255 * int(weights.weights.abs().amax()) < 2**15
    missed = by_hand(x, weights) - exact
    assert float(missed.norm() / (exact - linear.bias).norm()) < error
    assert float(missed.mean(0).norm() / missed.norm(dim=0).mean()) < 0.5  # the bias takes the mean


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_step_a_row_suits_rows_of_any_size(one_sided: bool) -> None:
    linear = make_linear()

    def make(seed: int) -> torch.Tensor:
        x = make_inputs(300, seed=seed) * torch.logspace(-3, 2, 300)[:, None]
        return torch.nn.functional.gelu(x) if one_sided else x - x.mean(1, keepdim=True)

    weights, x = quantize_by_row(linear.weight, linear.bias, make(1), 7), make(2)
    assert weights.weights.abs().amax() == 63
    assert weights.zero <= 48 if one_sided else weights.zero >= 48
    x[7] = 0
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    step = torch.maximum(high / (255 - weights.zero), -low / weights.zero).clamp_min(int8.LEAST_STEP)
    codes = (x / step).round()
    assert codes.min() >= -weights.zero  # no number is cut off
    assert codes.max() <= 255 - weights.zero
    found = step * (codes @ weights.weights.T.float() * weights.scale) + weights.bias
    missed = (found - linear(x)).norm(dim=1) / (linear(x) - linear.bias).norm(dim=1).clamp_min(1e-9)
    big = x.abs().amax(1) > x.abs().amax() / 100
    # of the small rows the bias, which makes up for the mean of all, is the larger part
    assert float(missed[big].mean()) < 0.02
    assert torch.equal(found[7], weights.bias)


def test_rounding_makes_up_for_itself() -> None:
    weights, inputs = 20 * make_linear().weight, make_inputs(500)
    inputs[:, 3] = 0
    together = round_together(weights, inputs, 127)
    assert torch.equal(together, together.round())
    missed = [float(((rounded - weights) @ inputs.T).norm()) for rounded in (together, weights.round())]
    assert missed[0] < 0.6 * missed[1]
    assert round_together(weights, inputs, 5).abs().amax() == 5


def test_inputs_that_do_not_go_together_leave_nothing_to_make_up() -> None:
    weights = 20 * make_linear(32, 40).weight
    inputs = torch.eye(32).repeat(3, 1) * torch.arange(1, 33)
    assert torch.equal(round_together(weights, inputs, 127), weights.round())


@multiplies
def test_copies_are_of_the_float_weights() -> None:
    linear = make_linear()
    used = Int8Linear(linear, quantize(linear.weight, linear.bias, make_inputs(500), BITS))
    x = make_inputs(9, seed=2)
    exact = linear(x)
    assert not torch.equal(used(x), exact)
    assert weights_sha256(used) == weights_sha256(linear)
    for copied in (copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert torch.equal(copied(x), exact)
        assert torch.equal(copied.gelu(x), torch.nn.functional.gelu(exact))


@multiplies
def test_which_products_they_are(tmp_path: Path) -> None:
    bert = make_bert()
    chosen = choose_int8(bert, load(save_pretrained(tmp_path), precision="fp32").encoder.tokenizer)
    assert [sorted(layer) for layer in chosen] == [["intermediate", "qkv"]] * 3
    used = InferenceBert(make_bert(), torch.float32, chosen)
    kinds = {name: type(part) for name, part in used.encoder.layer[2].named_children() if isinstance(part, Linear)}
    assert [name for name, kind in kinds.items() if kind is Int8Linear] == ["qkv", "intermediate"]


@multiplies
def test_a_model_in_int8_is_near_and_says_so(
    minilm: LoadedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = "bf16" if can_pack(torch.device("cpu"), torch.bfloat16) else "fp32"
    monkeypatch.setattr(loaded, "_faster_precision", lambda device: rest)
    model = load(minilm.folder, precision="int8")
    assert model.precision == f"int8+{rest}"
    said = capsys.readouterr().err
    assert f"computes in int8 and {rest}" in said
    assert float(said.split("is 0.")[1].split()[0]) / 1e5 > 0.99
    exact, found = (m.embed(TEXTS, normalize=True) for m in (minilm, model))
    cosines = (exact * found).sum(1)
    assert 0.995 < cosines.min() < 1 - 1e-6
    # beside others or alone: a text's own scales are the model's
    alone = np.concatenate([model.embed([text], normalize=True) for text in TEXTS])
    assert (alone * found).sum(1).min() > 0.9999
    # what goes in later changes nothing, and a second load is the same
    assert np.array_equal(load(minilm.folder, precision="int8").embed(TEXTS, normalize=True), found)


def test_where_there_are_no_such_products_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "int8_weight_bits", lambda: None)
    with pytest.raises(UserError, match="precision: int8 needs a CPU with AVX2"):
        load(save_pretrained(tmp_path), precision="int8")


def test_a_size_has_no_ranges_to_be_seen() -> None:
    with pytest.raises(UserError, match="--precision int8 is for a model folder; tiny has weights drawn at random"):
        benchmark_embedding("tiny", precision="int8")


@multiplies
@pytest.mark.parametrize(
    ("name", "broken", "what"),
    [
        ("encoder.layer.1.output.weight", float("nan"), "weights"),
        ("embeddings.word", float("inf"), "weights"),
        ("encoder.layer.1.output.weight", 3e38, "hidden states"),  # their sums are not finite
    ],
)
def test_a_model_that_diverged_is_refused(name: str, broken: float, what: str) -> None:
    bert = make_bert()
    with torch.no_grad():
        bert.get_parameter(name)[3] = broken
    with pytest.raises(UserError, match=f"precision: int8: the model's {what} are not finite numbers"):
        choose_int8(bert, BertTokenizer(TOKENS))


@multiplies
def test_a_model_of_one_segment() -> None:
    bert = BertModel(dataclasses.replace(SMALL, type_vocab_size=1))
    initialize_parameters(bert, SMALL.initializer_range, 0)
    assert len(choose_int8(bert, BertTokenizer(TOKENS))) == 3


@multiplies
def test_ranges_are_those_of_any_entry_of_the_vocabulary() -> None:
    """Of another language's, whose own words the demo's text doesn't hold: only [UNK], letters and endings occur."""
    words = [chr(number) for number in range(0x10A0, 0x10A0 + 60)]  # Georgian
    tokenizer = BertTokenizer([*TOKENS[:5], *words])
    chosen = choose_int8(make_bert(), tokenizer)
    exact = Encoder(InferenceBert(make_bert(), torch.float32), tokenizer, torch.device("cpu"))
    used = Encoder(InferenceBert(make_bert(), torch.float32, chosen), tokenizer, torch.device("cpu"))
    source = np.random.default_rng(0)
    sequences = Sequences.join([source.integers(2, 65, length) for length in (9, 40, 100)])
    for one, other in zip(*(e.hidden_states(sequences, [3]) for e in (exact, used)), strict=True):
        cosines = (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)
        assert cosines.min() > 0.99
