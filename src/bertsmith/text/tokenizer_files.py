"""Tokenizer folders in and out: ours, and Hugging Face's of any age (vocab.txt with or without config, tokenizer.json).

Line number = id, always. What a folder says about casing and accents is used; where two files, or a file and the
caller, say different things it is an error, because a model fed with the wrong casing works badly and says nothing.
"""

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from bertsmith.errors import UserError
from bertsmith.storage import write_text
from bertsmith.text.added_tokens import (
    ADDED,
    CONFIG,
    SPECIAL_MAP,
    SPECIAL_TOKENS,
    gather_added_tokens,
    new_contents,
    parse_added_tokens,
)
from bertsmith.text.words import Normalization

_MOST_TOKENS = 4_000_000
_LARGEST_FILE = 512_000_000  # bytes
_LONGEST_TOKEN = 1_000  # characters
_TELLING_SHARE = 0.005  # of the tokens: so many with capitals (accents) mean a cased (accents kept) vocabulary

FILE_NAMES = ("vocab.txt", "tokenizer.json", CONFIG, ADDED, SPECIAL_MAP)
"""What a tokenizer folder holds, the last two only where it came from an old release of transformers."""
_FILE_NAMES = FILE_NAMES[:3]
_CONFIG_KEYS = {
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "split_cjk": "tokenize_chinese_chars",
}


@dataclass
class TokenizerContent:
    """What a tokenizer's files hold."""

    tokens: list[str]
    normalization: Normalization
    max_length: int
    added: list[AddedToken]


def read_tokenizer(path: Path, lowercase: bool | None, strip_accents: bool | None) -> TokenizerContent:
    """Read a tokenizer folder, a vocab.txt or a tokenizer.json; see `load_tokenizer`."""
    vocab_file, json_file, config_file = _find_files(path)
    tokens: list[str] | None = None
    added: list[AddedToken] = []
    said: list[tuple[Path, dict[str, Any]]] = []  # what each file says about the normalization
    config = _read_json(config_file) if config_file else {}
    if json_file:
        tokens, added, settings = read_tokenizer_json(json_file)
        said.append((json_file, settings))
    if vocab_file:
        from_lines = read_vocabulary(vocab_file)
        if tokens is not None and from_lines not in (tokens, [*tokens, *new_contents(added, tokens)]):
            raise UserError(f"{path}: vocab.txt and tokenizer.json hold different vocabularies; remove the wrong one")
        if tokens is None:
            tokens = from_lines
            files = [vocab_file.parent / name for name in (ADDED, SPECIAL_MAP)]
            ids, special_map = (_read_json(file) if file.is_file() else {} for file in files)
            added = gather_added_tokens(vocab_file.parent, config, ids, special_map, tokens)
    assert tokens is not None
    missing = sorted(set(SPECIAL_TOKENS).difference(tokens), key=SPECIAL_TOKENS.index)
    if missing:
        raise UserError(
            f"{vocab_file or json_file}: no {', '.join(missing)} among the {len(tokens)} tokens; "
            f"BERT needs all of {' '.join(SPECIAL_TOKENS)}"
        )
    max_length = 512
    if config_file:
        settings, max_length = _read_config(config_file, config)
        said.append((config_file, settings))
    return TokenizerContent(tokens, _combine(path, said, tokens, lowercase, strip_accents), max_length, added)


def _find_files(path: Path) -> tuple[Path | None, Path | None, Path | None]:
    """vocab.txt, tokenizer.json and tokenizer_config.json of `path`; None for what is not there."""
    try:
        is_file = path.is_file()
    except OSError as error:  # the name is too long, a folder above may not be entered
        raise UserError(f"{path}: cannot be opened ({error.strerror}); give a folder with vocab.txt") from error
    if is_file and path.name in _FILE_NAMES:
        path = path.parent  # its neighbours say how it is to be used
    if path.is_file():
        return (None, path, None) if path.suffix == ".json" else (path, None, None)
    if not path.is_dir():
        raise UserError(f"{path}: no such tokenizer; give a folder with vocab.txt or tokenizer.json, or a vocab.txt")
    vocab_file, json_file, config_file = (file if file.is_file() else None for file in map(path.joinpath, _FILE_NAMES))
    if not vocab_file and not json_file:
        # a run keeps its tokenizer in the finished model
        inside = path / "model"
        there = any((inside / name).is_file() for name in _FILE_NAMES[:2])
        hint = f"did you mean {inside}?" if there else "is this a tokenizer or model folder?"
        raise UserError(f"{path}: neither vocab.txt nor tokenizer.json is here; {hint}")
    return vocab_file, json_file, config_file


def is_tokenizer_folder(path: Path) -> bool:
    """Whether `path` holds a tokenizer (and nothing says it holds more than that)."""
    return {entry.name for entry in path.iterdir()} <= set(_FILE_NAMES) and any(
        (path / name).is_file() for name in _FILE_NAMES[:2]
    )


def read_vocabulary(path: Path) -> list[str]:
    """The tokens of a vocab.txt, one a line; line number (from 0) = id.

    Only `\\n` (or `\\r\\n`) ends a line: Google's Chinese vocabulary holds U+2028 as a token. A byte-order mark is
    dropped. Raises UserError for a blank line or a repeated token (their ids would be anyone's guess), bytes that are
    not UTF-8, or an absurd size.
    """
    _check_size(path)
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 (byte {error.start}); save the vocabulary as UTF-8") from error
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if len(lines) > _MOST_TOKENS:
        raise UserError(f"{path}: {len(lines):,} lines; more than {_MOST_TOKENS:,} is not a vocabulary")
    seen: dict[str, int] = {}
    for number, text in enumerate(lines, start=1):
        token = text.strip(" \t\r")  # as the reference strips; other blanks may be tokens
        if not token:
            raise UserError(f"{path}:{number}: blank line; the line number is the token's id, so remove it or fill it")
        if "\t" in token:
            raise UserError(f"{path}:{number}: a tab inside the line; a vocab.txt holds one token a line, nothing else")
        if len(token) > _LONGEST_TOKEN:
            raise UserError(f"{path}:{number}: a token of {len(token):,} characters; is this a vocabulary?")
        if token in seen:
            raise UserError(f"{path}:{number}: {token!r} stands on line {seen[token]} already; rename one of the two")
        seen[token] = number
    return list(seen)


def read_tokenizer_json(path: Path) -> tuple[list[str], list[AddedToken], dict[str, Any]]:
    """Tokens in id order, added tokens, and the normalization settings of a WordPiece tokenizer.json."""
    content = _read_json(path)
    model = _part(path, content, "model")
    # files written before 2021 name no type; a WordPiece is known by its prefix
    if model.get("type", "WordPiece" if "continuing_subword_prefix" in model else "unnamed") != "WordPiece":
        raise UserError(f"{path}: holds a {model.get('type')} tokenizer; BERT's is WordPiece, others are not supported")
    if model.get("continuing_subword_prefix", "##") != "##" or model.get("unk_token", "[UNK]") != "[UNK]":
        raise UserError(f"{path}: model: only the prefix ## and the unknown token [UNK] are supported")
    normalizer = _part(path, content, "normalizer")
    if normalizer.get("type") != "BertNormalizer" or normalizer.get("clean_text", True) is not True:
        raise UserError(f"{path}: normalizer: only BertNormalizer with clean_text is supported")
    if _part(path, content, "pre_tokenizer").get("type") != "BertPreTokenizer":
        raise UserError(f"{path}: pre_tokenizer: only BertPreTokenizer is supported")
    limit = model.get("max_input_chars_per_word", 100)
    if type(limit) is not int or not 1 <= limit <= 1_000_000:
        raise UserError(f"{path}: model.max_input_chars_per_word: {limit!r} is not a sensible number")
    settings = {
        "lowercase": _read_flag(path, normalizer, "lowercase", optional=False),
        "strip_accents": _read_flag(path, normalizer, "strip_accents", optional=True),
        "split_cjk": _read_flag(path, normalizer, "handle_chinese_chars", optional=False),
        "max_word_characters": limit,
    }
    tokens = _order_by_id(path, _part(path, model, "vocab"))
    return tokens, parse_added_tokens(f"{path}: added_tokens", content.get("added_tokens") or [], tokens), settings


def _order_by_id(path: Path, vocabulary: dict[str, Any]) -> list[str]:
    if len(vocabulary) > _MOST_TOKENS:
        raise UserError(f"{path}: {len(vocabulary):,} entries; more than {_MOST_TOKENS:,} is not a vocabulary")
    tokens: list[str | None] = [None] * len(vocabulary)
    for token, index in vocabulary.items():
        if type(index) is not int or not 0 <= index < len(tokens) or tokens[index] is not None:
            raise UserError(
                f"{path}: model.vocab: the ids must be 0 to {len(tokens) - 1}, each once; {token!r}: {index!r}"
            )
        if not token or len(token) > _LONGEST_TOKEN:
            raise UserError(f"{path}: model.vocab: id {index}: a token of {len(token)} characters")
        tokens[index] = token
    return [token for token in tokens if token is not None]


def _read_config(path: Path, config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Normalization settings that a tokenizer_config.json states, and the longest input in tokens."""
    kind = config.get("tokenizer_class") or ""
    if "Japanese" in str(kind) or config.get("do_basic_tokenize", True) is False:
        raise UserError(
            f"{path}: this tokenizer splits words by a program of its own ({kind or 'do_basic_tokenize'}); "
            "bertsmith reads those that split words as BERT does"
        )
    settings: dict[str, Any] = {}
    for name, key, optional in (
        ("lowercase", "do_lower_case", False),
        ("strip_accents", "strip_accents", True),
        ("split_cjk", "tokenize_chinese_chars", False),
    ):
        if key in config:
            settings[name] = _read_flag(path, config, key, optional)
    length = config.get("model_max_length", 512)
    # transformers writes 1e30 for "not known"
    known = type(length) is int and 2 < length <= 1_000_000
    return settings, length if known else 512


def _combine(
    path: Path,
    said: list[tuple[Path, dict[str, Any]]],
    tokens: list[str],
    lowercase: bool | None,
    strip_accents: bool | None,
) -> Normalization:
    """One Normalization out of what the files and the caller say."""
    merged: dict[str, Any] = {}
    for file, settings in said:
        for key, value in settings.items():
            if key != "strip_accents" and merged.setdefault(key, value) != value:
                raise _contradiction(file, said[0][0], _CONFIG_KEYS[key], value, merged[key])
    if "lowercase" not in merged:
        if lowercase is None:
            lowercase = _share(tokens, lambda token: token != token.lower()) < _TELLING_SHARE
        merged["lowercase"] = lowercase
    elif lowercase not in (None, merged["lowercase"]):
        here, asked = ("cased", "uncased") if lowercase else ("uncased", "cased")
        raise UserError(f"{path}: this tokenizer was saved as {here}, but {asked} was asked for; drop the option")

    # None, "follow lowercase", and the value it stands for do not contradict each other
    for file, settings in said:
        value = settings.get("strip_accents")
        if "strip_accents" in settings:
            before = merged.setdefault("strip_accents", value)
            if _resolve(value, merged) != _resolve(before, merged):
                raise _contradiction(file, said[0][0], "strip_accents", value, before)
    if said:
        stored = _resolve(merged.setdefault("strip_accents", None), merged)
        if strip_accents not in (None, stored):
            asked, here = ("removed", "kept") if strip_accents else ("kept", "removed")
            raise UserError(f"{path}: this tokenizer was saved with accents {here}, not {asked}; drop the option")
    elif strip_accents is None and merged["lowercase"] and _share(tokens, _has_accent) >= _TELLING_SHARE:
        merged["strip_accents"] = False
    else:
        merged["strip_accents"] = strip_accents
    return Normalization(**merged)


def _resolve(strip_accents: bool | None, merged: dict[str, Any]) -> bool:
    return Normalization(merged["lowercase"], strip_accents).strips_accents


def _contradiction(file: Path, other: Path, key: str, value: object, before: object) -> UserError:
    return UserError(f"{file}: {key} is {value!r}, but {other.name} beside it says {before!r}; correct the wrong one")


def _has_accent(token: str) -> bool:
    return any(unicodedata.category(character) == "Mn" for character in unicodedata.normalize("NFD", token))


def _share(tokens: list[str], test: Any) -> float:
    """Share of `tokens` that pass, those in brackets ([MASK], [unused7], <S>) left out."""
    plain = [token for token in tokens if not (token[0] in "[<" and token[-1] in "]>" and len(token) > 2)]
    return sum(map(test, plain)) / max(len(plain), 1)


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > _LARGEST_FILE:
        raise UserError(f"{path}: {size:,} bytes; more than {_LARGEST_FILE:,} is not a tokenizer file")


def _read_json(path: Path) -> dict[str, Any]:
    _check_size(path)
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); save or download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON object is expected")
    return content


def _part(path: Path, content: dict[str, Any], key: str) -> dict[str, Any]:
    part = content.get(key)
    if not isinstance(part, dict):
        raise UserError(f"{path}: {key}: missing, or not an object; this is not the tokenizer of a BERT")
    return part


def _read_flag(path: Path, content: dict[str, Any], key: str, optional: bool) -> bool | None:
    value = content.get(key)
    if value is None and optional:
        return None
    if not isinstance(value, bool):
        raise UserError(f"{path}: {key}: {value!r} is not true or false")
    return value


def write_tokenizer_files(
    folder: Path, library_json: str, tokens: list[str], normalization: Normalization, max_length: int
) -> None:
    """tokenizer.json, vocab.txt and tokenizer_config.json, as `transformers` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True)
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalization.lowercase,
        "strip_accents": normalization.strip_accents,
        "tokenize_chinese_chars": normalization.split_cjk,
        "model_max_length": max_length,
        **dict(names),
    }
    write_text(folder / "vocab.txt", "".join(token + "\n" for token in tokens))
    write_text(folder / "tokenizer.json", library_json + "\n")
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
