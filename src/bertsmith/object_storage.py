"""Folders on object storage (s3://, gs:// and whatever else fsspec knows), where nothing can be renamed.

A folder is complete when the one file that says so is there, and that file is uploaded last. Where a store is and who
may use it is said the way its libraries want it: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, FSSPEC_S3_ENDPOINT_URL, …
"""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from bertsmith.errors import UserError
from bertsmith.text.streams import file_system, is_url

__all__ = ["RemoteFolder", "is_url", "local_copy"]


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn what remote file systems raise (each has its own kinds) into a UserError that names `url`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        what = str(error).strip().partition("\n")[0]
        raise UserError(f"{url}: {type(error).__name__}: {what}") from error


class RemoteFolder:
    """The objects under `url`. Every method raises UserError, with the URL, for what the store refuses."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if "::" in url or "?" in url:
            raise UserError(f"{url}: a folder is needed; chained URLs and those with a query name single files")
        self._system, path = file_system(self.url)
        if self._system.protocol == ("file", "local"):
            raise UserError(f"{url}: a folder of this machine; give it as a plain path")
        self._path = path.rstrip("/")

    def names(self) -> dict[str, int]:
        """Every object in the folder by its name relative to it, with its size in bytes."""
        with storage_errors(self.url):
            self._system.invalidate_cache()
            if not self._system.exists(self._path):
                return {}
            found = self._system.find(self._path, detail=True)
            start = len(self._path) + 1
            return {path[start:]: int(info["size"] or 0) for path, info in found.items() if path[start:]}

    def read(self, name: str) -> bytes:
        """The whole of a small object."""
        with storage_errors(f"{self.url}/{name}"):
            content = self._system.cat_file(f"{self._path}/{name}")
            assert isinstance(content, bytes)
            return content

    def write(self, name: str, content: bytes) -> None:
        """Store a small object: there whole, or not at all."""
        with storage_errors(f"{self.url}/{name}"):
            self._system.pipe_file(f"{self._path}/{name}", content)

    def upload(self, file: Path, name: str) -> None:
        """Store a file, and see that all of it arrived."""
        with storage_errors(f"{self.url}/{name}"):
            self._system.put_file(str(file), f"{self._path}/{name}")
            self._system.invalidate_cache()
            stored, size = self._system.size(f"{self._path}/{name}"), file.stat().st_size
            if stored != size:
                raise UserError(f"{self.url}/{name}: {stored} of {size} bytes were stored; run the same command again")

    def upload_folder(self, folder: Path, last: str) -> None:
        """Store every file in `folder`; `last` is the one that makes it complete."""
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        for name in sorted(files, key=lambda name: name == last):
            self.upload(folder / name, name)

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Fetch objects into `folder`."""
        for name in names:
            with storage_errors(f"{self.url}/{name}"):
                self._system.get_file(f"{self._path}/{name}", str(folder / name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects."""
        with storage_errors(self.url):
            for name in names:
                self._system.rm_file(f"{self._path}/{name}")
            self._system.invalidate_cache()


@contextlib.contextmanager
def local_copy(path: str | Path, names: Iterable[str]) -> Iterator[Path]:
    """A local path as it is; of a URL, a folder for the time being that holds those of `names` that are there."""
    url = str(path)
    if not is_url(url):
        yield Path(path)
        return
    remote = RemoteFolder(url)
    there = remote.names()
    if not there:
        raise UserError(f"{url}: no such folder")
    with tempfile.TemporaryDirectory(prefix="bertsmith-") as folder:
        remote.download([name for name in names if name in there], Path(folder))
        try:
            yield Path(folder)
        except UserError as error:
            raise UserError(str(error).replace(folder, remote.url)) from error
