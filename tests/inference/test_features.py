"""Vectors: of the layers asked for, pooled as said, one a text, token or word, in order, and what is cut is counted."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import WORDS, make_encoder

from bertsmith.errors import UserError
from bertsmith.inference import features
from bertsmith.inference.encoder import InferenceBert, Sequences
from bertsmith.inference.features import FeatureExtractor, FeatureOptions, parse_layers
from bertsmith.inference.loaded import LoadedModel

ENCODER = make_encoder()
TEXTS = ["the cat sat on a mat.", "", "running, seer!", "zzz 12 the", "a", "the old house " * 40]


def extract(texts: list, **options) -> list[np.ndarray]:
    """The vectors of each text, (rows, d), and nothing left to add up."""
    extractor = FeatureExtractor(ENCODER, FeatureOptions(**options))
    found = extractor.extract(texts, [f"text {n}" for n in range(len(texts))])
    assert found.rows.dtype == np.float32
    assert found.rows.shape[1] == extractor.dimension
    counts = np.ones(len(texts), dtype=int) if found.counts is None else found.counts
    assert counts.sum() == len(found.rows)
    return np.split(found.rows, np.cumsum(counts)[:-1])


def hidden_states(text: str) -> np.ndarray:
    """(levels, tokens, H) of a text that fits."""
    ids = [ENCODER.tokenizer.cls_id, *ENCODER.tokenizer.encode_ids([text])[0], ENCODER.tokenizer.sep_id]
    return ENCODER.hidden_states(Sequences.join([ids]), range(4))[0]


@pytest.mark.parametrize(("layers", "levels"), [("-1", [3]), ("0", [0]), ("-2:", [2, 3]), ("-1,1", [3, 1])])
@pytest.mark.parametrize("combine", ["concat", "sum", "mean"])
@pytest.mark.parametrize("pool", ["mean", "cls", "none"])
def test_layers_pooling_and_combination(layers: str, levels: list[int], combine: str, pool: str) -> None:
    found = extract(TEXTS, layers=layers, combine=combine, pool=pool)
    for text, rows in zip(TEXTS, found, strict=True):
        states = hidden_states(text)[levels]
        pooled = {"mean": states.mean(1, keepdims=True), "cls": states[:, :1], "none": states}[
            pool
        ]  # (levels, rows, H)
        expected = np.concatenate(list(pooled), axis=1) if combine == "concat" else getattr(pooled, combine)(0)
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)


def test_pooler() -> None:
    for text, rows in zip(TEXTS, extract(TEXTS, pool="pooler"), strict=True):
        expected = ENCODER.bert.pooler(torch.from_numpy(hidden_states(text)[3, :1])).numpy()
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="never trained"):
        FeatureExtractor(ENCODER, FeatureOptions(pool="pooler"), "x: never trained")


def test_words_are_the_mean_of_their_pieces() -> None:
    sentences = ["the running cat", ["the", "running", "cat"], ["\U000fe4fa", "river12", "a"], [], "  "]
    found = extract(sentences, words=True)
    assert [len(rows) for rows in found] == [3, 3, 3, 0, 0]
    np.testing.assert_array_equal(found[0], found[1])
    pieces = hidden_states("the running cat")[3]  # [CLS] the r ##u ##n ##n ##ing cat [SEP], or so
    (counts,) = [[len(ids) for ids in ENCODER.tokenizer.encode_words(["the", "running", "cat"])]]
    assert counts[1] > 1
    ends = np.cumsum(counts) + 1
    expected = [pieces[end - count : end].mean(0) for end, count in zip(ends, counts, strict=True)]
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)


@st.composite
def lists_of_texts(draw: st.DrawFn) -> list[str]:
    seed, count = draw(st.integers(0, 10_000)), draw(st.integers(1, 12))
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.choice([0, 1, 3, 9, 40, 130]))) for _ in range(count)]


@settings(max_examples=20)
@given(texts=lists_of_texts(), data=st.data())
def test_alone_or_in_a_batch_the_same(texts: list[str], data: st.DataObject) -> None:
    options = {
        "pool": data.draw(st.sampled_from(["mean", "cls", "none"])),
        "layers": data.draw(st.sampled_from(["-1", ":2", "-1,0"])),
        "long": data.draw(st.sampled_from(["cut", "window"])),
        "max_length": data.draw(st.sampled_from([None, 12, 64])),
        "normalize": data.draw(st.booleans()),
    }
    if data.draw(st.booleans()):
        options |= {"words": True, "pool": "mean", "long": None}
    together = extract(texts, **options)
    for text, rows in zip(texts, together, strict=True):
        (alone,) = extract([text], **options)
        np.testing.assert_allclose(rows, alone, rtol=0, atol=1e-5)
        if options["normalize"] and len(rows):
            np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 5000])
@pytest.mark.parametrize("long", ["cut", "window"])
def test_texts_of_any_length(tokens: int, long: str) -> None:
    text = "the " * (tokens - 2) if tokens > 2 else ""
    for options in ({}, {"pool": "none"}, {"words": True, "long": None}):
        extractor = FeatureExtractor(ENCODER, FeatureOptions(**({"long": long} | options)))
        found = extractor.extract([text, "a cat"], ["x", "y"])
        cut = max(0, tokens - 512) if extractor.long == "cut" else 0
        assert extractor.report.truncated == (cut > 0)
        assert extractor.report.truncated_tokens == cut
        assert extractor.report.windowed == (tokens > 512 and extractor.long == "window")
        assert extractor.report.tokens == max(tokens - 2, 0) + 2
        if found.counts is not None:
            kept = max(tokens - 2, 0) - cut
            assert found.counts.tolist() == ([kept, 2] if options.get("words") else [kept + 2, 4])
        assert np.isfinite(found.rows).all()


def test_windows_give_each_token_its_vector_from_where_it_has_the_most_context() -> None:
    text = " ".join(random.Random(3).choices(WORDS, k=30))
    ids = ENCODER.tokenizer.encode_ids([text])[0]
    extractor = FeatureExtractor(ENCODER, FeatureOptions(pool="none", max_length=12, long="window"))
    found = extractor.extract([text], ["x"])
    cls, sep = ENCODER.tokenizer.cls_id, ENCODER.tokenizer.sep_id
    assert found.token_ids is not None
    assert found.token_ids.tolist() == [cls, *ids, sep]

    def window(start: int) -> np.ndarray:
        return ENCODER.hidden_states(Sequences.join([[cls, *ids[start : start + 10], sep]]), [3])[0][0]

    # windows start at 0, 5, 10, 15 and 20; row 0 is [CLS], so that row 8 is the eighth token, which has two tokens on
    # its shorter side in the first window and in the second: the earlier one counts
    np.testing.assert_allclose(found.rows[:9], window(0)[:9], atol=1e-5)
    np.testing.assert_allclose(found.rows[9:14], window(5)[4:9], atol=1e-5)
    np.testing.assert_allclose(found.rows[24:], window(20)[4:], atol=1e-5)


def test_windows_of_a_text_are_averaged() -> None:
    text = " ".join(random.Random(3).choices(WORDS, k=25))
    words = text.split()
    (found,) = extract([text], max_length=12, long="window")
    windows = [" ".join(words[start : start + 10]) for start in (0, 7, 15)]  # as spread_windows lays them
    expected = np.mean([extract([window])[0] for window in windows], axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_words_longer_than_a_window_are_cut_and_counted() -> None:
    extractor = FeatureExtractor(ENCODER, FeatureOptions(words=True, max_length=6))
    found = extractor.extract([["cat", "zzzzzzzzz", "dog"], ["cat"]], ["x", "y"])
    assert found.counts is not None
    assert found.counts.tolist() == [3, 1]
    assert (extractor.report.truncated, extractor.report.truncated_tokens, extractor.report.tokens) == (1, 5, 12)


def test_long_texts_can_be_refused_by_name() -> None:
    extractor = FeatureExtractor(ENCODER, FeatureOptions(long="refuse", max_length=8))
    extractor.extract(["the cat sat on a mat"], ["f:1"])
    with pytest.raises(UserError, match=r"f:2 \(9\), f:4 \(12\): more tokens than 8; shorten"):
        extractor.extract(["a", "the " * 7, "the " * 6, "the " * 10], ["f:1", "f:2", "f:3", "f:4"])


def test_what_a_user_types_is_text_unless_special_tokens_are_allowed() -> None:
    (plain,), (special,), (spaced,) = (
        extract([text], pool="none", allow_special=allowed)
        for text, allowed in (("cat [SEP] dog", False), ("cat [SEP] dog", True), ("cat [ sep ] dog", False))
    )
    np.testing.assert_allclose(plain, spaced, atol=1e-5)
    assert len(special) == 5 < len(plain)
    (word,) = extract([["cat", "[SEP]"]], words=True, allow_special=True)
    assert len(word) == 2


@given(layers=st.integers(1, 24), data=st.data())
def test_layers_are_read_as_python_reads_them(layers: int, data: st.DataObject) -> None:
    level = st.integers(-layers - 1, layers)
    numbers = data.draw(st.lists(level, min_size=1, max_size=5))
    every = list(range(layers + 1))
    assert parse_layers(",".join(map(str, numbers)), layers) == [every[number] for number in numbers]
    first, last = data.draw(st.none() | level), data.draw(st.none() | level)
    text = f"{'' if first is None else first}:{'' if last is None else last}"
    if every[first:last]:
        assert parse_layers(text, layers) == every[first:last]
    else:
        with pytest.raises(UserError, match="is not in this model"):
            parse_layers(text, layers)


@pytest.mark.parametrize("layers", ["4", "-5", "1,9", "-9:", "3:2"])
def test_layers_that_are_not_there_are_refused_with_those_that_are(layers: str) -> None:
    with pytest.raises(UserError, match=rf"layers: {layers} is not in this model, which has 0 .* to 3, or -1 .* to -4"):
        FeatureExtractor(ENCODER, FeatureOptions(layers=layers))


@pytest.mark.parametrize("layers", ["", "last", "1:2:3", "1,,2", "1.5", ":,1", "--1"])
def test_what_names_no_layers_is_refused(layers: str) -> None:
    with pytest.raises(UserError, match="is no level, list"):
        parse_layers(layers, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": True, "pool": "cls"}, "pool cls contradicts"),
        ({"words": True, "long": "cut"}, "words would have no vector"),
        ({"pool": "pooler", "layers": "-2"}, "-2 contradicts pool pooler"),
        ({"pool": "max"}, "pool: 'max' is not known; use one of mean, cls, none, pooler"),
        ({"combine": "max"}, "combine: 'max' is not known"),
        ({"long": "skip"}, "long: 'skip' is not known"),
        ({"max_length": 2}, "2 is not between 3 and the model's 512"),
        ({"max_length": 513}, "513 is not between 3 and the model's 512"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FeatureExtractor(ENCODER, FeatureOptions(**options))


def test_a_list_of_words_is_no_text() -> None:
    with pytest.raises(UserError, match=r"text 1: is a list, not a text"):
        extract(["a", ["b"]])


def test_chunks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [(f"t{n}", "the cat " * (n % 7)) for n in range(50)]
    monkeypatch.setattr(features, "TEXTS_AT_ONCE", 8)
    chunks = list(FeatureExtractor(ENCODER, FeatureOptions()).chunks(texts))
    assert [len(chunk.rows) for chunk in chunks] == [8] * 6 + [2]
    whole = extract([text for _, text in texts])
    np.testing.assert_allclose(np.concatenate([chunk.rows for chunk in chunks]), np.concatenate(whole), atol=1e-5)
    monkeypatch.setattr(features, "_BYTES_AT_ONCE", 4 * 48 * 60)  # 60 vectors
    chunks = list(FeatureExtractor(ENCODER, FeatureOptions(pool="none")).chunks(texts))
    assert max(len(chunk.rows) for chunk in chunks) <= 60
    assert sum(len(chunk.counts) for chunk in chunks if chunk.counts is not None) == 50


def test_progress_goes_by_tokens() -> None:
    """Half of the texts hold nearly all of the tokens, and come first: they are nearly all of the way."""
    texts = [(f"t{n}", "the cat " * 30 if n % 2 else "") for n in range(1200)]
    extractor, done = FeatureExtractor(ENCODER, FeatureOptions()), [0.0]
    extractor.on_rows = lambda rows: done.append(done[-1] + rows)
    next(extractor.chunks(texts))
    assert len(done) > 4
    assert done[-1] == pytest.approx(1200)
    assert done[-2] > 0.9 * 1200


def test_mean_pooling_is_that_of_sentence_transformers_by_definition(minilm: LoadedModel) -> None:
    """The mean over the attention mask of the last hidden state, computed by transformers for a padded batch."""
    transformers = pytest.importorskip("transformers")
    texts = ["A man is eating food.", "", "Unaffable naïve café — it's 3.14%!", "日本語と English 🙂", "long " * 300]
    folder = minilm.folder
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    with torch.inference_mode():
        hidden = transformers.AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    expected = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    np.testing.assert_allclose(minilm.embed(texts, max_length=256), expected, rtol=0, atol=1e-5)
    normalized = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(minilm.embed(texts, max_length=256, normalize=True), normalized, rtol=0, atol=1e-5)


@pytest.mark.shared_data
def test_layers_of_minilm_are_the_golden_ones(shared_data: Path, minilm: LoadedModel) -> None:
    golden = np.load(shared_data / "golden" / "minilm_l6_hidden_states.npz")
    texts = json.loads((shared_data / "golden" / "minilm_l6_texts.json").read_text(encoding="utf-8"))
    single = [n for n, text in enumerate(texts) if text["b"] is None]
    found = minilm.embed([texts[n]["a"] for n in single], "-4:", pool="none", max_length=128, allow_special=True)
    for n, rows in zip(single, found, strict=True):
        expected = np.concatenate([golden[f"hidden_{level}"][n, : len(rows)] for level in (3, 4, 5, 6)], axis=1)
        assert len(rows) == len(texts[n]["input_ids"])
        np.testing.assert_allclose(rows, expected, rtol=0, atol=2e-5)


def test_vectors_that_are_no_numbers_are_refused() -> None:
    encoder = make_encoder()
    encoder.bert.encoder.layer[1].output.weight.fill_(float("nan"))
    encoder.bert = InferenceBert(encoder.bert, torch.float32)  # lays the weights out again
    with pytest.raises(UserError, match="text 1 and on: the model's vectors are not finite numbers"):
        FeatureExtractor(encoder, FeatureOptions()).extract(["the cat"], ["text 1"])
