"""Text → BERT's words: clean, split at blanks, punctuation and ideographs, lower-case, strip accents.

The rules are those of Google's BasicTokenizer as the `tokenizers` library implements them (BertNormalizer and
BertPreTokenizer). Because they look at one character at a time and never across a blank, a text can be cut at blanks
first, at C speed, and each distinct piece be treated once: both the encoder and the word counts live on that.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tokenizers import normalizers, pre_tokenizers

# str.split() also cuts at these control characters, which BERT's cleaning removes (joining what stands beside them).
_REMOVED_BUT_SPLIT = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_REMOVE = dict.fromkeys(map(ord, _REMOVED_BUT_SPLIT))
_SURROGATES = re.compile("[\ud800-\udfff]")
_ASCII_WORDS = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")

# Characters that are a word of their own whatever stands beside them: ASCII and common Unicode punctuation, and the
# ideographs of the basic plane. A part of BERT's own sets is enough: the rest stays inside the runs between them.
_PUNCTUATION = (
    r"!-/:-@\[-`{-~\u00a1\u00a7\u00ab\u00b6\u00b7\u00bb\u00bf\u2010-\u2027\u2030-\u2043"
    r"\u3001-\u3003\u3008-\u3011\u3014-\u301f\u30fb\uff01-\uff03\uff05-\uff0a\uff0c-\uff0f\uff1a\uff1b\uff1f\uff20"
)
_BLANKS = r" \t\n\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
IDEOGRAPHS = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"


@dataclass(frozen=True)
class Normalization:
    """How text becomes words. Saved beside the vocabulary, because a vocabulary is only right for the one it was made
    with."""

    lowercase: bool = True
    """Lower-case letter by letter (the final sigma of Greek capitals becomes σ, as in `tokenizers`)."""
    strip_accents: bool | None = None
    """Remove combining marks after canonical decomposition; None follows `lowercase`, as Google's code does."""
    split_cjk: bool = True
    """Each ideograph is a word."""
    max_word_characters: int = 100
    """A longer word is one [UNK] (the limit of `transformers`; Google's file says 200)."""

    @property
    def strips_accents(self) -> bool:
        """`strip_accents` with its default resolved."""
        return self.lowercase if self.strip_accents is None else self.strip_accents

    def normalizer(self) -> normalizers.Normalizer:
        """The same settings as the library's object."""
        return normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=self.split_cjk,
            strip_accents=self.strip_accents,
            lowercase=self.lowercase,
        )


def replace_surrogates(text: str) -> str:
    """Lone surrogates (JSON may hold them) become U+FFFD, which cleaning removes; positions stay as they are."""
    return _SURROGATES.sub("\ufffd", text)


def remove_splitting_controls(text: str) -> str:
    """`text` without the control characters that `str.split` takes for blanks and BERT removes."""
    # A look for each is a memchr: far cheaper than one pass of translate over a text that has none, the usual case.
    if any(control in text for control in _REMOVED_BUT_SPLIT):
        return text.translate(_REMOVE)
    return text


def split_at_blanks(text: str) -> list[str]:
    """Cut `text` at BERT's blanks. Joining `words` of the pieces gives exactly the words of the text."""
    return remove_splitting_controls(text).split()


class WordSplitter:
    """Turns what stands between two blanks into BERT's words."""

    def __init__(self, normalization: Normalization) -> None:
        self.normalization = normalization
        self._normalize = normalization.normalizer().normalize_str
        self._pre_tokenize = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
        self._lowercase = normalization.lowercase

    def words(self, raw: str) -> list[str]:
        """The words of `raw`, a piece of text (without blanks, when it should be quick)."""
        if raw.isascii() and raw.isprintable():
            lowered = raw.lower() if self._lowercase else raw
            return [lowered] if raw.isalnum() else _ASCII_WORDS.findall(lowered)
        try:
            normalized = self._normalize(raw)
        except UnicodeEncodeError:
            normalized = self._normalize(replace_surrogates(raw))
        return [word for word, _ in self._pre_tokenize(normalized)]

    @cached_property
    def _alone(self) -> str:
        return _PUNCTUATION + (IDEOGRAPHS if self.normalization.split_cjk else "")

    @cached_property
    def _runs(self) -> re.Pattern[str]:
        return re.compile(f"([^{self._alone}]+)")

    @cached_property
    def _boundary(self) -> re.Pattern[str]:
        return re.compile(f"[{_BLANKS}{self._alone}]")

    def split_runs(self, raw: str) -> Iterator[str]:
        """Cut `raw` further, at punctuation and ideographs; the words of the parts are the words of `raw`.

        Sentences of Chinese or Japanese are one piece between blanks: cut like this, their parts repeat.
        """
        # re.split with a group gives [alone characters, run, alone characters, run, …]: one match a run is several
        # times quicker than one a character.
        for index, part in enumerate(self._runs.split(raw)):
            if index % 2:
                yield part
            else:
                yield from part

    def last_boundary(self, text: str, start: int, end: int) -> int:
        """The last position in (start, end] where `text` can be cut between words; `start` if there is none."""
        reach = 100
        while True:
            begin = max(start, end - reach)
            last = start
            for found in self._boundary.finditer(text, begin, end):
                last = found.end()
            if last > start or begin == start:
                return last
            reach *= 100

    def next_boundary(self, text: str, start: int) -> int:
        """The first position from `start` on where `text` can be cut between words; its length if there is none."""
        found = self._boundary.search(text, start)
        return found.start() if found else len(text)
