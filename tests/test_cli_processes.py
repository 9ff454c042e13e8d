"""What only a process of its own shows: quick starts, other locales, no network, interruptions, closed pipes."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from command_line import TINY, Made, Outcome, bertsmith, bertsmith_process, start_process, write_texts
from watching import living_processes, needs_proc, wait_until

HEAVY = {"torch", "numpy", "pyarrow", "tokenizers", "matplotlib", "fsspec"}


# --- starting


@pytest.mark.parametrize("command", ["--help", "--version", "vocab --help", "fill --help", "vocab"])
def test_help_is_there_at_once(command: str) -> None:
    code = (
        "import sys, time; begun = time.process_time(); from bertsmith.cli import main; code = main(sys.argv[1:]);"
        "print(code, time.process_time() - begun, *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=True)
    exit_code, seconds, *modules = done.stderr.splitlines()[-1].split()
    assert exit_code == ("2" if command == "vocab" else "0")
    assert float(seconds) < 0.5
    assert not HEAVY & set(modules)


def test_the_help_of_pretraining_needs_no_torch() -> None:
    code = "import sys; from bertsmith.cli import main; main(['pretrain', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_script_and_the_module_are_one_program(made: Made) -> None:
    (script,) = entry_points(group="console_scripts", name="bertsmith")
    assert script.value == "bertsmith.cli:main"
    outcome = bertsmith_process("info", made.vocab)
    assert outcome.code == 0
    code = f"import sys; sys.argv[1:] = ['info', {str(made.vocab)!r}]; from bertsmith.cli import main; sys.exit(main())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.decode() == outcome.out


# --- locale and network

TYPED = "Le [MASK] é 中 ♡ [SEP]"
LOCALES = {
    "utf-8": {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"},
    "c": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


def without_network() -> list[str]:
    """The command that takes the network away from a process; none where the system does not let us."""
    unshare = shutil.which("unshare")
    for command in ([unshare, "-n"], [unshare, "-rn"]):
        if unshare and subprocess.run([*map(str, command), "true"], capture_output=True, check=False).returncode == 0:
            return [str(part) for part in command]
    return []


# the commands of one locale in one process: its arguments are theirs, with /// between
DRIVER = """
import itertools, sys
from bertsmith.cli import main
for apart, group in itertools.groupby(sys.argv[1:], lambda argument: argument == "///"):
    if not apart:
        code = main(list(group))
        for stream in (sys.stdout, sys.stderr):
            print(code, end="\\x1e", file=stream, flush=True)
"""


def go_the_whole_way(folder: Path, locale: dict[str, str], before: list[str]) -> dict[str, Outcome]:
    """Every command of the usual way in `folder`, with names that ASCII cannot spell."""
    write_texts(folder / "té 中 ♡", files=6)
    (folder / "frage.csv").write_bytes("id,täxt\n1,the [MASK] café\n".encode())
    commands: dict[str, list[str]] = {
        "vocab": ["vocab", "té 中 ♡", *["--out", "vocab/é", "--size", "150", "--workers", "2", "--json"]],
        "prepare": [
            *("prepare", "té 中 ♡", "--out", "corpus 中", "--tokenizer", "vocab/é"),
            *["--language", "fr", "--held-out", "0.3", "--workers", "2", "--json"],
        ],
        "pretrain": ["pretrain", "--data", "corpus 中", "--out", "run ♡", "--steps", "3", *TINY, "--json"],
        "fill": ["fill", "run ♡", TYPED, "--json"],
        "file": ["fill", "run ♡/model", "--input", "frage.csv", "--text-column", "täxt", "--json"],
        "info": ["info", "run ♡/model", "--json"],
        "shown": ["fill", "run ♡", TYPED],
        "mistake": ["info", "nö 中"],
    }
    arguments = [part for command in commands.values() for part in (*command, "///")]
    environment = os.environ | locale | {"OMP_NUM_THREADS": "1"}
    command = [*before, sys.executable, "-c", DRIVER, *arguments]
    done = subprocess.run(command, capture_output=True, env=environment, cwd=folder, check=True)
    parts = zip(*(stream.decode("utf-8").split("\x1e")[:-1] for stream in (done.stdout, done.stderr)), strict=True)
    return {name: Outcome(int(out[-1]), out[:-1], err[:-1]) for name, (out, err) in zip(commands, parts, strict=True)}


def digests(folder: Path) -> dict[str, str]:
    """sha256 of each file that holds no clock time."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not {"checkpoints", "tensorboard"}.intersection(path.parts)
        and path.name not in ("metrics.jsonl", "loss.png")
    }


def test_a_locale_without_utf8_and_no_network_change_nothing(tmp_path: Path) -> None:
    for name in LOCALES:
        (tmp_path / name).mkdir()
    plain = go_the_whole_way(tmp_path / "utf-8", LOCALES["utf-8"], [])
    poor = go_the_whole_way(tmp_path / "c", LOCALES["c"], without_network())
    assert digests(tmp_path / "c") == digests(tmp_path / "utf-8")
    assert len(digests(tmp_path / "c")) > 15
    for name in ("fill", "file", "info"):
        assert poor[name].json == plain[name].json
        assert poor[name].out == plain[name].out
    assert poor["fill"].json["texts"][0]["text"] == TYPED
    assert poor["fill"].json["model"] == "run ♡"
    assert poor["file"].json["texts"][0]["text"] == "the [MASK] café"
    assert poor["shown"] == plain["shown"]
    assert poor["shown"].out.startswith(TYPED)
    assert poor["mistake"] == plain["mistake"]
    assert poor["mistake"].mistake.startswith("nö 中: does not exist")
    for name in ("vocab", "prepare", "pretrain"):
        clocks = ("seconds", "peak_memory_mb", "megabytes_per_second", "tokens_per_second", "utilization")
        one, other = ({k: v for k, v in run[name].json.items() if k not in clocks} for run in (poor, plain))
        assert one == other


def test_no_connection_is_opened(made: Made, tmp_path: Path) -> None:
    # an address is asked for before any connection is made, so a refusal here proves it on every system
    guard = (
        "import sys, socket\n"
        "def refuse(*_, **__): raise AssertionError('a connection was opened')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse\n"
        "from bertsmith.cli import main\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    code = main(line.split('\\t'))\n"
        "    if code: sys.exit(code)\n"
    )
    commands = [
        ("vocab", made.texts, "--out", tmp_path / "vocab", "--workers", 1),
        ("prepare", made.texts, "--tokenizer", made.vocab, "--out", tmp_path / "corpus", "--workers", 1),
        ("pretrain", "--data", made.corpus, "--out", tmp_path / "run", "--steps", 2, *TINY),
        ("fill", tmp_path / "run", "the [MASK]"),
        ("info", tmp_path / "run"),
    ]
    lines = "\n".join("\t".join(map(str, command)) for command in commands)
    done = subprocess.run([sys.executable, "-c", guard], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- interruptions


def processes_of(group: int) -> list[int]:
    """The living processes of a process group."""
    return [pid for pid, process in living_processes().items() if process.group == group]


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough text that no command is done with it in the seconds that a test needs to interrupt it."""
    folder = write_texts(tmp_path_factory.mktemp("long") / "texts", files=1, lines=30000)
    (first,) = folder.iterdir()
    for number in range(20):
        (folder / f"{number}.txt").write_bytes(first.read_bytes() + str(number).encode())
    return folder


def interrupt(process: "subprocess.Popen[bytes]", way: signal.Signals) -> Outcome:
    """Ctrl-C as a terminal sends it, to the whole group; SIGTERM as a batch system does, to the one process."""
    if way == signal.SIGINT:
        os.killpg(process.pid, way)
    else:
        process.send_signal(way)
    out, err = process.communicate(timeout=60)
    wait_until(lambda: not processes_of(process.pid), "the end of its workers", seconds=20)
    return Outcome(process.returncode, out.decode(), err.decode())


@needs_proc
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["vocab", "prepare", "bench prepare"])
def test_interrupted_work_on_text_leaves_nothing(
    name: str, way: signal.Signals, made: Made, long_texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    arguments = {"vocab": ("--out", out), "prepare": ("--tokenizer", made.vocab, "--out", out), "bench prepare": ()}
    process = start_process(
        *name.split(), long_texts, *arguments[name], "--workers", 2, env={"TMPDIR": str(temporary)}, cwd=tmp_path
    )
    # the fourth is the tracker that multiprocessing starts
    wait_until(lambda: len(processes_of(process.pid)) >= 4, "workers", process=process)
    outcome = interrupt(process, way)
    assert (outcome.code, outcome.out) == (130, "")
    assert "Traceback" not in outcome.err
    assert outcome.err.endswith("bertsmith: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert not list(temporary.iterdir())


@needs_proc
@pytest.mark.parametrize(("way", "workers"), [(signal.SIGINT, 2), (signal.SIGTERM, 0)])
def test_interrupted_training_is_saved_and_resumed(
    way: signal.Signals, workers: int, made: Made, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--data", made.corpus, "--out", run, "--examples.workers", workers, *TINY)
    process = start_process("pretrain", *options, "--steps", 100000, "--log.every", 1)
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 3, "three steps", process=process)
    outcome = interrupt(process, way)
    assert (outcome.code, outcome.out) == (130, "")
    assert "Traceback" not in outcome.err
    assert "the run is saved at step" in outcome.err
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert not (run / "model").exists()
    step = int(checkpoint.name.removeprefix("step-"))
    info = bertsmith("info", run, "--json").json
    assert (info["step"], info["broken_checkpoints"], info["finished_model"]) == (step, [], None)


# --- pipes


def test_whoever_stops_reading_is_left_in_peace(made: Made) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start_process("info", made.corpus, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_on_a_full_disk_is_told(made: Made) -> None:
    with open("/dev/full", "wb") as full:
        outcome = bertsmith_process("info", made.corpus, stdout=full)
    assert outcome.mistake == "the output cannot be written: No space left on device"


@pytest.mark.parametrize("stderr", ["closed", "full", "broken"])
def test_work_goes_on_when_nobody_reads_its_progress(stderr: str, made: Made, tmp_path: Path) -> None:
    if stderr == "full" and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    arguments = ("prepare", made.texts, "--tokenizer", made.vocab, "--out", tmp_path / "corpus", "--workers", 1)
    if stderr == "closed":  # the one that has its own progress line, too
        arguments = ("pretrain", "--data", made.corpus, "--out", tmp_path / "run", "--steps", 2, *TINY)
    reader, broken = os.pipe()
    os.close(reader)
    target = os.open("/dev/full", os.O_WRONLY) if stderr == "full" else broken
    before = ("sh", "-c", 'exec "$@" 2>&-', "sh") if stderr == "closed" else ()
    outcome = bertsmith_process(*arguments, "--json", stderr=target, before=before)
    assert outcome.json
    os.close(broken)
