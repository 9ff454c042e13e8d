"""Wikitext → the passages of an article, as the BERT paper takes them from Wikipedia (section 3.1): running text only;
lists, tables and headers are left out, and with them templates, references, formulas, images, galleries and comments.

In: the source of a page. Out: paragraphs, one a line, a blank line between them.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any

HIDDEN_TAG_NAMES = (
    "categorytree ce chem gallery graph hiero imagemap includeonly indicator inputbox mapframe maplink math ref "
    "references score script section source style syntaxhighlight table templatedata templatestyles timeline"
)
HIDDEN_TAGS = frozenset(HIDDEN_TAG_NAMES.split())
SHOWN_TEMPLATES = dict.fromkeys(("abbr", "nobr", "nowrap", "small"), (1,)) | {
    "convert": (1, 2),
    "cvt": (1, 2),
    "lang": (2,),
}
"""Templates inside sentences → the arguments they show (`lang-xx`: the first); all others are left out."""
HIDDEN_NAMESPACES = frozenset(("category", "file", "image", "media"))
LIST_ITEM, LINE_BREAK = "\x00", "\x01"
"""Stand for markup while lines are sorted out; XML cannot hold either character."""

LANGUAGE_LINK = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]+)*|simple)$")
IMAGE_NAME = re.compile(r"\.(?:jpe?g|png|gif|svg|tiff?|webp|og[gv]|webm|pdf|djvu)\s*$", re.IGNORECASE)
BOLD_ITALIC = re.compile("'{2,5}")
MAGIC_WORD = re.compile("__[A-Z]+__")
VARIANTS = re.compile(r"-\{([^{}]*)\}-")
EMPTY_BRACKETS = re.compile(r"\s*\(\s*[,;:،\s]*\)|\s*（[，、；：\s]*）")
BRACKET_START = re.compile(r"\(\s*[,;:،]\s*|（[，、；：]\s*")
SPACES = re.compile(r"[ \t\xa0]+")
SPACE_BEFORE = re.compile(r" +([,.)\]])")
LETTER = re.compile(r"[^\W_]")


def strip_wikitext(source: str, hidden_namespaces: Collection[str] = ()) -> str:
    """The running text of a page. `hidden_namespaces`: the wiki's own lower-case names for File, Media and Category."""
    import mwparserfromhell

    # style tags ('' and ''') are left to a regular expression: the parser follows every wrong pairing of them
    nodes = mwparserfromhell.parse(source, skip_style_tags=True).nodes
    text = render(nodes, HIDDEN_NAMESPACES.union(hidden_namespaces))
    text = MAGIC_WORD.sub("", BOLD_ITALIC.sub("", VARIANTS.sub(choose_variant, text)))
    paragraphs: list[str] = []
    lines: list[str] = []
    for line in [*text.split("\n"), ""]:
        if line.strip() and not line.lstrip().startswith(LIST_ITEM):
            lines.append(line)
        elif lines:
            paragraphs += tidy(" ".join(lines).replace(LIST_ITEM, " "))
            lines = []
    return "\n\n".join(paragraphs)


def render(nodes: Iterable[Any], hidden: Collection[str]) -> str:
    """The visible text of parsed nodes; list items and forced line breaks as their marks."""
    from mwparserfromhell import nodes as kinds

    out: list[str] = []
    for node in nodes:
        if isinstance(node, kinds.Text):
            out.append(node.value)
        elif isinstance(node, kinds.Wikilink):
            out.append(render_link(node, hidden))
        elif isinstance(node, kinds.Tag):
            out.append(render_tag(node, hidden))
        elif isinstance(node, kinds.Template):
            out.append(render_template(node, hidden))
        elif isinstance(node, kinds.Heading):
            out.append("\n\n")
        elif isinstance(node, kinds.HTMLEntity):
            try:
                out.append(node.normalize())
            except (ValueError, OverflowError, KeyError):  # &#xFFFFFFFF;
                out.append(str(node))
        elif isinstance(node, kinds.ExternalLink):
            if node.title is not None:
                out.append(render(node.title.nodes, hidden))
            elif not node.brackets:
                out.append(str(node.url))
    return "".join(out)


def render_template(node: Any, hidden: Collection[str]) -> str:
    name = str(node.name).strip().lower()
    shown = (1,) if name.startswith("lang-") else SHOWN_TEMPLATES.get(name, ())
    values = [node.get(number).value for number in shown if node.has(number)]
    return " ".join(render(value.nodes, hidden).strip() for value in values)


def render_tag(node: Any, hidden: Collection[str]) -> str:
    name = str(node.tag).strip().lower()
    if name in HIDDEN_TAGS:
        return "\n\n" if name == "table" else ""
    if node.wiki_markup and name in ("li", "dt", "dd"):
        return LIST_ITEM
    if name == "br":
        return LINE_BREAK
    content = "" if node.contents is None else render(node.contents.nodes, hidden)
    if name in ("li", "dt", "dd"):
        return f"\n{LIST_ITEM}{content}\n"
    if name in ("p", "div", "blockquote", "center", "poem"):
        return f"\n\n{content}\n\n"
    return content


def render_link(node: Any, hidden: Collection[str]) -> str:
    title = str(node.title).strip()
    prefix, colon, _ = title.partition(":")
    if colon and prefix:
        prefix = prefix.strip().replace("_", " ").lower()
        if prefix in hidden or IMAGE_NAME.search(title):
            return ""
        if node.text is None and LANGUAGE_LINK.match(prefix):
            return ""
    return title.lstrip(":") if node.text is None else render(node.text.nodes, hidden)


def choose_variant(match: "re.Match[str]") -> str:
    """Chinese Wikipedia's `-{zh-hans:…; zh-hant:…}-`: the first variant; `-{…}-`: what is inside; rules: nothing."""
    flags, bar, body = match[1].rpartition("|")
    if bar and set("THA-D") & set(flags):
        return ""
    first = body.split(";")[0]
    return first.split(":", 1)[1].strip() if ":" in first else body


def tidy(paragraph: str) -> list[str]:
    """Mend what removed markup leaves: empty brackets, doubled spaces, lines without a letter or digit (dropped)."""
    out = []
    for line in paragraph.split(LINE_BREAK):
        line = BRACKET_START.sub(lambda m: m[0][0], EMPTY_BRACKETS.sub("", SPACES.sub(" ", line)))
        line = SPACE_BEFORE.sub(r"\1", SPACES.sub(" ", line)).strip()
        if LETTER.search(line):
            out.append(line)
    return out
