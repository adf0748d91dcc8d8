"""launch=docker on a real engine: the same answers as a process, and nothing left behind whatever goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading

import pyarrow.parquet as pq
import pytest
from docker_rig import free_port, owned, record

from adapters.policy import Policy
from harness.config import load
from harness.launch import LaunchError, docker_doctor, docker_gpu, launch, preflight
from harness.launch.capability import Gpu
from harness.launch.docker_container import DRAFT, PORT, SECRET, TARGET
from harness.launch.docker_daemon import OWNED, OWNER, RUN

STRICT = Policy("strict")


def rows(results) -> list[dict]:
    (folder,) = (results / "runs").iterdir()
    return pq.read_table(folder / "requests.parquet").to_pylist()


def refused(status: int, err: str) -> str:
    """The one line of an error."""
    lines = [line for line in err.splitlines() if line.startswith("specaccept:") and ": starting, " not in line]
    assert status == 2, err
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


@pytest.fixture
def running(overrides, tmp_path, client):
    """launch() itself: the engine, and its container as Docker sees it."""

    def start(*more):
        return launch(load([*overrides, *more]), tmp_path / "engine.log", STRICT)

    return start


def only(client):
    (container,) = client.containers.list(filters={"label": OWNED})
    return container


def test_a_container_answers_as_a_process_does(harness, tmp_path, client, reference):
    ids = {}
    for how in ("docker", "process"):
        status, _, err = harness(f"launch={how}", f"out={tmp_path / how}")
        assert status in (0, 2), err  # 2: a random draft is no draft of its target
        ids[how] = [(row["arm"], row["item"], row["output_ids"]) for row in rows(tmp_path / how)]
    assert ids["docker"] == ids["process"]
    assert len(ids["docker"]) == 9
    kept = record(tmp_path / "docker")
    assert kept["status"] == "complete"
    assert kept["identity"]["image_digest"] == client.images.get(reference).id == kept["launch"]["image_id"]
    assert kept["launch"]["labels"]["specaccept.engine"] == "reference"
    assert kept["launch"]["command"].startswith("python3 -m harness.engines.reference ")
    log = next((tmp_path / "docker" / "runs").glob("*/engine.log")).read_text()
    assert "ready on" in log


def test_the_gate_through_a_container(harness, tmp_path):
    harness("task=gate", "task.control=3")
    kept = record(tmp_path / "results")
    assert kept["gates"]["identity"]["mismatches"] == 0
    assert kept["gates"]["identity"]["compared"] == 3
    assert kept["gates"]["control"]["relaxed"] > 0


def test_replicas_share_the_items_and_their_counters_add_up(harness, tmp_path):
    harness("launch.replicas=2", "limit=5")
    kept, answers = record(tmp_path / "results"), rows(tmp_path / "results")
    assert [row["replica"] for row in sorted(answers, key=lambda row: row["order"])] == [0] * 3 + [1] * 3 + [0] * 3 + [
        1
    ] * 3 + [0] * 3
    for arm, shares in kept["launch"]["shards"].items():
        for replica, share in enumerate(shares):
            own = [row for row in answers if row["arm"] == arm and row["replica"] == replica]
            assert share["requests"] == len(own) == (3, 2)[replica]
            assert share["blocks"] == sum(row["steps"] for row in own)
            assert share["relaxed"] == sum(row["relaxed"] for row in own)
    log = next((tmp_path / "results" / "runs").glob("*/engine.log")).read_text()
    assert {"[0] ", "[1] "} <= {line[:4] for line in log.splitlines()}


def test_what_the_container_is_given(running, client, monkeypatch, pair, quick):
    monkeypatch.setenv("HF_TOKEN", "hf_never_shown")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with running(*quick, "image.memory_gib=2", "image.shm_gib=0.5", "image.cpus=1.5") as engine:
        container = only(client)
        told, host = container.attrs, container.attrs["HostConfig"]
        binding = told["NetworkSettings"]["Ports"][f"{PORT}/tcp"]
        assert [each["HostIp"] for each in binding] == ["127.0.0.1"]
        assert told["Config"]["User"].split(":")[0] not in ("", "0", "root")
        assert {each["Destination"]: each["RW"] for each in told["Mounts"]} == {TARGET: False, DRAFT: False}
        assert host["Init"] is True
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert (host["Memory"], host["MemorySwap"], host["ShmSize"]) == (2 << 30, 2 << 30, 1 << 29)
        assert (host["NanoCpus"], host["PidsLimit"], host["IpcMode"]) == (1_500_000_000, 4096, "private")
        environment = dict(each.split("=", 1) for each in told["Config"]["Env"])
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert environment["NCCL_DEBUG"] == "INFO"
        assert environment["SPECACCEPT_NONCE"] == engine.nonce == container.labels[RUN]
        assert "hf_never_shown" not in json.dumps(told)
        wrote = container.exec_run(["sh", "-c", f"echo x > {TARGET}/x"])
        assert wrote.exit_code != 0
        assert container.exec_run("id -u").output.strip() != b"0"
    assert owned(client) == []


def test_a_token_is_a_secret_file_of_the_container(running, client, monkeypatch, tmp_path, quick):
    monkeypatch.setenv("HF_TOKEN", "hf_never_shown")
    with running(*quick, "launch.offline=false") as engine:
        container = only(client)
        assert container.exec_run(["cat", SECRET]).output == b"hf_never_shown"
        assert b"-r--------" in container.exec_run(["ls", "-l", SECRET]).output
        assert "hf_never_shown" not in json.dumps(container.attrs)
        assert "hf_never_shown" not in json.dumps(engine.how)
        assert engine.how["token"] == "by secret"
    assert "hf_never_shown" not in (tmp_path / "engine.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_and_removes(cli, client, tmp_path, number, quick):
    run = cli(*quick, "limit=400")
    run.until_answers()
    port = only(client).attrs["NetworkSettings"]["Ports"][f"{PORT}/tcp"][0]["HostPort"]
    status, err = run.end(number)
    assert status == 128 + number
    assert "what was measured is kept" in err
    assert owned(client) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), 2)
    kept = record(tmp_path / "results")
    assert kept["status"] == "incomplete"
    assert kept["rows"] >= 3


def test_after_a_kill_the_next_start_reaps(cli, client, harness, tmp_path, quick):
    run = cli(*quick, "limit=400")
    run.until_answers()
    (left,) = owned(client)
    run.end(signal.SIGKILL)
    assert owned(client) == [left]  # a killed process cannot clean up
    kept = client.containers.create(
        "specaccept/reference-cpu:0.1.0", "true", labels={OWNED: "engine", OWNER: "another-machine - 1 2"}
    )
    try:
        harness(*quick, f"out={tmp_path / 'next'}", "limit=1")
        assert owned(client) == [kept.name]  # another machine's is not ours to remove
    finally:
        kept.remove()
    assert f"removed {left}" in next((tmp_path / "next" / "runs").glob("*/engine.log")).read_text()


def test_an_engine_killed_under_the_run_ends_it(cli, client, tmp_path, quick):
    run = cli(*quick, "limit=400")
    run.until_answers()
    only(client).kill()
    line = refused(*run.end())
    assert "engine: container exited with status 137" in line
    kept = record(tmp_path / "results")
    assert kept["status"] == "failed"
    assert kept["verdict"] is None


def test_a_container_removed_under_the_run_ends_it(cli, client, quick):
    run = cli(*quick, "limit=400")
    run.until_answers()
    only(client).remove(force=True)
    line = refused(*run.end())  # killed first, gone a moment later: either may be seen
    assert "its container was removed by someone else" in line or "container exited with status 137" in line


def test_a_port_that_is_taken(harness, quick):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = harness(*quick, f"launch.port={port}")
    assert "port taken: choose another launch.port" in refused(status, err)


def test_an_image_that_is_missing(harness, tmp_path):
    status, _, err = harness("image.reference=specaccept/none:1")
    assert "image missing: make images IMAGE=reference-cpu" in refused(status, err)
    assert not list(tmp_path.glob("results/runs/*"))  # nothing is recorded of a run that cannot start


def test_an_image_of_another_checkout(harness, derive, reference):
    other = derive("specaccept-test/other:1", f"FROM {reference}\nLABEL specaccept.adapter=0123456789abcdef\n")
    status, _, err = harness(f"image.reference={other}")
    line = refused(status, err)
    assert "label specaccept.adapter: expected" in line
    assert "it is not built from this checkout: make images" in line


BREAKS = {
    "adapter": (
        "echo '# edited' >> $(python3 -c 'import adapters.policy; print(adapters.policy.__file__)')",
        "adapters/policy.py: not the file that was installed",
    ),
    "engine": (
        "sed -i 's/class Qwen3ForCausalLM/class Qwen3ForCausalLanguage/' "
        "/usr/local/lib/python3.11/dist-packages/transformers/models/qwen3/modeling_qwen3.py",
        "Qwen3ForCausalLM: expected Qwen3ForCausalLM, found none",
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_seam_that_drifted_refuses_to_start(harness, derive, reference, tmp_path, what):
    command, words = BREAKS[what]
    text = f"FROM {reference}\nUSER root\nRUN {command}\nUSER 10001:10001\n"
    broken = derive(f"specaccept-test/broken-{what}:1", text)
    status, _, err = harness(f"image.reference={broken}")
    line = refused(status, err)
    assert "container exited with status 1: specaccept: refused: " in line
    assert words in line
    log = next((tmp_path / "results" / "runs").glob("*/engine.log")).read_text()
    assert "ready" not in log  # it never came to load a model


def test_a_gpu_that_is_absent(running, monkeypatch):
    monkeypatch.setattr(docker_gpu, "gpus", lambda: ())
    with pytest.raises(LaunchError, match=r"GPU absent: reference-cpu needs 1 .*found 0"), running("image.gpus=1"):
        pytest.fail("started")
    monkeypatch.setattr(docker_gpu, "gpus", lambda: (Gpu("L20", 44.9),))
    with pytest.raises(LaunchError, match="install the NVIDIA container toolkit") as caught, running("image.gpus=1"):
        pytest.fail("started")
    assert "\n" not in str(caught.value)


def test_an_engine_that_is_not_ready_in_time(running, quick):
    never = [*quick[:2], "++image.env.FAKE_FAULT=never-ready", "engine.ready_timeout_s=2"]
    with pytest.raises(LaunchError, match="not ready in time"), running(*never):
        pytest.fail("started")


def test_an_engine_that_runs_out_of_memory(running):
    with pytest.raises(LaunchError, match=r"exited with status 137.*memory"), running("image.memory_gib=0.05"):
        pytest.fail("started")


def test_a_model_the_container_cannot_read(overrides, tmp_path, pair):
    private = tmp_path / "private"
    shutil.copytree(pair["target"], private)
    (private / "model.safetensors").chmod(0o600)
    with pytest.raises(LaunchError, match=r"model\.target: model\.safetensors in .* is private"):
        preflight(load([*overrides, f"model.target={private}"]))
    with pytest.raises(LaunchError, match=r"model\.draft: none/none is not on this machine: expected `hf download"):
        preflight(load([*overrides, "model.draft=none/none"]))


def test_a_full_disk_under_the_record(cli, client, tmp_path, quick):
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    try:
        status, err = cli(*quick, f"out={place}", "limit=400").end()
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert "No space left on device" in refused(status, err)
    assert owned(client) == []


def test_another_engine_by_docker_host(harness, monkeypatch, tmp_path, client, quick):
    port = free_port()
    with forwarded(port, os.environ["DOCKER_HOST"].removeprefix("unix://")):
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
        harness(*quick, "limit=1")
    assert record(tmp_path / "results")["status"] == "complete"


class forwarded:
    """A loopback TCP port that leads to a Unix socket."""

    def __init__(self, port: int, path: str) -> None:
        self.server = socket.create_server(("127.0.0.1", port))
        self.path = path

    def __enter__(self):
        threading.Thread(target=self._serve, daemon=True).start()

    def __exit__(self, *_):
        self.server.close()

    def _serve(self):
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self.path)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    @staticmethod
    def _copy(one, other):
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_doctor_says_what_this_engine_can_run(client, reference):
    line, rows = docker_doctor.rows()
    assert f"at {os.environ['DOCKER_HOST']}" in line
    found = {row[0]: row[1:] for row in rows}
    assert found["reference-cpu"][1:3] == ["yes", "yes"]
    assert found["reference-cpu"][3] == "make bench MODEL=tiny-qwen3 ENGINE=reference LAUNCH=docker"
    assert found["mia-tp4"][1] in ("no", "once built", "yes")


def test_coding_items_are_scored_in_containers(harness, tmp_path, client):
    """And the containers are of the run's own image."""
    status, _, err = harness("traffic=generated-code", "limit=2", "traffic.max_new_tokens=8")
    assert status in (0, 2), err
    kept = record(tmp_path / "results")
    assert kept["status"] == "complete"
    assert kept["identity"]["config"]["launch"]["code"] == "container"
    assert all(row["outcome"] in ("truncated", "unparsed", "wrong") for row in rows(tmp_path / "results"))
