"""Where `prepare` writes, and what of it survives being stopped: a folder here or on object storage.

Every shard that is finished is recorded, with the state of its split, in the folder `unfinished` beside the shards. The
same command takes up after the last recorded shard: the text is read again, which is quick, but not tokenized again. It
is the same command if the record's settings say so: inputs and their sizes and times, tokenizer, options, versions.
Nobody takes an unfinished corpus for a whole one: here it has a hidden name until it is whole, and on object storage
corpus.json, without which nobody opens it, comes last.
"""

import base64
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.corpus.chunks import ChunkCounts
from bertsmith.corpus.shards import COUNTS, INDEX, REPORT, SPLITS, TOKENIZER, ShardEntry
from bertsmith.corpus.tokenize import TextChunk
from bertsmith.corpus.writer import CorpusWriter, SplitState, extend_digest
from bertsmith.errors import UserError
from bertsmith.object_storage import RemoteFolder, is_url
from bertsmith.progress import say
from bertsmith.storage import atomic_folder, sync
from bertsmith.text.streams import file_system

WORK = "unfinished"
SETTINGS = f"{WORK}/settings.json"
_VERSIONS_OF = ("bertsmith", "tokenizers", "sentencex")  # they decide what a sentence and a token are


class TextChangedError(UserError):
    """The text is not what the finished shards were made of."""


def describe_settings(paths: Sequence[str], **options: Any) -> bytes:
    """All that decides what `prepare` writes, as JSON: inputs (names, sizes, times or tags), options, versions."""
    versions = {name: importlib.metadata.version(name) for name in _VERSIONS_OF}
    inputs = hashlib.sha256()
    for path in paths:
        inputs.update(json.dumps(_identify(path)).encode("ascii"))
    settings = {"versions": versions, "files": len(paths), "inputs": inputs.hexdigest(), **options}
    return (json.dumps(settings, indent=1, sort_keys=True) + "\n").encode("ascii")


def _identify(path: str) -> list[str]:
    if not is_url(path):
        status = os.stat(path)
        return [path, str(status.st_size), str(status.st_mtime_ns)]
    system, inner = file_system(path)
    information = system.info(inner)
    keys = ("size", "ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created")
    return [path, *(f"{key} {information[key]}" for key in keys if key in information)]


@dataclass
class CorpusOutput:
    """A place to write a corpus to, given out by `open_output`."""

    folder: Path
    """Where the writer writes."""
    finished: dict[str, tuple[list[ShardEntry], SplitState]]
    """Of each split that has any: the shards an earlier run finished."""
    keep: Callable[[ShardEntry, bytes], None] = field(repr=False)
    """Makes a finished shard and its record last."""
    kept: int = 0
    """Shards that are finished, in this run or before."""

    @property
    def resumed(self) -> int:
        """Shards that an earlier run finished."""
        return sum(len(entries) for entries, _ in self.finished.values())

    def on_shard(self, entry: ShardEntry, state: SplitState) -> None:
        """For CorpusWriter."""
        self.keep(entry, _pack_record(entry, state))
        self.kept += 1

    def go_on(self, writer: CorpusWriter) -> None:
        """Give the writer what an earlier run finished."""
        for split, (entries, state) in self.finished.items():
            writer.writers[split].go_on(entries, state)
        if self.resumed:
            say(f"going on after {self.resumed} finished shard{'s' * (self.resumed != 1)} of an earlier run")

    def skip_finished(self, chunks: Iterator[TextChunk]) -> Iterator[TextChunk]:
        """The chunks that are in no finished shard. Raises TextChangedError where those that are have another text."""
        left = {split: state.chunks for split, (_, state) in self.finished.items()}
        digests = dict.fromkeys(left, "")
        for chunk in chunks:
            if not left.get(chunk.split):
                yield chunk
                continue
            left[chunk.split] -= 1
            digests[chunk.split] = extend_digest(digests[chunk.split], chunk.digest())
            if not left[chunk.split] and digests[chunk.split] != self.finished[chunk.split][1].digest:
                break
        else:
            if not any(left.values()):
                return
        raise TextChangedError(
            "the text is not what it was when the finished shards were made; they are dropped: run the same command"
            " again, it starts anew"
        )


@contextlib.contextmanager
def open_output(out: str | Path, settings: bytes) -> Iterator[CorpusOutput]:
    """Yield where to write the corpus `out`; complete when the block ends, and what is finished is kept if it fails.

    `settings`: `describe_settings`; what an earlier run with other ones left is removed. Raises UserError where `out`
    holds something already.
    """
    with _remote_output(str(out), settings) if is_url(str(out)) else _local_output(Path(out), settings) as output:
        yield output


def check_output(out: str | Path) -> None:
    """UserError where `out` holds something already, but an unfinished corpus."""
    if is_url(str(out)):
        _check_remote(RemoteFolder(str(out)))
        return
    path = Path(out)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{out}: exists already; remove it or choose another --out")


@contextlib.contextmanager
def _told(place: str, output: CorpusOutput) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if output.kept and not isinstance(error, TextChangedError):
            say(
                f"{output.kept} finished shard{'s are' if output.kept > 1 else ' is'} kept in {place}: the same command"
                " goes on from there; remove it if you do not want to"
            )
        raise


@contextlib.contextmanager
def _local_output(out: Path, settings: bytes) -> Iterator[CorpusOutput]:
    changed = False

    def adopt(leftover: Path) -> bool:
        try:
            return (leftover / SETTINGS).read_bytes() == settings
        except OSError:
            return False

    def worth_keeping(partial: Path) -> bool:
        return not changed and any((partial / WORK).glob("*-*.json"))

    with atomic_folder(out, adopt, worth_keeping) as folder:
        work = folder / WORK
        work.mkdir(exist_ok=True)
        (folder / SETTINGS).write_bytes(settings)
        sync(folder / SETTINGS)

        def find(name: str) -> bytes | None:
            try:
                return (work / name).read_bytes()
            except FileNotFoundError:
                return None

        def is_whole(entry: ShardEntry) -> bool:
            try:
                with (folder / entry.file).open("rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
            except FileNotFoundError:
                return False

        def keep(entry: ShardEntry, record: bytes) -> None:
            sync(folder / entry.file)
            partial = work / "new"
            partial.write_bytes(record)
            sync(partial)
            os.replace(partial, work / _record_name(entry.file))

        finished = _read_records(find, is_whole)
        for name in _not_in(finished, [path.name for path in folder.iterdir()]):
            (folder / name).unlink(missing_ok=True)
            (work / _record_name(name)).unlink(missing_ok=True)
        output = CorpusOutput(folder, finished, keep)
        output.kept = output.resumed
        try:
            with _told(str(folder), output):
                yield output
        except TextChangedError:
            changed = True
            raise
        shutil.rmtree(work)


@contextlib.contextmanager
def _remote_output(url: str, settings: bytes) -> Iterator[CorpusOutput]:
    remote = RemoteFolder(url)
    there = _check_remote(remote)
    if there and remote.read(SETTINGS) != settings:
        remote.remove(sorted(there, key=lambda name: name == SETTINGS))
        there = {}
    if not there:
        remote.write(SETTINGS, settings)

    def find(name: str) -> bytes | None:
        return remote.read(f"{WORK}/{name}") if f"{WORK}/{name}" in there else None

    finished = _read_records(find, lambda entry: there.get(entry.file) == entry.bytes)
    remote.remove(_not_in(finished, list(there)))
    with tempfile.TemporaryDirectory(prefix="bertsmith-") as name:
        folder = Path(name)

        def keep(entry: ShardEntry, record: bytes) -> None:
            remote.upload(folder / entry.file, entry.file)
            remote.write(f"{WORK}/{_record_name(entry.file)}", record)
            (folder / entry.file).unlink()

        output = CorpusOutput(folder, finished, keep)
        output.kept = output.resumed
        try:
            with _told(url, output):
                yield output
                remote.upload_folder(folder, last=INDEX)
        except BaseException as error:
            if not output.kept or isinstance(error, TextChangedError):
                with contextlib.suppress(UserError):
                    remote.remove(sorted(remote.names(), key=lambda name: name == SETTINGS))
            raise
    # complete from here on: whoever dies now leaves a few small files too many
    remote.remove(name for name in remote.names() if name.startswith(f"{WORK}/"))


def _check_remote(remote: RemoteFolder) -> dict[str, int]:
    """What an unfinished run left there; UserError if there is anything else."""
    there = remote.names()
    ours = {COUNTS, REPORT, SETTINGS}
    strangers = [
        name
        for name in there
        if name not in ours
        and not name.startswith((f"{TOKENIZER}/", f"{WORK}/"))
        and not (name.endswith(".arrow") and name.startswith(tuple(f"{split}-" for split in SPLITS)))
    ]
    if INDEX in there or strangers or (there and SETTINGS not in there):
        raise UserError(f"{remote.url}: exists already; remove it or choose another --out")
    return there


def _read_records(
    find: Callable[[str], bytes | None], is_whole: Callable[[ShardEntry], bool]
) -> dict[str, tuple[list[ShardEntry], SplitState]]:
    """The finished shards of each split, up to the first whose record or file is missing or damaged."""
    finished = {}
    for split in SPLITS:
        entries: list[ShardEntry] = []
        while (content := find(_record_name(f"{split}-{len(entries):05d}.arrow"))) is not None:
            try:
                entry, state = _unpack_record(content)
            except (ValueError, KeyError, TypeError, zlib.error):
                break
            if not is_whole(entry):
                break
            entries.append(entry)
            finished[split] = (entries, state)
    return finished


def _not_in(finished: dict[str, tuple[list[ShardEntry], SplitState]], names: Sequence[str]) -> list[str]:
    """Shard files among `names` that no record vouches for."""
    known = {entry.file for entries, _ in finished.values() for entry in entries}
    return [name for name in names if name.endswith(".arrow") and name not in known]


def _record_name(file: str) -> str:
    return file.removesuffix(".arrow") + ".json"


def _pack_record(entry: ShardEntry, state: SplitState) -> bytes:
    counts = base64.b64encode(zlib.compress(state.token_counts.astype("<i8").tobytes(), 1)).decode("ascii")
    record = {"shard": asdict(entry), "state": asdict(state) | {"token_counts": counts}}
    return (json.dumps(record) + "\n").encode("ascii")


def _unpack_record(content: bytes) -> tuple[ShardEntry, SplitState]:
    record = json.loads(content)
    state = dict(record["state"])
    counts = np.frombuffer(zlib.decompress(base64.b64decode(state.pop("token_counts"))), "<i8").astype(np.int64)
    lost = ChunkCounts(**state.pop("lost"))
    return ShardEntry(**record["shard"]), SplitState(counts, lost=lost, **state)
