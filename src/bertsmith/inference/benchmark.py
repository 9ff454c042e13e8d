"""How fast this machine makes vectors of texts, as texts and tokens a second and as a share of its limit.

Synthetic texts of mixed lengths the whole way of `embed`: tokenizing, packing, forward, mean over the tokens.
"""

import statistics
import string
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.errors import UserError
from bertsmith.hardware import prepare_machine
from bertsmith.inference.encoder import Encoder, InferenceBert
from bertsmith.inference.features import FeatureExtractor, FeatureOptions
from bertsmith.inference.int8 import INT8
from bertsmith.inference.loaded import load
from bertsmith.model.bert import BertModel, initialize_parameters
from bertsmith.model.config import SIZES, BertConfig, encoder_flops
from bertsmith.tasks.benchmark import synthetic_examples
from bertsmith.text.tokenizer import BertTokenizer
from bertsmith.text.tokenizer_files import SPECIAL_TOKENS
from bertsmith.training.benchmark import VOCAB_SIZE


def make_tokenizer() -> BertTokenizer:
    """Of VOCAB_SIZE entries: the special tokens, and words of four letters."""
    letters = string.ascii_lowercase
    words = [
        "".join(letters[number // 26**place % 26] for place in range(4))
        for number in range(VOCAB_SIZE - len(SPECIAL_TOKENS))
    ]
    return BertTokenizer([*SPECIAL_TOKENS, *words])


def open_encoder(model: str, device: str, precision: str, seed: int) -> tuple[Encoder, str]:
    """The encoder of a model folder, or one of a published size with weights drawn from `seed`; and its precision.

    Raises UserError for a folder that cannot be opened and a size that is not known.
    """
    if model not in SIZES and Path(model).exists():
        loaded = load(model, device, precision)
        return loaded.encoder, loaded.precision
    config = BertConfig.of_size(model, VOCAB_SIZE)
    if precision in INT8:
        raise UserError(f"--precision int8 is for a model folder; {model} has weights drawn at random")
    machine = prepare_machine(device, precision)
    bert = BertModel(config)
    initialize_parameters(bert, config.initializer_range, seed)
    bert.to(machine.device)
    return Encoder(InferenceBert(bert, machine.dtype), make_tokenizer(), machine.device), machine.precision


def synthetic_texts(tokenizer: BertTokenizer, texts: int, length: int, seed: int) -> list[str]:
    """Texts of random words that are one token each; lengths from a quarter of `length` up to it, [CLS], [SEP] counted.

    Raises UserError where no token of the vocabulary is a whole word.
    """
    # what is one token alone is one token between blanks as well
    encoded = tokenizer.encode_ids(tokenizer.tokens)
    words = [token for index, token in enumerate(tokenizer.tokens) if encoded[index] == [index]]
    if not words:
        raise UserError("model: no token of its vocabulary is a whole word, so that no text can be made of them")
    return [
        " ".join(words[index % len(words)] for index in sequence.token_ids[2:].tolist())
        for (sequence,) in synthetic_examples(texts, length, seed)
    ]


def benchmark_embedding(
    model: str,
    texts: int = 256,
    length: int = 128,
    steps: int = 10,
    device: str = "auto",
    precision: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """The first call with `texts` texts, then the median of `steps` more: the summary of `bertsmith bench embed`.

    `model`: a published size or a model folder. Raises UserError, before anything is timed, for a model that cannot be
    opened and numbers that make no sense.
    """
    if steps < 1:
        raise UserError(f"--steps {steps}: at least one is needed")
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed}: a number from 0 to 2^63 - 1 is needed")
    encoder, resolved = open_encoder(model, device, precision, seed)
    if not 4 <= length <= encoder.max_length or texts < 1:
        raise UserError(
            f"--texts {texts} --length {length}: at least one text, of 4 to {encoder.max_length} tokens, is needed"
        )
    made = synthetic_texts(encoder.tokenizer, texts, length, seed)
    places = [f"text {number}" for number in range(1, texts + 1)]
    extractor = FeatureExtractor(encoder, FeatureOptions())

    def take() -> float:
        begun = time.perf_counter()
        extractor.extract(made, places)  # its vectors are on the host: nothing is still being computed
        return time.perf_counter() - begun

    first = take()
    tokens = extractor.computed_tokens
    # products that are not of 8 bits are in the faster other precision, whose limit both are shares of
    machine = prepare_machine(encoder.device.type, INT8.get(resolved, resolved) or "auto")
    seconds = statistics.median(take() for _ in range(steps))
    lengths = np.array([len(text.split()) + 2 for text in made])
    assert tokens == lengths.sum()
    flops = encoder_flops(encoder.config, tokens, int((lengths**2).sum()), tokens) / 3  # a training step's is thrice
    return {
        "model": model,
        "texts": texts,
        "length": length,
        "device": encoder.device.type,
        "precision": resolved,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "first_call_seconds": first,
        "seconds_per_step": seconds,
        "texts_per_second": texts / seconds,
        "tokens_per_second": tokens / seconds,
        "gflops": flops / seconds / 1e9,
        "matmul_gflops": machine.matmul_flops / 1e9,
        "utilization": flops / seconds / machine.matmul_flops,
    }
