"""Bringing an engine up: proof of readiness and identity, and nothing left behind."""

import importlib
import os
import sys
from contextlib import contextmanager

import pytest

from adapters.policy import Policy
from harness.config import load
from harness.launch import LaunchError, capability, launch, preflight
from harness.launch.attach import same_model
from harness.launch.capability import Gpu, missing, require, unsupported
from harness.launch.command import command, printable

STRICT = Policy("strict")


@pytest.fixture
def fake(overrides, monkeypatch, tmp_path):
    """Launch the fake engine with a fault."""
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(__file__)))

    @contextmanager
    def start(fault="none", *more):
        monkeypatch.setenv("FAKE_FAULT", fault)
        with launch(load([*overrides, *more]), tmp_path / "engine.log", STRICT) as engine:
            yield engine

    return start


def test_a_ready_engine_is_the_one_that_was_started(fake, pair, tmp_path):
    with fake() as engine:
        assert engine.nonce
        assert engine.server.snapshot.nonce == engine.nonce
        assert engine.server.target == pair["target"]
        assert engine.how["kind"] == "process"
        assert sys.executable not in engine.how["command"]
        engine.check_alive()
    with pytest.raises(LaunchError, match="exited"):
        engine.check_alive()
    assert "ready on" in (tmp_path / "engine.log").read_text()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuse", "exited with status 1: fake: draft: expected a folder, found nothing"),
        ("nonce", r"specaccept\.nonce: expected '\w+', found 'another'"),
        ("unarmed", "not armed"),
        ("model", "model_path: expected .*, found 'another'"),
        ("restless", "same greedy ids twice"),
        ("die", "exited with status -9|connection"),
        ("never-ready", "ready_timeout_s"),
    ],
)
def test_an_engine_that_is_not_ready_or_not_the_one_is_refused(fake, fault, words):
    timeout = ["engine.ready_timeout_s=2"] if fault == "never-ready" else []
    with pytest.raises(LaunchError, match=words) as caught, fake(fault, *timeout):
        pytest.fail("the engine was accepted")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["none", "stubborn"])
def test_the_whole_group_is_stopped(fake, ticks, fault):
    reader = os.open(ticks, os.O_RDONLY | os.O_NONBLOCK)  # the engine waits for a reader
    with pytest.raises(RuntimeError, match="of the run"), fake(fault, "launch.stop_timeout_s=0.5"):
        raise RuntimeError("an error of the run")
    os.set_blocking(reader, True)
    while os.read(reader, 4096):
        pass  # the end of the pipe: neither the engine nor its worker lives
    os.close(reader)


def test_attach_takes_the_server_as_it_is(overrides, server, tmp_path):
    url = server()
    with launch(load([*overrides, "launch=attach", f"url={url}"]), tmp_path / "log", STRICT) as engine:
        assert engine.nonce is None
        assert engine.how["kind"] == "attach"
    assert engine.client.url == url
    with launch(load([*overrides, "launch=attach", f"url={url}/"]), tmp_path / "log", STRICT) as engine:
        assert engine.server.version == "1"  # still there: attach never stops a server


def test_attach_refuses_another_engine(overrides, server, tmp_path):
    config = load([*overrides, "engine=sglang", "launch=attach", f"url={server()}"])
    refused = pytest.raises(LaunchError, match=r"specaccept\.adapter: expected 'sglang', found 'reference'")
    with refused, launch(config, tmp_path / "log", STRICT):
        pytest.fail("the server was accepted")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("model", r"model: expected '.*target', found 'another'"),
        ("other-draft", r"draft: expected '.*draft', found 'another'"),
        ("no-draft", r"draft: expected '.*draft', found none"),
    ],
)
def test_attach_refuses_another_model(overrides, server, tmp_path, fault, words):
    config = load([*overrides, "launch=attach", f"url={server(fault)}"])
    with pytest.raises(LaunchError, match=words), launch(config, tmp_path / "log", STRICT):
        pytest.fail("the server was accepted")


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "qwen/qwen3-8b/", True),
        ("Qwen/Qwen3-8B", "/models/Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "/cache/models--Qwen--Qwen3-8B/snapshots/0123", True),
        ("recipes/checkpoints/tiny-qwen3", "/elsewhere/tiny-qwen3", True),
        ("Qwen/Qwen3-8B", "Other/Qwen3-8B", False),
        ("Qwen/Qwen3-8B", "/cache/models--Other--Qwen3-8B/snapshots/0123", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8", False),
        ("Qwen/Qwen3-8B", "/models/Qwen3-8B/other", False),
        ("recipes/checkpoints/tiny-qwen3", "/elsewhere/tiny-qwen3-dspark-block7", False),
        ("recipes/checkpoints/tiny-qwen3", "", False),
    ],
)
def test_a_model_is_known_by_its_whole_name(expected, found, same):
    assert same_model(expected, found) is same


def test_attach_needs_a_policy_per_request(overrides):
    config = load([*overrides, "launch=attach", "url=http://127.0.0.1:1", "engine.per_request_policy=false"])
    with pytest.raises(LaunchError, match="nothing to compare it with"):
        preflight(config)


def test_docker_without_an_engine_is_refused_in_one_line(overrides, monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(LaunchError, match=r"docker: no engine at unix://.*none\.sock: start it, or set") as told:
        preflight(load([*overrides, "launch=docker"]))
    assert "\n" not in str(told.value)


def test_commands_of_the_engines():
    line = printable(command(load(["model=qwen3-14b", "engine=sglang"]), 30000))
    assert line.startswith("python -m sglang.launch_server --model-path Qwen/Qwen3-14B --speculative-algorithm DSPARK ")
    assert "--speculative-draft-model-path deepseek-ai/dspark_qwen3_14b_block7" in line
    assert "--disable-radix-cache --" in line or line.endswith("--disable-radix-cache")
    assert " --tp-size 1 " in line
    assert "--tp-size 4" in printable(command(load(["model=deepseek-v4-flash", "engine=sglang"]), 1))
    assert "--dtype" not in printable(command(load(["model=deepseek-v4-flash", "engine=sglang"]), 1))
    assert "--weight-version n0nce" in printable(command(load(["model=qwen3-14b", "engine=sglang"]), 1, nonce="n0nce"))
    own = command(load(["engine.threads=2"]), 0)
    assert own[1:3] == ["-m", "harness.engines.reference"]
    assert own[own.index("--threads") + 1] == "2"
    assert "--device" not in own
    line = printable(command(load(["model=qwen3-8b", "engine=lightllm"]), 1))
    assert line.startswith("python -m adapters.lightllm serve --model_dir Qwen/Qwen3-8B ")
    assert "--mtp_step 7" in printable(command(load(["model=qwen3-8b", "engine=lightllm"]), 1))


def test_what_a_machine_lacks(monkeypatch):
    config = load(["model=qwen3-14b"])
    monkeypatch.setattr(capability, "gpus", lambda: ())
    assert missing(config) == ["1 CUDA GPU of 40 GiB (found none)"]
    monkeypatch.setattr(capability, "gpus", lambda: (Gpu("L4", 22.5),))
    assert missing(config) == ["1 CUDA GPU of 40 GiB (found L4 22 GiB)"]
    monkeypatch.setattr(capability, "gpus", lambda: (Gpu("L20", 44.9),))
    assert missing(config) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert missing(config) == ["the target Qwen/Qwen3-14B", "the draft deepseek-ai/dspark_qwen3_14b_block7"]


def test_a_pair_that_cannot_be_says_what_runs_instead(monkeypatch, pair):
    monkeypatch.setattr(capability, "gpus", lambda: ())
    with pytest.raises(LaunchError, match="qwen3-14b on reference: missing 1 CUDA GPU of 40 GiB") as caught:
        require(load(["model=qwen3-14b"]))
    assert "\n" not in str(caught.value)
    assert "runs here" in str(caught.value)
    assert unsupported(load(["model=deepseek-v4-flash"])) == "deepseek-v4-flash runs on sglang only"


def test_a_folder_of_an_engine_s_name_is_no_engine(monkeypatch, tmp_path):
    (tmp_path / "some_engine").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not capability.installed("some_engine")
    (tmp_path / "some_engine" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert capability.installed("some_engine")
