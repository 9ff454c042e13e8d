"""WikiExtractor output and MediaWiki dumps."""

from pathlib import Path

import pytest
from made_files import COMPRESS, read, read_texts, write

from bertsmith.errors import UserError
from bertsmith.text.wiki import MAX_PAGE
from bertsmith.text.wikitext import strip_wikitext

DOCS = """<doc id="1" url="http://x?curid=1" title="First">
First

A &lt; B &amp; C. "AT&T" &amp;lt;
Second line.

</doc>
<doc id="2" url="http://x?curid=2" title="Second">
Second

Ça va.
</doc>
"""


def dump(*pages: str, head: str = "") -> str:
    return (
        f'{head}<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" xml:lang="de">\n<siteinfo><namespaces>\n'
        '<namespace key="0" case="first-letter" />\n<namespace key="6">Datei</namespace>\n'
        '<namespace key="14">Kategorie</namespace>\n</namespaces></siteinfo>\n' + "\n".join(pages) + "\n</mediawiki>\n"
    )


def page(text: str, ns: str = "0", extra: str = "", model: str = "wikitext", title: str = "T") -> str:
    return (
        f"<page><title>{title}</title><ns>{ns}</ns><id>1</id>{extra}<revision><id>2</id><model>{model}</model>"
        f'<text xml:space="preserve">{text}</text></revision></page>'
    )


@pytest.mark.parametrize("name", ["wiki_00", "wiki_00.bz2", "x.txt", "x.jsonl"])
def test_wikiextractor_is_told_by_content(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, COMPRESS[".bz2"](DOCS.encode()))
    documents, report = read(path)
    assert [(d.line, d.text) for d in documents] == [
        (1, 'First\n\nA < B & C. "AT&T" &lt;\nSecond line.'),
        (8, "Second\n\nÇa va."),
    ]
    assert not report.skipped


def test_wikiextractor_oddities(tmp_path: Path) -> None:
    text = DOCS.replace("</doc>\n<doc", "</doc>\nstray\n<doc").replace("Ça va.\n</doc>", "Ça va.")
    path = write(tmp_path / "wiki_00", text + '<doc id="3" title="x"></doc>\n<doc id="4" title="y">\ny\n</doc>')
    documents, report = read(path)
    assert [d.text.split("\n")[0] for d in documents] == ["First", "Second", "y"]
    assert report.skipped == {"text outside of <doc> blocks": 1, "empty document": 1}
    with pytest.raises(UserError, match="ends inside the <doc> that starts on line 8"):
        read(write(tmp_path / "cut", DOCS[:-8]))


def test_mediawiki_gives_the_articles_and_counts_the_rest(tmp_path: Path) -> None:
    text = dump(
        page("'''Alice''' is a [[book|novel]]."),
        page("talk", ns="1"),
        page("#REDIRECT [[Alice]]", extra='<redirect title="Alice" />'),
        page("#redirect [[Alice]]"),
        page("{}", model="json"),
        page("{{stub}}"),
        page("x" * (MAX_PAGE + 1)),
        page("second"),
        head='<?xml version="1.0" encoding="UTF-8"?>\n',
    )
    for name, data in [
        ("a.xml.bz2", COMPRESS[".bz2"](text.encode())),
        ("a.txt", b"\xff\xfe" + text.encode("utf-16-le")),
        ("a", text.encode()),
    ]:
        documents, report = read(write(tmp_path / name, data))
        assert [(d.line, d.text) for d in documents] == [(8, "Alice is a novel."), (15, "second")]
        assert report.skipped == {
            "page of another namespace": 1,
            "redirect": 2,
            "page of json, not wikitext": 1,
            "empty document": 1,
            f"page over {MAX_PAGE:,} characters": 1,
        }


def test_of_several_revisions_the_last_is_taken(tmp_path: Path) -> None:
    text = dump(page("old").replace("</page>", "<revision><text>new</text></revision></page>"))
    assert read_texts(write(tmp_path / "x", text)) == ["new"]


def test_entity_bombs_are_refused(tmp_path: Path) -> None:
    bomb = '<?xml version="1.0"?>\n<!DOCTYPE m [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>\n'
    with pytest.raises(UserError, match=r"x\.xml: line 2: declares a document type"):
        read(write(tmp_path / "x.xml", bomb + "<mediawiki>&b;</mediawiki>"))
    # the same behind a start that looks like a dump's
    with pytest.raises(UserError, match=r"line \d+"):
        read(write(tmp_path / "y.xml", dump(page("a")) + bomb))
    with pytest.raises(UserError, match="undefined entity"):
        read(write(tmp_path / "z.xml", dump(page("&b;"))))
    external = '<!-- a <mediawiki> -->\n<!DOCTYPE mediawiki SYSTEM "file:///etc/passwd">'
    with pytest.raises(UserError, match="declares a document type"):
        read(write(tmp_path / "w", dump(page("a"), head=external)))
    with pytest.raises(UserError, match="no MediaWiki dump; extract its text first"):
        read(write(tmp_path / "feed", '<?xml version="1.0"?>\n<rss><channel/></rss>'))


def test_broken_and_cut_dumps_are_refused_with_the_place(tmp_path: Path) -> None:
    whole = dump(page("a"), page("b"))
    with pytest.raises(UserError, match=r"cut off \(line 8\)"):
        read(write(tmp_path / "x", whole[: whole.rindex("<revision>")]))
    with pytest.raises(UserError, match=r"line 7, column \d+: no well-formed XML \(mismatched tag\)"):
        read(write(tmp_path / "x", whole.replace("</title>", "</titel>", 1)))


def test_wikitext_becomes_passages() -> None:
    source = """{{Infobox|a=b}}[[Datei:a.jpg|mini|caption with [[link]]]]
'''Alice''' (; {{IPA|x}}) ''is'' a [[book|novel]]{{cite|x}} of {{convert|70|km|mi}} by [[Lewis Carroll]],
soft-wrapped<ref>note</ref> here.<br>After a break. __NOTOC__

== Plot ==
* a list
# numbered
:indented
; term : definition
{| class="wikitable"
| cell
|}
See [http://x.org the site] &amp; [[:Kategorie:Bücher]], &nbsp;&#8212; <math>x^2</math>[[Kategorie:Bücher]] [[fr:Alice]]
<!-- comment --><gallery>
a.jpg|b
</gallery>
<nowiki>[[kept]]</nowiki> -{zh-hans:简体; zh-hant:繁體}- -{plain}- {{lang|fr|déjà}} {{lang-la|''ars''}}

{{end}} .
"""
    assert strip_wikitext(source, ["datei", "kategorie"]).split("\n\n") == [
        "Alice is a novel of 70 km by Lewis Carroll, soft-wrapped here.",
        "After a break.",
        "See the site & Kategorie:Bücher, —",
        "[[kept]] 简体 plain déjà ars",
    ]


def test_wikitext_nested_deeply_or_broken_is_no_fault() -> None:
    for source in ("{{" * 3000 + "x", "[[" * 3000 + "x", "'" * 5000, "<ref>" * 2000, "{|" * 1000, "&#xFFFFFFFF; x"):
        assert isinstance(strip_wikitext(source), str)
