"""Added tokens: those that are matched in a text before its words are made, as the files of a tokenizer name them.

Parsed JSON in, AddedTokens out, in the order of their ids. New ones continue the vocabulary's ids; anything else would
leave holes in the embedding and is an error.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from bertsmith.errors import UserError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONFIG, ADDED, SPECIAL_MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_DECODER = "added_tokens_decoder"
_ROLES = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True))
_OTHER_ROLES = ("bos_token", "eos_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")  # until transformers 4, from 5 on


def parse_added_tokens(place: str, entries: Any, tokens: list[str]) -> list[AddedToken]:
    """Added tokens out of objects with content, id and flags; `place` is the file and key, for messages."""
    if not isinstance(entries, list):
        raise UserError(f"{place}: a list is expected")
    known = {token: index for index, token in enumerate(tokens)}
    added = []
    for entry in entries:
        try:
            flags = {"normalized": not entry.get("special", False)} | {k: bool(entry[k]) for k in _FLAGS if k in entry}
            token = AddedToken(str(entry["content"]), **flags)
            index = entry["id"]
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{place}: {entry!r} is not an added token") from error
        expected = known.setdefault(token.content, len(known))
        if index != expected or not token.content:
            raise UserError(f"{place}: {token.content!r} has id {index!r}, {expected} is expected")
        added.append(token)
    return added


def new_contents(added: list[AddedToken], tokens: list[str]) -> list[str]:
    """The added tokens that the vocabulary lacks."""
    known = set(tokens)
    return [token.content for token in added if token.content not in known]


def gather_added_tokens(
    folder: Path, config: dict[str, Any], ids: dict[str, Any], special_map: dict[str, Any], tokens: list[str]
) -> list[AddedToken]:
    """The added tokens of a folder without tokenizer.json, gathered as transformers does (from_pretrained in
    tokenization_utils_base.py): `config`, `ids` and `special_map` are what tokenizer_config.json, added_tokens.json and
    special_tokens_map.json hold ({}: no such file).

    added_tokens_decoder has all flags and replaces the two older files. Without it, what they name special is special
    and matched in the text as it stands, the rest of added_tokens.json in the normalized text. (transformers 5 reads
    `additional_special_tokens` of special_tokens_map.json too late for that; 4, which wrote such files, does not.)
    Special tokens that have no id yet get the next ones. Raises UserError where the files contradict each other.
    """
    if _DECODER in config:
        place, entries = f"{folder / CONFIG}: {_DECODER}", _decoder_entries(folder / CONFIG, config[_DECODER])
        known = {str(entry.get("content")): entry["id"] for entry in entries}
        for token, index in ids.items():
            if known.get(token) != index:
                raise UserError(
                    f"{folder / ADDED}: {token!r}, id {index!r}, is not so in {_DECODER} of {CONFIG} beside it; "
                    "correct the wrong one"
                )
        special = _special_entries(folder / CONFIG, config)
    else:
        place = f"{folder / ADDED}: added_tokens"
        special = _special_entries(folder / CONFIG, config) | _special_entries(folder / SPECIAL_MAP, special_map)
        entries = [special.get(token, {"content": token}) | {"id": index} for token, index in ids.items()]
    try:
        added = parse_added_tokens(place, sorted(entries, key=lambda entry: entry["id"]), tokens)
    except TypeError as error:
        raise UserError(f"{folder / ADDED}: every value must be a token id") from error
    there = {*SPECIAL_TOKENS, *(token.content for token in added)}
    whole = [*tokens, *new_contents(added, tokens)]
    numbers = {token: index for index, token in enumerate(whole)}
    rest = [
        entry | {"id": numbers.setdefault(content, len(numbers))}
        for content, entry in special.items()
        if content not in there
    ]
    added += parse_added_tokens(str(folder / CONFIG), rest, whole)
    return sorted(added, key=lambda token: numbers[token.content])


def _decoder_entries(path: Path, decoder: Any) -> list[dict[str, Any]]:
    """added_tokens_decoder, {id: flags}, as a list."""
    try:
        return [{**flags, "id": int(index)} for index, flags in decoder.items()]
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: {_DECODER}: an object of added tokens by their ids is expected") from error


def _special_entries(path: Path, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tokens that a file names special, by their contents: those with a role, then the others."""
    found = {key: content.get(key) for key in (*_ROLES, *_OTHER_ROLES)}
    for key in _LISTS:
        values = content.get(key) or []
        if isinstance(values, dict):
            values = list(values.values())
        if not isinstance(values, list):
            raise UserError(f"{path}: {key}: a list of tokens is expected")
        found |= {f"{key}[{number}]": value for number, value in enumerate(values)}
    entries = {}
    for key, value in found.items():
        if value is None:
            continue
        entry = value if isinstance(value, dict) else {"content": value}
        token = entry.get("content")
        if not isinstance(token, str) or not token:
            raise UserError(f"{path}: {key}: {value!r} is no token")
        if token != _ROLES.get(key, token):
            raise UserError(f"{path}: {key} is {token!r}; only {_ROLES[key]} is supported")
        entries[token] = {"normalized": False} | entry | {"special": True}
    return entries
