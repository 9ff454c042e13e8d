"""`--ray`: the bytes of the local pool, whatever dies on the way, and texts and corpus on object storage."""

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_texts import (
    RECORDS,
    folder_bytes,
    make_documents,
    run_prepare,
    save_tokenizer,
    write_jsonl,
    write_long_corpus,
)

from bertsmith import ray_workers
from bertsmith.corpus.prepare import prepare_corpus
from bertsmith.errors import UserError
from bertsmith.ray_workers import RayPool
from bertsmith.text.vocabulary import build_vocabulary
from bertsmith.workers import make_pool
from command_line import bertsmith, bertsmith_process
from watching import found_in, living_processes, needs_proc, wait_until

pytestmark = needs_proc


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A short TMPDIR, for Ray's sockets; what a killed cluster leaves there goes with it."""
    folder = tempfile.mkdtemp(prefix="b-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An S3 on this machine, with an empty bucket, found by the environment as a real one is."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("bucket")
    yield system
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def descendants(process: int) -> dict[int, str]:
    """Command lines of the processes that `process` started, directly or not."""
    everyone, found = living_processes(), {process: ""}
    while more := {pid: one.command for pid, one in everyone.items() if one.parent in found and pid not in found}:
        found |= more
    del found[process]
    return found


def listening_addresses(process: int) -> set[str]:
    """Local addresses, as the kernel writes them, at which `process` waits for connections."""
    sockets = set()
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for file in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(file)
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:
                    found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_same_bytes_as_two_local_workers_from_and_to_object_storage(
    tokenizer_folder: Path, tmp_path: Path, s3: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        write_jsonl(tmp_path / "texts" / f"{number}.jsonl", make_documents(300, seed=number))
    s3.put(str(tmp_path / "texts"), "bucket/texts", recursive=True)
    s3.put(str(tokenizer_folder), "bucket/tokenizer", recursive=True)
    small = {"workers": 2, "chunk_characters": 2_000, "shard_tokens": 8_000}
    local = prepare_corpus([str(tmp_path / "texts")], tokenizer_folder, tmp_path / "corpus", **small)
    capsys.readouterr()
    remote = prepare_corpus(["s3://bucket/texts"], "s3://bucket/tokenizer", "s3://bucket/corpus", ray="local", **small)
    assert remote["sha256"] == local["sha256"]
    assert remote["ray"]["machines"] == 1
    assert 1 <= remote["ray"]["processes"] <= 2
    assert remote["chunks_tokenized"] == local["chunks_tokenized"] > 20
    stored = {path.removeprefix("bucket/corpus/"): s3.cat_file(path) for path in s3.find("bucket/corpus")}
    expected = folder_bytes(tmp_path / "corpus")
    assert len([name for name in stored if name.startswith("train-")]) > 2
    assert stored == expected
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Ray: 1 machine, 2 processors; 2 tasks at a time" in printed.err
    assert "preparing: " in printed.err
    refused = bertsmith("pretrain", "--data", "s3://bucket/corpus", "--out", tmp_path / "run", "--steps", 1)
    assert "copy the folder here first" in refused.mistake
    s3.rm_file("bucket/corpus/corpus.json")
    refused = bertsmith("pretrain", "--data", "s3://bucket/corpus", "--out", tmp_path / "run", "--steps", 1)
    assert "corpus.json is missing" in refused.mistake


def test_a_killed_worker_and_a_killed_driver_change_nothing(
    tokenizer_folder: Path, tmp_path: Path, ray_folder: str
) -> None:
    (tmp_path / "out").mkdir()
    arguments: dict[str, Any] = {
        "inputs": [write_long_corpus(tmp_path / "long.jsonl", 6)],
        "tokenizer": str(tokenizer_folder),
        "out": str(tmp_path / "out" / "corpus"),
        "workers": 2,
        "chunk_characters": 100_000,
        "shard_tokens": 200_000,
    }
    environment = {"TMPDIR": ray_folder}
    driver = run_prepare(arguments | {"ray": "local"}, environment)

    def records() -> int:
        return len(found_in(tmp_path / "out", RECORDS))

    wait_until(records, "a finished shard", process=driver)
    cluster = descendants(driver.pid)
    assert any("raylet" in command for command in cluster.values())
    assert not any("dashboard.py" in command and "--minimal" not in command for command in cluster.values())
    for process in cluster:
        assert listening_addresses(process) <= LOOPBACK, cluster[process]
    workers = wait_until(
        lambda: [pid for pid, name in descendants(driver.pid).items() if name.startswith("ray::_run")], "a worker"
    )
    os.kill(workers[0], signal.SIGKILL)
    before = records()
    wait_until(lambda: records() > before, "another shard", process=driver)
    assert driver.poll() is None
    cluster = descendants(driver.pid)
    driver.kill()
    output, errors = (text.decode() for text in driver.communicate(timeout=60))
    assert output == "", "what Ray says of its workers does not go to stdout"
    assert "Ray: A worker died or was killed" in errors
    # Ray's two agents look for their parent once a minute only
    cluster = {pid: command for pid, command in cluster.items() if "Agent" not in command}
    wait_until(lambda: not living_processes().keys() & cluster.keys(), "the end of Ray's processes")

    # the record is the same for both pools, and the local one starts sooner
    finished = records()
    output, errors = (text.decode() for text in run_prepare(arguments | {"workers": 1}).communicate(timeout=100))
    summary = json.loads(output or errors)
    assert f"going on after {finished} finished shards" in errors
    assert summary["resumed_shards"] == finished
    whole = prepare_corpus(**(arguments | {"out": tmp_path / "whole", "workers": 1}))
    tokens_a_chunk = whole["tokens"] / whole["chunks_tokenized"]
    redone = summary["chunks_tokenized"] - (whole["chunks_tokenized"] - finished * 200_000 / tokens_a_chunk)
    assert redone < finished + 1, "of finished shards, nothing but what their files had no room for"
    assert folder_bytes(tmp_path / "out" / "corpus") == folder_bytes(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["corpus"]


def test_a_cluster_by_its_address(tmp_path: Path, ray_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", make_documents(3000))
    build_vocabulary([source], tmp_path / "local", size=200, workers=2, chunk_characters=50_000)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback
    ray_workers.use_token()  # not taken back: Ray keeps it for as long as a process lives
    start = (
        "import sys, time, ray\n"
        "ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "time.sleep(300)\n"
    )
    cluster = subprocess.Popen([sys.executable, "-c", start, ray_folder], stdout=subprocess.PIPE, text=True)
    try:
        assert cluster.stdout
        address = cluster.stdout.readline().strip()
        arguments = ("vocab", source, "--size", 200, "--ray", address, "--json")
        done = bertsmith_process(*arguments, "--workers", 2, "--out", tmp_path / "one")
        assert done.json["ray"]["machines"] == 1
        assert done.json["workers"] == 2
        assert "Ray: 1 machine, 3 processors; 2 tasks at a time" in done.err
        assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "local")

        taken = 0

        def items() -> Iterator[float]:
            nonlocal taken
            for number in range(30):
                taken += 1
                yield 0.3 * (number % 10 == 0)

        with make_pool(2, address) as pool:
            assert list(pool.map_in_order(math.sqrt, range(30))) == [math.sqrt(number) for number in range(30)]
            for done, _ in enumerate(pool.map_in_order(time.sleep, items()), start=1):
                assert taken <= done + 2 * 2 + 1, "results wait for the first of them: no more are made"
            assert taken == done == 30
            with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
                list(pool.map_in_order(math.sqrt, [1, -1]))
    finally:
        cluster.kill()
        cluster.wait()


@pytest.mark.slow
def test_a_machine_that_dies_changes_nothing(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster of two machines (two of Ray's node processes on this one), of which one is killed in the middle."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray_workers.use_token()
    script = (
        "import sys\n"
        "from ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 1, 'include_dashboard': False})\n"
        "other = cluster.add_node(num_cpus=1)\n"
        "print(cluster.address, flush=True)\n"
        "sys.stdin.readline()\n"
        "cluster.remove_node(other, allow_graceful=False)\n"
        "print('removed', flush=True)\n"
        "sys.stdin.readline()\n"
        "cluster.shutdown()\n"
    )
    arguments: dict[str, Any] = {
        "inputs": [write_long_corpus(tmp_path / "long.jsonl", 12)],
        "tokenizer": str(tokenizer_folder),
        "out": str(tmp_path / "corpus"),
        "chunk_characters": 200_000,
        "shard_tokens": 200_000,
    }
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as cluster:
        assert cluster.stdin
        assert cluster.stdout
        try:
            lines = iter(cluster.stdout.readline, "")
            address = next(line.strip() for line in lines if line.startswith("127.0.0.1:"))
            prepare = ("prepare", *arguments["inputs"], "--tokenizer", tokenizer_folder, "--out", tmp_path / "no")
            refused = bertsmith_process(*prepare, "--ray", address, env={"RAY_AUTH_TOKEN": "0" * 64})
            assert "this cluster asks for a token; set RAY_AUTH_MODE=token" in refused.mistake
            driver = run_prepare(arguments | {"ray": address})
            wait_until(lambda: found_in(tmp_path, RECORDS), "a finished shard", process=driver)
            cluster.stdin.write("now\n")
            cluster.stdin.flush()
            assert any(line.strip() == "removed" for line in lines)
            assert driver.poll() is None
            output, errors = (text.decode() for text in driver.communicate(timeout=300))
            assert json.loads(output or errors)["workers"] == 2
            assert "Ray: 2 machines, 2 processors" in errors
            assert errors.count("Ray: ") > 1, "that it died is told"
        finally:
            cluster.stdin.close()
            cluster.wait(timeout=60)
    prepare_corpus(**(arguments | {"out": tmp_path / "whole", "workers": 1}))
    assert folder_bytes(tmp_path / "corpus") == folder_bytes(tmp_path / "whole")


def test_mistakes_are_one_sentence_in_bounded_time(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", make_documents(5))
    prepare = ("prepare", source, "--tokenizer", tokenizer_folder, "--out", tmp_path / "c", "--ray")
    started = time.monotonic()
    assert "--ray 127.0.0.1:1: nobody answers there" in bertsmith(*prepare, "127.0.0.1:1").mistake
    assert time.monotonic() - started < 10
    assert "give local, or HOST:PORT" in bertsmith(*prepare, "headnode").mistake
    assert "run the command on a machine of the cluster" in bertsmith(*prepare, "ray://10.0.0.5:10001").mistake
    assert "--workers 0" in bertsmith(*prepare, "local", "--workers", 0).mistake
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'bertsmith[ray]'" in bertsmith(*prepare, "local").mistake
    assert "pip install 'bertsmith[ray]'" in bertsmith(*prepare, "127.0.0.1:6379").mistake
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_something_else_at_the_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "CONNECT_SECONDS", 3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"--ray {address}: (no Ray cluster answered|this cluster cannot be used)"):
            make_pool(1, address).__enter__()


def test_a_machine_that_would_make_other_bytes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    pool = RayPool("local", 1)
    monkeypatch.setattr(ray, "get", lambda reference: ("node7", 1, 1, {"bertsmith": "0.0.1"}, None))
    with pytest.raises(UserError, match=r"node7 has bertsmith 0\.0\.1, this machine .*install the same"):
        pool._take(None)

    def fail(reference: Any) -> None:
        raise ray.exceptions.RayTaskError("_run", "ModuleNotFoundError: No module named 'bertsmith'", ImportError())

    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(UserError, match="not installed on every machine of the cluster"):
        pool._take(None)


def test_ray_is_not_touched_without_the_option(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", make_documents(5))
    script = (
        "import sys\n"
        "from bertsmith.cli import main\n"
        f"assert main(['vocab', {source!r}, '--out', {str(tmp_path / 'v')!r}, '--workers', '1']) == 0\n"
        "assert not {'ray', 's3fs', 'bertsmith.ray_workers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, stderr=subprocess.DEVNULL)
