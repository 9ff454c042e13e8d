"""From settings to what fine-tuning needs: labels learnt, every row read and encoded before step 1.

All mistakes in files, columns and labels are found here, before any training.
"""

import hashlib
import itertools
import sys
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertsmith.corpus.random_bits import derive_key, permutation
from bertsmith.errors import UserError
from bertsmith.model.config import BertConfig
from bertsmith.progress import Progress, say
from bertsmith.tasks.examples import (
    EncodedSequence,
    EncodingReport,
    class_name,
    label_names,
    replaced_bytes,
    say_unknown,
)
from bertsmith.tasks.files import TaskFiles, find_files
from bertsmith.tasks.held_out import hold_out, warn_of_absent_labels
from bertsmith.tasks.ner import is_word_table
from bertsmith.tasks.registry import make_task, task_name
from bertsmith.tasks.seen_texts import SENTENCES, SeenTexts
from bertsmith.tasks.settings import FinetuneSettings, NerSettings, SquadSettings
from bertsmith.tasks.spans import SPECIAL
from bertsmith.tasks.spec import TaskSpec
from bertsmith.tasks.table import NUMBER, PAIR_COLUMNS, Problems
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer import BertTokenizer

_CHUNK = 1024
# notes that need no warning: lines that are meant to be no words
_NO_LOSS = ("docstart_line", "comment")
# what other notes mean, for a warning: `N of the file's examples ...`
_SENTENCES = SENTENCES | {"empty_texts": "have an empty text: what is predicted for them comes from no words"}


@dataclass
class Split:
    """A file read and encoded."""

    path: str
    examples: list[Any]
    encoded: list[list[EncodedSequence]]
    report: EncodingReport = field(default_factory=EncodingReport)


@dataclass
class TaskData:
    """Everything a run reads. `train` keeps no texts."""

    task: Task
    files: TaskFiles
    train: list[list[EncodedSequence]]
    dev: dict[str, Split]
    report: dict[str, Any]
    """The data-loss report: counts by file."""
    parts: dict[str, str]
    """sha256 by what may differ from a run begun before: `train` and `dev`."""
    sha256: str
    """Of what is learnt from and scored on, wherever the files lie and however they are packed."""


def make_spec(settings: FinetuneSettings, config: BertConfig) -> TaskSpec:
    """The task as the settings describe it, its labels still to be learnt. Raises UserError for a length too great."""
    name = task_name(settings.task)
    longest = config.max_position_embeddings
    length = settings.max_length or min(384 if name.startswith("squad") else 128, longest)
    if length > longest:
        raise UserError(f"--max-length: sequences of {length} tokens are longer than the model's {longest} positions")
    if settings.long == "window" and (name.startswith("squad") or name in ("ner", "choice", "swag")):
        raise UserError(f"--long: window is for tasks on whole texts; {name} needs no such switch, leave it out")
    squad, ner = settings.squad, settings.ner
    max_question = fit_questions(length, squad) if name.startswith("squad") else squad.max_question
    spec = TaskSpec(
        name,
        length,
        long=settings.long,
        label_separator=settings.label_separator,
        encoding=settings.encoding,
        stride=squad.stride,
        max_question=max_question,
        n_best=squad.n_best,
        max_answer=squad.max_answer,
        token_column=ner.token_column,
        tag_column=ner.tag_column,
        separator=ner.separator,
        strip_digit=ner.strip_digit,
    )
    return spec.with_columns(
        text_column=settings.text_column,
        text_pair_column=settings.text_pair_column,
        label_column=settings.label_column,
    )


def check_column_flags(settings: FinetuneSettings, files: TaskFiles) -> None:
    """Raise UserError for columns named for files that have none by name, or of a layout the task does not read."""
    name = task_name(settings.task)
    if name != "ner":
        if settings.ner != NerSettings():
            raise UserError(
                f"--ner.…: says how files of words and tags are laid out and means nothing to {name}; leave it out"
            )
        return
    if any(is_word_table(path) for path in (files.train, *files.dev.values(), *files.test.values())):
        return
    for flag in ("text_column", "label_column"):
        if getattr(settings, flag) is not None:
            number = "token-column" if flag == "text_column" else "tag-column"
            raise UserError(
                f"--{flag.replace('_', '-')}: {files.train} holds a word a line in columns without names; leave it "
                f"out, or give the column's number as --ner.{number}"
            )


def fit_questions(max_length: int, squad: SquadSettings) -> int:
    """The longest question beside which a window holds a stride of context: no question can then fail later.

    Raises UserError where the stride leaves room for none.
    """
    room = max_length - SPECIAL - squad.stride
    most = max_length - SPECIAL - 1
    if max_length > SPECIAL and room < 1:
        smaller = f"a stride of {most} or less, or " if most > 0 else ""
        raise UserError(
            f"--squad.stride: {squad.stride} is too much for windows of --max-length {max_length}: {SPECIAL} of their "
            f"tokens are special, and a question needs room beside the stride; use {smaller}a larger --max-length"
        )
    if squad.max_question > room > 0:
        say(
            f"questions are cut to {room} tokens, not {squad.max_question}: max_length {max_length} less {SPECIAL} "
            f"special tokens and a stride of {squad.stride}"
        )
        return room
    return squad.max_question


def open_task_data(settings: FinetuneSettings, config: BertConfig, tokenizer: BertTokenizer) -> TaskData:
    """Find, read, check and encode all files. Raises UserError, before any training, for whatever is wrong in them."""
    files = find_files(settings)
    task = make_task(make_spec(settings, config), tokenizer)
    check_column_flags(settings, files)
    classes: list[str] = []
    task = learn_task(task, files.train, classes)
    total = len(classes)
    rows: Sequence[int] = range(total)  # to learn from
    held = None
    if settings.dev_share is not None and total:
        examples = task.read(files.train, "train", True, EncodingReport())
        held = hold_out(files.train, examples, settings.dev_share, tokenizer.normalization)
        rows = [number for number in rows if number not in held.numbers]
    if settings.train_rows is not None and settings.train_rows < len(rows):
        # the same rows for every seed: seeds differ in initialization, order and dropout
        drawn = permutation(derive_key("train rows"), len(rows))[: settings.train_rows].tolist()
        rows = [rows[place] for place in drawn]
    elif settings.train_rows is not None and settings.train_rows > len(rows):
        say(f"warning: --train-rows {settings.train_rows:,}: there are {len(rows):,} rows to learn from; all are used")
    if held is not None:
        warn_of_absent_labels(held.labels, rows, held.numbers)
    seen = SeenTexts()
    train = read_split(task, files.train, "train", seen, set(rows) if len(rows) < total else None)
    # an example may have no sequence: a question whose answer is not where the file says cannot be learnt from
    train.examples, train.encoded = [], [sequences for sequences in train.encoded if sequences]
    dev = {
        name: read_split(task, path, "dev", seen, None if held is None else held.numbers)
        for name, path in files.dev.items()
    }
    for split in (train, *dev.values()):
        if not split.encoded:
            raise UserError(f"{split.path}: holds no example to learn from or to score; give another file")
        check_segments(split, config)
    report: dict[str, Any] = {
        part: {"path": split.path} | split.report.as_dict() for part, split in {"train": train, **dev}.items()
    }
    if task.spec.labels and set(classes) - {""}:
        learnt = Counter(classes[number] for number in rows)
        report["train"]["labels"] = {label: learnt[label] for label in sorted(set(classes))}
    if held is not None:
        report["dev"] |= {"held_out_of": held.examples, "texts": held.texts}
    for name, path in files.test.items():
        report[name] = {"path": path} | check_test(task, path, seen).as_dict()
    for part, counted in report.items():
        warn_of_losses(part, counted, task, "; --long window shows all of it" if task.head == "sequence" else "")
    parts = {"train": fingerprint(task, train), "dev": fingerprint(None, *dev.values())}
    return TaskData(task, files, train.encoded, dev, report, parts, fingerprint(task, train, *dev.values()))


def learn_task(task: Task, path: str, classes: list[str]) -> Task:
    """The task with the classes of its training file; `classes` gets that of each example, "" where it has no name."""

    first: dict[str, str] = {}
    pairs = False

    def counted() -> Iterator[Any]:
        nonlocal pairs
        for example in task.read(path, "train", True, EncodingReport()):  # counted when it is encoded
            pairs = pairs or getattr(example, "pair", None) is not None
            classes.append(sys.intern(class_name(example)))  # one text a class, not one a row
            for name in label_names(example):
                first.setdefault(name, example.place)
            yield example

    spec = replace(task.spec, labels=task.learn_labels(counted()), scheme=task.learnt_scheme())
    check_label_names(first)
    if pairs and not spec.two_texts:  # regress on sentence1 and sentence2, found by their names: the folder must say so
        spec = replace(spec, text_column=PAIR_COLUMNS[0], text_pair_column=PAIR_COLUMNS[1])
    if task.named_classes and len(spec.labels) < (1 if spec.name in ("ner", "multilabel") else 2):
        raise UserError(
            f"{path}: holds {'the one label ' + repr(spec.labels[0]) if spec.labels else 'no label'}; there is nothing "
            "to tell apart, two classes or more are needed"
        )
    return make_task(spec, task.tokenizer)


def check_label_names(first: Mapping[str, str]) -> None:
    """Raise UserError for labels that look alike and are not; `first`: the place where each was first met.

    Blanks around a label or of another kind, letters of no width, and a letter and its accent as one character or as
    two, are slips that nobody sees on the screen: half of a class would be learnt as another one. Names of one number
    ("1", "1.0", "01") or of one word in capitals and not can be seen, and may be meant: they are said.
    """
    problems = Problems("labels that look alike would be learnt as two classes; write each in one way")
    looks: dict[str, str] = {}
    numbers: dict[float, str] = {}
    folded: dict[str, str] = {}
    for name, place in first.items():
        # blanks of every kind as one, and without characters that take no place (zero-width spaces, direction marks)
        shown = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
        other = looks.setdefault(unicodedata.normalize("NFC", " ".join(shown.split())), name)
        if other != name:
            # as they are printed, the two forms of one letter are the same
            show = repr if other.strip(" ") == name.strip(" ") else ascii
            problems.add(place, f"label {show(name)} looks like {show(other)}, first at {first[other]}")
        elif NUMBER.fullmatch(name) and (other := numbers.setdefault(float(name), name)) != name:
            say(f"warning: {place}: label {name!r} is the same number as {other!r}, first at {first[other]}; they are "
                "two classes, so if one is meant, write it in one way")  # fmt: skip
        elif (other := folded.setdefault(" ".join(shown.split()).casefold(), name)) != name:
            say(f"warning: {place}: label {name!r} differs from {other!r}, first at {first[other]}, in capitals; they "
                "are two classes, so if one is meant, write it in one way")  # fmt: skip
    problems.check()


def read_split(task: Task, path: str, part: str, seen: SeenTexts, wanted: Collection[int] | None = None) -> Split:
    """Read and encode a labelled file, or its examples numbered `wanted`; the training file comes first."""
    split = Split(path, [], [])
    # what is mended in reading a file that both parts are of is counted in the one that is learnt from
    mended = split.report if part == "train" or wanted is None else EncodingReport()
    examples = task.read(path, part, True, mended)
    if wanted is not None:
        examples = (example for number, example in enumerate(examples) if number in wanted)
    with Progress(f"reading {Path(path).name}", None, "rows") as bar:
        while chunk := list(itertools.islice(examples, _CHUNK)):
            # labels of a dev file are held against those of the training file where they have names
            encoded = task.encode(chunk, split.report, train=part == "train" or task.named_classes)
            split.encoded += encoded
            compare = seen.learn if part == "train" else seen.look_up
            for example, sequences in zip(chunk, encoded, strict=True):
                compare(example, sequences, split.report)
                if part == "train" and not sequences:
                    split.report.note("rows_not_learnt", 1, example.place)
            if part != "train":
                split.examples += chunk
            bar.advance(len(chunk))
    return split


def check_test(task: Task, path: str, seen: SeenTexts) -> EncodingReport:
    """Read a test file once, so that what is wrong in it is said before training and not after it."""
    report = EncodingReport()
    examples = task.read(path, "test", None, report)
    while chunk := list(itertools.islice(examples, _CHUNK)):
        for labelled in (True, False):
            some = [example for example in chunk if task.is_labelled(example) is labelled]
            for example, sequences in zip(
                some, task.encode(some, report, train=labelled and task.named_classes), strict=True
            ):
                seen.look_up(example, sequences, report)
    return report


def check_segments(split: Split, config: BertConfig) -> None:
    """Raise UserError for pairs of texts where the model can tell no second segment."""
    if config.type_vocab_size < 2 and any(s.second_segment < len(s) for sequences in split.encoded for s in sequences):
        raise UserError(
            f"{split.path}: holds pairs of texts, and the model has no embedding for a second segment "
            f"(type_vocab_size {config.type_vocab_size}); use another model"
        )


def fingerprint(task: Task | None, *splits: Split) -> str:
    """sha256 of labels, sequences, targets and what predictions are held against.

    Without a task, of no labels and targets: those of a dev file are numbers that the training file gives.
    """
    digest = hashlib.sha256(repr(task.spec.labels if task else ()).encode())
    for split in splits:
        digest.update(f"{len(split.encoded)} examples".encode())
        for sequences in split.encoded:
            for sequence in sequences:
                digest.update(sequence.token_ids.data)
                if task:
                    digest.update(sequence.targets.data)
        for example in split.examples:
            gold = [getattr(example, name, None) for name in ("label", "tags", "answers")]
            digest.update(repr(gold).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def warn_of_losses(part: str, counted: dict[str, Any], task: Task, remedy: str = "") -> None:
    """Say what is cut or unknown in a file: it is in the summary too, but a person should not have to look there.

    `remedy`: what can be done about texts that are cut.
    """
    rows = max(counted["rows"], 1)
    if counted["truncated"]:
        say(
            f"{part}: {counted['truncated']:,} of {rows:,} examples are longer than {task.spec.max_length} tokens and "
            f"cut ({counted['truncated_tokens']:,} tokens){remedy}"
        )
    places = {what: place for what, place in counted.get("first_places", {}).items() if what not in _NO_LOSS}
    if place := places.pop("invalid_bytes", None):
        say(f"warning: {part}: {replaced_bytes(counted['invalid_bytes'], task.spec.encoding, place)}")
    for what, sentence in _SENTENCES.items():
        if place := places.pop(what, None):
            say(f"warning: {part}: {counted[what]:,} of {rows:,} examples {sentence} (first {place})")
    if places:
        shown = "; ".join(
            f"{what.replace('_', ' ')}: {counted[what]:,} (first {place})" for what, place in places.items()
        )
        say(f"warning: {part}: {shown}")
    say_unknown(counted["unknown_rate"], part)
