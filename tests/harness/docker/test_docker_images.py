"""The images: pins, labels, users, seams; push, pull by digest and refresh at a real registry."""

from __future__ import annotations

import fcntl
import io
import shutil
import socket
import struct
import subprocess
import time

import container_base as base
import docker
import pytest
from docker.errors import DockerException, ImageNotFound
from docker_rig import record

from adapters import __version__
from adapters.sglang import seams
from harness.config import ROOT, choices, load, member
from harness.launch import LaunchError, images
from harness.launch.docker import find_image
from harness.launch.docker_daemon import adapter_digest

SITE = base.TO.strip("/")
DOUBLE = ROOT / "tests" / "adapters" / "lightllm" / "double"
BRIDGE = b"specaccept1"
SIOCBRADDBR, SIOCBRDELBR, SIOCSIFFLAGS = 0x89A0, 0x89A1, 0x8914
BUILT = {
    "mia-tp4": ("sglang", "0.5.23"),
    "8xL20-sglang": ("sglang", "0.5.16"),
    "8xL20-lightllm": ("lightllm", None),
}


def sglang_tree(version: str, change: tuple[str, str] | None = None) -> dict[str, str]:
    """A package with every name and parameter list the adapter expects of a release, and nothing behind them.

    change: a dotted path and the parameters it has instead.
    """
    modules: dict[str, dict[str, dict[str, str]]] = {}
    for path, names in seams.expected(version).values():
        if change and path == change[0]:
            names = tuple(change[1].split())
        module, _, name = path.rpartition(".")
        owner = module.rpartition(".")[2]
        if owner.lstrip("_")[:1].isupper():
            modules.setdefault(module.rpartition(".")[0], {}).setdefault(owner, {})[name] = ", ".join(names)
        else:
            modules.setdefault(module, {}).setdefault("", {})[name] = ", ".join(names)
    files = {"sglang/__init__.py": f"__version__ = {version!r}\n"}
    for module, owners in modules.items():
        text = ""
        for owner, functions in owners.items():
            indent = "    " if owner else ""
            text += f"class {owner}:\n" if owner else ""
            for name, parameters in functions.items():
                static = f"{indent}@staticmethod\n" if owner and not parameters.startswith("self") else ""
                text += f"{static}{indent}def {name}({parameters}):\n{indent}    raise NotImplementedError\n"
        files[module.replace(".", "/") + ".py"] = text
    info = f"sglang-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    return {f"site/{name}": text for name, text in files.items()}


@pytest.fixture(scope="session")
def engine_base(derive, tmp_path_factory):
    """A base image with an engine's names in it, as a tag; broken: with one parameter list that is another."""

    def make(engine: str, version: str | None, broken: bool = False) -> str:
        tag = f"specaccept-test/{engine}-{version or 'double'}:{'broken' if broken else 'sound'}"
        if engine == "sglang":
            path = seams.expected(version)["finalize"][0]
            files = sglang_tree(version, (path, "self folded_accept bs") if broken else None)
        else:
            tree = tmp_path_factory.mktemp("double") / "lightllm"
            shutil.copytree(DOUBLE / "lightllm", tree)
            kernel = tree / "common" / "basemodel" / "triton_kernel" / "mtp_utils.py"
            if broken:
                kernel.write_text(kernel.read_text().replace("b_req_mtp_start_loc", "b_req_start_loc"))
            files = {"site/lightllm": tree}
        return derive(tag, f"FROM {base.name('python')}\nCOPY site /{SITE}/\n", **files)

    return make


@pytest.mark.parametrize("name", BUILT)
def test_an_engine_image_is_built_and_checks_itself_at_start(client, engine_base, name):
    engine, version = BUILT[name]
    tag = images.build(client, member("image", name), engine_base(engine, version), f"specaccept-test/{name.lower()}:1")
    try:
        found = client.images.get(tag)
        assert found.attrs["Config"]["User"] == "10001:10001"
        assert found.labels["specaccept.engine"] == engine
        assert found.labels["specaccept.adapter"] == adapter_digest()
        assert found.labels["org.opencontainers.image.title"] == f"specaccept/{name}"
        assert found.labels["org.opencontainers.image.version"] == __version__
        for field in ("revision", "created", "base.name", "licenses"):
            assert found.labels[f"org.opencontainers.image.{field}"] not in ("", "unknown")
        command = ["python3", "-c", "import adapters.policy, os; print('started', os.getuid())"]
        options = {"network_mode": "none", "remove": True}
        assert client.containers.run(tag, command, **options) == b"started 10001\n"
        # The same image with a seam that drifted after the build.
        path = "common/basemodel/triton_kernel/mtp_utils.py" if engine == "lightllm" else None
        if path is None:
            path = seams.expected(version)["finalize"][0].rsplit(".", 2)[0].removeprefix("sglang.").replace(".", "/")
            path += ".py"
        text = f"FROM {tag}\nUSER root\nRUN sed -i 's/folded_accept\\|b_req_idx/renamed/' /{SITE}/{engine}/{path}\n"
        broken = f"specaccept-test/{name.lower()}:drifted"
        client.images.build(fileobj=io.BytesIO(text.encode()), tag=broken, rm=True, forcerm=True)
        try:
            status, log = run(client, broken, command)
        finally:
            client.images.remove(broken, force=True)
        assert status == 1
        assert b"specaccept: refused: " in log
        assert b"renamed" in log
        assert b"started" not in log
    finally:
        client.images.remove(tag, force=True)


def run(client, image: str, command: list[str]) -> tuple[int, bytes]:
    container = client.containers.run(image, command, network_mode="none", detach=True)
    try:
        return container.wait()["StatusCode"], container.logs()
    finally:
        container.remove(force=True)


@pytest.mark.parametrize("name", BUILT)
def test_a_base_with_another_seam_is_not_built_from(client, engine_base, name):
    engine, version = BUILT[name]
    tag = f"specaccept-test/{name.lower()}:never"
    with pytest.raises(LaunchError, match=f"image {name}: refused: .*expected .*found") as caught:
        images.build(client, member("image", name), engine_base(engine, version, broken=True), tag)
    assert "\n" not in str(caught.value)
    assert client.images.list(name=tag) == []


def test_a_base_without_the_engine_is_not_built_from(client):
    with pytest.raises(LaunchError, match=r"image mia-tp4: refused: .*sglang"):
        images.build(client, member("image", "mia-tp4"), base.name("python"), "specaccept-test/none:1")


def test_the_reference_image(client, reference):
    found = client.images.get(reference)
    assert found.attrs["Config"]["User"] == "10001:10001"
    assert found.labels["org.opencontainers.image.base.name"] == base.name("torch")
    layers = " ".join(str(layer["CreatedBy"]) for layer in found.history())
    assert "pip install --no-deps" in layers
    assert "index-url" not in layers
    status, log = run(client, reference, ["python3", "-m", "harness.engines.reference", "--help"])
    assert status == 0, log


def test_push_pull_by_digest_and_refresh(client, registry, fake, harness, tmp_path):
    repository = f"{registry}/fake"
    by_digest = images.push(client, fake, repository)
    digest = by_digest.partition("@")[2]
    assert by_digest == f"{repository}@{digest}"
    assert images.DIGEST.fullmatch(digest)

    pins = tmp_path / "bases.yaml"
    pins.write_text(
        f"# kept\none:\n  image: {repository}:1\n  digest: unresolved\ntwo:\n  image: x:1\n  digest: unresolved\n"
    )
    with pytest.raises(
        LaunchError, match=r"base one: .* is not pinned to a digest: run `python -m harness.launch.images"
    ):
        images.bases(pins)["one"].reference  # noqa: B018
    assert images.refresh(client, ["one"], pins) == {"one": digest}
    assert images.bases(pins)["one"].reference == by_digest
    assert images.bases(pins)["two"].digest is None
    assert pins.read_text().startswith("# kept\n")
    assert images.refresh(client, ["one"], pins) == {}

    # The tag moves on; the pin stays what it was until the next refresh.
    client.images.get(base.name("python")).tag(repository, "1")
    for line in client.api.push(repository, tag="1", stream=True, decode=True):
        assert "error" not in line
    assert images.bases(pins)["one"].digest == digest
    changed = images.refresh(client, ["one"], pins)["one"]
    assert changed != digest

    pins.write_text(f"one:\n  image: {registry}/none:1\n  digest: unresolved\n")
    with pytest.raises(LaunchError, match="the registry does not have it"):
        images.refresh(client, [], pins)

    # Gone here, named by digest: pulled, run, and the digest observed is the one asked for.
    client.images.remove(f"{repository}:1", force=True)
    client.images.remove(by_digest, force=True)
    with pytest.raises(ImageNotFound):
        client.images.get(by_digest)
    status, _, err = harness(f"image.reference={by_digest}", "engine.module=fake_engine", "limit=1")
    assert status in (0, 2), err
    kept = record(tmp_path / "results")
    assert kept["identity"]["image_digest"] == digest
    assert kept["launch"]["image"] == by_digest
    client.images.remove(by_digest, force=True)


def test_a_full_disk_of_the_engine(registry, fake, client, tmp_path, monkeypatch):
    """A second engine whose disk is 48 MiB is asked for an image that is larger."""
    by_digest = images.push(client, fake, f"{registry}/fake")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)], check=True)
    address = tmp_path / "d.sock"
    command = [
        "dockerd",
        "--host",
        f"unix://{address}",
        "--data-root",
        str(place / "data"),
        "--pidfile",
        f"{tmp_path}/pid",
    ]
    command += ["--exec-root", "/run/specaccept-small", "--bridge", BRIDGE.decode(), "--iptables=false"]
    bridge(SIOCBRADDBR)
    log = (tmp_path / "dockerd.log").open("wb")
    daemon = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{address}")
        small = wait_for(address, daemon)
        with pytest.raises(LaunchError, match="disk full: make room where Docker keeps its data") as caught:
            find_image(small, load(["launch=docker", f"image.reference={by_digest}"]))
        assert "\n" not in str(caught.value)
        small.close()
    finally:
        daemon.terminate()
        daemon.wait(30)
        log.close()
        bridge(SIOCBRDELBR)
        subprocess.run(["umount", str(place)], check=True)
        client.images.remove(by_digest, force=True)


def bridge(request: int) -> None:
    """A second engine without a bridge of its own would remove the first one's."""
    with socket.socket() as any_socket:
        if request == SIOCBRDELBR:  # only one that is down can go
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", BRIDGE, 0))
        fcntl.ioctl(any_socket, request, BRIDGE + b"\0")


def wait_for(address, daemon):
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        assert daemon.poll() is None
        try:
            small = docker.DockerClient(f"unix://{address}", timeout=60)
            small.ping()
        except (DockerException, OSError):
            time.sleep(0.1)
            continue
        return small
    raise AssertionError("the second engine does not answer")


def test_every_image_has_a_base_and_a_folder():
    assert set(images.bases()) == {name for name in choices("image") if name != "auto"}
    for name in images.bases():
        folder = images.FOLDER / member("image", name).folder
        assert {path.name for path in folder.iterdir()} >= {"Dockerfile", "entrypoint", "README.md"}
