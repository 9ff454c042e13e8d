"""Tokenizer folders of every kind: the right ids, the saved settings, or one sentence that names file and line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from bertsmith.errors import UserError
from bertsmith.text import tokenizer_files
from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer, load_tokenizer
from bertsmith.text.tokenizer_files import is_tokenizer_folder, read_vocabulary
from bertsmith.text.words import Normalization

WORDS = ["the", "cia", "newton", "arrest", "##s", ",", "[", "]", "se", "##p", "cafe"]
CASED_WORDS = ["The", "CIA", "Newton", *WORDS]
TEXTS = ["The CIA arrests Newton, café!", "", "中文 the 12"]


def write_vocabulary(path: Path, tokens: list[str], end: str = "\n", start: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(start + "".join(token + end for token in tokens).encode("utf-8"))
    return path


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder as we save it: uncased, accents stripped."""
    BertTokenizer([*SPECIAL_TOKENS, *WORDS]).save(tmp_path / "saved")
    return tmp_path / "saved"


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; `normalizer__lowercase` is the key lowercase of the object normalizer; ... removes."""
    content = json.loads(file.read_text(encoding="utf-8"))
    for name, value in changes.items():
        *parents, key = name.split("__")
        place = content
        for parent in parents:
            place = place[parent]
        if value is ...:
            place.pop(key, None)
        else:
            place[key] = value
    write_json(file, content)


# -- vocab.txt: line number = id --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "start"), [("\n", b""), ("\r\n", b""), ("\n", b"\xef\xbb\xbf"), ("\r\n", b"\xef\xbb\xbf")]
)
def test_line_number_is_the_id(tmp_path: Path, end: str, start: bytes) -> None:
    """T15: U+2028 and its like are tokens, not line ends; CRLF and a byte-order mark change nothing."""
    tokens = [*SPECIAL_TOKENS, "a", "\u2028", "##\u2028", "\u3000", "\x85", "\x0c", "b"]
    path = write_vocabulary(tmp_path / "v.txt", tokens, end, start)
    assert read_vocabulary(path) == tokens
    assert load_tokenizer(path).encode_ids(["b a"]) == [[11, 5]]


def test_last_line_may_lack_its_end(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes("\n".join([*SPECIAL_TOKENS, "a"]).encode())
    assert read_vocabulary(path)[-1] == "a"


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"[PAD]\n\na\n", 2, "blank line"),
        (b"[PAD]\na\n\n", 3, "blank line"),
        (b"[PAD]\n \t\na\n", 2, "blank line"),
        (b"[PAD]\na\nb\na\n", 4, "'a' stands on line 2"),
        (b"[PAD]\na\t-3.5\n", 2, "a tab inside"),
        (b"[PAD]\nb\n\xe9t\xe9\n", 3, "not UTF-8 (byte 8)"),
        (b"[PAD]\n" + b"x" * 1001 + b"\n", 2, "1,001 characters"),
    ],
)
def test_lines_that_would_shift_ids_are_named(tmp_path: Path, content: bytes, line: int, words: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{path}:{line}: ") + ".*" + re.escape(words)):
        load_tokenizer(path)


def test_absurd_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    monkeypatch.setattr(tokenizer_files, "_MOST_TOKENS", 10)
    with pytest.raises(UserError, match="16 lines; more than 10"):
        read_vocabulary(saved / "vocab.txt")
    with pytest.raises(UserError, match="16 entries; more than 10"):
        load_tokenizer(saved)
    monkeypatch.setattr(tokenizer_files, "_LARGEST_FILE", 20)
    for name in ("vocab.txt", "tokenizer.json"):
        with pytest.raises(UserError, match="is not a tokenizer file"):
            load_tokenizer(saved / name)


def test_missing_special_tokens_are_named(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocab.txt", ["[PAD]", "[UNK]", "[SEP]", "a"])
    with pytest.raises(UserError, match=re.escape("vocab.txt: no [CLS], [MASK] among the 4 tokens")):
        load_tokenizer(path)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(UserError, match="among the 0 tokens"):
        load_tokenizer(tmp_path / "empty.txt")


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "size", "lowercase"),
    [
        ("bert-base-uncased", 30522, True),
        ("bert-base-cased", 28996, False),
        ("bert-base-chinese", 21128, True),
        ("bert-base-multilingual-cased", 119547, False),
    ],
)
def test_googles_vocabularies(shared_data: Path, tmp_path: Path, name: str, size: int, lowercase: bool) -> None:
    tokenizer = load_tokenizer(shared_data / "vocabs" / name)
    assert (tokenizer.vocab_size, tokenizer.lowercase, tokenizer.strip_accents) == (size, lowercase, None)
    lines = (shared_data / "vocabs" / name / "vocab.txt").read_bytes().decode("utf-8").split("\n")[:-1]
    assert tokenizer.tokens == lines
    tokenizer.save(tmp_path)
    assert (tmp_path / "vocab.txt").read_bytes() == (shared_data / "vocabs" / name / "vocab.txt").read_bytes()
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_come_from_the_folder_and_conflicts_are_errors(tmp_path: Path) -> None:
    """T4."""
    BertTokenizer([*SPECIAL_TOKENS, *CASED_WORDS], Normalization(lowercase=False), max_length=128).save(tmp_path)
    for tokenizer in (load_tokenizer(tmp_path), load_tokenizer(tmp_path, lowercase=False, strip_accents=False)):
        assert (tokenizer.lowercase, tokenizer.strip_accents, tokenizer.max_length) == (False, None, 128)
        assert tokenizer.encode("The CIA arrests Newton").tokens == ["The", "CIA", "arrest", "##s", "Newton"]
    with pytest.raises(UserError, match="saved as cased, but uncased was asked for"):
        load_tokenizer(tmp_path, lowercase=True)
    with pytest.raises(UserError, match="saved with accents kept, not removed"):
        load_tokenizer(tmp_path, strip_accents=True)


def test_an_uncased_folder_refuses_to_be_cased(saved: Path) -> None:
    assert load_tokenizer(saved, lowercase=True, strip_accents=True).lowercase
    with pytest.raises(UserError, match="saved as uncased, but cased was asked for"):
        load_tokenizer(saved, lowercase=False)
    with pytest.raises(UserError, match="saved with accents removed, not kept"):
        load_tokenizer(saved, strip_accents=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (WORDS, (True, None)),
        (CASED_WORDS, (False, None)),
        (["hacía", "día", "##ó"], (True, False)),  # uncased, but accents are in the vocabulary
        (["Hacía", "día"], (False, None)),
        (["[unused1]", "[SPECIAL]", "<S>", "<T>"], (True, None)),  # bracketed names tell nothing
        ([*(f"w{i}" for i in range(1000)), "A", "é"], (True, None)),  # nor do a few strays
    ],
)
def test_a_bare_vocabulary_tells_its_casing(
    tmp_path: Path, words: list[str], expected: tuple[bool, bool | None]
) -> None:
    path = write_vocabulary(tmp_path / "mine.txt", [*SPECIAL_TOKENS, *words])
    tokenizer = load_tokenizer(path)
    assert (tokenizer.lowercase, tokenizer.strip_accents) == expected
    chosen = load_tokenizer(path, lowercase=not expected[0], strip_accents=True)
    assert (chosen.lowercase, chosen.strip_accents) == (not expected[0], True)


@pytest.mark.parametrize(
    "text", ["{}", '{"model_max_length": 1000000000000000019884624838656}', '{"do_lower_case": true}']
)
def test_old_folders_with_little_in_their_config(tmp_path: Path, text: str) -> None:
    write_vocabulary(tmp_path / "vocab.txt", [*SPECIAL_TOKENS, *WORDS])
    (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.lowercase, tokenizer.strip_accents, tokenizer.max_length) == (True, None, 512)


def test_config_decides_over_what_the_vocabulary_looks_like(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocab.txt", [*SPECIAL_TOKENS, *WORDS])
    config = {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False, "model_max_length": 64}
    write_json(tmp_path / "tokenizer_config.json", config)
    for path in (tmp_path, tmp_path / "vocab.txt"):
        tokenizer = load_tokenizer(path)
        assert tokenizer.normalization == Normalization(False, True, split_cjk=False)
        assert tokenizer.max_length == 64


def test_only_tokenizer_json(saved: Path) -> None:
    expected = load_tokenizer(saved)
    (saved / "vocab.txt").unlink()
    (saved / "tokenizer_config.json").unlink()
    (saved / "other.json").write_bytes((saved / "tokenizer.json").read_bytes())
    for path in (saved, saved / "tokenizer.json", saved / "other.json"):
        assert load_tokenizer(path).fingerprint == expected.fingerprint


def test_longer_words_where_the_folder_says_so(saved: Path) -> None:
    edit_json(saved / "tokenizer.json", model__max_input_chars_per_word=200)
    tokenizer = load_tokenizer(saved)
    assert tokenizer.normalization.max_word_characters == 200
    tokenizer.save(saved)
    assert load_tokenizer(saved).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "tokenizer_config.json",
            {"do_lower_case": False},
            "do_lower_case is False, but tokenizer.json beside it says",
        ),
        (
            "tokenizer_config.json",
            {"strip_accents": False},
            "strip_accents is False, but tokenizer.json beside it says",
        ),
        ("tokenizer_config.json", {"do_lower_case": "yes"}, "do_lower_case: 'yes' is not true or false"),
        ("tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer"}, "splits words by a program of its own"),
        ("tokenizer_config.json", {"do_basic_tokenize": False}, "splits words by a program of its own"),
        ("tokenizer.json", {"model__type": "BPE"}, "holds a BPE tokenizer"),
        ("tokenizer.json", {"model__continuing_subword_prefix": "@@"}, "only the prefix ##"),
        ("tokenizer.json", {"model__max_input_chars_per_word": "many"}, "'many' is not a sensible number"),
        ("tokenizer.json", {"model__vocab__the": 15}, "ids must be 0 to 15, each once"),
        ("tokenizer.json", {"model__vocab__the": "5"}, "ids must be 0 to 15, each once"),
        ("tokenizer.json", {"model__vocab": ["the"]}, "vocab: missing, or not an object"),
        ("tokenizer.json", {"normalizer": None}, "normalizer: missing"),
        ("tokenizer.json", {"normalizer__type": "NFKC"}, "only BertNormalizer"),
        ("tokenizer.json", {"normalizer__lowercase": None}, "lowercase: None is not true or false"),
        ("tokenizer.json", {"pre_tokenizer__type": "Whitespace"}, "only BertPreTokenizer"),
        ("tokenizer.json", {"added_tokens": [{"id": 99, "content": "<e>"}]}, "'<e>' has id 99, 16 is expected"),
        ("tokenizer.json", {"added_tokens": [7]}, "7 is not an added token"),
        ("tokenizer.json", {"added_tokens": {"a": 1}}, "a list is expected"),
    ],
)
def test_what_cannot_be_right_is_named(saved: Path, file: str, changes: dict[str, Any], message: str) -> None:
    edit_json(saved / file, **changes)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        load_tokenizer(saved)
    assert str(saved / file) in str(raised.value)


def test_none_and_the_accents_it_stands_for_agree(saved: Path) -> None:
    edit_json(saved / "tokenizer_config.json", strip_accents=True)
    assert load_tokenizer(saved).normalization.strips_accents


def test_two_vocabularies_in_a_folder(saved: Path) -> None:
    write_vocabulary(saved / "vocab.txt", [*SPECIAL_TOKENS, *reversed(WORDS)])
    with pytest.raises(UserError, match="hold different vocabularies"):
        load_tokenizer(saved)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x80"])
def test_broken_json(saved: Path, text: str) -> None:
    (saved / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=re.escape(str(saved / "tokenizer.json"))):
        load_tokenizer(saved)


def test_paths_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such tokenizer"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"neither vocab\.txt nor tokenizer.json"):
        load_tokenizer(tmp_path)


def test_is_tokenizer_folder(saved: Path) -> None:
    assert is_tokenizer_folder(saved)
    (saved / "thesis.txt").write_text("years of work")
    assert not is_tokenizer_folder(saved)
    assert not is_tokenizer_folder(saved.parent)


def test_saving_is_the_same_bytes_in_any_locale(saved: Path, tmp_path: Path) -> None:
    """T1: tokens beyond ASCII, read and written where the locale's codec is ASCII."""
    tokens = [*SPECIAL_TOKENS, "é", "中", "♡", "##ば"]
    BertTokenizer(tokens, Normalization(True, False)).save(tmp_path / "here")
    script = (
        "import sys; from pathlib import Path; from bertsmith.text.tokenizer import load_tokenizer\n"
        "load_tokenizer(sys.argv[1]).save(Path(sys.argv[2]))"
    )
    for language, mode in (("C", "0"), ("C.UTF-8", "1")):
        environment = {**os.environ, "LC_ALL": language, "PYTHONUTF8": mode, "PYTHONCOERCECLOCALE": "0"}
        there = tmp_path / language
        subprocess.run([sys.executable, "-c", script, tmp_path / "here", there], check=True, env=environment)
        for file in (tmp_path / "here").iterdir():
            assert (there / file.name).read_bytes() == file.read_bytes()


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [None, True, False])
def test_transformers_opens_ours(tmp_path: Path, lowercase: bool, strip_accents: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    ours = BertTokenizer([*SPECIAL_TOKENS, *CASED_WORDS, "café", "中"], Normalization(lowercase, strip_accents))
    ours.save(tmp_path)
    for loader in (transformers.AutoTokenizer, transformers.BertTokenizerFast):
        theirs = loader.from_pretrained(tmp_path)
        assert [theirs.encode(text, add_special_tokens=False) for text in TEXTS] == ours.encode_ids(TEXTS)
        pair = theirs("the", "cia")
        the, cia = ours.encode_ids(["the", "cia"])
        assert pair["input_ids"] == [ours.cls_id, *the, ours.sep_id, *cia, ours.sep_id]
        assert pair["token_type_ids"] == [0, 0, 0, 1, 1]
        assert (theirs.model_max_length, theirs.mask_token_id, theirs.vocab_size) == (
            512,
            ours.mask_id,
            ours.vocab_size,
        )


@pytest.mark.parametrize("lowercase", [True, False])
def test_we_open_what_transformers_saves(tmp_path: Path, lowercase: bool) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = [*SPECIAL_TOKENS, *CASED_WORDS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    theirs = transformers.BertTokenizerFast(vocab=vocabulary, do_lower_case=lowercase, model_max_length=64)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert (ours.tokens, ours.lowercase, ours.max_length) == (tokens, lowercase, 64)
    assert ours.encode_ids(TEXTS) == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]


def test_tokens_added_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *WORDS])}
    theirs = transformers.BertTokenizerFast(vocab=vocabulary)
    theirs.add_tokens(["newtonian", "the end"])
    theirs.add_special_tokens({"additional_special_tokens": ["<e1>", "</e1>"]})
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    texts = ["<e1> newton </e1> newtonian the end", "thenewtonian", "the cia"]
    assert ours.vocab_size == len(theirs)
    assert ours.encode_ids(texts, allow_special=True) == [theirs.encode(t, add_special_tokens=False) for t in texts]
    assert theirs.convert_tokens_to_ids("<e1>") not in ours.encode_ids(texts)[0]
    ours.save(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert [again.encode(t) for t in texts] == [theirs.encode(t) for t in texts]
    assert load_tokenizer(tmp_path / "again").fingerprint == ours.fingerprint


def test_added_tokens_of_old_folders(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocab.txt", [*SPECIAL_TOKENS, *WORDS])
    write_json(tmp_path / "added_tokens.json", {"covid": 17, "sars": 16, "[MASK]": 4})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.tokens[16:] == ["sars", "covid"]
    assert tokenizer.encode_ids(["the COVID, sars"]) == [[5, 17, 10, 16]]
    write_json(tmp_path / "added_tokens.json", {"covid": 20})
    with pytest.raises(UserError, match=r"added_tokens.json: added_tokens: 'covid' has id 20, 16 is expected"):
        load_tokenizer(tmp_path)
    write_json(tmp_path / "added_tokens.json", {"covid": None, "sars": 16})
    with pytest.raises(UserError, match="must be a token id"):
        load_tokenizer(tmp_path)


OLD_WORDS = [
    "[unused5]",
    "hello",
    "world",
    "[",
    "]",
    "a",
    "b",
    "e1",
    "##1",
    "unused",
    "##5",
    "<",
    ">",
    "/",
    "foo",
    "dog",
]
FIRST = 5 + len(OLD_WORDS)  # the id of the first new token


def flags(content: str, special: bool, normalized: bool, **more: bool) -> dict[str, Any]:
    others = {"lstrip": False, "rstrip": False, "single_word": False}
    return others | {"content": content, "special": special, "normalized": normalized} | more


def decoder(*entries: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json with such tokens beside BERT's five; new ones get the ids after the vocabulary."""
    listed = {str(number): flags(token, True, False) for number, token in enumerate(SPECIAL_TOKENS)}
    new = iter(range(FIRST, 100))
    for entry in entries:
        listed[str(5 if entry["content"] == "[unused5]" else next(new))] = entry
    return {"added_tokens_decoder": listed}


def write_old_folder(folder: Path, files: dict[str, Any]) -> Path:
    write_vocabulary(folder / "vocab.txt", [*SPECIAL_TOKENS, *OLD_WORDS])
    for name, content in files.items():
        write_json(folder / f"{name}.json", content)
    return folder


E1, E2 = "[E1]", "<e1>"
ADDITIONAL = {"additional_special_tokens": ["[unused5]", E1]}
OLD_FOLDERS: dict[str, dict[str, Any]] = {
    "in the vocabulary": {"tokenizer_config": decoder(flags("[unused5]", False, True))},
    "in the vocabulary, special": {"tokenizer_config": decoder(flags("[unused5]", True, False))},
    "new": {"tokenizer_config": decoder(flags(E2, False, False), flags("</e1>", False, False))},
    "new, single word": {"tokenizer_config": decoder(flags("cat", False, True, single_word=True))},
    "flags beside ids": {"tokenizer_config": decoder(flags(E1, True, False)), "added_tokens": {E1: FIRST}},
    "decoder and more": {"tokenizer_config": decoder(flags(E2, False, False)) | {"additional_special_tokens": [E1]}},
    "decoder before map": {"tokenizer_config": decoder(flags(E2, False, False)), "special_tokens_map": ADDITIONAL},
    "ids alone": {"added_tokens": {E2: FIRST, "[unused5]": 5, "Hello World": FIRST + 1}},
    "map alone": {"special_tokens_map": ADDITIONAL},
    "list in the configuration": {"tokenizer_config": ADDITIONAL},
    "as transformers 5 names it": {"tokenizer_config": {"extra_special_tokens": {"entity": E1}}},
    "ids, list": {"tokenizer_config": {"additional_special_tokens": [E1]}, "added_tokens": {E2: FIRST, E1: FIRST + 1}},
    "role": {"tokenizer_config": {"bos_token": E1}, "special_tokens_map": {"eos_token": "[unused5]"}},
}


@pytest.mark.parametrize("name", OLD_FOLDERS)
def test_added_tokens_without_tokenizer_json_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_old_folder(tmp_path, OLD_FOLDERS[name])
    theirs, ours = transformers.BertTokenizer.from_pretrained(folder), load_tokenizer(folder)
    texts = [
        "Hello [unused5] World",
        "[E1] a [e1] b",
        "a<e1>foo</e1>",
        "<E1>",
        "foo[Unused5]b [SEP]",
        "cats Cat hello  world",
    ]
    assert ours.vocab_size == len(theirs)
    assert ours.encode_ids(texts, allow_special=True) == [theirs.encode(t, add_special_tokens=False) for t in texts]
    special = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    assert {ours.id_to_token(index) for index in ours.special_ids} == special
    assert not set(ours.special_ids).intersection(*ours.encode_ids(texts[:1]))  # what is typed is plain text
    ours.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").fingerprint == ours.fingerprint


def test_what_transformers_4_wrote_is_read_as_it_was_meant(tmp_path: Path) -> None:
    """transformers 5 refuses flags in the list, and takes tokens for plain ones where added_tokens.json has them."""
    listed = {"additional_special_tokens": [flags(E1, False, False), E2]}
    for files in (
        {"special_tokens_map": listed, "added_tokens": {E1: FIRST, E2: FIRST + 1}},
        {"tokenizer_config": listed},
    ):
        tokenizer = load_tokenizer(write_old_folder(tmp_path / str(len(files)), files))
        assert tokenizer.special_ids[5:] == (FIRST, FIRST + 1)
        assert tokenizer.encode_ids(["[E1] [e1] <e1>"], allow_special=True) == [[FIRST, 8, 12, 9, FIRST + 1]]
        assert not {FIRST, FIRST + 1}.intersection(*tokenizer.encode_ids(["[E1] <e1>"]))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": decoder(), "added_tokens": {E1: FIRST}},
            f"added_tokens.json: '[E1]', id {FIRST}, is not so in added_tokens_decoder of tokenizer_config.json",
        ),
        ({"added_tokens": {"hello": 9}}, "added_tokens.json: added_tokens: 'hello' has id 9, 6 is expected"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"40": flags(E1, True, False)}}},
            f"tokenizer_config.json: added_tokens_decoder: '[E1]' has id 40, {FIRST} is expected",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": {}}}},
            "an object of added tokens by their ids is expected",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": [E1]}}, "an object of added tokens by their ids is expected"),
        (
            {"special_tokens_map": {"mask_token": "<mask>"}},
            "special_tokens_map.json: mask_token is '<mask>'; only [MASK]",
        ),
        ({"special_tokens_map": {"eos_token": 7}}, "special_tokens_map.json: eos_token: 7 is no token"),
        (
            {"tokenizer_config": {"additional_special_tokens": "x"}},
            "additional_special_tokens: a list of tokens is expected",
        ),
    ],
)
def test_files_that_contradict_each_other(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_tokenizer(write_old_folder(tmp_path, files))


def test_a_path_that_cannot_be_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x: cannot be opened \(File name too long\)"):
        load_tokenizer(tmp_path / ("x" * 5000))


def test_a_tokenizer_of_another_kind(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="holds a BPE tokenizer"):
        load_tokenizer(tmp_path)
