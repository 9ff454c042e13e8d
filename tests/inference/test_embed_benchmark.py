"""`bertsmith bench embed`: texts of known lengths the whole way, and figures that follow from each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import TOKENS, save_pretrained

from bertsmith.errors import UserError
from bertsmith.inference import benchmark
from bertsmith.inference.benchmark import benchmark_embedding, make_tokenizer, open_encoder, synthetic_texts
from bertsmith.inference.features import FeatureExtractor, FeatureOptions
from bertsmith.model.config import BertConfig
from bertsmith.text.tokenizer import BertTokenizer
from command_line import bertsmith

SIX: dict[str, Any] = {"texts": 6, "length": 16, "steps": 2, "device": "cpu", "precision": "fp32"}


@pytest.mark.parametrize("tokenizer", [BertTokenizer(TOKENS), make_tokenizer()], ids=["letters", "made"])
def test_texts_have_the_lengths_they_are_said_to_have(tokenizer: BertTokenizer) -> None:
    texts = synthetic_texts(tokenizer, 200, 64, 3)
    assert texts == synthetic_texts(tokenizer, 200, 64, 3)
    assert texts != synthetic_texts(tokenizer, 200, 64, 4)
    flat, lengths = tokenizer.encode_flat(texts)
    assert lengths.tolist() == [len(text.split()) for text in texts]
    assert tokenizer.unk_id not in flat
    assert lengths.min() + 2 >= 16
    assert lengths.max() + 2 <= 64
    assert len(set(lengths.tolist())) > 20


def test_made_vocabulary_is_as_large_as_the_published_one() -> None:
    assert make_tokenizer().vocab_size == benchmark.VOCAB_SIZE


def test_figures_of_the_command() -> None:
    flags = ("--model", "tiny", "--texts", 6, "--length", 16, "--steps", 2, "--precision", "fp32", "--json")
    found = bertsmith("bench", "embed", *flags).json
    lengths = np.array([len(text.split()) + 2 for text in synthetic_texts(make_tokenizer(), 6, 16, 0)])
    assert found["texts_per_second"] == pytest.approx(6 / found["seconds_per_step"])
    assert found["tokens_per_second"] == pytest.approx(lengths.sum() / found["seconds_per_step"])
    assert found["utilization"] == pytest.approx(found["gflops"] / found["matmul_gflops"])
    assert found["first_call_seconds"] > 0
    # 2 layers of: query, key, value and output, feed-forward at all tokens, and both products of attention
    config = BertConfig.of_size("tiny")
    hidden, inner = config.hidden_size, config.intermediate_size
    flops = 2 * lengths.sum() * 2 * (4 * hidden**2 + 2 * hidden * inner) + 2 * (lengths**2).sum() * 4 * hidden
    assert found["gflops"] * 1e9 * found["seconds_per_step"] == pytest.approx(flops)


def test_a_folder_is_timed_with_its_own_weights(tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "model")
    found = benchmark_embedding(str(folder), **SIX)
    assert (found["model"], found["precision"], found["texts"]) == (str(folder), "fp32", 6)
    assert found["tokens_per_second"] > 0
    encoder, _ = open_encoder(str(folder), "cpu", "fp32", 0)
    vectors = FeatureExtractor(encoder, FeatureOptions()).extract(["the cat"], ["text 1"]).rows
    assert vectors.shape == (1, encoder.config.hidden_size)


def test_weights_of_a_size_come_from_the_seed() -> None:
    words = [open_encoder("tiny", "cpu", "fp32", seed)[0].bert.embeddings.word for seed in (1, 1, 2)]
    assert words[0].equal(words[1])
    assert not words[0].equal(words[2])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "huge"}, "'huge'"),
        ({"texts": 0}, "--texts 0"),
        ({"length": 3}, "--length 3"),
        ({"length": 513}, "of 4 to 512 tokens"),
        ({"steps": 0}, "--steps 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_wrong_options(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        benchmark_embedding(**({"model": "tiny"} | SIX | options))


def test_a_vocabulary_without_words() -> None:
    tokenizer = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##a"])
    with pytest.raises(UserError, match="whole word"):
        synthetic_texts(tokenizer, 2, 8, 0)
