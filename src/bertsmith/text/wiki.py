"""Wikipedia's two layouts: MediaWiki XML dumps, and the `<doc …>` blocks WikiExtractor writes.

From a dump come the articles: namespace 0, no redirects, the newest revision, wikitext stripped to its passages. The
XML is parsed as it streams; a document type declaration (where entity bombs live, and dumps have none) is refused, and
no page is kept that is larger than any real one.
"""

import re
from collections.abc import Iterator
from xml.parsers import expat

from bertsmith.errors import UserError
from bertsmith.text.decoding import TextFile
from bertsmith.text.documents import Document, make_document
from bertsmith.text.wikitext import strip_wikitext

MAX_PAGE = 1 << 24
"""Characters of a page's source; MediaWiki itself allows 2 MB (`$wgMaxArticleSize`)."""

DOC_START = re.compile(r"<doc\b[^>]*\bid=\"[^>]*>\s*")
ENTITIES = (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))
"""What WikiExtractor 3 escapes; nothing else is touched."""


def read_wikiextractor(file: TextFile) -> Iterator[Document]:
    """A document for each `<doc …>` block, its title line included, as WikiExtractor wrote it.

    A file that ends inside a block was cut: UserError.
    """
    start = 0
    text: list[str] = []
    for first, lines in file.lines():
        for number, line in enumerate(lines, first):
            opens = line.startswith("<doc ") and DOC_START.match(line)
            if start and (opens or line.rstrip() == "</doc>"):
                if document := make_doc_document(file, text, start):
                    yield document
                start = 0
            if opens:
                start, text = number, []
                if rest := line[opens.end() :].rstrip():
                    text.append(rest.removesuffix("</doc>"))
                    if rest.endswith("</doc>"):
                        if document := make_doc_document(file, text, start):
                            yield document
                        start = 0
            elif start:
                text.append(line)
            elif line.strip() and line.rstrip() != "</doc>":
                file.report.skip("text outside of <doc> blocks", f"{file.path}:{number}")
    if start:
        raise UserError(f"{file.path}: the file ends inside the <doc> that starts on line {start}; get the whole file")


def make_doc_document(file: TextFile, lines: list[str], start: int) -> Document | None:
    text = "\n".join(lines).strip("\n")
    for escaped, plain in ENTITIES:
        text = text.replace(escaped, plain)
    return make_document(text, file.path, start, file.options, file.report)


class Page:
    """What is gathered of one <page>."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.fields = {"title": "", "ns": "", "model": "", "text": ""}
        self.redirect = False
        self.too_long = False


class DumpParser:
    """expat's callbacks: finished pages gather in `pages`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.parser = expat.ParserCreate("utf-8")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end
        self.parser.CharacterDataHandler = self.characters
        self.parser.StartDoctypeDeclHandler = self.doctype
        self.page: Page | None = None
        self.pages: list[Page] = []
        self.kept: list[str] | None = None  # pieces of the element being gathered
        self.length = 0
        self.namespace_key = ""
        self.hidden_namespaces: set[str] = set()

    def feed(self, text: str, final: bool) -> list[Page]:
        """Parse more of the file; the pages it finished. UserError with line and column where it is no XML."""
        try:
            self.parser.Parse(text.encode("utf-8"), final)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            if final:  # all was well until here: what is missing is the rest
                raise UserError(f"{self.path}: the dump is cut off (line {error.lineno}); get the whole file") from None
            raise UserError(
                f"{self.path}: line {error.lineno}, column {error.offset + 1}: no well-formed XML ({reason})"
            ) from None
        pages, self.pages = self.pages, []
        return pages

    def doctype(self, *_: object) -> None:
        raise UserError(
            f"{self.path}: line {self.parser.CurrentLineNumber}: declares a document type; MediaWiki dumps have none, "
            "and such declarations can blow up a parser: refused"
        )

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "page":
            self.page = Page(self.parser.CurrentLineNumber)
        elif name == "namespace":
            self.namespace_key, self.kept, self.length = attributes.get("key", ""), [], 0
        elif self.page:
            if name in self.page.fields:
                self.kept, self.length = [], 0
            elif name == "redirect":
                self.page.redirect = True

    def characters(self, data: str) -> None:
        if self.kept is not None:
            self.length += len(data)
            if self.length <= MAX_PAGE:
                self.kept.append(data)

    def end(self, name: str) -> None:
        content = "".join(self.kept) if self.kept is not None else ""
        if name == "namespace":
            if self.namespace_key in ("-2", "6", "14") and content:
                self.hidden_namespaces.add(content.lower())
        elif self.page:
            if name in self.page.fields and self.kept is not None:
                if name == "text":
                    self.page.too_long = self.length > MAX_PAGE
                self.page.fields[name] = content  # of several revisions the last, the newest, stays
            elif name == "page":
                self.pages.append(self.page)
                self.page = None
        self.kept = None


def read_mediawiki(file: TextFile) -> Iterator[Document]:
    """A document for each article. What is not one is counted: redirect, other namespace, other content, too long."""
    parser = DumpParser(file.path)
    for text in file.blocks():
        for page in parser.feed(text, final=False):
            if document := make_article(file, page, parser.hidden_namespaces):
                yield document
    parser.feed("", final=True)


def make_article(file: TextFile, page: Page, hidden_namespaces: set[str]) -> Document | None:
    import mwparserfromhell

    place = f"{file.path}:{page.line}"
    model = page.fields["model"].strip()
    if page.fields["ns"].strip() not in ("0", ""):
        file.report.skip("page of another namespace", place)
    elif page.redirect or page.fields["text"][:20].lstrip().lower().startswith("#redirect"):
        file.report.skip("redirect", place)
    elif model not in ("wikitext", ""):
        file.report.skip(f"page of {model}, not wikitext", place)
    elif page.too_long:
        file.report.skip(f"page over {MAX_PAGE:,} characters", place)
    else:
        try:
            text = strip_wikitext(page.fields["text"], hidden_namespaces)
        except (mwparserfromhell.parser.ParserError, RecursionError):
            file.report.skip("wikitext that cannot be parsed", place)
            return None
        return make_document(text, file.path, page.line, file.options, file.report)
    return None
