"""Fill `[MASK]` in texts: the masked language model's most likely tokens for each mask.

Texts in, one result a text out. Only the literal `[MASK]` is special here; whatever else looks like a token is text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bertsmith.errors import UserError
from bertsmith.hardware import PRECISIONS, choose_device
from bertsmith.model.weights import load_model
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer

MASK = "[MASK]"
# tokens that go through the model at once
_BATCH_TOKENS = 8192


def encode_with_masks(text: str, number: int, tokenizer: BertTokenizer, limit: int) -> list[int]:
    """`[CLS]` text `[SEP]` as ids, each literal `[MASK]` being the mask token.

    Raises UserError, naming the text by `number` (from 1), when it holds no mask or more than `limit` tokens.
    """
    pieces = text.split(MASK)
    if len(pieces) == 1:
        raise UserError(f"text {number}: holds no {MASK}; write {MASK} where a token is to be guessed")
    encoded = tokenizer.encode_ids(pieces)
    ids = [tokenizer.cls_id, *encoded[0]]
    for piece in encoded[1:]:
        ids += [tokenizer.mask_id, *piece]
    ids.append(tokenizer.sep_id)
    if len(ids) > limit:
        raise UserError(f"text {number}: {len(ids)} tokens are more than the model's {limit}; shorten the text")
    return ids


@torch.inference_mode()
def fill_masks(
    folder: str | Path, texts: Sequence[str], top: int = 5, device: str = "auto", precision: str = "auto"
) -> dict[str, Any]:
    """The `top` tokens with probabilities for each mask of each text, as the JSON summary of `bertsmith fill`.

    Raises UserError for a folder without a trained MLM head, a text without masks or longer than the model's positions.
    """
    if top < 1:
        raise UserError(f"--top {top}: a number from 1 up is needed")
    model, report, _ = load_model(folder)
    absent = report.missing_from("mlm")
    if absent:
        raise UserError(f"{folder}: has no masked-LM head ({absent[0]} is missing); use a pre-trained model")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} entries, its word table {model.config.vocab_size}; "
            "they do not belong together"
        )
    rows = [
        encode_with_masks(text, number, tokenizer, model.config.max_position_embeddings)
        for number, text in enumerate(texts, 1)
    ]
    place = choose_device(device)
    model = model.to(place).eval()
    # a few short texts gain nothing from measuring which arithmetic is faster
    model.bert.compute_dtype = PRECISIONS["fp32" if precision == "auto" else precision]

    results: list[dict[str, Any]] = []
    for first, last in _batches(rows):
        part = rows[first:last]
        lengths = torch.tensor([len(row) for row in part])
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(place)
        ids = torch.tensor([i for row in part for i in row], device=place)
        positions = torch.cat([torch.arange(len(row)) for row in part]).to(place)
        masked = (ids == tokenizer.mask_id).nonzero()[:, 0]
        logits, _ = model.logits(ids, torch.zeros_like(ids), positions, starts, masked)
        # rows of a padded word table past the vocabulary are no tokens
        best = logits[:, : tokenizer.vocab_size].softmax(-1).topk(min(top, tokenizer.vocab_size), -1)
        guesses = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        for text, row in zip(texts[first:last], part, strict=True):
            masks = []
            for _ in range(row.count(tokenizer.mask_id)):
                tokens, shares = next(guesses)
                masks.append(
                    [
                        {"token": tokenizer.id_to_token(token), "probability": share}
                        for token, share in zip(tokens, shares, strict=True)
                    ]
                )
            results.append({"text": text, "masks": masks})
    return {"model": str(folder), "texts": results}


def _batches(rows: list[list[int]]) -> list[tuple[int, int]]:
    """Ranges of rows of about _BATCH_TOKENS tokens."""
    bounds, first, tokens = [], 0, 0
    for index, row in enumerate(rows):
        if tokens and tokens + len(row) > _BATCH_TOKENS:
            bounds.append((first, index))
            first, tokens = index, 0
        tokens += len(row)
    return [*bounds, (first, len(rows))] if rows else []
