"""Every file of the shared folder of hard files is read, or refused with its name and the reason: nothing else."""

from pathlib import Path

import pytest
from made_files import read, read_texts

from bertsmith.errors import UserError
from bertsmith.text.readers import ReadOptions, ReadReport, check_inputs, expand_inputs, read_documents
from bertsmith.text.sentences import split_sentences

pytestmark = pytest.mark.shared_data

ENCODINGS = {
    "Arabic_Alarabia-Arabic.txt": "cp1256",
    "Chinese_Mandarin-GB2312.txt": "gb2312",
    "Greek_Ellinika-Greek.txt": "iso8859-7",
    "Hebrew_Ivrit-Hebrew.txt": "cp1255",
    "Japanese_Nihongo-EUC.txt": "euc-jp",
    "Japanese_Nihongo-SJIS.txt": "shift_jis",
    "Russian-Cyrillic.txt": "cp1251",
    "Russian_Russky-Cyrillic.txt": "cp1251",
}
"""The files that are refused as UTF-8, and what they are."""


@pytest.fixture
def hard(shared_data: Path) -> Path:
    return shared_data / "hard"


def test_every_file_is_read_or_refused(hard: Path) -> None:
    files = [path for path in sorted(hard.rglob("*")) if path.is_file()]
    assert len(files) >= 58
    refused, clean = {}, 0
    for path in files:
        report = ReadReport()
        given = 0
        try:
            for document in read_documents(str(path), ReadOptions(), report):
                given += len(document.text)
                assert document.text.strip()
                assert "\r" not in document.text
                assert document.source == str(path)
                sentences = split_sentences(document.text, "en")
                assert "".join("".join(sentences).split()) == "".join(document.text.split())
        except UserError as error:
            refused[path.name] = str(error)
            continue
        assert report.files == 1
        assert report.characters == given
        assert given or sum(report.skipped.values())  # nothing comes out only where the reason is counted
        assert (report.invalid_bytes > 0) == bool(report.invalid_places)
        clean += not report.invalid_bytes and not report.skipped
    assert set(refused) == {*ENCODINGS, "alice_truncated.txt.gz"}
    assert all(f"/{name}: " in message for name, message in refused.items())
    assert all("--encoding" in refused[name] for name in ENCODINGS)
    assert "cut off" in refused["alice_truncated.txt.gz"]
    assert clean >= 30


def test_alice_is_the_same_in_every_wrapping(hard: Path) -> None:
    alice = (hard / "made" / "alice.txt").read_bytes().decode("utf-8")
    same = [
        "alice.txt.bz2 alice.txt.gz alice.txt.xz alice.txt.zst alice_bom.txt alice_cr.txt alice_crlf.txt",
        "alice_gz_no_suffix alice_two_members.txt.gz alice_utf16.txt alice_wrong_suffix.gz",
    ]
    for name in " ".join(same).split():
        documents, report = read(hard / "made" / name)
        assert [d.text for d in documents] == [alice], name
        assert not report.skipped
        assert not report.invalid_bytes
    assert read_texts(hard / "made" / "alice_no_final_newline.txt") == [alice[:2000]]
    assert read_texts(hard / "made" / "alice_oneline.txt") == [alice.replace("\n", " ")]
    assert alice.count("\n") == 1788


def test_faults_are_counted_and_named_exactly(hard: Path) -> None:
    path = hard / "made" / "alice_badutf8.txt"
    documents, report = read(path)
    data = path.read_bytes()
    assert documents[0].text == data.decode("utf-8", "replace")
    assert report.invalid_bytes == len(data) - len(data.decode("utf-8", "ignore").encode()) == 16
    assert report.invalid_places[0] == f"{path}:25:3000"
    with pytest.raises(UserError, match="line 25, byte 3000"):
        read(path, on_invalid="error")

    documents, report = read(hard / "made" / "alice_nul.txt")
    assert report.control_characters == documents[0].text.count("\0") == 23
    assert documents[0].text.count("\n") == 118

    documents, report = read(hard / "made" / "alice_separators.txt")
    assert documents[0].text.count("\n") == 24
    assert report.control_characters == 44

    for name, reason in [
        ("empty.txt", "empty file"),
        ("only_bom.txt", "empty file"),
        ("only_newlines.txt", "empty document"),
    ]:
        assert read(hard / "made" / name)[1].skipped == {reason: 1}
    assert read_texts(hard / "made" / "one_word.txt") == ["hello"]
    assert read_texts(hard / "made" / "one_char_docs.txt", documents="blank-line") == ["a", "b", "中"]


def test_rows_are_counted_exactly(hard: Path) -> None:
    documents, report = read(hard / "made" / "docs_mixed.jsonl")
    assert (len(documents), documents[-1].text) == (23, "no newline at end")
    assert "line\nbreak \0 and 😀 emoji" in [d.text for d in documents]
    assert report.skipped == {
        "blank line": 1,
        "empty document": 1,
        "text is null": 1,
        "no text column": 1,
        "broken JSON": 1,
        "not a JSON object": 1,
    }
    assert [place.split(":")[1] for place in report.skipped_places] == ["6", "7", "8", "9", "10", "11"]
    tables = [read_texts(hard / "made" / f"docs_{kind}.parquet") for kind in ("none", "snappy", "gzip", "zstd")]
    assert len(tables[0]) == 21
    assert all(table == tables[0] for table in tables)
    documents, report = read(hard / "made" / "docs_nulls_dict.parquet")
    assert [(d.line, d.text) for d in documents] == [(3, "one"), (5, "two")]
    assert report.skipped == {"text is null": 2, "empty document": 1}


def test_wikipedia_is_told_by_content(hard: Path) -> None:
    documents, report = read(hard / "real" / "wikiextractor" / "wiki_01")
    assert len(documents) == 372
    assert documents[0].text.startswith("Chen Zhili\n\nChen Zhili (; born November 1942)")
    assert not report.skipped

    dumps = hard / "real" / "mediawiki"
    bulgarian, tables, english = (next(dumps.glob(f"{x}*")) for x in ("bgwiki", "enwiki-table", "enwiki-latest"))
    documents, report = read(bulgarian)  # UTF-16 inside
    assert len(documents) == 1
    assert documents[0].text.startswith("Григорианският календар (понякога")
    assert report.skipped == {"page of another namespace": 2}
    documents, report = read(english)
    assert len(documents) == 105
    assert report.skipped == {"redirect": 99, "page of another namespace": 1, "empty document": 1}
    documents, report = read(tables)
    assert len(documents) == 5
    for document in documents:
        assert not any(mark in document.text for mark in ("{{", "}}", "[[", "]]", "{|", "|}", "<ref", "==", "'''"))


def test_legacy_encodings_by_option(hard: Path) -> None:
    beginnings = {
        "Arabic_Alarabia-Arabic.txt": "الإعلان العالمي",
        "Chinese_Mandarin-GB2312.txt": "世界人权宣言",
        "Greek_Ellinika-Greek.txt": "ΟΙΚΟΥΜΕΝΙΚΗ ΔΙΑΚΗΡΥΞΗ",
        "Hebrew_Ivrit-Hebrew.txt": "ההכרזה לכל באי עולם",
        "Japanese_Nihongo-EUC.txt": "『世界人権宣言』",
        "Japanese_Nihongo-SJIS.txt": "『世界人権宣言』",
        "Russian-Cyrillic.txt": "Всеобщая декларация прав человека",
        "Russian_Russky-Cyrillic.txt": "Всеобщая декларация прав человека",
    }
    for name, encoding in ENCODINGS.items():
        documents, report = read(hard / "real" / "udhr" / name, encoding=encoding)
        assert documents[0].text.startswith(beginnings[name])
        assert report.invalid_bytes <= 4, name  # cut in mid character, or a stray byte of the page's own
    documents, report = read(hard / "real" / "udhr" / "French_Francais-Latin1.txt")
    assert report.invalid_bytes == documents[0].text.count("\ufffd") == 304
    documents, report = read(hard / "real" / "abc_science_cp1252_crlf.txt", encoding="cp1252")
    assert not report.invalid_bytes
    assert documents[0].text.count("\n") == 16509


def test_the_folder_as_an_input(hard: Path) -> None:
    report = ReadReport()
    files = expand_inputs([str(hard)], report)
    assert len(files) == sum(path.is_file() for path in hard.rglob("*"))
    with pytest.raises(UserError) as caught:
        check_inputs(files, ReadOptions())
    assert {Path(line.split(": ")[0]).name for line in str(caught.value).splitlines()} == set(ENCODINGS)


def test_googles_sample_in_its_layout(hard: Path) -> None:
    documents, _ = read(hard / "real" / "google_bert_sample_text.txt", documents="blank-line")
    lines = (hard / "real" / "google_bert_sample_text.txt").read_text("utf-8").split("\n")
    assert len(documents) == 3
    assert documents[0].text.startswith(
        "This text is included to make sure Unicode is handled properly: 力加勝北区ᴵᴺᵀᵃছজটডণত"
    )
    assert sum(d.text.count("\n") + 1 for d in documents) == sum(bool(line) for line in lines)
