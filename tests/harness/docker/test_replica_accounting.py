"""Sharding and GPU memory without Docker: what the counters of replicas must say, and how an arm waits for its GPUs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.policy import Policy
from harness.config import load
from harness.engines.base import EngineError, Server, Snapshot
from harness.launch import LaunchError, docker_doctor, docker_gpu, images
from harness.launch.capability import Gpu
from harness.launch.docker import _url, card
from harness.launch.docker_container import HUB, SHARED, argv, host_config
from harness.launch.docker_daemon import explain, is_local, is_orphan, owner
from harness.launch.docker_gpu import Memory, devices
from harness.launch.shards import ShardedClient, merge
from harness.records import Row
from harness.tasks.arms import prove_replicas
from harness.tasks.summary import summarize


class Lane:
    """A replica that answers with its own number and what it was asked."""

    def __init__(self, number: int, nonce: str = "n") -> None:
        self.url, self.number, self.nonce = f"http://{number}", number, nonce

    def generate_many(self, requests):
        return [(self.number, request) for request in requests]

    def server(self):
        raw = {
            "schema": 1,
            "nonce": self.nonce,
            "counters": {"strict": {"requests": self.number, "fallbacks": {"x": 1}}},
        }
        return Server("1", "t", "d", 1, Snapshot(raw))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(), max_size=23), st.integers(1, 9))
def test_a_list_is_dealt_out_and_comes_back_in_order(requests, count):
    answers = ShardedClient([Lane(k) for k in range(count)]).generate_many(requests)
    assert answers == [(i % count, request) for i, request in enumerate(requests)]


leaves = st.dictionaries(st.sampled_from("xy"), st.integers(0, 9))
counters = st.dictionaries(
    st.sampled_from("abc"), st.fixed_dictionaries({"n": st.integers(0, 9), "f": leaves}), max_size=3
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(counters, max_size=5))
def test_counters_add_up_leaf_by_leaf(parts):
    total = merge(parts)
    for key in "abc":
        own = [part[key] for part in parts if key in part]
        assert (key in total) == bool(own)
        assert total.get(key, {}).get("n", 0) == sum(each["n"] for each in own)
        for leaf in "xy":
            assert total.get(key, {}).get("f", {}).get(leaf, 0) == sum(each["f"].get(leaf, 0) for each in own)


def test_replicas_are_one_server_only_while_they_are_alike():
    shared = ShardedClient([Lane(1), Lane(2)])
    assert shared.server().snapshot.counters == {"strict": {"requests": 3, "fallbacks": {"x": 2}}}
    with pytest.raises(EngineError, match="replica 1: expected the adapter and engine of replica 0"):
        ShardedClient([Lane(1), Lane(2, "another")]).server()


def row(item: str, replica: int, **more) -> Row:
    common = {
        "arm": "strict",
        "policy_key": "strict",
        "order": 0,
        "task": "math",
        "prompt_sha256": "",
        "prompt_tokens": 1,
    }
    return Row(**common, item=item, replica=replica, steps=2, proposed=14, output_ids=[1, 2], wall_s=1.0, **more)


SHARES = [{"requests": 2, "blocks": 4, "drafts_verified": 28, "relaxed": 0}] * 2
ROWS = [row("a", 0), row("b", 1), row("c", 0), row("d", 1)]


def test_exact_accounting_passes():
    assert prove_replicas("strict", SHARES, ROWS) == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ROWS[:3], "replica 1: requests: the answers say 1, the counters moved by 2"),
        ([*ROWS[:3], row("d", 0)], "replica 0: requests: the answers say 3, the counters moved by 2"),
        ([*ROWS[:3], row("a", 1)], "an item was answered more than once"),
        ([*ROWS, row("e", 2)], "answers of replica 2, found counters of 2"),
        ([*ROWS[:3], row("d", 1, relaxed=1)], "replica 1: relaxed: the answers say 1, the counters moved by 0"),
    ],
)
def test_any_other_accounting_fails(rows, words):
    found = prove_replicas("strict", SHARES, rows)
    assert words in " | ".join(problem.text for problem in found)
    assert {problem.outcome for problem in found} == {"fail"}


def test_a_failed_request_may_be_counted_or_not():
    failed = [*ROWS[:3], row("d", 1, error="timeout")]
    assert prove_replicas("strict", SHARES, failed) == []
    assert prove_replicas("strict", [SHARES[0], {**SHARES[1], "requests": 0}], failed)


@pytest.mark.parametrize(("replicas", "gpus", "expected"), [(8, 8, 2.0), (4, 8, 1.0), (1, 8, 0.25), (2, 0, None)])
def test_the_table_is_per_gpu(replicas, gpus, expected):
    """2 tokens a second on each server: eight servers of one GPU, four of two, one of eight."""

    class Kept:
        task = "bench"
        arms = {"strict": None}
        launch = {"replicas": replicas, "gpus": gpus}
        workload = {}

        class identity:
            config = {"engine": {}}

    found = summarize(Kept, ROWS)["arms"]["strict"]
    assert found["tps"]["value"] == 2.0
    assert (found["tps_per_gpu"] or {}).get("value") == expected


def test_gpus_are_dealt_to_replicas(monkeypatch):
    monkeypatch.setattr(docker_gpu, "is_local", lambda: True)
    monkeypatch.setattr(docker_gpu, "gpus", lambda: (Gpu("L20", 44.9),) * 8)
    config = load(["launch=docker", "model=qwen3-14b", "image=8xL20-sglang"])
    assert config.launch.replicas == 8
    assert devices(config, 8) == [[str(k)] for k in range(8)]
    paired = load(["launch=docker", "model=qwen3-14b", "image=8xL20-sglang", "launch.replicas=4", "image.gpus=2"])
    assert devices(paired, 4) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    some = load(["launch=docker", "model=qwen3-14b", "launch.gpus=[6,7]", "launch.replicas=2"])
    assert devices(some, 2) == [["6"], ["7"]]
    with pytest.raises(LaunchError, match=r"GPU absent: 8xL20-sglang needs 1 .*found 8"):
        devices(load(["launch=docker", "model=qwen3-14b", "launch.gpus=[8]"]), 1)
    with pytest.raises(LaunchError, match="expected 2 different ids"):
        devices(load(["launch=docker", "model=qwen3-14b", "launch.gpus=[1,1]"]), 2)


def test_a_card_that_cannot_run_an_image_says_so(monkeypatch):
    monkeypatch.setattr("harness.launch.docker.is_local", lambda: True)
    config = load(["launch=docker", "model=qwen3-14b", "image=8xL20-lightllm"])
    monkeypatch.setattr("harness.launch.docker.gpus", lambda: (Gpu("NVIDIA L20", 44.9),))
    assert "FlashAttention 3 only, which needs Hopper" in card(config)
    assert "found NVIDIA L20" in card(config)
    monkeypatch.setattr("harness.launch.docker.gpus", lambda: (Gpu("NVIDIA H200", 139.0),))
    assert card(config) is None


def test_the_next_arm_waits_for_the_memory_of_the_last(monkeypatch):
    readings = iter([{"0": 40_000.0, "1": 10.0}, {"0": 900.0}, {"0": 300.0}])
    Memory({"0": 100.0, "1": 10.0}, lambda: next(readings)).settle(5, 0)
    assert list(readings) == []
    with pytest.raises(LaunchError, match="GPU 0: 39900 MiB more in use than before the run"):
        Memory({"0": 100.0}, lambda: {"0": 40_000.0}).settle(0, 0)
    Memory({}, dict).settle(0, 0)


def test_who_owns_a_container():
    host, boot, pid, started = owner().split()
    assert not is_orphan(owner())
    assert is_orphan(f"{host} {boot} {pid} {int(started) - 1}")  # an earlier process of the same number
    assert is_orphan(f"{host} another-boot {pid} {started}")
    assert not is_orphan(f"another-host {boot} {pid} {started}")
    assert not is_orphan("")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert is_orphan(f"{host} {boot} {child} {started}")  # a zombie is gone
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("write /x: no space left on device", "disk full"),
        ('could not select device driver "" with capabilities: [[gpu]]', "install the NVIDIA container toolkit"),
        ("driver failed programming external connectivity: address already in use", "launch.port"),
        ("No such image: x:1", "image missing: build it"),
        ("something\nelse", "something else"),
    ],
)
def test_what_the_engine_says_is_one_line_with_a_fix(text, words):
    found = explain(text)
    assert words in found
    assert "\n" not in found


def test_another_machine_is_not_reached_by_its_loopback(monkeypatch):
    class Published:
        def endpoint(self):
            return "127.0.0.1", 32768

    config = load(["launch=docker"])
    assert is_local("unix:///x.sock")
    assert is_local("tcp://127.0.0.1:2375")
    assert not is_local("tcp://gpu-box:2375")
    assert not is_local("ssh://me@gpu-box")
    monkeypatch.setenv("DOCKER_HOST", "tcp://gpu-box:2375")
    with pytest.raises(LaunchError, match=r"launch.publish: tcp://gpu-box:2375 is another machine"):
        _url(config, Published())
    Published.endpoint = lambda self: ("0.0.0.0", 32768)
    assert _url(replace(config), Published()) == "http://gpu-box:32768"


def test_doctor_without_an_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    line, rows = docker_doctor.rows()
    assert line.startswith("docker: no engine at unix://")
    assert {row[0]: row[2] for row in rows} == dict.fromkeys(images.bases(), "no")
    assert all(len(row) == len(docker_doctor.COLUMNS) and all(row) for row in rows)


def test_models_of_the_hub_come_from_a_read_only_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    config = load(["launch=docker", "model=qwen3-14b", "launch.hub_cache=/cache/hub"])
    given = host_config(config, Policy("strict"), "n", ["0"], None, None)
    assert [(each["Target"], each["Source"], each["ReadOnly"]) for each in given["mounts"]] == [
        (HUB, "/cache/hub", True)
    ]
    assert {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": HUB, "NCCL_P2P_DISABLE": "1"}.items() <= given["environment"].items()
    assert given["device_requests"][0]["DeviceIDs"] == ["0"]
    assert given["shm_size"] == 16 << 30
    line = argv(config)
    assert line[:3] == ["python3", "-m", "sglang.launch_server"]
    assert line[line.index("--model-path") + 1] == "Qwen/Qwen3-14B"
    assert line[line.index("--host") + 1] == "0.0.0.0"


def test_an_engine_with_one_policy_shares_a_folder_for_its_counters(monkeypatch, tmp_path):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    config = load(
        ["launch=docker", "model=qwen3-14b", "engine=lightllm", "image.gpus=2", "launch.hub_cache=/cache/hub"]
    )
    given = host_config(config, Policy("strict"), "n", ["0", "1"], None, tmp_path)
    assert (SHARED, str(tmp_path), False) in [(m["Target"], m["Source"], m["ReadOnly"]) for m in given["mounts"]]
    assert given["environment"]["SPECACCEPT_TELEMETRY_DIR"] == SHARED
    line = argv(config)
    assert line[line.index("--tp") + 1] == "2"


def test_memory_is_read_from_nvidia_smi_and_awaited_before_the_next_server(monkeypatch, tmp_path):
    """A program in its place that says less each time it is asked."""
    told = tmp_path / "told"
    told.write_text("100\n40000\n20000\n100\n")
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nread first < {told}\nsed -i 1d {told}\nprintf "0, %s\\n1, 7\\n" "$first"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(docker_gpu, "is_local", lambda: True)
    docker_gpu.settle()
    docker_gpu.watch(["0"])
    docker_gpu.settle()
    assert told.read_text() == ""
