"""Fill `[MASK]` in texts: the masked language model's most likely tokens for each mask.

Texts in, one result a text out. Only the literal `[MASK]` is special here; whatever else looks like a token is text.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bertsmith.errors import UserError, not_finite, one_of
from bertsmith.hardware import PRECISIONS, choose_device
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.weights import find_model, load_model
from bertsmith.tasks.examples import say_unknown
from bertsmith.tasks.model_folder import open_tokenizer, say_random_positions
from bertsmith.text.tokenizer import BertTokenizer

MASK = "[MASK]"
# Tokens that go through the model at once; should all of them be masks, their probabilities fit in memory.
_BATCH_TOKENS = 2048
_MOST_PROBLEMS = 5


def encode_with_masks(text: str, place: str, tokenizer: BertTokenizer, limit: int) -> list[int]:
    """`[CLS]` text `[SEP]` as ids, each literal `[MASK]` being the mask token.

    Raises UserError, naming the text by `place`, when it holds no mask or gives more than `limit` tokens.
    """
    pieces = text.split(MASK)
    if len(pieces) == 1:
        found = re.search(re.escape(MASK), text, re.IGNORECASE)
        small = f", and {found[0]} is plain text: capitals matter" if found else ""
        raise UserError(f"{place}: holds no {MASK}{small}; write {MASK} where a token is to be guessed")
    encoded = tokenizer.encode_ids(pieces)
    ids = [tokenizer.cls_id, *encoded[0]]
    for piece in encoded[1:]:
        ids += [tokenizer.mask_id, *piece]
    ids.append(tokenizer.sep_id)
    if len(ids) > limit:
        raise UserError(f"{place}: {len(ids)} tokens are more than the model's {limit}; shorten the text")
    return ids


def fill_masks(
    folder: str | Path,
    texts: Sequence[str],
    top: int = 5,
    device: str = "auto",
    precision: str = "auto",
    places: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The `top` tokens with probabilities for each mask of each text, as the JSON summary of `bertsmith fill`.

    `folder`: a model, or a run whose model is finished. `places`: what messages call the texts (default `text 1` …).
    `precision` auto is fp32: the few texts gain nothing from less.

    Raises UserError, before anything is computed, for a folder without a trained MLM head, and naming every text
    without masks or longer than the model's positions.
    """
    if top < 1:
        raise UserError(f"--top {top}: a number from 1 up is needed")
    where = choose_device(device)
    one_of("precision", precision, ("auto", *PRECISIONS))
    model_folder = find_model(folder)
    model, report, _ = load_model(model_folder)
    absent = report.missing_from("mlm")
    if absent:
        raise UserError(f"{model_folder}: has no masked-LM head ({absent[0]} is missing); use a pre-trained model")
    tokenizer = open_tokenizer(model_folder, model.config)
    rows = encode_all(texts, places, tokenizer, model.config.max_position_embeddings)
    say_random_positions(model_folder, model.config, longest := max(map(len, rows), default=0), longest)
    unknown = sum(row.count(tokenizer.unk_id) for row in rows) / max(sum(map(len, rows)), 1)
    say_unknown(unknown)
    model = model.to(where).eval()
    model.bert.compute_dtype = PRECISIONS["fp32" if precision == "auto" else precision]
    results = []
    for first, last in split_rows(rows):
        guesses = guess_masks(model, tokenizer, rows[first:last], top)
        results += [{"text": text, "masks": masks} for text, masks in zip(texts[first:last], guesses, strict=True)]
    return {"model": str(folder), "texts": results}


def encode_all(
    texts: Sequence[str], places: Sequence[str] | None, tokenizer: BertTokenizer, limit: int
) -> list[list[int]]:
    """The ids of every text; one UserError names the first few that cannot be used."""
    rows, problems = [], []
    for number, text in enumerate(texts, 1):
        try:
            place = places[number - 1] if places is not None else f"text {number}"
            rows.append(encode_with_masks(text, place, tokenizer, limit))
        except UserError as error:
            problems.append(str(error))
    if problems:
        more = f"\n… and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise UserError("\n".join(problems[:_MOST_PROBLEMS]) + more)
    return rows


@torch.inference_mode()
def guess_masks(
    model: BertForPreTraining, tokenizer: BertTokenizer, rows: list[list[int]], top: int
) -> Iterator[list[list[dict[str, Any]]]]:
    """For each row, for each of its masks: the `top` tokens with their probabilities, the likeliest first."""
    where = next(model.parameters()).device
    starts = torch.tensor([0, *itertools.accumulate(map(len, rows))], device=where)  # (N + 1,)
    ids = torch.tensor([i for row in rows for i in row], device=where)  # (T,)
    positions = torch.cat([torch.arange(len(row)) for row in rows]).to(where)  # (T,)
    masked = (ids == tokenizer.mask_id).nonzero()[:, 0]  # (M,)
    logits, _ = model.logits(ids, torch.zeros_like(ids), positions, starts, masked)  # (M, V)
    # rows of a padded word table past the vocabulary are no tokens
    shares = logits[:, : tokenizer.vocab_size].float().softmax(-1)
    if not bool(shares.isfinite().all()):
        raise not_finite("fill: the model's probabilities")
    best = shares.topk(min(top, tokenizer.vocab_size), -1)
    guesses = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    for row in rows:
        yield [
            [
                {"token": tokenizer.id_to_token(token), "probability": share}
                for token, share in zip(*next(guesses), strict=True)
            ]
            for _ in range(row.count(tokenizer.mask_id))
        ]


def split_rows(rows: list[list[int]]) -> list[tuple[int, int]]:
    """Ranges of rows of about _BATCH_TOKENS tokens."""
    bounds, first, tokens = [], 0, 0
    for index, row in enumerate(rows):
        if tokens and tokens + len(row) > _BATCH_TOKENS:
            bounds.append((first, index))
            first, tokens = index, 0
        tokens += len(row)
    return [*bounds, (first, len(rows))] if rows else []
