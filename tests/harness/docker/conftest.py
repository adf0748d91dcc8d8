"""A Docker engine to test with (engine.sh), images made on it, and the check that every test leaves nothing there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import container_base as base
import container_pair
import docker
import pytest
from docker.errors import DockerException
from docker_rig import Cli, context, free_port, owned

from harness.config import ROOT, member
from harness.launch import images
from harness.launch.docker_daemon import adapter_digest

ENDPOINT = os.environ.get("SPECACCEPT_DOCKER_HOST")
NEEDS_ENGINE = ("test_docker_",)  # modules; the others here need none


def _why_not() -> str | None:
    if not ENDPOINT:
        return "no Docker engine: SPECACCEPT_DOCKER_HOST is not set (tests/harness/docker/engine.sh run COMMAND)"
    try:
        docker.DockerClient(ENDPOINT, timeout=10).ping()
    except (DockerException, OSError) as error:
        return f"no Docker engine at {ENDPOINT}: {error}"
    return None


WHY_NOT = _why_not()


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.name.startswith(NEEDS_ENGINE):
            item.add_marker(pytest.mark.slow)
            if WHY_NOT:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="session")
def client():
    """The engine of these tests, for the harness too."""
    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = ENDPOINT
    client = docker.DockerClient(ENDPOINT, timeout=300)
    yield client
    client.close()
    if before is None:
        del os.environ["DOCKER_HOST"]
    else:
        os.environ["DOCKER_HOST"] = before


@pytest.fixture
def nothing_left(client, tmp_path, monkeypatch):
    """Containers and temporary files of the project: none afterwards."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    assert owned(client) == []
    yield
    assert owned(client) == []
    assert list(place.iterdir()) == []


@pytest.fixture(scope="session")
def derive(client):
    """Build a throw-away image from a Dockerfile and files: its tag."""
    made = []

    def build(tag: str, dockerfile: str, **files) -> str:
        client.images.build(
            fileobj=context({"Dockerfile": dockerfile, **files}), custom_context=True, tag=tag, rm=True, forcerm=True
        )
        made.append(tag)
        return tag

    yield build
    for tag in made:
        for name in client.images.get(tag).tags:  # a push gives it further ones
            client.images.remove(name, force=True)


@pytest.fixture(scope="session")
def reference(client) -> str:
    """The image reference-cpu on the local base."""
    return images.build(client, member("image", "reference-cpu"), base.name("torch"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("pair")
    folders = container_pair.write(root)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folders


@pytest.fixture
def quick(fake) -> list[str]:
    """The other tests' fake engine in the container: up in a second, slow enough to be interrupted."""
    return [f"image.reference={fake}", "engine.module=fake_engine", "++image.env.FAKE_FAULT=slow"]


@pytest.fixture
def overrides(pair, tmp_path, reference, nothing_left) -> list[str]:
    """The command line of a run in a container, records in tmp_path."""
    return [
        "launch=docker",
        "launch.stop_timeout_s=10",
        "traffic=generated-math",
        "traffic.max_new_tokens=24",
        "limit=3",
        "task.warmup=1",
        f"out={tmp_path / 'results'}",
        f"model.target={pair['target']}",
        f"model.draft={pair['draft']}",
        "model.calibration=null",
        "policy.budget=1000",
        "policy.gate=1000",
    ]


@pytest.fixture
def cli(overrides, tmp_path):
    started = []

    def start(*more: str) -> Cli:
        one = Cli([*overrides, *more], tmp_path / "results")
        started.append(one)
        return one

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            one.process.communicate(timeout=60)


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    """Debian's docker-registry on a loopback port: its address."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    root = tmp_path_factory.mktemp("registry")
    port = free_port()
    settings = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(root)}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (root / "config.yml").write_text(json.dumps(settings))
    process = subprocess.Popen(
        [program, "serve", str(root / "config.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait()
    shutil.rmtree(root)


FAKE = """
FROM {base}
COPY site /usr/local/lib/python3.11/dist-packages/
COPY adapters /usr/local/lib/python3.11/dist-packages/adapters
COPY fake_engine.py /usr/local/lib/python3.11/dist-packages/
LABEL specaccept.engine=reference specaccept.adapter={adapter}
USER 10001:10001
"""


@pytest.fixture(scope="session")
def fake(derive) -> str:
    """A small image: the engine of the other tests, with this checkout's adapter layer."""
    names = ("uvicorn", "starlette", "anyio", "h11", "click", "idna", "sniffio", "typing_extensions.py")
    site = {f"site/{name}": base.SITE / name for name in names if (base.SITE / name).exists()}
    text = FAKE.format(base=base.name("python"), adapter=adapter_digest())
    engine = ROOT / "tests" / "harness" / "fake_engine.py"
    return derive("specaccept-test/fake:1", text, adapters=ROOT / "adapters", **{"fake_engine.py": engine}, **site)
