"""Text → token ids, as BERT's own tokenizer gives them, with offsets into the text as it was typed.

A word always gives the same pieces, so `encode_flat` and `encode_ids` keep the pieces of the words seen lately and look
words up: ten times the speed of tokenizing each occurrence, same ids. `[SEP]` and the like in a text are plain text
unless `allow_special`: what a user types must not become a separator. Folders are read and written by
tokenizer_files.py.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from bertsmith.errors import UserError
from bertsmith.text.tokenizer_files import SPECIAL_TOKENS, read_tokenizer, write_tokenizer_files
from bertsmith.text.words import Normalization, WordSplitter, replace_surrogates, split_at_blanks

CONTINUATION = "##"

_CACHE_ENTRIES = 1 << 18  # about 50 MB of words and their ids
_LONGEST_CACHED = 40  # characters; longer words hardly ever come back
_LONGEST_CACHED_WHOLE = 16  # a piece with punctuation or ideographs in it ("said,") is kept whole up to here


@dataclass(frozen=True)
class Encoding:
    """One text's tokens. `offsets[i]`: the (start, end) in characters of the original text that token i stands for."""

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]


class _PieceCache(dict[str, bytes]):
    """Piece of text → its ids as packed integers. Emptied when full: text comes in stretches of one subject."""

    def __init__(self, compute: Callable[[str], tuple[bytes, bool]]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, raw: str) -> bytes:
        packed, keep = self._compute(raw)
        if keep:
            if len(self) >= _CACHE_ENTRIES:
                self.clear()
            self[raw] = packed
        return packed


class BertTokenizer:
    """WordPiece over BERT's words (Devlin et al. 2018, section 3; google-research/bert tokenization.py).

    `tokens` in id order; id = position. `added` are tokens beyond BERT's five that are matched in the text before
    anything else (fine-tuned checkpoints have such); those that are not in `tokens` get the ids after them.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        normalization: Normalization | None = None,
        max_length: int = 512,
        added: Sequence[AddedToken] = (),
    ) -> None:
        self.normalization = normalization or Normalization()
        self.max_length = max_length
        self._vocabulary_tokens = list(tokens)
        self._vocabulary = {token: index for index, token in enumerate(tokens)}
        if len(self._vocabulary) != len(tokens):
            raise ValueError("tokens are not unique")
        missing = [token for token in SPECIAL_TOKENS if token not in self._vocabulary]
        if missing:
            raise UserError(f"the vocabulary has no {', '.join(missing)}; BERT needs all of {' '.join(SPECIAL_TOKENS)}")
        self.added = [token for token in added if token.content not in SPECIAL_TOKENS]
        self.tokens = self._vocabulary_tokens + [t.content for t in self.added if t.content not in self._vocabulary]
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (self._ids[t] for t in SPECIAL_TOKENS)
        self.special_ids = tuple(self._ids[t] for t in SPECIAL_TOKENS) + tuple(
            self._ids[t.content] for t in self.added if t.special
        )
        self._splitter = WordSplitter(self.normalization)
        self._cache = _PieceCache(self._encode_piece)

    def __reduce__(self) -> tuple[Any, ...]:
        return BertTokenizer, (self._vocabulary_tokens, self.normalization, self.max_length, self.added)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.tokens)

    @property
    def lowercase(self) -> bool:
        """Whether text is lower-cased."""
        return self.normalization.lowercase

    @property
    def strip_accents(self) -> bool | None:
        """Whether accents are removed; None follows `lowercase`."""
        return self.normalization.strip_accents

    @property
    def id_dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The smallest type ids are stored in."""
        return np.uint16 if self.vocab_size <= 0xFFFF else np.uint32

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over the tokens and everything that changes ids; equal after saving and loading."""
        settings = {
            "tokens": self.tokens,
            "lowercase": self.lowercase,
            "strip_accents": self.normalization.strips_accents,
            "split_cjk": self.normalization.split_cjk,
            "max_word_characters": self.normalization.max_word_characters,
            "added": [
                [t.content, t.single_word, t.lstrip, t.rstrip, t.normalized, bool(t.special)] for t in self.added
            ],
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode("ascii")).hexdigest()

    @cached_property
    def continuation(self) -> np.ndarray:
        """bool (vocab_size,): True where the token continues a word (## in front)."""
        return np.array([token.startswith(CONTINUATION) and len(token) > 2 for token in self.tokens])

    def id_to_token(self, index: int) -> str:
        """The token with this id; IndexError past the end."""
        if index < 0:
            raise IndexError(index)
        return self.tokens[index]

    def token_to_id(self, token: str) -> int | None:
        """The id of `token`, None where the vocabulary lacks it."""
        return self._ids.get(token)

    # -- the quick way: no [CLS] and [SEP] added, no offsets ---------------------------------------------------------

    def encode_flat(self, texts: Iterable[str], allow_special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """All ids of `texts` one after the other, `id_dtype` (T,), and how many each text has, int64 (N,)."""
        packed = self._pack(texts, allow_special)
        ids = np.frombuffer(b"".join(packed), dtype=self.id_dtype)
        counts = np.fromiter(map(len, packed), dtype=np.int64, count=len(packed)) // ids.itemsize
        return ids, counts

    def encode_ids(self, texts: Iterable[str], allow_special: bool = False) -> list[list[int]]:
        """The ids of each text. Never cut: a text longer than the model takes is the caller's to cut or window."""
        return [np.frombuffer(packed, self.id_dtype).tolist() for packed in self._pack(texts, allow_special)]

    def encode_words(self, words: Iterable[str]) -> list[list[int]]:
        """The ids of each word of a sentence that is split already (NER); never an empty list.

        A word of which cleaning leaves nothing (private-use or control characters only) is one [UNK], so words and
        predictions stay in step.
        """
        return [ids or [self.unk_id] for ids in self.encode_ids(words)]

    def count_overlong_words(self, texts: Iterable[str]) -> int:
        """How many words of `texts` are longer than `max_word_characters` and so become one [UNK] each."""
        limit = self.normalization.max_word_characters
        # decomposition makes up to four characters of one: what is shorter than a quarter need not be looked at
        pieces = (piece for text in texts for piece in split_at_blanks(text) if len(piece) > limit // 4)
        return sum(len(word) > limit for piece in pieces for word in self._splitter.words(piece))

    def _pack(self, texts: Iterable[str], allow_special: bool) -> list[bytes]:
        find = self._cache.__getitem__
        if not allow_special and not self.added:
            return [b"".join(map(find, split_at_blanks(text))) for text in texts]
        matched = self._matched_tokens(allow_special)
        packed = []
        for text in texts:
            if any(token in text for token in matched):
                packed.append(np.array(self.encode(text, allow_special).ids, dtype=self.id_dtype).tobytes())
            else:
                packed.append(b"".join(map(find, split_at_blanks(text))))
        return packed

    def _matched_tokens(self, allow_special: bool) -> list[str]:
        """What the library looks for in a text before it makes words; an empty string (always found) where the search
        is not a plain one."""
        added = [token for token in self.added if allow_special or not token.special]
        if any(token.normalized for token in added):
            return [""]
        return [token.content for token in added] + (list(SPECIAL_TOKENS) if allow_special else [])

    def _encode_piece(self, raw: str) -> tuple[bytes, bool]:
        """The packed ids of a piece of text without blanks, and whether it is worth keeping."""
        if len(raw) > 1 and (len(raw) > _LONGEST_CACHED or not raw.isascii()):
            parts = list(self._splitter.split_runs(raw))
            if len(parts) > 1:
                return b"".join(map(self._cache.__getitem__, parts)), len(raw) <= _LONGEST_CACHED_WHOLE
        whole, encode = self._tables[0].get, self._encode_word
        packed = b"".join([whole(word) or encode(word) for word in self._splitter.words(raw)])
        return packed, len(raw) <= _LONGEST_CACHED

    @cached_property
    def _tables(self) -> tuple[dict[str, bytes], dict[str, bytes], int, int]:
        """Packed id of each token that may start and of each that may continue a word, and the longest of either."""
        packed = [number.tobytes() for number in np.arange(len(self._vocabulary_tokens), dtype=self.id_dtype)]
        pairs = [
            (token, identifier)
            for token, identifier in zip(self._vocabulary_tokens, packed, strict=True)
            if len(token) <= self.normalization.max_word_characters
        ]
        start = dict(pairs)
        rest = {token[2:]: identifier for token, identifier in pairs if token.startswith(CONTINUATION)}
        return start, rest, max(map(len, start), default=0), max(map(len, rest), default=0)

    @cached_property
    def _packed_unknown(self) -> bytes:
        return np.array(self.unk_id, dtype=self.id_dtype).tobytes()

    def _encode_word(self, word: str) -> bytes:
        """Greedy longest match from the left; [UNK] when any part has no match (WordpieceTokenizer.tokenize)."""
        table, rest, longest, longest_rest = self._tables
        length = len(word)
        if length > self.normalization.max_word_characters:
            return self._packed_unknown
        pieces = []
        start = 0
        while start < length:
            end = min(length, start + longest)
            while end > start:
                piece = table.get(word[start:end])
                if piece is not None:
                    break
                end -= 1
            else:
                return self._packed_unknown
            pieces.append(piece)
            start, table, longest = end, rest, longest_rest
        return b"".join(pieces)

    # -- the whole picture: tokens and offsets, by the library -------------------------------------------------------

    def encode(self, text: str, allow_special: bool = False) -> Encoding:
        """Ids, tokens and offsets into `text` (characters). No [CLS] and [SEP] added, nothing cut."""
        library = self._library_special if allow_special else self._library_plain
        encoded = library.encode(replace_surrogates(text), add_special_tokens=False)
        return Encoding(encoded.ids, encoded.tokens, encoded.offsets)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Readable text: pieces joined, blanks before punctuation removed. Not the original, which ids do not hold."""
        special = set(self.special_ids) if skip_special else ()
        tokens = [self.id_to_token(int(index)) for index in ids if int(index) not in special]
        return str(decoders.WordPiece(prefix=CONTINUATION, cleanup=True).decode(tokens))

    @cached_property
    def _library_plain(self) -> Tokenizer:
        library = self._build_library()
        library.encode_special_tokens = True  # the library's switch for "as if they were plain text"
        return library

    @cached_property
    def _library_special(self) -> Tokenizer:
        return self._build_library()

    def _build_library(self) -> Tokenizer:
        library = Tokenizer(
            models.WordPiece(
                self._vocabulary,
                unk_token=SPECIAL_TOKENS[1],
                continuing_subword_prefix=CONTINUATION,
                max_input_chars_per_word=self.normalization.max_word_characters,
            )
        )
        library.normalizer = self.normalization.normalizer()
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=True)
        library.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.cls_id), ("[SEP]", self.sep_id)],
        )
        library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
        for token in self.added:
            (library.add_special_tokens if token.special else library.add_tokens)([token])
        return library

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, vocab.txt and tokenizer_config.json into `folder`; `transformers` opens them."""
        write_tokenizer_files(
            folder, self._library_special.to_str(), self._vocabulary_tokens, self.normalization, self.max_length
        )


def load_tokenizer(path: str | Path, lowercase: bool | None = None, strip_accents: bool | None = None) -> BertTokenizer:
    """Open a tokenizer folder (ours or Hugging Face's), a vocab.txt or a tokenizer.json.

    `lowercase` and `strip_accents` may be given to check (a folder that says otherwise is an error) or, where nothing
    is said, as beside a bare vocab.txt, to decide. Undecided, a vocabulary in which 0.5 % of the tokens hold capitals
    is cased; an uncased one in which 0.5 % hold accents keeps accents. Raises UserError naming the file, and the line
    or key.
    """
    content = read_tokenizer(Path(path), lowercase, strip_accents)
    return BertTokenizer(content.tokens, content.normalization, content.max_length, content.added)
