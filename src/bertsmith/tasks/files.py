"""Which files a task has: those that are named, or those that a folder holds under the names they usually have."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bertsmith.errors import UserError
from bertsmith.tasks.glue_files import GLUE_TASKS, find_glue_files, find_glue_tasks, require_glue_files
from bertsmith.tasks.registry import task_name
from bertsmith.tasks.settings import FinetuneSettings
from bertsmith.tasks.task import COMPRESSED

_ENDINGS = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".conll", ".txt")
_PART_NAMES = {"train": ("train",), "dev": ("dev", "valid", "validation", "val"), "test": ("test",)}
# beside these, the names that SQuAD's own files have: train-v1.1.json, dev-v2.0.json
_SQUAD_VERSIONS = {"squad1": "v1.1", "squad2": "v2.0"}


@dataclass(frozen=True)
class TaskFiles:
    """Paths by part. dev and test may be several (MNLI: matched, mismatched); the first dev file is the one to choose
    the best weights by."""

    train: str
    dev: dict[str, str]
    test: dict[str, str]


def find_files(settings: FinetuneSettings) -> TaskFiles:
    """The files of a task; dev is the training file itself where a share of it is to be held out.

    Raises UserError naming what is not there, and a dev file that is there beside such a share.
    """
    files = _find_named_files(settings) if settings.data is None else _find_in_folder(settings.data, settings)
    if settings.dev_share is None:
        return files
    if files.dev:
        raise UserError(
            f"--dev-share: {settings.data} holds a file to score on, {Path(next(iter(files.dev.values()))).name}; "
            "leave --dev-share out, or name the training file alone with --train"
        )
    return replace(files, dev={"dev": files.train})


def _find_named_files(settings: FinetuneSettings) -> TaskFiles:
    assert settings.train is not None
    named = {"dev": settings.dev, "test": settings.test}
    dev, test = ({part: path} if path is not None else {} for part, path in named.items())
    return TaskFiles(settings.train, dev, test)


def _find_in_folder(home: str, settings: FinetuneSettings) -> TaskFiles:
    if not Path(home).is_dir():
        raise UserError(f"--data: {home} is no folder; name the folder with the task's files")
    name = task_name(settings.task)
    if name not in GLUE_TASKS:
        return _find_own_files(Path(home), settings)
    task = GLUE_TASKS[name]
    if not find_glue_files(task, home, "train"):  # the folder of all tasks may be named as well
        home = find_glue_tasks(home).get(name, home)
    train = next(iter(require_glue_files(task, home, "train").values()))
    find_dev = require_glue_files if settings.dev_share is None else find_glue_files
    dev = find_dev(task, home, "dev") if settings.dev is None else {"dev": settings.dev}
    test = find_glue_files(task, home, "test") if settings.test is None else {"test": settings.test}
    return TaskFiles(train, dev, test)


def _find_own_files(folder: Path, settings: FinetuneSettings) -> TaskFiles:
    names = dict(_PART_NAMES)
    if version := _SQUAD_VERSIONS.get(task_name(settings.task)):
        names |= {part: (*names[part], f"{part}-{version}") for part in ("train", "dev")}
    parts = {part: _find_part(folder, names[part]) for part in _PART_NAMES}
    for part, wanted in (("dev", settings.dev), ("test", settings.test)):
        if wanted is not None:
            parts[part] = wanted
    train, dev, test = (parts[part] for part in _PART_NAMES)
    if train is None or (dev is None and settings.dev_share is None):
        missing = "train" if train is None else "dev"
        official = f" (or {missing}-{version})" if version else ""
        instead = ", or hold out a share of the training file with --dev-share" if missing == "dev" else ""
        raise UserError(
            f"{folder}: holds no file called {missing}{official} with one of the endings {', '.join(_ENDINGS)}; name "
            f"the files with --train and --dev{instead}"
        )
    return TaskFiles(train, {} if dev is None else {"dev": dev}, {} if test is None else {"test": test})


def _find_part(folder: Path, names: Sequence[str]) -> str | None:
    for name, ending, compressed in itertools.product(names, _ENDINGS, ("", *COMPRESSED)):
        path = folder / f"{name}{ending}{compressed}"
        if path.is_file():
            return str(path)
    return None
