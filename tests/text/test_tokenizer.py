"""Token ids equal Google's rules, the quick way equals the library, offsets point into what was typed."""

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers

from bertsmith.errors import UserError
from bertsmith.text import tokenizer as tokenizer_module
from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer, load_tokenizer
from bertsmith.text.words import Normalization, WordSplitter, split_at_blanks

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(*words: str, lowercase: bool = True, strip_accents: bool | None = None) -> BertTokenizer:
    """A tokenizer that spells anything in ASCII, knows `words`, and little else."""
    characters = LETTERS + LETTERS.upper() + "0123456789.,;!?[]()-'\"<>/+=éèíçñüが中文國、。“”"
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *words, *characters, *("##" + c for c in characters)])
    return BertTokenizer(list(tokens), Normalization(lowercase, strip_accents))


# -- the reference: Google's tokenization.py, written again from its description --------------------------------------


def is_punctuation(character: str) -> bool:
    return (33 <= ord(character) < 127 and not character.isalnum()) or unicodedata.category(character).startswith("P")


def reference_words(text: str, lowercase: bool) -> list[str]:
    cleaned = []
    for character in text:
        if character in " \t\n\r" or unicodedata.category(character) == "Zs":
            cleaned.append(" ")
        elif character == "\ufffd" or unicodedata.category(character).startswith("C"):
            continue
        elif any(low <= ord(character) <= high for low, high in ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF))):
            cleaned.append(f" {character} ")
        else:
            cleaned.append(character)
    words = []
    for token in "".join(cleaned).split():
        if lowercase:
            decomposed = unicodedata.normalize("NFD", token.lower())
            token = "".join(character for character in decomposed if unicodedata.category(character) != "Mn")
        words += "".join(f" {c} " if is_punctuation(c) else c for c in token).split()
    return words


def reference_ids(words: list[str], vocabulary: dict[str, int]) -> list[int]:
    ids = []
    for word in words:
        pieces, start = [], 0
        while start < len(word) <= 100:
            end = len(word)
            while end > start and ("##" if start else "") + word[start:end] not in vocabulary:
                end -= 1
            if end == start:
                break
            pieces.append(vocabulary[("##" if start else "") + word[start:end]])
            start = end
        ids += pieces if start == len(word) else [vocabulary["[UNK]"]]
    return ids


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("vocabulary", "corpus", "lowercase"),
    [
        ("bert-base-uncased", "wiki_en-00", True),
        ("bert-base-cased", "books_en-00", False),
        ("bert-base-chinese", "zh_wiki-00", True),
        ("bert-base-multilingual-cased", "eltec_fr-00", False),
        ("bert-base-multilingual-cased", "debian_docs_ar-00", False),
        ("bert-base-multilingual-cased", "debian_docs_ja-00", False),
        ("bert-base-uncased", "debian_docs_ja-00", True),
    ],
)
def test_equals_the_reference_on_real_text(shared_data: Path, vocabulary: str, corpus: str, lowercase: bool) -> None:
    tokenizer = load_tokenizer(shared_data / "vocabs" / vocabulary / "vocab.txt")
    assert tokenizer.lowercase is lowercase
    known = {token: index for index, token in enumerate(tokenizer.tokens)}
    with gzip.open(shared_data / "corpora" / f"{corpus}.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"][:20_000] for line, _ in zip(file, range(40), strict=False)]
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n")]
    differing = [
        paragraph
        for paragraph, ids in zip(paragraphs, tokenizer.encode_ids(paragraphs), strict=True)
        if ids != reference_ids(reference_words(paragraph, lowercase), known)
    ]
    # One known difference, that of every `tokenizers`-based BERT: lower-casing by letter has no final sigma.
    assert [paragraph for paragraph in differing if "Σ" not in paragraph] == []
    assert len(paragraphs) > 100


# -- the quick way and the library ------------------------------------------------------------------------------------

AWKWARD = (
    "\x00\x01\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x7f\x85\xa0\xad\u1680\u2003\u200b\u200d\u2028\u2029\u3000"
    "\ufeff\ufffd\ue000"
    "\u0301\u0323\u0345\u302e\u3099がガ中國𠀀𪛟豈한글\u1100\u1161ΣσςİıßﬁǅÅÅ😀👍🏽。、，“”‘’—…（）・「」＄＋abzABZ09.,;[]##'"
    "\U000fe4fa\U0001d165\U0001d16d"
)
texts = st.text(st.one_of(st.sampled_from(AWKWARD), st.characters(exclude_categories=["Cs"])), max_size=60)
normalizations = st.builds(
    Normalization, st.booleans(), st.sampled_from([None, True, False]), st.booleans(), st.sampled_from([3, 100])
)


@settings(max_examples=400)
@given(texts, normalizations)
def test_cutting_text_first_gives_the_librarys_words(text: str, normalization: Normalization) -> None:
    splitter = WordSplitter(normalization)
    library = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalization.normalizer().normalize_str(text))
    expected = [word for word, _ in library]
    pieces = split_at_blanks(text)
    assert [word for piece in pieces for word in splitter.words(piece)] == expected
    parts = [part for piece in pieces for part in splitter.split_runs(piece)]
    assert [word for part in parts for word in splitter.words(part)] == expected


@settings(max_examples=300)
@given(st.lists(texts, max_size=5), normalizations, st.booleans())
def test_quick_ids_equal_the_librarys(several: list[str], normalization: Normalization, allow_special: bool) -> None:
    characters = sorted({c for c in AWKWARD.lower() + AWKWARD if c.isprintable() and c != " "})
    tokens = [*SPECIAL_TOKENS, *characters, *("##" + c for c in characters), "ab", "##zab", "abza", "[se", "##"]
    tokenizer = BertTokenizer(list(dict.fromkeys(tokens)), normalization)
    several = [text.replace("😀", "[SEP]") for text in several]
    expected = [tokenizer.encode(text, allow_special).ids for text in several]
    assert tokenizer.encode_ids(several, allow_special) == expected
    assert tokenizer.encode_ids(several, allow_special) == expected  # now out of the cache
    ids, counts = tokenizer.encode_flat(several, allow_special)
    assert ids.tolist() == [index for one in expected for index in one]
    assert counts.tolist() == [len(one) for one in expected]


def test_ids_do_not_depend_on_what_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"{word}{index % 7}, {word}s" for index, word in enumerate(["cat", "dog", "Éclair", "中文"] * 50))
    expected = make_tokenizer("cat", "##s").encode_ids([text])
    monkeypatch.setattr(tokenizer_module, "_CACHE_ENTRIES", 3)
    small = make_tokenizer("cat", "##s")
    assert small.encode_ids([text]) == expected
    assert len(small._cache) <= 3


def test_ids_are_stored_in_as_few_bytes_as_their_number_allows() -> None:
    few = BertTokenizer([*SPECIAL_TOKENS, *(f"w{i}" for i in range(65_530))])
    many = BertTokenizer([*SPECIAL_TOKENS, *(f"w{i}" for i in range(65_531))])
    assert few.encode_flat(["w0 w65529"])[0].dtype == np.uint16
    assert many.encode_flat(["w0 w65530"])[0].dtype == np.uint32
    assert few.encode_ids(["w0 w65529 x"]) == [[5, 65_534, 1]]
    assert many.encode_ids(["w0 w65530 x"]) == [[5, 65_535, 1]]
    assert [few.encode_flat([])[0].size, few.encode_flat(["", " "])[1].tolist()] == [0, [0, 0]]


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = make_tokenizer("the", "##ing")
    batches = [[f"the thing{n} {n}ing, {letter}" for n in range(300)] for letter in LETTERS[:4]]
    results: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        results[index] = tokenizer.encode_ids(batches[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(4)] == [make_tokenizer("the", "##ing").encode_ids(b) for b in batches]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forking_after_use_neither_hangs_nor_warns() -> None:
    """P14: `tokenizers` warns and may hang when its threads ran before a fork; ours never start."""
    script = """
import multiprocessing
from tests.text.test_tokenizer import make_tokenizer
tokenizer = make_tokenizer("word")
before = tokenizer.encode_ids(["a word"] * 100)
tokenizer.encode("a word")
with multiprocessing.get_context("fork").Pool(4) as pool:
    assert pool.map(tokenizer.encode_ids, [["a word"] * 100] * 8) == [before] * 8
"""
    root = Path(__file__).parents[2]
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, env=environment, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- what users stumble over ------------------------------------------------------------------------------------------


def test_typed_special_tokens_are_plain_text_unless_allowed() -> None:
    """T8."""
    tokenizer = make_tokenizer("good", "bad")
    text = "good [SEP] bad [CLS] [PAD]"
    plain = tokenizer.encode_ids([text])[0]
    assert not set(plain) & set(tokenizer.special_ids)
    assert tokenizer.encode(text).ids == plain
    assert [tokenizer.id_to_token(index) for index in plain][:8] == ["good", "[", "s", "##e", "##p", "]", "bad", "["]
    good, bad = tokenizer.token_to_id("good"), tokenizer.token_to_id("bad")
    allowed = [good, tokenizer.sep_id, bad, tokenizer.cls_id, tokenizer.pad_id]
    assert tokenizer.encode_ids([text, "good"], allow_special=True) == [allowed, [good]]
    assert tokenizer.encode(text, allow_special=True).ids == allowed


def test_typed_special_tokens_after_saving(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("good", "bad")
    tokenizer.save(tmp_path)
    text = ["good [SEP] bad [MASK][unused1]"]
    assert load_tokenizer(tmp_path).encode_ids(text) == tokenizer.encode_ids(text)
    assert load_tokenizer(tmp_path).encode_ids(text, True) == tokenizer.encode_ids(text, True)


@pytest.mark.parametrize(
    ("lowercase", "strip_accents", "expected"),
    [
        (True, None, "hacia hacia cafe は nfd"),  # Google's: lower-casing also strips
        (True, True, "hacia hacia cafe は nfd"),
        (True, False, "hacía hacia café ば nfd"),
        (False, None, "Hacía hacia Café ば NFD"),
        (False, False, "Hacía hacia Café ば NFD"),
        (False, True, "Hacia hacia Cafe は NFD"),
    ],
)
def test_lowercase_and_accents_are_two_switches(
    tmp_path: Path, lowercase: bool, strip_accents: bool | None, expected: str
) -> None:
    """T3; and both are saved with the vocabulary."""
    tokens = [
        *SPECIAL_TOKENS,
        *["hacía", "hacia", "Hacía", "Hacia", "café", "cafe", "Café", "Cafe", "ば", "は", "nfd", "NFD"],
    ]
    BertTokenizer(tokens, Normalization(lowercase, strip_accents)).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.lowercase, tokenizer.strip_accents) == (lowercase, strip_accents)
    ids = tokenizer.encode_ids(["Hacía hacia Café ば NFD"])[0]
    assert " ".join(tokenizer.id_to_token(index) for index in ids) == expected


def test_composed_and_decomposed_accents() -> None:
    text = "résumé façade"
    both = [text, unicodedata.normalize("NFD", text)]
    stripped = make_tokenizer("resume", "facade").encode_ids(both)
    assert stripped[0] == stripped[1] != []
    kept = make_tokenizer(strip_accents=False)  # the reference does not compose: é written as two is another word
    assert kept.encode_ids(both)[0] != kept.encode_ids(both)[1]


@pytest.mark.parametrize(("length", "unknown"), [(99, False), (100, False), (101, True), (200, True), (201, True)])
def test_words_over_the_limit_are_one_unknown_and_counted(length: int, unknown: bool) -> None:
    """T5: 100 characters, as in transformers; counted after normalization."""
    tokenizer = make_tokenizer("the")
    ids = tokenizer.encode_ids(["the " + "a" * length + "."])[0]
    assert len(ids) == (3 if unknown else 2 + length)
    assert (tokenizer.unk_id in ids) == unknown
    assert tokenizer.count_overlong_words(["the " + "a" * length + ".", "a"]) == unknown
    assert tokenizer.encode("the " + "a" * length + ".").ids == ids


def test_overlong_words_are_counted_after_decomposition() -> None:
    hangul = "한" * 40  # 40 characters typed, 120 once decomposed
    assert make_tokenizer().count_overlong_words([hangul, "é" * 100]) == 1
    assert make_tokenizer(lowercase=False).count_overlong_words([hangul]) == 0


def test_long_strings_take_linear_time() -> None:
    tokenizer = make_tokenizer("the", "##ab")
    base64 = ("QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo0NTY3ODkw+/9" * 250)[:10_000]
    assert tokenizer.encode_ids([base64]) == [tokenizer.encode(base64).ids]
    assert tokenizer.count_overlong_words([base64, "A" * 10_000]) == 1

    def seconds(text: str) -> float:
        started = time.process_time()
        tokenizer.encode_ids([text])
        return time.process_time() - started

    seconds(base64)
    short, long = min(seconds(base64 * 10) for _ in range(3)), seconds(base64 * 100)
    assert long < 40 * max(short, 0.001)  # 10 times the text; quadratic would be 100


def test_a_word_of_which_nothing_is_left_keeps_its_place() -> None:
    """T7: three words in, three answers out."""
    tokenizer = make_tokenizer("ewww", "ok")
    words = ["ewww", "\U000fe4fa", "ok", "", "don't"]
    assert tokenizer.encode_ids(["\U000fe4fa"]) == [[]]
    encoded = tokenizer.encode_words(words)
    assert [len(ids) for ids in encoded] == [1, 1, 1, 1, 5]
    assert encoded[1] == encoded[3] == [tokenizer.unk_id]


@pytest.mark.parametrize("length", [511, 512, 513, 2000])
def test_nothing_is_cut(length: int) -> None:
    """T14: what is too long for a model is for the caller to cut, window or refuse: it must see all of it."""
    tokenizer = make_tokenizer("word")
    text = "word " * length
    assert [len(tokenizer.encode_ids([text])[0]), len(tokenizer.encode(text).offsets)] == [length, length]


def test_lone_surrogates_are_dropped_like_other_invalid_characters() -> None:
    tokenizer = make_tokenizer("cat", "dog")
    text = "cat\ud83d \udc00dog"
    assert tokenizer.encode_ids([text]) == tokenizer.encode_ids(["cat dog"])
    encoding = tokenizer.encode(text)
    assert [text[start:end] for start, end in encoding.offsets] == ["cat", "dog"]


@settings(max_examples=200)
@given(texts)
def test_offsets_point_into_the_original_text(text: str) -> None:
    tokenizer = make_tokenizer("the", "##ing")
    encoding = tokenizer.encode(text)
    assert len(encoding.ids) == len(encoding.tokens) == len(encoding.offsets)
    for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
        assert 0 <= start < end <= len(text)
        if token != "[UNK]":
            assert tokenizer.normalization.normalizer().normalize_str(text[start:end]).strip() == token.removeprefix(
                "##"
            )


def test_offsets_over_removed_and_changed_characters() -> None:
    text = "  Thé\u200bing\x00 中文, [SEP]"
    encoding = make_tokenizer("the", "##ing").encode(text)
    found = list(zip(encoding.tokens, (text[start:end] for start, end in encoding.offsets), strict=True))
    assert found[:5] == [("the", "Thé"), ("##ing", "ing"), ("中", "中"), ("文", "文"), (",", ",")]


# -- the object -------------------------------------------------------------------------------------------------------


def test_special_ids_continuation_and_lookups() -> None:
    tokenizer = BertTokenizer(["a", "##a", "[MASK]", "[UNK]", "##", "[PAD]", "[SEP]", "[CLS]", "b"])
    assert tokenizer.special_ids == (5, 3, 7, 6, 2)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        5,
        3,
        7,
        6,
        2,
    )
    assert np.flatnonzero(tokenizer.continuation).tolist() == [1]
    assert tokenizer.continuation.shape == (tokenizer.vocab_size,) == (9,)
    assert (tokenizer.token_to_id("b"), tokenizer.token_to_id("c"), tokenizer.id_to_token(1)) == (8, None, "##a")
    for index in (-1, 9):
        with pytest.raises(IndexError):
            tokenizer.id_to_token(index)


def test_decoding_joins_pieces() -> None:
    tokenizer = make_tokenizer("walk", "##ing", "home")
    ids = [tokenizer.cls_id, *tokenizer.encode_ids(["Walking home, A."])[0], tokenizer.sep_id]
    assert tokenizer.decode(ids) == "[CLS] walking home, a. [SEP]"
    assert tokenizer.decode(np.array(ids), skip_special=True) == "walking home, a."


def test_every_special_token_is_needed() -> None:
    with pytest.raises(UserError, match=re.escape("no [CLS], [MASK];")):
        BertTokenizer(["[PAD]", "[UNK]", "[SEP]", "a"])


def test_fingerprint_follows_what_changes_ids(tmp_path: Path) -> None:
    tokens = [*SPECIAL_TOKENS, "a", "b"]
    one = BertTokenizer(tokens)
    one.save(tmp_path)
    assert len(one.fingerprint) == 64
    same = [load_tokenizer(tmp_path), pickle.loads(pickle.dumps(one)), BertTokenizer(tokens, Normalization(True, True))]
    assert {other.fingerprint for other in same} == {one.fingerprint}
    others = [
        BertTokenizer([*SPECIAL_TOKENS, "b", "a"]),
        BertTokenizer(tokens, Normalization(False)),
        BertTokenizer(tokens, Normalization(True, False)),
        BertTokenizer(tokens, Normalization(split_cjk=False)),
        BertTokenizer(tokens, Normalization(max_word_characters=200)),
        BertTokenizer(tokens, added=[AddedToken("<e>")]),
        BertTokenizer(tokens, added=[AddedToken("<e>", special=True)]),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 8


def test_pickled_and_unpickled_it_encodes_the_same() -> None:
    tokenizer = make_tokenizer("word")
    tokenizer.encode_ids(["word"])
    other = pickle.loads(pickle.dumps(tokenizer))
    assert other.encode_ids(["a word, [SEP]"]) == tokenizer.encode_ids(["a word, [SEP]"])
    assert other.normalization == tokenizer.normalization


def test_tokens_added_to_a_vocabulary() -> None:
    added = [AddedToken("<e1>", special=True), AddedToken("new york", normalized=False), AddedToken("Word")]
    base = make_tokenizer("york")
    tokenizer = BertTokenizer(base.tokens, base.normalization, added=added)
    first = base.vocab_size
    assert tokenizer.tokens[first:] == ["<e1>", "new york", "Word"]
    assert tokenizer.special_ids[-1] == first
    text = "<e1> new york york word"
    plain, allowed = tokenizer.encode_ids([text])[0], tokenizer.encode_ids([text], allow_special=True)[0]
    york = tokenizer.token_to_id("york")
    assert plain[-3:] == [first + 1, york, first + 2]
    assert first not in plain
    assert allowed == [first, first + 1, york, first + 2]
    assert tokenizer.encode(text).ids == plain
