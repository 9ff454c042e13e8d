"""Pseudo-log-likelihood of sentences by a masked language model (Salazar et al. 2020, section 2), and minimal pairs.

Each token of a sentence is masked in turn and the log-probability (natural) of what stood there is taken; their sum is
the sentence's PLL, exp(-PLL / tokens) its pseudo-perplexity. [CLS] and [SEP] are seen and not scored.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.errors import UserError, not_finite, one_of
from bertsmith.inference.chunks import split_chunks
from bertsmith.inference.embed import check_output, check_rows, read_text_rows, say_empty, say_losses
from bertsmith.inference.encoder import Encoder, Sequences, pack_sequences, ranges
from bertsmith.inference.kept_columns import KeptColumns
from bertsmith.inference.row_writer import Row, find_ending, open_row_writer
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.heads import ROWS_AT_ONCE
from bertsmith.model.layers import fill_up
from bertsmith.progress import Progress, say, silenced
from bertsmith.tasks.examples import EncodingReport
from bertsmith.tasks.table import Problems, Table, read_text, shorten
from bertsmith.text.documents import join_names
from bertsmith.text.tables import near_names

Pair = tuple[str, str]

WITHIN_WORD = ("visible", "mask")
PAIR_COLUMNS = (("sentence_good", "sentence_bad"), ("good", "bad"))
"""Names of the columns of minimal pairs where none are given: BLiMP's, and plain ones."""
# a token is a copy of its sentence: so many characters of text at a time bound the copies that are planned at once
_CHARACTERS_AT_ONCE = 200_000
# rows as they are written, for the columns' sake
_LIKE_SENTENCE: Row = {"pll": 0.0, "tokens": 0, "pppl": 0.0}
_LIKE_PAIR: Row = {"good_pll": 0.0, "bad_pll": 0.0, "good_tokens": 0, "bad_tokens": 0, "correct": True}


class SentenceScorer:
    """Texts → scores. `encoder.bert` is `model.bert`.

    `within_word`: while a piece of a word is masked, the pieces after it in the word are "visible", as in Salazar et
    al., or masked too ("mask": PLL-word-l2r of Kauf & Ivanova 2023, which does not overrate long rare words).
    Sentences longer than the model takes are cut, and counted in `report`.
    """

    def __init__(self, model: BertForPreTraining, encoder: Encoder, within_word: str = "visible") -> None:
        one_of("within_word", within_word, WITHIN_WORD)
        self.model = model
        self.encoder = encoder
        self.mask_words = within_word == "mask"
        self.report = EncodingReport()

    def score(self, texts: Sequence[str]) -> list[Row]:
        """For each text its `pll`, its `tokens` and its `pppl`, in order; the scores are None where no token is."""
        chunks = split_chunks((("", text) for text in texts), _CHARACTERS_AT_ONCE)
        return [row for chunk in chunks for row in self._score_some([str(text) for _, text in chunk])]

    def _score_some(self, texts: Sequence[str]) -> Iterator[Row]:
        """All copies of these texts are planned at once."""
        sequences = self._encode(texts)
        lengths = sequences.lengths - 2
        owners = np.repeat(np.arange(len(texts)), lengths)  # (C,): the sentence of each copy
        places = ranges(np.ones_like(lengths), lengths)  # (C,): its scored token, counted from [CLS]
        masked = np.ones_like(places)  # (C,): tokens masked from there on
        if self.mask_words:
            begins = np.flatnonzero(~self.encoder.tokenizer.continuation[sequences.token_ids])
            scored = sequences.starts[owners] + places
            masked = begins[np.searchsorted(begins, scored, side="right")] - scored
        sums = np.zeros(len(texts))

        def compute(chosen: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
            scores = self._log_probabilities(sequences, owners[chosen], places[chosen], masked[chosen])
            found: npt.NDArray[np.float64] = scores.double().cpu().numpy()
            return found

        for chosen, scores in self.encoder.map(compute, self.encoder.group(sequences.lengths[owners].tolist())):
            if not np.isfinite(scores).all():
                raise not_finite("score: the model's log-probabilities")
            np.add.at(sums, owners[chosen], scores)
        for total, tokens in zip(sums.tolist(), lengths.tolist(), strict=True):
            # the sum over no token, 0, would be better than any sentence's
            yield {"pll": total if tokens else None, "tokens": tokens, "pppl": _perplexity(total, tokens)}

    def _encode(self, texts: Sequence[str]) -> Sequences:
        tokenizer, report, room = self.encoder.tokenizer, self.report, self.encoder.max_length - 2
        flat, counts = tokenizer.encode_flat(texts)
        kept = np.minimum(counts, room)
        report.examples += len(texts)
        report.tokens += len(flat)
        report.unknown_tokens += int(np.count_nonzero(flat == tokenizer.unk_id))
        report.truncated += int(np.count_nonzero(counts > room))
        report.truncated_tokens += int((counts - kept).sum())
        return Sequences.frame(tokenizer, flat, np.cumsum(counts) - counts, kept)

    @torch.inference_mode()
    def _log_probabilities(
        self,
        sequences: Sequences,
        owners: npt.NDArray[Any],
        places: npt.NDArray[Any],
        masked: npt.NDArray[Any],
    ) -> Tensor:
        """(c,) float32: for each of c copies the log-probability of the token at its place, which is masked."""
        batch = pack_sequences(sequences, owners, self.encoder.device)
        wanted = batch.starts[:-1] + places
        rows = torch.from_numpy(wanted).to(self.encoder.device)
        labels = batch.token_ids[rows]
        hidden_places = torch.from_numpy(ranges(wanted, masked)).to(self.encoder.device)
        batch.token_ids[hidden_places] = self.encoder.tokenizer.mask_id
        hidden = self.model.bert(*batch.inputs(), rows=fill_up(rows))
        hidden = self.model.mlm_head(hidden)[: len(rows)].float()  # (c, H)
        known = self.encoder.tokenizer.vocab_size  # rows of a padded word table are no tokens
        table, bias = self.model.bert.embeddings.word[:known], self.model.mlm_head.bias[:known]
        losses = [
            F.cross_entropy(F.linear(part, table, bias), label, reduction="none")
            for part, label in zip(hidden.split(ROWS_AT_ONCE), labels.split(ROWS_AT_ONCE), strict=True)
        ]
        return -torch.cat(losses)


def _perplexity(pll: float, tokens: int) -> float | None:
    if not tokens:
        return None
    mean = -pll / tokens
    return math.exp(mean) if mean < 700 else math.inf


def score_file(
    scorer: SentenceScorer,
    input_path: str,
    output_path: str | Path | None = None,
    text_column: str = "text",
    encoding: str = "utf-8",
    keep: Sequence[str] = (),
) -> dict[str, Any]:
    """Score every row of a file; the rows of `SentenceScorer.score` are written in order, where an output is named,
    after the columns `keep` of the input (see kept_columns.py).

    Returns the JSON summary: `pll_mean` is over sentences, `pppl` over all tokens of the file. Texts without a token
    are in neither, and counted in `without_tokens`. Raises UserError for rows that cannot be read, naming the line, and
    an output that cannot be written.
    """
    begun = time.monotonic()
    rows, scored, total, tokens = 0, 0, 0.0, 0
    kept = _open_kept(input_path, output_path, keep, _LIKE_SENTENCE, encoding)

    def read() -> Iterator[tuple[str, str]]:
        return kept.follow(read_text_rows(input_path, text_column, encoding), itemgetter(0))

    with _open_output(output_path, kept, _LIKE_SENTENCE, kept.count(read())) as write:
        for chunk in split_chunks(read(), _CHARACTERS_AT_ONCE, weigh=kept.weigh):
            scores = scorer.score([str(text) for _, text in chunk])
            write(scores)
            rows += len(scores)
            plls = [row["pll"] for row in scores if row["tokens"]]
            scored += len(plls)
            total += sum(plls)
            tokens += sum(row["tokens"] for row in scores)
    say_empty(rows, input_path, output_path)
    if without := rows - scored:
        say(f"warning: {without:,} of {rows:,} texts hold no token, so that they have no score and are in no mean")
    figures = {
        "pll_mean": total / scored if scored else None,
        "pppl": _perplexity(total, tokens),
        "without_tokens": without,
    }
    return _summary(scorer, rows, figures, begun, output_path)


def score_pairs_file(
    scorer: SentenceScorer,
    input_path: str,
    output_path: str | Path | None = None,
    good_column: str | None = None,
    bad_column: str | None = None,
    encoding: str = "utf-8",
    keep: Sequence[str] = (),
) -> dict[str, Any]:
    """Score a table of minimal pairs: how often has the acceptable sentence the higher PLL (Salazar et al., section 4)?

    Columns not named are those of PAIR_COLUMNS. Rows written: the columns `keep` of the input, good_pll, bad_pll,
    good_tokens, bad_tokens, correct. A pair of equal PLLs is not correct and counted in `ties`. A pair with a sentence
    without tokens is neither won nor lost (`correct` None): it is not in `accuracy`, but counted in `without_tokens`.
    Raises UserError as `score_file`.
    """
    begun = time.monotonic()
    rows = scored = correct = ties = 0
    kept = _open_kept(input_path, output_path, keep, _LIKE_PAIR, encoding)

    def read() -> Iterator[tuple[str, Pair]]:
        return kept.follow(read_pairs(input_path, good_column, bad_column, encoding), itemgetter(0))

    with _open_output(output_path, kept, _LIKE_PAIR, kept.count(read())) as write:
        for chunk in split_chunks(read(), _CHARACTERS_AT_ONCE, weigh=kept.weigh):
            scores = scorer.score([sentence for _, pair in chunk for sentence in pair])
            results = [
                {
                    "good_pll": good["pll"],
                    "bad_pll": bad["pll"],
                    "good_tokens": good["tokens"],
                    "bad_tokens": bad["tokens"],
                    "correct": good["pll"] > bad["pll"] if good["tokens"] and bad["tokens"] else None,
                }
                for good, bad in zip(scores[::2], scores[1::2], strict=True)
            ]
            write(results)
            rows += len(results)
            compared = [row for row in results if row["correct"] is not None]
            scored += len(compared)
            correct += sum(row["correct"] for row in compared)
            ties += sum(row["good_pll"] == row["bad_pll"] for row in compared)
    say_empty(rows, input_path, output_path)
    if without := rows - scored:
        say(f"warning: {without:,} of {rows:,} pairs hold a sentence without a token; they are not in the accuracy")
    figures = {"accuracy": correct / scored if scored else None, "ties": ties, "without_tokens": without}
    return _summary(scorer, rows, figures, begun, output_path)


def check_scoring(
    input_path: str, output: Path | None, rows: Iterator[Any], keep: Sequence[str], pairs: bool, encoding: str
) -> None:
    """Raise UserError for whatever can be told of the files before there is a model.

    `rows`: what reads `input_path`, of which the first is looked at.
    """
    _open_kept(input_path, output, keep, _LIKE_PAIR if pairs else _LIKE_SENTENCE, encoding)
    try:
        check_rows(input_path, rows)
    except UserError:
        if not pairs and (columns := _pair_columns(input_path, encoding)):
            raise UserError(
                f"{input_path}: holds minimal pairs, {columns[0]!r} and {columns[1]!r}: add --pairs, or name the "
                "column of single sentences with --text-column"
            ) from None
        raise


def _pair_columns(path: str, encoding: str) -> Pair | None:
    """The columns of a table that are named as those of minimal pairs are."""
    with contextlib.suppress(UserError), silenced(), Table(path, encoding) as table:
        return next((pair for pair in PAIR_COLUMNS if set(pair) <= set(table.columns)), None)
    return None


def _open_kept(
    input_path: str, output_path: str | Path | None, keep: Sequence[str], like: Row, encoding: str
) -> KeptColumns:
    """The columns to carry along. Raises UserError for files that do not suit."""
    output = None if output_path is None else Path(output_path)
    if output is not None:
        find_ending(output)
        check_output(input_path, output)
    return KeptColumns(input_path, keep, output, like, encoding)


@contextlib.contextmanager
def _open_output(
    output_path: str | Path | None, kept: KeptColumns, like: Row, total: int | None
) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Yield what takes rows such as `like`: it writes them after what is `kept` of theirs, where an output is named,
    and moves the bar, which ends at `total`."""
    with contextlib.ExitStack() as stack:
        writer = None
        if output_path is not None:
            writer = stack.enter_context(open_row_writer(Path(output_path), kept.arrow_types()))
            writer.expect(dict.fromkeys(kept.names) | like)
        bar = stack.enter_context(Progress("scoring", total, "rows"))

        def write(rows: Sequence[Row]) -> None:
            if writer is not None:
                writer.write(kept.beside(rows))
            bar.advance(len(rows))

        yield write


def _summary(
    scorer: SentenceScorer, rows: int, figures: dict[str, Any], begun: float, output_path: str | Path | None
) -> dict[str, Any]:
    report = scorer.report
    say_losses(report, scorer.encoder.max_length)
    return {
        "rows": rows,
        "tokens": report.tokens - report.truncated_tokens,
        **figures,
        "truncated": report.truncated,
        "truncated_tokens": report.truncated_tokens,
        "unknown_rate": report.as_dict()["unknown_rate"],
        "seconds": time.monotonic() - begun,
        "output": None if output_path is None else str(output_path),
    }


def read_pairs(path: str, good: str | None, bad: str | None, encoding: str) -> Iterator[tuple[str, Pair]]:
    """(`file:line`, (acceptable, unacceptable) sentence) of every row."""
    problems = Problems("every row needs two sentences")
    with Table(path, encoding) as table:
        default = next((pair for pair in PAIR_COLUMNS if set(pair) <= set(table.columns)), PAIR_COLUMNS[0])
        columns = [good or default[0], bad or default[1]]
        if missing := [name for name in columns if name not in table.columns]:
            table.check_separator(missing)
            raise UserError(
                f"{path}: no column {' and no '.join(map(repr, missing))}; there are "
                f"{join_names(map(shorten, table.columns)) or 'none'}; name yours with --good-column and "
                f"--bad-column{near_names(missing, table.columns)}"
            )
        for row in table.rows((), columns):
            place = f"{path}:{row.line}"
            try:
                pair = read_text(row, columns[0], False), read_text(row, columns[1], False)
            except ValueError as error:
                problems.add(place, str(error))
                continue
            if not problems:
                yield place, pair
    problems.check()
