"""Batches: the same from any position, rank and worker; laid out as the model expects; wrong input named early."""

import dataclasses
import gzip
import itertools
import json
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_corpus import CLS, FIRST_ID, MASK, SEP, MadeSplit, make_split, make_tokenizer, random_documents

from bertsmith.corpus.batches import (
    Batch,
    BatchCounts,
    BatchStream,
    StreamPosition,
    describe_example,
    split_batch,
)
from bertsmith.corpus.examples import OBJECTIVES, Objective
from bertsmith.corpus.masking import MaskingOptions, TokenizerInfo
from bertsmith.corpus.shards import open_corpus
from bertsmith.corpus.writer import write_corpus
from bertsmith.errors import UserError
from bertsmith.text.tokenizer import load_tokenizer

VOCABULARY = 500
TOKENIZER = make_tokenizer(VOCABULARY, continuation_share=0.3)
DOCUMENTS = random_documents(60, sentences=12)
SPLIT = make_split(DOCUMENTS, shards=2, vocab_size=VOCABULARY)


def stream(objective: Objective = "mlm+nsp", split: MadeSplit = SPLIT, **options: Any) -> BatchStream:
    """A stream of the made corpus, in several windows."""
    given_options = {"max_length": 64, "batch_size": 8, "seed": 3, "block_tokens": 300, "window_blocks": 5} | options
    return BatchStream(split, given_options.pop("tokenizer", TOKENIZER), objective, **given_options)


def take(batches: Iterable[Batch], count: int) -> list[Batch]:
    return list(itertools.islice(batches, count))


def same(a: Batch, b: Batch) -> bool:
    """Whether two batches are equal in every field."""
    return all(
        getattr(a, f.name) == getattr(b, f.name)
        if f.name == "position"
        else np.array_equal(getattr(a, f.name), getattr(b, f.name))
        for f in dataclasses.fields(Batch)
    )


def all_same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def rows(batch: Batch) -> dict[tuple[int, ...], int]:
    """What each example holds (id, label, tokens, masks) → how often it comes."""
    found: dict[tuple[int, ...], int] = {}
    for part in split_batch(batch, 1) if len(batch) else []:
        labels = [] if part.next_sentence_labels is None else part.next_sentence_labels.tolist()
        key = (
            *part.example_ids.tolist(),
            *labels,
            *part.token_ids.tolist(),
            *part.masked_positions.tolist(),
            *part.masked_labels.tolist(),
        )
        found[key] = found.get(key, 0) + 1
    return found


def all_rows(batches: Iterable[Batch]) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for batch in batches:
        for row, count in rows(batch).items():
            found[row] = found.get(row, 0) + count
    return found


# --- layout


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_layout(objective: Objective) -> None:
    for batch in take(stream(objective).batches(), 30):
        assert len(batch) == 8
        starts = batch.sequence_starts
        total = len(batch.token_ids)
        arrays = [batch.token_ids, batch.segment_ids, batch.position_ids, starts, batch.masked_positions]
        assert {array.dtype for array in [*arrays, batch.masked_labels, batch.example_ids]} == {np.dtype(np.int64)}
        assert starts[0] == 0
        assert starts[-1] == total == len(batch.segment_ids) == len(batch.position_ids)
        assert batch.max_sequence_length == np.diff(starts).max() <= 64
        assert (batch.next_sentence_labels is None) == (objective == "mlm")
        for low, high in itertools.pairwise(starts.tolist()):
            tokens, segments = batch.token_ids[low:high], batch.segment_ids[low:high]
            assert batch.position_ids[low:high].tolist() == list(range(high - low))
            assert tokens[0] == CLS
            assert tokens[-1] == SEP
            separators = np.flatnonzero(tokens == SEP)
            assert (tokens == CLS).sum() == 1
            if objective == "mlm":
                assert not segments.any()
                assert 1 not in np.diff(separators)
            else:
                first, last = separators
                assert 2 <= first < last - 1
                assert segments.tolist() == [0] * (first + 1) + [1] * (last - first)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masks_of_a_batch(objective: Objective) -> None:
    for batch in take(stream(objective).batches(), 10):
        plain = batch.token_ids.copy()
        plain[batch.masked_positions] = batch.masked_labels
        assert MASK not in plain
        assert batch.masked_labels.min() >= FIRST_ID
        per_sequence = np.diff(np.searchsorted(batch.masked_positions, batch.sequence_starts))
        ordinary = [
            int((plain[low:high] > MASK).sum()) for low, high in itertools.pairwise(batch.sequence_starts.tolist())
        ]
        assert per_sequence.tolist() == [max(1, round(0.15 * n)) for n in ordinary]


def test_first_segment_and_second_segment_are_what_the_label_says() -> None:
    # ids that tell where a token came from
    documents = random_documents(30)
    split = make_split(documents)
    document_of = np.repeat(np.arange(30), [sum(document) for document in documents])
    tokens = sum(map(sum, documents)) + FIRST_ID
    made = stream(split=split, tokenizer=make_tokenizer(tokens))
    for batch in made.batches(epochs=1):
        plain = batch.token_ids.copy()
        plain[batch.masked_positions] = batch.masked_labels
        assert batch.next_sentence_labels is not None
        for n, label in enumerate(batch.next_sentence_labels.tolist()):
            low, high = batch.sequence_starts[n : n + 2]
            ids, segment = plain[low:high], batch.segment_ids[low:high]
            first, second = (ids[(segment == s) & (ids >= FIRST_ID)] - FIRST_ID for s in (0, 1))
            assert (np.diff(first) == 1).all()
            assert (np.diff(second) == 1).all()
            same_document = document_of[first[0]] == document_of[second[0]]
            assert same_document == (label == 0)
            if label == 0:
                assert 1 <= second[0] - first[-1] <= 1 + batch.tokens_cut[n]


def test_swapped_segments_are_laid_out_in_swapped_order() -> None:
    documents = random_documents(30)
    made = stream("mlm+sop", make_split(documents), tokenizer=make_tokenizer(sum(map(sum, documents)) + FIRST_ID))
    labels = []
    for batch in made.batches(epochs=1):
        plain = batch.token_ids.copy()
        plain[batch.masked_positions] = batch.masked_labels
        assert batch.next_sentence_labels is not None
        firsts = plain[batch.sequence_starts[:-1] + 1]
        lasts = plain[batch.sequence_starts[1:] - 2]
        assert ((firsts > lasts) == (batch.next_sentence_labels == 1)).all()
        labels += batch.next_sentence_labels.tolist()
    assert set(labels) == {0, 1}


# --- positions, epochs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_resuming_anywhere_and_again_gives_the_same_batches(objective: Objective) -> None:
    unbroken = take(stream(objective).batches(), 60)
    assert unbroken[-1].position.epoch >= 1
    for stop in (0, 1, 7, 25, 49):
        position = StreamPosition(**json.loads(json.dumps(unbroken[stop].position.as_dict())))
        resumed = take(stream(objective).batches(position), 5)
        assert all_same(resumed, unbroken[stop + 1 : stop + 6])
        again = take(stream(objective).batches(resumed[2].position), 4)
        assert all_same(again, unbroken[stop + 4 : stop + 8])


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6), window_blocks=st.integers(1, 30))
def test_examples_come_in_one_order_whatever_the_batch_size(sizes: list[int], window_blocks: int) -> None:
    position, ids = StreamPosition(), []
    for size in sizes:
        [batch] = take(stream(batch_size=size, window_blocks=window_blocks).batches(position), 1)
        ids += batch.example_ids.tolist()
        position = batch.position
    [whole] = take(stream(batch_size=sum(sizes), window_blocks=window_blocks).batches(), 1)
    assert whole.example_ids.tolist() == ids
    assert whole.position == position


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_epoch_has_each_example_once(objective: Objective) -> None:
    first = list(stream(objective).batches(epochs=1))
    assert all(len(batch) == 8 for batch in first[:-1])
    assert first[-1].position == StreamPosition(1, 0, 0, 1.0)
    ids = np.concatenate([batch.example_ids for batch in first])
    assert len(set(ids.tolist())) == len(ids)
    assert ids.min() >= 0
    planner = stream(objective).planner
    plan = planner.plan_blocks(np.arange(planner.corpus.blocks), stream(objective)._key, 0)
    assert sorted(ids.tolist()) == sorted(plan.ids.tolist())
    if objective == "mlm":
        text = np.concatenate([batch.token_ids for batch in first])
        specials = sum(int((batch.token_ids == SEP).sum()) + len(batch) for batch in first)
        assert len(text) - specials == sum(map(sum, DOCUMENTS)), "every token once"


def test_epochs_run_on_without_a_break() -> None:
    endless = take(stream().batches(), 100)
    bounded = list(stream().batches(epochs=2))
    assert all_same(endless[: len(bounded) - 1], bounded[:-1])
    assert bounded[-1].position == StreamPosition(2, 0, 0, 2.0)
    assert len(bounded[-1]) <= 8
    assert not list(stream().batches(StreamPosition(2, 0, 0, 2.0), epochs=2))


def test_the_fraction_of_epochs_rises_evenly() -> None:
    batches = list(stream().batches(epochs=2))
    fractions = [batch.position.fraction for batch in batches]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 2.0
    steps = np.diff([0.0, *fractions[:-1]])
    assert steps.max() < 4 * np.median(steps)
    assert all(int(batch.position.fraction) == batch.position.epoch for batch in batches)


def test_epochs_and_seeds_differ() -> None:
    for objective in OBJECTIVES:
        first, second = (
            all_rows(stream(objective).batches(StreamPosition(epoch), epochs=epoch + 1)) for epoch in (0, 1)
        )
        assert len(first.keys() & second.keys()) < 0.02 * len(first)
        other_seed = all_rows(stream(objective, seed=4).batches(epochs=1))
        assert len(first.keys() & other_seed.keys()) < 0.02 * len(first)
        orders = [[b.example_ids.tolist() for b in stream(objective, seed=seed).batches(epochs=1)] for seed in (3, 4)]
        assert orders[0] != orders[1]


def test_static_masks_repeat_in_another_order() -> None:
    made = stream(masking=MaskingOptions(static=True))
    first, second = (list(made.batches(StreamPosition(epoch), epochs=epoch + 1)) for epoch in (0, 1))
    assert all_rows(first) == all_rows(second)
    assert [b.example_ids.tolist() for b in first] != [b.example_ids.tolist() for b in second]


def test_a_position_of_another_corpus_is_refused() -> None:
    with pytest.raises(UserError, match="window 400"):
        next(stream().batches(StreamPosition(0, 400, 0)))


def test_an_offset_past_a_window_goes_on_with_the_next() -> None:
    # as when a run moves on to longer sequences, whose windows hold fewer examples
    beyond = take(stream().batches(StreamPosition(0, 1, 10_000)), 3)
    assert all_same(beyond, take(stream().batches(StreamPosition(0, 2, 0)), 3))


# --- evaluation


def test_evaluation_is_always_the_same() -> None:
    first = list(stream().evaluation_batches(50))
    assert sum(map(len, first)) == 50
    assert all_same(first, list(stream().evaluation_batches(50)))
    assert all_same(first, list(stream(seed=99).evaluation_batches(50))), "for any seed"
    made = stream()
    take(made.batches(), 12)
    assert all_same(first, list(made.evaluation_batches(50))), "wherever training stands"
    assert all_rows(first) == all_rows(stream().evaluation_batches(50, batch_size=3)), "for any batch size"
    training = all_rows(stream().batches(epochs=1))
    assert not training.keys() & all_rows(first).keys()


def test_evaluation_takes_each_example_once() -> None:
    whole = list(stream().evaluation_batches())
    ids = np.concatenate([batch.example_ids for batch in whole])
    assert len(set(ids.tolist())) == len(ids)
    few = np.concatenate([batch.example_ids for batch in stream().evaluation_batches(13, batch_size=5)])
    assert few.tolist() == ids[:13].tolist()
    assert [len(b) for b in stream().evaluation_batches(13, batch_size=5)] == [5, 5, 3]
    assert sum(map(len, stream().evaluation_batches(10**9))) == len(ids)
    shared = [all_rows(stream().evaluation_batches(50, rank=rank, world_size=3)) for rank in range(3)]
    assert sum(sum(found.values()) for found in shared) == 50


# --- ranks and workers


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_ranks_and_workers_share_the_same_examples(world_size: int, workers: int) -> None:
    expected = all_rows(stream().batches(epochs=2))
    found: dict[tuple[int, ...], int] = {}
    steps = []
    for rank in range(world_size):
        parts = [
            list(stream().batches(rank=rank, world_size=world_size, epochs=2, worker=w, workers=workers))
            for w in range(workers)
        ]
        steps.append(sum(map(len, parts)))
        for row, count in all_rows(itertools.chain(*parts)).items():
            found[row] = found.get(row, 0) + count
    assert found == expected
    assert len(set(steps)) == 1, "every rank takes as many steps"


def test_more_ranks_than_examples() -> None:
    # 10 examples in batches of 2 for 3 ranks: all take 5 steps, the third always with nothing
    split = make_split([[30, 30]] * 10, vocab_size=VOCABULARY)
    shares = [
        list(BatchStream(split, TOKENIZER, "mlm+sop", batch_size=2, short_share=0.0).batches(None, rank, 3, epochs=1))
        for rank in range(3)
    ]
    assert [len(share) for share in shares] == [5, 5, 5]
    assert [sum(map(len, share)) for share in shares] == [5, 5, 0]
    empty = shares[2][0]
    assert empty.sequence_starts.tolist() == [0]
    assert len(empty.token_ids) == len(empty.masked_positions) == empty.max_sequence_length == 0
    assert empty.position == shares[0][0].position
    assert split_batch(empty, 4) == [empty]


def test_a_stream_pickles_small_and_gives_the_same() -> None:
    made = stream()
    expected = take(made.batches(), 5)
    copy = pickle.loads(pickle.dumps(made))
    assert all_same(take(copy.batches(), 5), expected)


# --- wrong input


def test_wrong_options_are_named_together() -> None:
    with pytest.raises(UserError) as caught:
        stream("nsp", max_length=4, batch_size=0, short_share=2.0)  # type: ignore[arg-type]
    for part in ("objective: 'nsp'", "max_length: 4", "batch_size: 0", "short_share: 2.0"):
        assert part in str(caught.value)


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"another tokenizer.*bertsmith prepare"):
        stream(tokenizer=make_tokenizer(VOCABULARY, fingerprint="other"))


def test_token_ids_past_the_vocabulary_are_refused_before_the_model_sees_them() -> None:
    split = make_split([[20] * 10] * 30, vocab_size=VOCABULARY)
    split.shards[0].tokens[2500] = VOCABULARY
    with pytest.raises(UserError, match=rf"token id {VOCABULARY} .*document \d+ of the split"):
        list(stream("mlm", split).batches(epochs=1))
    with pytest.raises(UserError, match="document 13 "):
        list(stream("mlm", split, block_tokens=200, max_length=128).batches(epochs=1))


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(UserError, match="special tokens only"):
        stream(tokenizer=dataclasses.replace(TOKENIZER, replacements=np.zeros(0, dtype=np.int64)))


# --- micro-batches, counts, descriptions


@given(size=st.integers(1, 12))
def test_micro_batches_make_up_the_batch(size: int) -> None:
    [batch] = take(stream().batches(), 1)
    parts = split_batch(batch, size)
    assert [len(part) for part in parts] == [size] * (8 // size) + [8 % size] * bool(8 % size)
    for name in ("token_ids", "segment_ids", "position_ids", "masked_labels", "next_sentence_labels", "example_ids"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(batch, name)), name
    offset = 0
    positions = []
    for part in parts:
        positions += (part.masked_positions + offset).tolist()
        offset += len(part.token_ids)
        assert part.position == batch.position
        assert part.sequence_starts[0] == 0
        assert part.sequence_starts[-1] == len(part.token_ids)
    assert positions == batch.masked_positions.tolist()
    with pytest.raises(UserError, match="micro_batch_size"):
        split_batch(batch, 0)


def test_counts_add_up() -> None:
    counts = BatchCounts()
    batches = list(stream().batches(epochs=1))
    for batch in batches:
        counts.add(batch)
    assert counts.examples == sum(map(len, batches)) == counts.label_0 + counts.label_1
    assert counts.tokens == sum(len(batch.token_ids) for batch in batches)
    assert counts.masked == sum(len(batch.masked_labels) for batch in batches)
    assert counts.tokens_cut == sum(int(batch.tokens_cut.sum()) for batch in batches) > 0
    named = counts.as_dict("mlm+nsp")
    assert named["is next"] + named["random"] == counts.examples
    assert set(counts.as_dict("mlm+sop")) >= {"in order", "swapped", "tokens_cut"}
    assert set(counts.as_dict("mlm")) == {"examples", "tokens", "masked", "tokens_cut"}
    assert BatchCounts(**json.loads(json.dumps(dataclasses.asdict(counts)))) == counts


def test_examples_are_described_in_words() -> None:
    class Names:
        def id_to_token(self, id: int, /) -> str:
            return {CLS: "[CLS]", SEP: "[SEP]", MASK: "[MASK]"}.get(id, f"w{id}")

    [batch] = take(stream().batches(), 1)
    assert batch.next_sentence_labels is not None
    for n in range(len(batch)):
        text = describe_example(batch, n, Names())
        label, _, tokens = text.partition(": ")
        assert label == f"example {batch.example_ids[n]}, {('is next', 'random')[batch.next_sentence_labels[n]]}"
        low, high = batch.sequence_starts[n : n + 2]
        words = tokens.split(" ")
        assert len(words) == high - low
        assert words[0] == "[CLS]"
        assert words[-1] == "[SEP]"
        masked = {int(p - low): f"{{w{i}}}" for p, i in zip(batch.masked_positions, batch.masked_labels, strict=True)}
        for place, word in enumerate(words):
            assert word.partition("{")[1:] == (("{", masked[place][1:]) if place in masked else ("", ""))
    swapped = describe_example(batch, 0, Names(), "mlm+sop")
    assert ", in order: " in swapped or ", swapped: " in swapped
    [plain] = take(stream("mlm").batches(), 1)
    assert describe_example(plain, 0, Names(), "mlm").startswith(f"example {plain.example_ids[0]}: [CLS]")


@pytest.mark.shared_data
def test_real_text(shared_data: Path, tmp_path: Path) -> None:
    """Wikipedia articles: balanced labels, the share of masks, words masked whole, and text that reads on."""
    tokenizer = load_tokenizer(shared_data / "vocabs" / "bert-base-uncased")
    documents = []
    with gzip.open(shared_data / "corpora" / "wiki_en-00.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in itertools.islice(file, 400):
            sentences = re.split(r"(?<=[.!?])\s+", json.loads(line)["text"])
            documents.append([ids for ids in tokenizer.encode_ids([s for s in sentences if s.strip()]) if ids])
    write_corpus(tmp_path / "corpus", tokenizer, {"train": [d for d in documents if d]})
    split = open_corpus(tmp_path / "corpus").split("train")
    made = BatchStream(split, TokenizerInfo.of(tokenizer), max_length=128, masking=MaskingOptions(unit="word"))
    counts = BatchCounts()
    for batch in made.batches(epochs=1):
        counts.add(batch)
        plain = batch.token_ids.copy()
        plain[batch.masked_positions] = batch.masked_labels
        masked = np.zeros(len(plain), dtype=bool)
        masked[batch.masked_positions] = True
        goes_on = np.flatnonzero(tokenizer.continuation[plain])
        inside = goes_on[~np.isin(plain[goes_on - 1], tokenizer.special_ids)]
        assert np.array_equal(masked[inside], masked[inside - 1]), "all pieces of a word or none"
    assert counts.label_1 / counts.examples == pytest.approx(0.5, abs=0.03)
    assert counts.masked / (counts.tokens - 3 * counts.examples) == pytest.approx(0.15, abs=0.003)
    assert counts.tokens_cut < 0.12 * split.tokens
    assert "[MASK]{" in describe_example(batch, 0, tokenizer)
