"""The token store: what is written is what is read, without copies, and whatever is broken is named."""

import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.corpus.chunks import LONGEST_SENTENCE, TokenChunk, token_dtype
from bertsmith.corpus.shards import Shard, describe_corpus, open_corpus, unigram_entropy
from bertsmith.corpus.writer import CorpusWriter, ShardWriter, write_corpus
from bertsmith.errors import UserError
from bertsmith.storage import sha256_of_files
from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer

Documents = list[list[list[int]]]


def make_tokenizer(size: int = 300) -> BertTokenizer:
    return BertTokenizer([*SPECIAL_TOKENS, *(f"w{i}" for i in range(size - 5))])


def random_documents(seed: int, count: int, vocab_size: int = 300) -> Documents:
    generator = np.random.default_rng(seed)
    return [
        [generator.integers(5, vocab_size, generator.integers(1, 40)).tolist() for _ in range(generator.integers(1, 9))]
        for _ in range(count)
    ]


def read_documents(shards: list[Shard]) -> Documents:
    documents = []
    for shard in shards:
        bounds = shard.sentence_offsets
        for first, end in pairwise(shard.document_offsets):
            documents.append([shard.tokens[bounds[s] : bounds[s + 1]].tolist() for s in range(first, end)])
    return documents


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    splits = {"train": random_documents(0, 40), "held-out": random_documents(1, 3)}
    write_corpus(folder, make_tokenizer(), splits, shard_tokens=1000)
    return folder


def test_round_trip(corpus_folder: Path) -> None:
    corpus = open_corpus(corpus_folder)
    train, held_out = corpus.split("train"), corpus.split("held-out")
    assert len(train.shards) > 2
    assert read_documents(train.shards) == random_documents(0, 40)
    assert read_documents(held_out.shards) == random_documents(1, 3)
    everything = [i for document in random_documents(0, 40) for sentence in document for i in sentence]
    assert train.tokens == len(everything)
    assert train.documents == 40
    assert train.longest_sentence == max(len(s) for d in random_documents(0, 40) for s in d)
    both = everything + [i for document in random_documents(1, 3) for sentence in document for i in sentence]
    assert corpus.token_counts.tolist() == np.bincount(both, minlength=300).tolist()
    assert corpus.tokenizer_fingerprint == make_tokenizer().fingerprint
    assert corpus.vocab_size == 300
    with pytest.raises(ValueError, match="split 'test'"):
        corpus.split("test")  # type: ignore[arg-type]


def test_offsets_agree(corpus_folder: Path) -> None:
    for shard in open_corpus(corpus_folder).split("train").shards:
        assert shard.sentence_offsets[shard.document_offsets].tolist() == shard.document_token_offsets.tolist()
        assert np.diff(shard.sentence_offsets).tolist() == shard.sentence_lengths.tolist()
        assert (shard.document_count, shard.sentence_count, shard.token_count) == (
            len(shard.document_offsets) - 1,
            len(shard.sentence_lengths),
            len(shard.tokens),
        )
        for document in range(shard.document_count):
            low, high = shard.document_offsets[document : document + 2]
            assert shard.sentence_offsets_of(document).tolist() == shard.sentence_offsets[low : high + 1].tolist()


def test_reading_copies_nothing_and_keeps_no_file_open(corpus_folder: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("this system has no /proc/self/fd to count open files in")
    before = pa.total_allocated_bytes(), len(list(descriptors.iterdir()))
    shards = open_corpus(corpus_folder).split("train").shards
    arrays = [(s.tokens, s.sentence_lengths, s.document_offsets, s.document_token_offsets) for s in shards]
    assert (pa.total_allocated_bytes(), len(list(descriptors.iterdir()))) == before
    assert not any(array.flags.owndata or array.flags.writeable for group in arrays for array in group)
    assert [array.dtype for array in arrays[0]] == [np.uint16, np.uint16, np.int32, np.int32]


def test_pickles_as_a_path(corpus_folder: Path) -> None:
    split = open_corpus(corpus_folder).split("train")
    _ = [shard.tokens for shard in split.shards]
    packed = pickle.dumps(split)
    assert len(packed) < 1500 * len(split.shards)
    assert read_documents(pickle.loads(packed).shards) == random_documents(0, 40)


def test_other_tools_read_the_files(corpus_folder: Path) -> None:
    with pa.memory_map(str(corpus_folder / "held-out-00000.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema.names == ["tokens", "sentence_lengths"]
    assert table.schema.metadata[b"bertsmith.tokenizer"].decode() == make_tokenizer().fingerprint
    expected = random_documents(1, 3)
    assert table["tokens"].to_pylist() == [[i for sentence in document for i in sentence] for document in expected]
    assert table["sentence_lengths"].to_pylist() == [[len(sentence) for sentence in document] for document in expected]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    assert token_dtype(65_535) == np.uint16
    assert token_dtype(65_536) == np.uint32
    write_corpus(tmp_path / "c", make_tokenizer(70_000), {"train": [[[69_999, 5], [65_536]]]})
    shard = open_corpus(tmp_path / "c").split("train").shards[0]
    assert shard.tokens.tolist() == [69_999, 5, 65_536]
    assert shard.tokens.dtype == np.uint32


@settings(max_examples=40)
@given(st.data())
def test_documents_spread_over_chunks_come_out_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any way of cutting a sequence of documents into chunks stores the same documents, or counts each cut."""
    sentence = st.lists(st.integers(5, 299), min_size=1, max_size=5)
    documents = data.draw(st.lists(st.lists(sentence, max_size=6), min_size=1, max_size=6))
    chunks: list[tuple[Documents, bool]] = []
    for document in documents:
        cut = data.draw(st.integers(0, len(document)))
        for part, continues in ((document[:cut], False), (document[cut:], True)):
            if not continues and chunks and data.draw(st.booleans()):
                chunks[-1][0].append(part)
            else:
                chunks.append(([part], continues))
    folder = tmp_path_factory.mktemp("shards")
    shard_tokens = data.draw(st.sampled_from([5, 1000]))
    writer = ShardWriter(folder, "train", "f", 300, shard_tokens)
    for part, continues in chunks:
        chunk = TokenChunk.from_lists(part, 300)
        writer.add(TokenChunk(chunk.tokens, chunk.sentence_lengths, chunk.document_lengths, continues))
    entries = writer.close()
    stored = read_documents([Shard(folder / entry.file, entry, "f", 300) for entry in entries])
    full = [document for document in documents if document]
    assert [s for document in stored for s in document] == [s for document in full for s in document]
    assert writer.state.documents == len(documents)
    assert len(stored) == writer.state.documents + writer.state.cut_documents - writer.empty_documents
    assert writer.empty_documents == len(documents) - len(full)
    if shard_tokens == 1000:
        assert stored == full
        assert writer.state.single_sentence_documents == sum(len(document) == 1 for document in full)


def test_same_input_same_bytes(corpus_folder: Path, tmp_path: Path) -> None:
    splits = {"train": random_documents(0, 40), "held-out": random_documents(1, 3)}
    write_corpus(tmp_path / "again", make_tokenizer(), splits, shard_tokens=1000)
    for file in sorted(corpus_folder.rglob("*")):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "again" / file.relative_to(corpus_folder)).read_bytes(), file


def test_sha256_covers_shards_and_counts(corpus_folder: Path) -> None:
    files = [*corpus_folder.glob("*.arrow"), corpus_folder / "token_counts.npy"]
    assert open_corpus(corpus_folder).sha256 == sha256_of_files(files)


def test_bytes_per_token_counts_everything(corpus_folder: Path) -> None:
    corpus = open_corpus(corpus_folder)
    size = sum(file.stat().st_size for file in corpus_folder.rglob("*") if file.is_file())
    tokens = corpus.split("train").tokens + corpus.split("held-out").tokens
    assert corpus.report["tokens"] == tokens
    assert corpus.report["bytes_per_token"] == pytest.approx(size / tokens, abs=1e-3)


def test_missing_folder_and_other_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: does not exist.*bertsmith prepare"):
        open_corpus(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is not a corpus folder"):
        open_corpus(tmp_path)


def test_truncated_shard_is_named(corpus_folder: Path) -> None:
    shard = corpus_folder / "train-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"train-00001\.arrow.*of 3,386 bytes are there.*bertsmith prepare"):
        open_corpus(corpus_folder)


def test_broken_shard_of_the_right_length_is_named(corpus_folder: Path) -> None:
    shard = corpus_folder / "train-00001.arrow"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(UserError, match=r"train-00001\.arrow.*broken"):
        open_corpus(corpus_folder)


def test_missing_shard_is_named(corpus_folder: Path) -> None:
    (corpus_folder / "held-out-00000.arrow").unlink()
    with pytest.raises(UserError, match=r"held-out-00000\.arrow.*missing"):
        open_corpus(corpus_folder)


def test_shard_of_another_corpus_is_named(corpus_folder: Path, tmp_path: Path) -> None:
    tokens = [f"x{i}" for i in range(295)]
    write_corpus(
        tmp_path / "other", BertTokenizer([*SPECIAL_TOKENS, *tokens]), {"train": random_documents(0, 40)}, 1000
    )
    shutil.copy(tmp_path / "other" / "train-00001.arrow", corpus_folder / "train-00001.arrow")
    with pytest.raises(UserError, match=r"train-00001\.arrow: belongs to another corpus"):
        open_corpus(corpus_folder)


def test_exchanged_shards_are_named(corpus_folder: Path) -> None:
    """Same tokenizer, same split, other documents: the counts tell."""
    index = json.loads((corpus_folder / "corpus.json").read_bytes())
    index["shards"][0]["documents"] += 1
    (corpus_folder / "corpus.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UserError, match=r"train-00000\.arrow: holds other documents"):
        open_corpus(corpus_folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.json", b"{", r"corpus\.json: cannot be read"),
        ("corpus.json", b"[1]", r"corpus\.json: is not what"),
        ("corpus.json", b'{"format": 99}', r"corpus format 99"),
        ("corpus.json", b'{"format": 1}', r"corpus\.json: is damaged"),
        ("token_counts.npy", b"", r"token_counts\.npy: is missing or broken"),
    ],
)
def test_broken_index_and_counts_are_named(corpus_folder: Path, file: str, content: bytes, message: str) -> None:
    (corpus_folder / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_corpus(corpus_folder)


def test_counts_of_another_vocabulary_are_named(corpus_folder: Path) -> None:
    np.save(corpus_folder / "token_counts.npy", np.zeros(7, np.int64))
    with pytest.raises(UserError, match=r"token_counts\.npy: \(7,\) counts for 300 ids"):
        open_corpus(corpus_folder)


def test_counts_are_never_unpickled(corpus_folder: Path) -> None:
    np.save(corpus_folder / "token_counts.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"token_counts\.npy: is missing or broken"):
        open_corpus(corpus_folder)


def test_missing_tokenizer_folder_is_named(corpus_folder: Path) -> None:
    shutil.rmtree(corpus_folder / "tokenizer")
    with pytest.raises(UserError, match=r"tokenizer: is missing"):
        open_corpus(corpus_folder)


def test_another_tokenizer_is_refused(corpus_folder: Path) -> None:
    corpus = open_corpus(corpus_folder)
    corpus.check_tokenizer(make_tokenizer().fingerprint, "here")
    with pytest.raises(UserError, match=r"made with another tokenizer.*MODEL holds"):
        corpus.check_tokenizer("0" * 64, "MODEL")


def test_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", refuse)
    with pytest.raises(UserError, match="the disk is full"):
        write_corpus(tmp_path / "c", make_tokenizer(), {"train": random_documents(0, 3)})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token ids from 5 to 300 in a vocabulary of 300"):
        TokenChunk.from_lists([[[5, 300]]], 300)
    with pytest.raises(ValueError, match="sentences of 0 to 1 tokens"):
        TokenChunk.from_lists([[[5], []]], 300)
    with pytest.raises(ValueError, match="sentences of 1 to 65536 tokens; 1 to 65535 fit"):
        TokenChunk.from_lists([[[5], [6] * (LONGEST_SENTENCE + 1)]], 300)


def test_an_empty_corpus_opens_and_says_so(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", make_tokenizer(), {})
    corpus = open_corpus(tmp_path / "c")
    assert (corpus.split("train").documents, corpus.split("held-out").tokens) == (0, 0)
    assert corpus.unigram_entropy == 0.0


def test_unigram_entropy() -> None:
    counts = np.array([1000, 500, 3, 3, 3, 3])
    assert unigram_entropy(counts, (0, 1)) == pytest.approx(np.log(4))
    skewed = np.array([0.5, 0.25, 0.25, 0.0])
    assert unigram_entropy((skewed * 400).astype(np.int64)) == pytest.approx(1.5 * np.log(2))


def test_description(corpus_folder: Path) -> None:
    described = describe_corpus(corpus_folder)
    assert described["kind"] == "corpus"
    assert described["splits"]["held-out"]["documents"] == 3
    assert 0 < described["unigram_entropy"] < described["ln_vocab"] == pytest.approx(np.log(300), abs=1e-4)
    assert described["report"]["sha256"] == described["sha256"]
    json.dumps(described)


def test_token_counts_and_bytes_do_not_depend_on_how_documents_are_grouped(tmp_path: Path) -> None:
    documents = random_documents(3, 20)
    for name, groups in (("one", [documents]), ("many", [[document] for document in documents])):
        (tmp_path / name).mkdir()
        writer = CorpusWriter(tmp_path / name, make_tokenizer())
        for group in groups:
            writer.writers["train"].add(TokenChunk.from_lists(group, 300))
        writer.finish({})
    assert open_corpus(tmp_path / "one").sha256 == open_corpus(tmp_path / "many").sha256
