"""Cores of its own for every server: real processes that say where they may run, and a client that keeps the rest."""

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from adapters.policy import Policy
from harness import sweep
from harness.config import ConfigError, load
from harness.launch import LaunchError, cores, docker_container, launch, launch_all, preflight, process
from harness.publish import labels, site
from harness.records.read import read_all
from harness.tasks import serving

MINE = sorted(os.sched_getaffinity(0))
TOLD = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))), flush=True)"
TREE = f"{TOLD}\nimport subprocess, sys; subprocess.run([sys.executable, '-c', {TOLD!r}])"
STRICT = Policy("strict")

two = pytest.mark.skipif(len(MINE) < 2, reason="needs a core for the server and one for the client")
three = pytest.mark.skipif(len(MINE) < 3, reason="needs a core for each of two servers and one for the client")


@pytest.fixture
def pinned(overrides, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(__file__)))
    return load([*overrides, "launch.cores=1"])


def told(path, core):
    """What a process and its child said of where they may run, once both have ended."""
    with (
        path.open("wb") as output,
        process._child([sys.executable, "-c", TREE], dict(os.environ), output, 5, core) as it,
    ):
        it.wait(30)
    return [json.loads(line) for line in path.read_text().splitlines()]


@two
def test_a_server_and_all_it_starts_are_on_its_cores_before_it_runs(tmp_path):
    assert told(tmp_path / "one", MINE[:1]) == [MINE[:1]] * 2
    assert told(tmp_path / "other", MINE[1:2]) == [MINE[1:2]] * 2
    assert told(tmp_path / "free", None) == [MINE] * 2


def test_cores_are_disjoint_in_order_and_one_is_left(monkeypatch, overrides):
    config = load([*overrides, "launch.cores=2"])
    monkeypatch.setattr(cores, "available", lambda: [1, 2, 3, 6, 7, 8, 9])
    assert cores.shares(config, 3) == [[1, 2], [3, 6], [7, 8]]
    refused = r"launch\.cores: expected 9 cores \(4 servers x 2, and one for the client\), found 7 \(1-3,6-9\)"
    with pytest.raises(LaunchError, match=refused):
        cores.shares(config, 4)
    with pytest.raises(LaunchError, match="found 7"):
        preflight(config, servers=4)
    monkeypatch.setattr(cores, "available", lambda: [0, 1])
    with pytest.raises(LaunchError, match=r"expected 3 cores \(1 server x 2, .* found 2 \(0-1\)"):
        cores.shares(config, 1)
    assert cores.shares(load(overrides), 100) is None


def test_another_platform_is_refused(monkeypatch, overrides):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match=r"launch\.cores: expected Linux, .* found darwin"):
        cores.shares(load([*overrides, "launch.cores=1"]), 1)


def test_a_server_of_someone_else_has_no_cores_of_ours(overrides):
    with pytest.raises(ConfigError, match=r"launch\.cores: .* found it with launch=attach"):
        load([*overrides, "launch=attach", "url=http://127.0.0.1:1", "launch.cores=1"])
    with pytest.raises(ConfigError, match=r"launch\.cores: expected a number >= 1, found 0"):
        load([*overrides, "launch.cores=0"])


def test_jobs_of_a_sweep_that_run_side_by_side_would_share_them(overrides):
    wanted = sweep.grid([*overrides, "policy.budget=1,2", "launch.cores=1"])
    with pytest.raises(ConfigError, match=r"launch\.cores: .* expected sweep\.jobs=1, found 2"):
        sweep.planned("bench", wanted, jobs=2)
    assert len(sweep.planned("bench", wanted)[0].points) == 2


@two
def test_the_client_keeps_the_rest_with_all_its_threads(pinned, tmp_path):
    begin, end, found = threading.Event(), threading.Event(), []

    def watch():  # a thread from before the servers
        begin.wait(30)
        found.append(os.sched_getaffinity(0))
        end.wait(30)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=watch)
    thread.start()
    with launch(pinned, tmp_path / "log", STRICT) as engine:
        assert engine.how["cores"] == [MINE[:1]]
        assert engine.how["client_cores"] == sorted(os.sched_getaffinity(0)) == MINE[1:]
        begin.set()
        while len(found) < 1:
            thread.join(0.01)
    assert sorted(os.sched_getaffinity(0)) == MINE
    end.set()
    thread.join()
    assert found == [set(MINE[1:]), set(MINE)]


@two
def test_an_engine_that_sets_its_own_affinity_is_refused(pinned, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_ROAMS", "1")
    refused = pytest.raises(
        LaunchError, match=rf"launch\.cores: .* expected cores {MINE[0]}, found .* its own affinity"
    )
    with refused, launch(pinned, tmp_path / "log", STRICT):
        pytest.fail("the engine was accepted")
    assert sorted(os.sched_getaffinity(0)) == MINE
    with launch(replace(pinned, launch=replace(pinned.launch, cores=None)), tmp_path / "log", STRICT) as engine:
        assert "cores" not in engine.how


@two
def test_cores_that_are_not_there_stop_the_launch(pinned, monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "available", lambda: [100_000, *MINE])
    with pytest.raises(LaunchError, match="cannot start"), launch(pinned, tmp_path / "log", STRICT):
        pytest.fail("the engine was accepted")


@two
def test_a_record_says_whose_cores_are_whose(harness, tmp_path):
    harness("arms=[strict,asd]", "launch.cores=1", "limit=2")
    run = read_all(tmp_path / "results")[-1]
    assert run.problems == []
    record = run.record
    assert (record.launch["cores"], record.launch["client_cores"]) == ([MINE[:1]], MINE[1:])
    assert "(1 for each server alone)" in labels.machine(record)
    shown = json.dumps(site.drawer(record, "asd"), default=str)
    assert f"servers {MINE[0]}; client {cores.spelled(MINE[1:])}" in shown


@two
def test_each_of_several_servers_gets_its_own(pinned, monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "available", lambda: [*MINE[:2], 100_000])  # the client stays where it is
    monkeypatch.setattr(cores, "client", lambda taken: nullcontext())
    with launch_all(pinned, [(tmp_path / "one", STRICT), (tmp_path / "other", STRICT)]) as engines:
        assert [engine.how["cores"] for engine in engines] == [[MINE[:1]], [MINE[1:2]]]


@three
def test_servers_side_by_side_have_cores_of_their_own(harness, tmp_path):
    beside = ["engine.unarmed_why=null", "engine.unarmed_env={FAKE_UNARMED: '1'}", "launch.together=true"]
    harness(*beside, "arms=[unarmed,strict,asd]", "launch.cores=1", "limit=2")
    record = read_all(tmp_path / "results")[-1].record
    assert [each["cores"] for each in record.launch["servers"]] == [[MINE[:1]], [MINE[1:2]]]
    assert record.launch["client_cores"] == MINE[2:]


def test_too_few_cores_for_the_servers_that_are_up_at_once(harness, tmp_path):
    beside = ["engine.unarmed_why=null", "engine.unarmed_env={FAKE_UNARMED: '1'}", "launch.together=true"]
    status, _, err = harness(*beside, "arms=[unarmed,strict,asd]", f"launch.cores={len(MINE)}", "limit=2")
    assert status == 2
    assert f"launch.cores: expected {2 * len(MINE) + 1} cores (2 servers x {len(MINE)}, and one for the client)" in err
    assert read_all(tmp_path / "results") == []


def test_a_run_that_is_continued_keeps_its_cores():
    group = [SimpleNamespace(name="strict")]
    one, beside = {"cores": [[0]]}, {"cores": [[4]], "servers": [{"arms": ["strict"], "cores": [[0]]}]}
    for began in (one, beside):
        serving._check_cores(began, SimpleNamespace(how={"cores": [[0]]}), group)
        with pytest.raises(LaunchError, match=r"begun on \[\[0\]\], found \[\[1\]\]: resume=never starts another"):
            serving._check_cores(began, SimpleNamespace(how={"cores": [[1]]}), group)
    serving._check_cores({}, SimpleNamespace(how={}), group)


def test_containers_get_theirs_by_cpuset(monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    config = load(["launch=docker", "model=tiny-qwen3", "launch.cores=2"])
    given = docker_container.host_config(config, STRICT, "n", [], None, None, [4, 5])
    assert given["cpuset_cpus"] == "4-5"
    assert docker_container.host_config(config, STRICT, "n", [], None, None)["cpuset_cpus"] is None


def test_cores_are_spelled_as_taskset_has_them():
    assert [cores.spelled(each) for each in ([0], [0, 1], [3, 1, 2, 7], [0, 2, 4, 5])] == [
        "0",
        "0-1",
        "1-3,7",
        "0,2,4-5",
    ]
    line = cores.spelled(MINE)
    done = subprocess.run(
        ["taskset", "-c", line, sys.executable, "-c", TOLD], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == MINE
