"""Plain text: compression by content, encodings, byte-order marks, line ends, bad bytes, cut and foreign files."""

import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_files import COMPRESS, read, read_texts, write

from bertsmith.errors import UserError
from bertsmith.text.documents import MAX_DOCUMENT
from bertsmith.text.readers import ReadOptions, ReadReport, check_inputs, read_documents

PROSE = "Curiouser and curiouser, cried Alice.\n\nÇa va? 你好。\nEnd" * 50


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["right", "no suffix", "wrong suffix"])
def test_compression_is_told_by_content(tmp_path: Path, suffix: str, name: str) -> None:
    names = {"right": f"a.txt{suffix}", "no suffix": "a", "wrong suffix": "a.gz" if suffix != ".gz" else "a.bz2"}
    data = PROSE.encode()
    path = write(tmp_path / names[name], COMPRESS[suffix](data))
    documents, report = read(path)
    assert [(d.text, d.source, d.line) for d in documents] == [(PROSE, str(path), 1)]
    assert (report.files, report.documents, report.characters, report.bytes) == (1, 1, len(PROSE), len(data))
    assert not report.skipped
    assert not report.invalid_bytes


@pytest.mark.parametrize("suffix", [s for s in COMPRESS if s])
def test_members_in_a_row_are_one_stream(tmp_path: Path, suffix: str) -> None:
    half = COMPRESS[suffix](b"one\n"), COMPRESS[suffix](b"two\n")
    assert read_texts(write(tmp_path / "x", half[0] + half[1])) == ["one\ntwo\n"]
    if suffix != ".zst":  # tapes and block devices pad with zeros
        assert read_texts(write(tmp_path / "y", half[0] + bytes(700) + half[1] + bytes(3000))) == ["one\ntwo\n"]


@pytest.mark.parametrize("suffix", [s for s in COMPRESS if s])
def test_a_cut_stream_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    noise = random.Random(1).randbytes(3_000_000).hex().encode()  # several blocks of output
    whole = COMPRESS[suffix](noise)
    for kept in (len(whole) - 1, len(whole) // 2, 20):
        path = write(tmp_path / f"cut{kept}{suffix}", whole[:kept])
        with pytest.raises(UserError, match="cut off") as caught:
            read(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("suffix", [s for s in COMPRESS if s])
def test_bytes_after_a_stream_are_not_dropped(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / "x", COMPRESS[suffix](b"sound") + b"something else entirely")
    with pytest.raises(UserError, match=r"appended|damaged") as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_damaged_stream_is_refused(tmp_path: Path) -> None:
    for suffix in (".gz", ".bz2", ".xz"):
        data = bytearray(COMPRESS[suffix](PROSE.encode()))
        data[len(data) // 2] ^= 0xFF
        with pytest.raises(UserError, match="damaged"):
            read(write(tmp_path / f"x{suffix}", bytes(data)))


def test_compressed_twice_and_archives_are_refused(tmp_path: Path) -> None:
    twice = write(tmp_path / "a.gz", COMPRESS[".gz"](COMPRESS[".xz"](b"text")))
    with pytest.raises(UserError, match="compressed twice"):
        read(twice)
    tar = bytes(257) + b"ustar" + bytes(250)
    with pytest.raises(UserError, match="tar archive"):
        read(write(tmp_path / "a.tar.gz", COMPRESS[".gz"](tar)))
    with pytest.raises(UserError, match="ZIP archive; unpack"):
        read(write(tmp_path / "a.txt", b"PK\x03\x04" + bytes(100)))


@pytest.mark.parametrize(("end", "name"), [("\r\n", "DOS"), ("\r", "old Macintosh"), ("\n", "Unix")])
def test_line_ends_become_newlines(tmp_path: Path, end: str, name: str) -> None:
    lines = ["one", "", "two\x0b\x0c\x1c\x85\u2028\u2029still two", "three", ""]
    text = "\n".join(lines)
    assert read_texts(write(tmp_path / "x", end.join(lines).encode())) == [text]
    by_blank_line, _ = read(tmp_path / "x", documents="blank-line")
    assert [(d.text, d.line) for d in by_blank_line] == [("one", 1), ("\n".join(lines[2:4]), 3)]


def test_a_line_end_split_between_blocks_is_one(tmp_path: Path) -> None:
    for offset in range(-2, 3):
        text = "x" * ((1 << 20) + offset) + "\r\n" + "y" * (1 << 20) + "\r"
        assert read_texts(write(tmp_path / "x", text)) == [text.replace("\r\n", "\n").replace("\r", "\n")]


@pytest.mark.parametrize(
    ("mark", "codec"),
    [
        (b"\xef\xbb\xbf", "utf-8"),
        (b"\xff\xfe", "utf-16-le"),
        (b"\xfe\xff", "utf-16-be"),
        (b"\xff\xfe\0\0", "utf-32-le"),
        (b"\0\0\xfe\xff", "utf-32-be"),
    ],
)
@pytest.mark.parametrize("asked", ["utf-8", "utf-8-sig", "latin-1", "utf-16"])
def test_a_byte_order_mark_wins_and_is_dropped(tmp_path: Path, mark: bytes, codec: str, asked: str) -> None:
    path = write(tmp_path / "x", mark + PROSE.encode(codec))
    assert read_texts(path, encoding=asked) == [PROSE]


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("latin-1", "déjà vu à la française\n" * 40),
        ("cp1252", "“smart” – quotes €\n" * 40),
        ("cp1251", "Всеобщая декларация прав человека\n" * 40),
        ("iso-8859-7", "ΟΙΚΟΥΜΕΝΙΚΗ ΔΙΑΚΗΡΥΞΗ\n" * 40),
        ("gb18030", "世界人权宣言，联合国大会。𠀀\n" * 40),
        ("shift_jis", "世界人権宣言、ソ連の表\n" * 40),
        ("euc-jp", "世界人権宣言、ソ連の表\n" * 40),
        ("iso2022_jp", "世界人権宣言\n" * 40),
        ("utf-16-le", "Universal Declaration\n" * 40),
        ("utf-16-be", "Всеобщая\n" * 40),
        ("utf-7", "déjà vu\n" * 40),
        ("utf-16", "ohne Marke\n" * 40),
        ("utf-32", "ohne Marke, 中\n" * 40),
    ],
)
def test_another_encoding_by_option(tmp_path: Path, codec: str, text: str) -> None:
    path = write(tmp_path / "x", text.encode(codec))
    documents, report = read(path, encoding=codec)
    assert [d.text for d in documents] == [text]
    if codec in ("utf-16", "utf-32"):  # also without the mark Python writes
        for order in ("-le", "-be")[: 2 if codec == "utf-16" else 1]:
            assert read_texts(write(path, text.encode(codec + order)), encoding=codec) == [text]
    assert report.invalid_bytes == 0
    # a block border falls in the middle of a character somewhere
    big = text * (1_200_000 // len(text.encode(codec)) + 1)
    assert "".join(read_texts(write(path, big.encode(codec)), encoding=codec)) == big


def test_bad_bytes_are_replaced_counted_and_named(tmp_path: Path) -> None:
    data = (
        b"first line\nsecond \xff line\nthird\xe4\xb8 line\r\nfour\xed\xa0\x80th\n" + b"fine\n" * 60 + b"cut \xe4\xb8"
    )
    path = write(tmp_path / "x", data)
    documents, report = read(path)
    assert documents[0].text == data.decode("utf-8", "replace").replace("\r\n", "\n")
    assert report.invalid_bytes == 1 + 2 + 3 + 2
    assert report.invalid_places == [
        f"{path}:{line}:{data.index(bad)}"
        for line, bad in [(2, b"\xff"), (3, b"\xe4\xb8 "), (4, b"\xed\xa0"), (4, b"\xa0\x80t"), (4, b"\x80t")]
    ] + [f"{path}:65:{len(data) - 2}"]


def test_bad_bytes_far_into_a_file_are_placed_right(tmp_path: Path) -> None:
    good = "gut, schön\n".encode()
    data = good * 250_000 + b"\xe9t\xe9\n" + good * 250_000 + b"\xff"
    path = write(tmp_path / "x", data)
    documents, report = read(path)
    assert report.invalid_bytes == 3
    start = len(good) * 250_000
    assert report.invalid_places == [
        f"{path}:250001:{start}",
        f"{path}:250001:{start + 2}",
        f"{path}:500002:{len(data) - 1}",
    ]
    assert "".join(d.text for d in documents) == data.decode("utf-8", "replace")


def test_bad_bytes_are_fatal_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"good\nba\xffd\n")
    with pytest.raises(UserError, match=r"x: line 2, byte 7: not utf-8; name .*--encoding"):
        read(path, on_invalid="error")


@settings(max_examples=60)
@given(
    pieces=st.lists(st.sampled_from([b"\xff", b"\xe4\xb8", b"\xf0\x9f\x98", b"\r", b"\r\n", b"a\n", "é中😀".encode()])),
    pad=st.integers(0, 6000),
)
def test_replacement_is_pythons_and_the_count_adds_up(tmp_path: Path, pieces: list[bytes], pad: int) -> None:
    data = b"a" * pad + b"b".join(pieces)
    documents, report = read(write(tmp_path / "x", data))
    expected = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    assert "".join(d.text for d in documents) == ("" if expected.isspace() else expected)
    valid = len(data.decode("utf-8", "ignore").encode())
    assert report.invalid_bytes == len(data) - valid


@settings(max_examples=40)
@given(
    data=st.binary(max_size=200),
    codec=st.sampled_from(["gb18030", "shift_jis", "euc-kr", "big5", "utf-16-le", "utf-32-be", "cp1252", "iso2022_jp"]),
)
def test_any_bytes_in_any_encoding_are_read(tmp_path: Path, data: bytes, codec: str) -> None:
    try:
        documents, report = read(write(tmp_path / "x", b"safe" * 4 + data), encoding=codec)
    except UserError as error:
        assert str(tmp_path / "x") in str(error)  # noqa: PT017
        return
    try:
        (b"safe" * 4 + data).decode(codec)
        assert report.invalid_bytes == 0
    except UnicodeDecodeError:
        assert report.invalid_bytes > 0
        assert "\ufffd" in documents[0].text


def test_a_file_in_another_encoding_is_refused_with_the_flag(tmp_path: Path) -> None:
    russian = "Всеобщая декларация прав человека\n" * 40
    with pytest.raises(UserError, match=r"not utf-8 \(.*--encoding"):
        read(write(tmp_path / "x", russian.encode("cp1251")))
    with pytest.raises(UserError, match="read it with --encoding utf-16-le"):
        read(write(tmp_path / "x", ("plain English " * 40).encode("utf-16-le")))
    with pytest.raises(UserError, match="read it with --encoding utf-16-be"):
        read(write(tmp_path / "x", ("plain English " * 40).encode("utf-16-be")))


def test_binary_junk_is_refused(tmp_path: Path) -> None:
    junk = random.Random(3).randbytes(5000)
    for data in (junk, bytes(1000), b"\x7fELF" + junk, b"\x89PNG\r\n\x1a\n" + junk):
        path = write(tmp_path / "junk.txt", data)
        with pytest.raises(UserError, match=r"junk\.txt: "):
            read(path)
    with pytest.raises(UserError, match="HTML or XML"):
        read(write(tmp_path / "page.txt", "<!DOCTYPE html>\n<html><body>hello</body></html>"))


def test_control_characters_stay_and_are_counted(tmp_path: Path) -> None:
    text = "a\0b\nc\x01d\te\x7f\x85f\n\x0cg" + " plain" * 20
    documents, report = read(write(tmp_path / "x", text))
    assert documents[0].text == text
    assert report.control_characters == 5
    assert text.count("\n") == 2


def test_empty_files_are_counted(tmp_path: Path) -> None:
    for data, reason in [(b"", "empty file"), (b"\xef\xbb\xbf", "empty file"), (b"\n\n \n\t\r\n", "empty document")]:
        documents, report = read(write(tmp_path / "x", data))
        assert not documents
        assert report.skipped == {reason: 1}
        assert report.skipped_places[0].endswith(reason)
    assert read(write(tmp_path / "x", COMPRESS[".gz"](b"")))[1].skipped == {"empty file": 1}


def test_blank_line_layout(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "\n\nOne.\nTwo.\n \t\n\n中\n\n\nlast, no newline")
    documents, report = read(path, documents="blank-line")
    assert [(d.text, d.line) for d in documents] == [("One.\nTwo.", 3), ("中", 7), ("last, no newline", 10)]
    assert report.documents == 3
    assert not report.skipped


@settings(max_examples=60)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])).map(lambda t: t.lstrip("\ufeff")),
    suffix=st.sampled_from(sorted(COMPRESS)),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_any_text_comes_back(tmp_path: Path, text: str, suffix: str, mark: str) -> None:
    text = "x" + text  # may begin like no other format
    documents, report = read(write(tmp_path / "x.txt", COMPRESS[suffix]((mark + text).encode())))
    expected = text.replace("\r\n", "\n").replace("\r", "\n")
    if documents:  # a few draws hold mostly control characters: refused, below
        assert [d.text for d in documents] == [expected]
        assert report.characters == len(expected)


def test_long_documents_go_on_as_the_next_and_memory_is_flat(tmp_path: Path) -> None:
    line = "All work and no play makes Jack a dull boy. " * 20 + "\n"
    count = 19 * MAX_DOCUMENT // (2 * len(line))
    path = write(tmp_path / "big.txt", line * count)
    report = ReadReport()
    tracemalloc.start()
    characters = documents = 0
    starts = []
    for document in read_documents(str(path), ReadOptions(), report):
        assert len(document.text) <= MAX_DOCUMENT
        assert document.text.endswith("boy. \n")
        starts.append((document.line - 1) * len(line) == characters)
        characters += len(document.text)
        documents += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters == len(line) * count
    assert all(starts)
    assert report.continued_documents == documents - 1 == 9
    assert peak < 7 * MAX_DOCUMENT


@pytest.mark.parametrize("layout", ["file", "blank-line"])
@pytest.mark.parametrize("word", ["word ", "x"])
def test_one_huge_line(tmp_path: Path, layout: str, word: str) -> None:
    text = word * (int(2.5 * MAX_DOCUMENT) // len(word))
    documents, report = read(write(tmp_path / "x", COMPRESS[".gz"](text.encode())), documents=layout)
    assert "".join(d.text for d in documents) == text
    assert [d.line for d in documents] == [1, 1, 1]
    assert report.continued_documents == 2
    assert max(len(d.text) for d in documents) <= MAX_DOCUMENT
    if word == "word ":
        assert all(d.text.endswith(" ") for d in documents)


def test_stored_bytes_are_told(tmp_path: Path) -> None:
    for suffix, compress in COMPRESS.items():
        path = write(tmp_path / f"x{suffix}", compress(PROSE.encode() * 1000))
        told: list[int] = []
        list(read_documents(str(path), ReadOptions(), ReadReport(), told.append))
        assert sum(told) == path.stat().st_size


def test_bad_options_are_named_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        ReadOptions(documents="line", encoding="klingon", on_invalid="ignore", text_column="")
    for name in ("--documents", "--encoding", "--on-invalid", "--text-column"):
        assert name in str(caught.value)
    for codec in ("hex", "rot13", "zip", "base64", "idna", "punycode", "unicode_escape", "undefined"):
        with pytest.raises(UserError, match="not a text encoding"):
            ReadOptions(encoding=codec)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="folder where a file"):
        read(tmp_path)


def test_check_inputs_names_every_bad_file_before_work(tmp_path: Path) -> None:
    good = write(tmp_path / "good.txt", PROSE)
    paths = [
        good,
        write(tmp_path / "junk", bytes(1000)),
        write(tmp_path / "a.csv", "id,body\n1,x\n"),
        write(tmp_path / "b.tsv", "id\ttext\n1\tx\n"),
        write(tmp_path / "c.parquet", "no parquet"),
        write(tmp_path / "empty.txt", ""),
        tmp_path / "missing.txt",
    ]
    check_inputs([str(good)], ReadOptions())
    with pytest.raises(UserError) as caught:
        check_inputs([str(p) for p in paths], ReadOptions())
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [str(paths[i]) for i in (1, 2, 4, 6)]
    assert "'id', 'body'" in lines[1]


def test_report_merges_and_goes_to_json_and_back(tmp_path: Path) -> None:
    import json

    _, first = read(write(tmp_path / "a", b"a\xff" * 30), documents="blank-line")
    _, second = read(write(tmp_path / "b", b"\n\n"))
    merged = ReadReport(**json.loads(json.dumps(first.as_dict())))
    assert merged == first
    merged.merge(second)
    merged.merge(first)
    assert merged.files == 3
    assert merged.invalid_bytes == 60
    assert len(merged.invalid_places) == 20
    assert merged.skipped == {"empty document": 1}
    assert merged.characters == 2 * first.characters
