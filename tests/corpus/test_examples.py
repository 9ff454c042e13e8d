"""Examples: what the paper's procedure promises holds for any corpus, and nothing of the text gets lost uncounted."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_corpus import MadeSplit, make_split, random_documents

from bertsmith.corpus.examples import ExamplePlan, ExamplePlanner, Objective, _cut_rows, _tokens_to_cut
from bertsmith.corpus.windows import CorpusIndex
from bertsmith.errors import UserError

KEY = 12345


@dataclass
class Example:
    """An example with its pieces as ranges of the corpus's tokens (ids of a traceable corpus are numbers of tokens)."""

    id: int
    label: int
    pieces: list[tuple[int, int]]
    tokens_cut: int


@dataclass
class Plans:
    planner: ExamplePlanner
    document_of: np.ndarray  # document of each token
    tokens: int

    def examples(self, epoch: int = 0, key: int = KEY) -> list[Example]:
        corpus = self.planner.corpus
        plan = self.planner.plan_blocks(np.arange(corpus.blocks), key, epoch)
        pieces = self.planner.resolve(plan)
        base = np.cumsum([0, *(len(shard.tokens) for shard in corpus.shards)])
        starts = (base[pieces.shard] + pieces.start).tolist()
        ends = (base[pieces.shard] + pieces.start + pieces.length).tolist()
        return [
            Example(
                int(plan.ids[n]),
                int(plan.label[n]),
                list(zip(starts[low:high], ends[low:high], strict=True)),
                int(pieces.tokens_cut[n]),
            )
            for n, (low, high) in enumerate(zip(pieces.offsets[:-1], pieces.offsets[1:], strict=True))
        ]


def plans(
    documents: list[list[int]],
    objective: Objective,
    max_length: int,
    shards: int = 1,
    block_tokens: int = 1000,
    short_share: float = 0.1,
) -> Plans:
    index = CorpusIndex(make_split(documents, shards), block_tokens)
    totals = [sum(document) for document in documents]
    planner = ExamplePlanner(index, objective, max_length, short_share)
    return Plans(planner, np.repeat(np.arange(len(documents)), totals), sum(totals))


CORPORA = st.lists(
    st.lists(st.one_of(st.integers(1, 30), st.integers(1, 400)), min_size=1, max_size=25), min_size=2, max_size=30
)


@settings(max_examples=60)
@given(
    documents=CORPORA,
    max_length=st.integers(5, 140),
    shards=st.integers(1, 3),
    block_tokens=st.sampled_from([60, 500, 100_000]),
    epoch=st.integers(0, 3),
)
def test_next_sentence_pairs(
    documents: list[list[int]], max_length: int, shards: int, block_tokens: int, epoch: int
) -> None:
    documents = [*documents, [1, 1]]  # so that a pair exists at all
    made = plans(documents, "mlm+nsp", max_length, shards, block_tokens)
    seen = np.zeros(made.tokens, dtype=int)
    cut = 0
    examples = made.examples(epoch)
    for example in examples:
        (a, a_end), (b, b_end) = example.pieces
        assert a < a_end
        assert b < b_end
        assert a_end - a + b_end - b <= max_length - 3
        document = made.document_of[a]
        assert made.document_of[a_end - 1] == document
        assert made.document_of[b] == made.document_of[b_end - 1]
        seen[a:a_end] += 1
        cut += example.tokens_cut
        if example.label == 0:
            assert made.document_of[b] == document
            assert 0 <= b - a_end <= example.tokens_cut, "the second segment follows the first, save for what was cut"
            seen[b:b_end] += 1
        else:
            assert made.document_of[b] != document, "a random next never comes from the same document"
    # every token is in the running text of one example, or counted as cut
    assert seen.max() <= 1
    assert seen.sum() + cut == made.tokens
    assert len({example.id for example in examples}) == len(examples)


@settings(max_examples=60)
@given(
    documents=CORPORA,
    max_length=st.integers(5, 140),
    shards=st.integers(1, 3),
    block_tokens=st.sampled_from([60, 500, 100_000]),
)
def test_sentence_order_pairs(documents: list[list[int]], max_length: int, shards: int, block_tokens: int) -> None:
    made = plans([*documents, [2, 1]], "mlm+sop", max_length, shards, block_tokens)
    seen = np.zeros(made.tokens, dtype=int)
    cut = 0
    for example in made.examples():
        (a, a_end), (b, b_end) = sorted(example.pieces)
        assert (example.pieces[0] > example.pieces[1]) == bool(example.label), "label 1 means swapped"
        assert a < a_end <= b < b_end
        assert b - a_end <= example.tokens_cut
        assert a_end - a + b_end - b <= max_length - 3
        assert made.document_of[a] == made.document_of[b_end - 1]
        seen[a:a_end] += 1
        seen[b:b_end] += 1
        cut += example.tokens_cut
    assert seen.max() <= 1
    assert seen.sum() + cut == made.tokens


@settings(max_examples=60)
@given(
    documents=CORPORA,
    max_length=st.integers(3, 140),
    shards=st.integers(1, 3),
    block_tokens=st.sampled_from([60, 500, 100_000]),
)
def test_rows_hold_every_token_once(
    documents: list[list[int]], max_length: int, shards: int, block_tokens: int
) -> None:
    made = plans(documents, "mlm", max_length, shards, block_tokens)
    corpus = made.planner.corpus
    rows = sorted(made.examples(), key=lambda example: example.pieces[0])
    position = 0
    not_full = 0
    for row in rows:
        for start, end in row.pieces:
            assert start == position < end
            assert made.document_of[start] == made.document_of[end - 1], "a [SEP] stands between documents"
            position = end
        length = 1 + sum(end - start + 1 for start, end in row.pieces)
        assert length <= max_length
        ends_document = position == made.tokens or made.document_of[position - 1] != made.document_of[position]
        assert length >= max_length - 1 or length < max_length
        if length == max_length - 1 and ends_document:
            continue  # one more token would have been the [SEP] before the next document
        not_full += length < max_length
        assert row.tokens_cut == 0
    assert position == made.tokens
    assert not_full <= corpus.blocks, "only the last row of a block is shorter"


@given(first=st.integers(1, 300), second=st.integers(1, 300), room=st.integers(2, 200))
def test_truncation_is_the_references(first: int, second: int, room: int) -> None:
    a, b = first, second
    while a + b > room:  # truncate_seq_pair
        if a > b:
            a -= 1
        else:
            b -= 1
    cut_a, cut_b = _tokens_to_cut(np.array([first]), np.array([second]), room)
    assert (first - cut_a[0], second - cut_b[0]) == (a, b)


def test_truncation_takes_from_front_and_back() -> None:
    made = plans([[100, 100]] * 400, "mlm+sop", 153, short_share=0.0)
    fronts, backs = [], []
    for example in made.examples():
        (a, a_end), (_, b_end) = sorted(example.pieces)
        assert (a_end - a, example.tokens_cut) == (75, 50)
        fronts.append(a % 200)
        backs.append(-b_end % 200)
    for lost in (fronts, backs):
        assert np.mean(lost) == pytest.approx(12.5, abs=0.6)  # half of 25 coins
        assert np.std(lost) == pytest.approx(2.5, rel=0.15)


# --- the paper's procedure, written out plainly, to compare statistics with


def reference_pairs(
    documents: list[list[int]], max_length: int, chance: float, generator: random.Random
) -> list[tuple[int, int, int]]:
    """(label, tokens of A, tokens of B) of create_instances_from_document, with a target drawn for each pair."""
    pairs = []
    room = max_length - 3
    for number, document in enumerate(documents):
        i = 0
        while i < len(document):
            target = generator.randint(2, room) if generator.random() < 0.1 else room
            chunk: list[int] = []
            while i < len(document) and sum(chunk) < target:
                chunk.append(document[i])
                i += 1
            a_end = generator.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
            a, b = sum(chunk[:a_end]), 0
            label = int(len(chunk) == 1 or generator.random() < chance)
            if label:
                other = number
                while other == number:
                    other = generator.randrange(len(documents))
                for length in documents[other][generator.randrange(len(documents[other])) :]:
                    b += length
                    if b >= target - a:
                        break
                i -= len(chunk) - a_end
            else:
                b = sum(chunk[a_end:])
            while a + b > room:
                a, b = (a - 1, b) if a > b else (a, b - 1)
            pairs.append((label, a, b))
    return pairs


@pytest.mark.parametrize("max_length", [64, 128])
@pytest.mark.parametrize("balanced", [False, True])
def test_statistics_are_those_of_the_papers_procedure(max_length: int, balanced: bool) -> None:
    documents = random_documents(1500, sentences=40)
    made = plans(documents, "mlm+nsp", max_length, block_tokens=30_000)
    if not balanced:
        made.planner.random_chance = 0.5
    chance = made.planner.random_chance
    generator = random.Random(0)
    expected = np.array([p for _ in range(3) for p in reference_pairs(documents, max_length, chance, generator)])
    found = np.array(
        [
            (e.label, e.pieces[0][1] - e.pieces[0][0], e.pieces[1][1] - e.pieces[1][0])
            for epoch in range(3)
            for e in made.examples(epoch)
        ]
    )
    assert len(found) == pytest.approx(len(expected), rel=0.02)
    assert found[:, 0].mean() == pytest.approx(expected[:, 0].mean(), abs=0.015)
    for label in (0, 1):
        for column in (1, 2):
            ours, theirs = (rows[rows[:, 0] == label, column] for rows in (found, expected))
            assert ours.mean() == pytest.approx(theirs.mean(), rel=0.03)
            assert ours.std() == pytest.approx(theirs.std(), rel=0.05)
    if balanced:
        assert found[:, 0].mean() == pytest.approx(0.5, abs=0.015)
    else:
        assert found[:, 0].mean() > 0.52, "a fair coin leaves more random pairs than true ones"


# --- labels, order, epochs


@pytest.mark.parametrize("sentences", [2, 3, 8])
def test_labels_are_balanced_even_in_short_documents(sentences: int) -> None:
    made = plans([[20] * sentences] * 1000, "mlm+nsp", 128)
    labels = [example.label for epoch in range(2) for example in made.examples(epoch)]
    assert np.mean(labels) == pytest.approx(0.5, abs=0.03)
    assert made.planner.expected_random_share == pytest.approx(0.5, abs=0.02)


def test_two_thousand_templated_sentences() -> None:
    made = plans([[12] * 40] * 50, "mlm+nsp", 64)
    for epoch in range(2):
        examples = made.examples(epoch)
        assert np.mean([example.label for example in examples]) == pytest.approx(0.5, abs=0.06)
        first = [example.pieces[0] for example in examples]
        assert len(set(first)) == len(first)


def test_swaps_are_balanced() -> None:
    labels = [example.label for example in plans([[20] * 30] * 300, "mlm+sop", 128).examples()]
    assert np.mean(labels) == pytest.approx(0.5, abs=0.05)


def test_a_tenth_of_the_pairs_is_short() -> None:
    shares = []
    for short_share in (0.1, 0.0):
        made = plans([[5] * 4000] * 10, "mlm+sop", 203, block_tokens=100_000, short_share=short_share)
        lengths = np.array([sum(end - start for start, end in example.pieces) for example in made.examples()])
        shares.append((lengths < 200).mean())
    assert shares[0] == pytest.approx(0.1, abs=0.025)
    assert shares[1] < 0.01


def test_random_segments_come_from_everywhere() -> None:
    documents = random_documents(40, sentences=10)
    made = plans(documents, "mlm+nsp", 64, shards=3)
    found = {
        made.document_of[example.pieces[1][0]]
        for epoch in range(20)
        for example in made.examples(epoch)
        if example.label == 1
    }
    assert len(found) == 40


def test_epochs_and_seeds_differ_and_repeat() -> None:
    made = plans(random_documents(50), "mlm+nsp", 64)
    assert made.examples(1) == made.examples(1)
    assert made.examples(0) != made.examples(1)
    assert made.examples(0, key=1) != made.examples(0, key=2)


def test_a_block_is_planned_alike_alone_and_among_others() -> None:
    planner = plans(random_documents(60), "mlm+nsp", 64).planner
    everything = planner.plan_blocks(np.arange(planner.corpus.blocks), KEY, 2)
    for block in range(planner.corpus.blocks):
        alone = planner.plan_blocks(np.array([block]), KEY, 2)
        rows = np.flatnonzero(everything.ids >> 24 == block)
        among = everything.take(rows)
        for name in ("ids", "keys", "shard", "start", "first_length", "second_length", "label", "target", "document"):
            assert np.array_equal(getattr(alone, name), getattr(among, name)), name


# --- corpora of odd shape


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm+sop"])
def test_documents_of_one_sentence_are_refused(objective: Objective) -> None:
    with pytest.raises(UserError, match=r"30 documents, mean 1\.0 sentences"):
        plans([[9]] * 30, objective, 128)


def test_one_document_has_no_random_next() -> None:
    with pytest.raises(UserError, match=r"from another document.*1 documents, mean 50\.0 sentences"):
        plans([[9] * 50], "mlm+nsp", 128)
    assert plans([[9] * 50], "mlm+sop", 128).examples()
    assert plans([[9] * 50], "mlm", 128).examples()


def test_one_document_with_random_segments_from_elsewhere() -> None:
    held_out, train = make_split([[9] * 80]), make_split([[3] * 20] * 10)
    planner = ExamplePlanner(CorpusIndex(held_out), "mlm+nsp", 64, random_corpus=CorpusIndex(train))
    plan = planner.plan_blocks(np.arange(1), KEY, 0)
    pieces = planner.resolve(plan)
    second = pieces.shard[1::2]
    assert set(plan.label.tolist()) == {0, 1}
    assert np.array_equal(second == 1, plan.label == 1)  # shard 1 is the first of the other corpus
    assert (pieces.start[1::2] + pieces.length[1::2])[plan.label == 1].max() <= 600


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(UserError, match="no documents"):
        CorpusIndex(MadeSplit([]))


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm+sop"])
def test_a_line_of_five_thousand_words_is_all_used(objective: Objective) -> None:
    made = plans([[5000], [7000], [20, 20]], objective, 128)
    examples = made.examples()
    own = sum(
        end - start
        for example in examples
        for start, end in (example.pieces[:1] if (objective, example.label) == ("mlm+nsp", 1) else example.pieces)
    )
    assert own > 0.9 * made.tokens, "pieces of the long line make pairs; the reference would use 125 tokens of it"
    assert own + sum(example.tokens_cut for example in examples) == made.tokens
    assert all(sum(end - start for start, end in example.pieces) <= 125 for example in examples)
    assert {example.label for example in examples} == {0, 1}


def test_long_sentences_alone_make_pairs() -> None:
    # documents of one sentence each, but long enough to be cut in pieces that follow each other
    labels = [example.label for example in plans([[500]] * 40, "mlm+nsp", 64).examples()]
    assert np.mean(labels) == pytest.approx(0.5, abs=0.1)


def test_single_tokens_have_no_order_and_are_counted() -> None:
    made = plans([[1], [8, 8], [1], [1], [8, 8], [1]], "mlm+sop", 128, short_share=0.0)
    examples = made.examples()
    assert len(examples) == 2
    assert sum(example.tokens_cut for example in examples) == 4


def test_mostly_single_sentences_give_as_many_true_pairs_as_there_can_be() -> None:
    made = plans([[20]] * 900 + [[20, 20]] * 100, "mlm+nsp", 128)
    assert made.planner.random_chance < 0.01
    assert made.planner.expected_random_share == pytest.approx(0.9, abs=0.02)
    [warning] = made.planner.warnings()
    assert warning.startswith("90% of the pairs")
    assert "1,000 documents, mean 1.1 sentences" in warning
    assert plans([[20] * 5] * 100, "mlm+nsp", 128).planner.warnings() == []


# --- blocks


@settings(max_examples=60)
@given(documents=CORPORA, shards=st.integers(1, 3), block_tokens=st.integers(2, 2000))
def test_blocks_divide_the_corpus(documents: list[list[int]], shards: int, block_tokens: int) -> None:
    index = CorpusIndex(make_split(documents, shards), block_tokens)
    assert int((index.block_end - index.block_start).sum()) == index.tokens == sum(map(sum, documents))
    table = index.sentence_table(np.arange(index.blocks), room=10_000)
    assert table.length.tolist() == [length for document in documents for length in document]
    assert table.document.tolist() == [d for d, document in enumerate(documents) for _ in document]
    assert index.sentences == len(table.length)


def test_documents_stay_whole_unless_they_are_long() -> None:
    index = CorpusIndex(make_split([[10] * 5] * 200 + [[10] * 1000]), block_tokens=1000)
    boundaries = index.block_start.tolist()
    assert all(start % 50 == 0 for start in boundaries if start < 10_000)
    assert len([start for start in boundaries if start >= 10_000]) >= 9, "the long document is cut"
    sizes = index.block_end - index.block_start
    assert sizes.max() <= 1500


def test_windows_of_an_epoch_hold_each_block_once() -> None:
    index = CorpusIndex(make_split(random_documents(200)), block_tokens=500, window_blocks=7)
    orders = []
    for epoch in (0, 1):
        order = np.concatenate([index.window(KEY, epoch, window) for window in range(index.windows)])
        assert sorted(order.tolist()) == list(range(index.blocks))
        orders.append(order.tolist())
    assert orders[0] != orders[1]
    assert index.window(KEY, 0, 1).tolist() == orders[0][7:14]


def test_sums_of_an_enormous_document_are_kept() -> None:
    index = CorpusIndex(make_split([[1] * 70_000, [2] * 3], vocab_size=100))
    first = index.sentence_offsets(0, 0)
    assert index.sentence_offsets(0, 0) is first
    assert first.tolist() == list(range(70_001))
    assert index.sentence_offsets(0, 1).tolist() == [70_000, 70_002, 70_004, 70_006]


@given(
    length=st.integers(1, 300), starts=st.sets(st.integers(1, 299)), room=st.integers(1, 50), base=st.integers(0, 1000)
)
def test_rows_are_as_long_as_they_can_be(length: int, starts: set[int], room: int, base: int) -> None:
    inside = sorted(base + s for s in starts if s < length)
    cuts = _cut_rows(base, base + length, inside, room)
    assert cuts[0] == base
    assert cuts[-1] == base + length

    def size(start: int, end: int) -> int:
        return end - start + sum(start < s < end for s in inside)

    for start, end in itertools.pairwise(cuts):
        assert 0 < size(start, end) <= room
        assert end == base + length or size(start, end + 1) > room


def test_plans_can_be_joined_and_picked_from() -> None:
    planner = plans(random_documents(30), "mlm+nsp", 64).planner
    plan = planner.plan_blocks(np.arange(planner.corpus.blocks), KEY, 0)
    joined = ExamplePlan.concatenate([plan.take(slice(0, 5)), plan.take(np.arange(5, len(plan)))])
    assert np.array_equal(joined.ids, plan.ids)
    assert np.array_equal(joined.start, plan.start)
