"""A document's text → its sentences, by sentencex's rules for the language, with a newline always ending a sentence.

The exception is hard-wrapped text (Project Gutenberg's, e-mail's), where newlines are the margin's doing: it is
recognised for each document as a whole and unwrapped first. No character but spaces is ever lost, and any line, of any
length, takes linear time.
"""

import re
from collections.abc import Iterator
from functools import cache

from bertsmith.errors import UserError
from bertsmith.text.wrapping import unwrap_lines

LONGEST_PIECE = 10_000
"""Characters handed to sentencex at once; some of its rules look at the whole paragraph for each sentence mark."""
LONGEST_CJK_PIECE = 2_000
"""The same for text without spaces, where looking for the last word runs to the start of the paragraph."""

ISO_639_1 = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es
et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj
kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv
ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti
tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"""
OTHER_CODES = """
aae abs ace acm ady aeb aln als alt ami anp apc arn arq ary arz ast atj avk awa azb ban bar bbc bcc bci bdr bew bgn bjn
blk bpy bqi btm bug bxr cdo cpx crh csb dsb dtp dty dua egl eml ext fit fon frc frp frr fur gag gan gcf gcr gld glk gom
gor gsw guc hak hif hke hrx hsb hsn hyw iba inh jut kaa kab kbd kbp kea kge khw kiu kjh kjp koi krc krl ksh ksw kum lad
lbe lez lij liv ljp lki lld lmo lrc ltg lua luz lzh lzz mad mag mai mdf mhr min mnc mnw mrj mui mwl myv mzn nah nan nap
nds nia nrm nyo olo pcd pdc pdt pfl pms pnt pwn qug rgn rmy rsk rue rup ruq rut sah scn sdc sdh ses sgs shi shy sjd skr
sli sma smn srn sro stq sty szl szy tay tcy tet trv ttj tyv udm vec vep vls vmf vmw vot vro wls wuu xal xmf yue"""
"""ISO 639-3 codes sentencex 1.0 documents a fallback for; it finds the language with rules that is nearest."""

ODD_SPACES = (
    "\t\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""All that str.isspace() knows but newline and space: BERT's tokenizer would drop some and join the words around them;
and sentencex 1.0.32 panics on some of more than one byte before a full stop ("J\\xa0.")."""

CJK_STOP_BEFORE_LATIN = re.compile(r"([。！？｡][”’」』）》〉】]*)(?=[0-9A-Za-z])")
CJK_SENTENCE_END = re.compile(r"[。！？｡][”’」』）》〉】]*")
CJK_OPENING, CJK_CLOSING = "“‘「『（《〈【", "”’」』）》〉】"
CONTINUATIONS = frozenset("。！？｡，、；：,;)]}”’」』）》〉】»›")
"""No sentence starts with these: a piece that does goes to the one before it."""
PLAIN_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？｡])")


_PLAIN = dict.fromkeys(map(ord, ODD_SPACES), " ")
_LINE = re.compile(r"[^\n]+")


@cache
def resolve_language(language: str) -> str:
    """The code sentencex is given for `language` ("EN", "pt_BR", "zh-Hans-CN" are fine).

    Where sentencex has neither rules nor a documented fallback (sv, ko, zh …) it applies its default rules, which know
    the sentence marks of every script. Raises UserError for what is no language code.
    """
    code = language.strip().lower().replace("_", "-")
    known = set(ISO_639_1.split()) | set(OTHER_CODES.split())
    if code.split("-")[0] in known:
        return code.split("-")[0]
    raise UserError(
        f"--language: {language!r} is not known; use an ISO 639 code such as en, de, fr, es, ru, ar, hi, ja or zh"
    )


def split_sentences(text: str, language: str = "en") -> list[str]:
    """The sentences of a document, in order, none empty; spaces around them are dropped, odd ones inside made plain.

    A newline ends a sentence, unless the document is hard-wrapped (see `unwrap_lines`). Lines of more than
    10,000 characters (2,000 in text without spaces) go to sentencex in pieces, cut at a mark, else at a space. Raises
    UserError on an unknown language.
    """
    code = resolve_language(language)
    for space in ODD_SPACES:
        if space in text:
            text = text.replace(space, " ")
    if "。" in text or "！" in text or "？" in text or "｡" in text:
        # sentencex takes a digit or small letter after a mark for the same sentence, as in scripts with spaces
        text = CJK_STOP_BEFORE_LATIN.sub(r"\1 ", text)
    sentences: list[str] = []
    for line in unwrap_lines(text.split("\n")):
        if line:
            split_line(line, code, sentences)
    return sentences


def find_sentences(text: str, language: str = "en") -> Iterator[tuple[int, int]]:
    """Where the sentences of a text stand as it is, first character and one past the last, blanks around them left out.

    Every newline ends one, and marks that `split_sentences` would join to the sentence before may stand alone. Raises
    UserError on an unknown language.
    """
    code = resolve_language(language)
    plain = text.translate(_PLAIN)
    for line in _LINE.finditer(plain):
        place = line.start()
        for piece in cut_line(line.group()):
            for part in segment(piece, code):
                if sentence := part.strip():
                    place = plain.index(sentence, place)
                    yield place, place + len(sentence)
                    place += len(sentence)


def split_line(line: str, code: str, sentences: list[str]) -> None:
    """Append the sentences of one line."""
    first = len(sentences)
    for piece in cut_line(line) if len(line) > LONGEST_CJK_PIECE else (line,):
        for part in segment(piece, code):
            if not (sentence := part.strip()):
                continue
            if len(sentences) > first and continues(sentence) and len(sentences[-1]) < LONGEST_CJK_PIECE:
                sentences[-1] += sentence
            else:
                sentences.append(sentence)


def continues(sentence: str) -> bool:
    """Whether a piece cannot stand alone: a comma or closing mark comes first, or there is no letter in it."""
    return sentence[0] in CONTINUATIONS or (len(sentence) < 4 and not any(map(str.isalnum, sentence)))


def segment(text: str, code: str) -> list[str]:
    """sentencex's pieces of `text` (one line), or, where it fails or would lose a character, a plain rule's."""
    import sentencex

    try:
        parts = sentencex.segment(code, text)
    except UnicodeEncodeError:  # a lone surrogate
        return PLAIN_SENTENCE_END.split(text)
    except BaseException as error:  # a panic in Rust is no Exception
        if type(error).__name__ != "PanicException":
            raise
        return PLAIN_SENTENCE_END.split(text)
    return parts if sum(map(len, parts)) == len(text) else PLAIN_SENTENCE_END.split(text)


def cut_line(line: str) -> list[str]:
    """Cut a line too long for sentencex's rules: at sentence ends, where there are none at spaces, or anywhere."""
    pieces, start = [], 0
    while start < len(line):
        spaced = line.count(" ", start, start + LONGEST_PIECE) * 40 > min(len(line) - start, LONGEST_PIECE)
        longest = LONGEST_PIECE if spaced else LONGEST_CJK_PIECE
        end = len(line) if len(line) - start <= longest else find_sentence_end(line, start, start + longest)
        pieces.append(line[start:end])
        start = end
    return pieces


def find_sentence_end(line: str, start: int, end: int) -> int:
    """The last good place to cut in line[start:end]: a CJK sentence end outside quotes, a mark and a space, a space."""
    window = line[start:end]
    ends = [match.end() for match in CJK_SENTENCE_END.finditer(window) if match.end() < len(window)]
    for place in reversed(ends):
        before = window[:place]
        if sum(map(before.count, CJK_OPENING)) == sum(map(before.count, CJK_CLOSING)):
            return start + place
    place = max(window.rfind(mark) for mark in (". ", "! ", "? ", "… "))
    if place > 0:
        return start + place + 2
    if ends:
        return start + ends[-1]
    place = window.rfind(" ")
    return start + place + 1 if place > 0 else end
