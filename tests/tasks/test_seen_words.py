"""Training the rows of the word table that occur is training all of them, up to rounding."""

import numpy as np
import pytest
import torch

from bertsmith.model.config import BertConfig
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.task_model import BertForTask
from bertsmith.tasks.seen_words import WORDS, SeenWords
from bertsmith.training.optimizer import BertOptimizer, clip_gradients
from bertsmith.training.settings import OptimizerSettings

CONFIG = BertConfig(
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=12,
)


def make_batches(steps: int) -> list[dict[str, torch.Tensor]]:
    """Three sequences a step; of the 60 words some come late, and some never."""
    source = np.random.default_rng(3)
    starts = np.array([0, 5, 9, 16])
    place = np.arange(16) - np.repeat(starts[:-1], np.diff(starts))
    batches = []
    for step in range(steps):
        batch = {
            "token_ids": source.integers(3, 10 + 4 * step, 16),
            "segment_ids": np.zeros(16, dtype=np.int64),
            "position_ids": place,
            "sequence_starts": starts,
            "rows": starts[:-1],
        }
        batches.append({name: torch.from_numpy(array) for name, array in batch.items()})
    return batches


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("layer_decay", [1.0, 0.8])
def test_the_same_weights_as_training_the_whole_table(bias_correction: bool, layer_decay: float) -> None:
    batches = make_batches(8)
    settings = OptimizerSettings(name="adamw", learning_rate=1e-2, weight_decay=0.1, bias_correction=bias_correction)
    results, norms = [], []
    for narrow in (False, True):
        model = BertForTask(CONFIG, "sequence", 3).initialize(1)
        words = SeenWords(model.bert.embeddings, [batch["token_ids"].numpy() for batch in batches]) if narrow else None
        if words:
            assert 20 < len(model.bert.embeddings.word) < 50
        optimizer = BertOptimizer(
            model.named_parameters(), settings, lambda name: layer_decay if "embeddings" in name else 1.0
        )
        shrunk = 1.0
        for number, batch in enumerate(batches):
            token_ids, *others = batch.values()
            masks = DropoutMasks((1, number))
            scores = model(words.numbers(token_ids) if words else token_ids, *others, masks)
            torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1, 2])).backward()
            norms.append(float(clip_gradients(model.parameters(), 0.5)))
            optimizer.step(1 - number / 10)
            shrunk *= optimizer.decay_factor(WORDS, 1 - number / 10)
            optimizer.zero_grad()
        if words:
            trained = model.bert.embeddings.word
            with words.whole(shrunk):
                results.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            assert model.bert.embeddings.word is trained
            assert 0.9 < shrunk < 1
        else:
            results.append(model.state_dict())
    whole, narrowed = results
    assert whole.keys() == narrowed.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(
            narrowed[name], tensor, atol=2e-6, rtol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert norms[: len(batches)] == pytest.approx(norms[len(batches) :], rel=1e-4)


def test_a_resumed_table_takes_what_did_not_occur_from_the_beginning() -> None:
    """The narrow rows come from the checkpoint, the rest from the weights that the run began with."""
    model = BertForTask(CONFIG, "token", 3).initialize(1)
    begun = model.bert.embeddings.word.detach().clone()
    with torch.no_grad():
        model.bert.embeddings.word.mul_(3)  # as if a checkpoint had been loaded
    words = SeenWords(model.bert.embeddings, [np.array([7, 9]), np.array([9, 30])], begun)
    assert words.numbers(torch.tensor([[9, 7], [30, 0]])).tolist() == [[2, 1], [3, 0]]
    with words.whole(0.5):
        table = model.bert.embeddings.word.detach().clone()
    seen = [0, 7, 9, 30]
    unseen = [number for number in range(60) if number not in seen]
    assert torch.equal(table[seen], 3 * begun[seen])
    assert torch.equal(table[unseen], 0.5 * begun[unseen])
