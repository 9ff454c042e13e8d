"""The encoder that is only used: the hidden states transformers computes, alone or in any batch, in input order."""

import copy
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import SMALL, TOKENS, make_bert, make_encoder

from bertsmith.inference.encoder import Encoder, InferenceBert, Sequences, ranges
from bertsmith.inference.loaded import LoadedModel
from bertsmith.inference.products import PackedLinear, can_pack
from bertsmith.model.layers import Linear, fill_up
from bertsmith.tasks.model_folder import weights_sha256
from bertsmith.text.tokenizer import BertTokenizer


def make_sequences(lengths: list[int], segments: bool = False) -> Sequences:
    source = np.random.default_rng(1)
    rows = [source.integers(5, SMALL.vocab_size, length) for length in lengths]
    return Sequences.join(rows, [length // 2 for length in lengths] if segments else None)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("lengths", [[7], [12, 12, 12], [3, 40, 17, 2, 512, 39, 38, 1], [90, 80, 85, 84]])
def test_hidden_states_are_those_of_the_trained_model(lengths: list[int], segments: bool) -> None:
    sequences = make_sequences(lengths, segments)
    found = make_encoder().hidden_states(sequences, [0, 1, 2, 3])
    model = make_bert().eval()
    for number, (start, length) in enumerate(zip(sequences.starts, lengths, strict=False)):
        ids = torch.from_numpy(sequences.token_ids[start : start + length].astype(np.int64))
        places = torch.arange(length)
        second = (places >= length // 2).long() if segments else torch.zeros_like(places)
        with torch.no_grad():
            expected = torch.stack(model.hidden_states(ids, second, places, torch.tensor([0, length])))
        assert found[number].shape == (4, length, 48)
        np.testing.assert_allclose(found[number], expected.numpy(), rtol=0, atol=1e-5)


def test_layers_above_the_wanted_ones_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, sequences = make_encoder(), make_sequences([9, 5])
    expected = encoder.hidden_states(sequences, [2, 0])
    encoder.bert.encoder.layer[2] = torch.nn.Identity()  # would fail if it were run
    found = encoder.hidden_states(sequences, [2, 0])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(AssertionError):
        encoder.hidden_states(sequences, [3])


@pytest.mark.parametrize("level", [0, 2, 3])
def test_some_tokens_of_the_highest_level_only(level: int) -> None:
    encoder = make_encoder()
    (batch,) = encoder.batches(make_sequences([9, 5, 14]))
    rows = torch.tensor([20, 0, 3])
    wanted = [1, level] if level else [0]
    whole = encoder.bert.levels(*batch.inputs(), wanted)
    some = encoder.bert.levels(*batch.inputs(), wanted, rows)
    torch.testing.assert_close(some[-1], whole[-1][rows], rtol=0, atol=1e-6)
    if level:
        assert torch.equal(some[0], whole[0])


def test_it_stands_in_for_the_model_it_was_made_of() -> None:
    encoder = make_encoder()
    (batch,) = encoder.batches(make_sequences([9, 5, 14]))
    model = make_bert().eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder.bert(*batch.inputs()), model(*batch.inputs()), rtol=0, atol=1e-5)
        for one, other in zip(
            encoder.bert.hidden_states(*batch.inputs()), model.hidden_states(*batch.inputs()), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_bf16_computes_in_bf16_and_is_near() -> None:
    encoder, exact = make_encoder(torch.bfloat16), make_encoder()
    sequences = make_sequences([30, 12, 50])
    (batch,) = encoder.batches(sequences)
    assert encoder.bert(*batch.inputs()).dtype == torch.bfloat16
    assert encoder.bert.encoder.layer[0].qkv.weight.dtype == torch.bfloat16
    for one, other in zip(encoder.hidden_states(sequences, [3]), exact.hidden_states(sequences, [3]), strict=True):
        cosine = (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)
        assert 0.99 < cosine.min() < 1 - 1e-7


def test_every_sequence_is_in_one_batch_and_no_batch_is_over_the_budget() -> None:
    encoder = make_encoder()
    encoder.tokens_at_once = 200
    source = random.Random(0)
    sequences = make_sequences([source.randrange(1, 300) for _ in range(80)])
    seen = []
    for batch in encoder.batches(sequences):
        assert len(batch.token_ids) <= 200 or len(batch.numbers) == 1
        seen += batch.numbers.tolist()
        assert batch.starts.tolist() == batch.sequence_starts.tolist()
        for index, number in enumerate(batch.numbers):
            stretch = slice(batch.starts[index], batch.starts[index + 1])
            start, end = sequences.starts[number : number + 2]
            assert batch.token_ids[stretch].tolist() == sequences.token_ids[start:end].tolist()
            assert batch.position_ids[stretch].tolist() == list(range(end - start))
    assert sorted(seen) == list(range(80))


def test_ranges() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.zeros(0, dtype=int), np.zeros(0, dtype=int)).tolist() == []


def test_batches_have_few_shapes() -> None:
    """oneDNN keeps a kernel a shape: over calls of random length memory would grow for thousands of calls."""
    filled = {}
    for length in range(1, 4097):
        ids = torch.ones(length, dtype=torch.long)
        padded = fill_up(ids)
        filled[length] = len(padded)
        assert torch.equal(padded[:length], ids)
        assert not padded[length:].any()
        assert len(padded) - length <= max(7, 0.032 * length)
    assert len(set(filled.values())) < 200


def test_no_sequences() -> None:
    empty = Sequences.join([])
    assert len(empty) == 0
    assert make_encoder().hidden_states(empty, [0]) == []


@pytest.mark.shared_data
def test_minilm_gives_the_golden_hidden_states_and_pooler(shared_data: Path, minilm: LoadedModel) -> None:
    golden = np.load(shared_data / "golden" / "minilm_l6_hidden_states.npz")
    texts = json.loads((shared_data / "golden" / "minilm_l6_texts.json").read_text(encoding="utf-8"))
    encoder = minilm.encoder
    tokenizer = encoder.tokenizer
    for text in texts:  # the tokens, with typed special tokens allowed, which is transformers' default
        segments = tokenizer.encode_ids([text["a"], *([text["b"]] if text["b"] else [])], allow_special=True)
        ids = [tokenizer.cls_id, *segments[0][:126], tokenizer.sep_id]
        text["second"] = len(ids)
        ids += [*segments[1], tokenizer.sep_id] if text["b"] else []
        assert ids == text["input_ids"], text["a"]
    sequences = Sequences.join([text["input_ids"] for text in texts], [text["second"] for text in texts])
    found = encoder.hidden_states(sequences, range(7))
    for number, states in enumerate(found):
        for level in range(7):
            expected = golden[f"hidden_{level}"][number, : states.shape[1]]
            np.testing.assert_allclose(states[level], expected, rtol=0, atol=2e-5)
    cls = torch.from_numpy(np.stack([states[6, 0] for states in found]))
    pooled = encoder.bert.pooler(cls).detach().numpy()
    np.testing.assert_allclose(pooled, golden["pooler_output"], rtol=0, atol=2e-5)


def test_threads_that_share_the_work_have_as_many_batches_of_as_many_tokens() -> None:
    encoder = make_encoder()
    lengths = np.random.default_rng(2).integers(3, 90, 300).tolist()
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        encoder.tokens_at_once = 1000
        groups = list(encoder.group(lengths))
        assert len(list(encoder.group(lengths[:3]))) == 1  # too few to share
    finally:
        torch.set_num_threads(before)
    assert sorted(np.concatenate(groups).tolist()) == list(range(300))
    assert len(groups) % 4 == 0
    tokens = [sum(lengths[number] for number in group) for group in groups]
    assert max(tokens) <= 1000
    assert max(tokens) - min(tokens) < 2 * 90


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    lengths = np.random.default_rng(3).integers(3, 200, 60).tolist()
    sequences = make_sequences(lengths)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = make_encoder().hidden_states(sequences, [3])
    torch.set_num_threads(threads)
    try:
        found = make_encoder().hidden_states(sequences, [3])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def packable(dtype: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not can_pack(torch.device("cpu"), dtype), reason=f"oneDNN does not multiply {dtype} faster on this machine"
    )


def make_linear(dtype: torch.dtype) -> Linear:
    torch.manual_seed(0)
    linear = Linear(48, 96).to(dtype)
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    return linear


@packable(torch.bfloat16)
def test_packed_weights_give_the_same_bits_and_the_same_digest() -> None:
    linear = make_linear(torch.bfloat16)
    packed = PackedLinear(linear)
    for rows in (1, 8, 37, 2048):
        x = torch.randn(rows, 48).to(torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(packed(x), linear(x))
    assert weights_sha256(packed) == weights_sha256(linear)
    # the packed copy goes nowhere with the weights
    assert [name for name, _ in packed.named_parameters()] == ["weight", "bias"]
    x = torch.randn(5, 48)
    with torch.no_grad():
        expected = linear(x.to(torch.bfloat16))
        for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
            assert torch.equal(copied(x.to(torch.bfloat16)), expected)
        torch.testing.assert_close(packed.float()(x), expected.float(), rtol=0, atol=0.3)


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=packable(dtype)) for dtype in (torch.float32, torch.bfloat16)]
)
def test_packed_weights_with_and_without_gelu(dtype: torch.dtype) -> None:
    packed = PackedLinear(make_linear(dtype))
    copied = copy.deepcopy(packed)  # has its weights as they were, not laid out
    for rows in (1, 8, 37, 2048):
        x = torch.randn(rows, 48).to(dtype)
        with torch.no_grad():
            exact = x.double() @ packed.weight.double().T + packed.bias.double()
            for layer in (packed, copied):
                tolerances = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
                torch.testing.assert_close(layer(x).double(), exact, **tolerances)
                torch.testing.assert_close(layer.gelu(x).double(), torch.nn.functional.gelu(exact), **tolerances)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
def test_every_activation_is_the_training_models(activation: str) -> None:
    bert = make_bert(hidden_act=activation).eval()
    sequences = make_sequences([9, 30, 4])
    ids = torch.from_numpy(sequences.token_ids.astype(np.int64))
    places = torch.from_numpy(ranges(np.zeros(3, dtype=np.int64), sequences.lengths))
    with torch.no_grad():
        expected = bert(ids, torch.zeros_like(ids), places, torch.from_numpy(sequences.starts))
    encoder = Encoder(InferenceBert(bert, torch.float32), BertTokenizer(TOKENS), torch.device("cpu"))
    found = np.concatenate([states[0] for states in encoder.hidden_states(sequences, [3])])
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)
