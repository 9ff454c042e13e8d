"""Where `vocab` writes: a tokenizer folder here or on object storage, whole or not at all."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bertsmith.object_storage import RemoteFolder, is_url
from bertsmith.storage import atomic_folder
from bertsmith.text.tokenizer_files import FILE_NAMES, is_tokenizer_folder


def why_taken(out: str) -> str | None:
    """Why no tokenizer can be written to `out`; None where it is free, empty, or holds a tokenizer and nothing else."""
    if is_url(out):
        taken = not RemoteFolder(out).names().keys() <= set(FILE_NAMES)
    else:
        path = Path(out)
        if path.name in ("", ".."):
            return f"--out {out}: give the new folder a name"
        taken = path.exists() and not (path.is_dir() and (not any(path.iterdir()) or is_tokenizer_folder(path)))
    return f"{out}: holds something else than a tokenizer; remove it or choose another --out" if taken else None


@contextlib.contextmanager
def tokenizer_folder(out: str) -> Iterator[Path]:
    """An empty folder to save a tokenizer in; when the block ends it becomes `out`, in place of an older tokenizer."""
    if not is_url(out):
        with atomic_folder(Path(out)) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="bertsmith-") as name:
        yield Path(name)
        remote = RemoteFolder(out)
        # An older one goes first: half of it and half of ours would be anybody's guess. Then vocab.txt comes last.
        # Nobody takes a lone tokenizer_config.json for a tokenizer, and tokenizer.json alone says all there is to say.
        remote.remove(remote.names())
        remote.upload_folder(Path(name), last="vocab.txt")
