"""The two base images of the container tests, made here because no registry can be reached.

`python`: Debian bookworm by debootstrap, its Python, and this environment's pip and setuptools. `torch`: the same with
what the embedded engine needs of this environment (Debian's Python 3.11 and this one share their ABI).
Kept by the content of requirements.lock and of this file.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
from pathlib import Path

import docker
from docker.errors import ImageNotFound

ROOT = Path(__file__).resolve().parents[3]
SITE = Path(sysconfig.get_path("purelib"))
REPOSITORY = "specaccept-test"
PACKAGES = "python3,libgomp1"
TO = "/usr/local/lib/python3.11/dist-packages"
# The Dockerfiles build the adapter layer with the setuptools of the base: nothing can be downloaded here.
PIP = "[global]\nno-build-isolation = false\ndisable-pip-version-check = true\n"
BUILDERS = ("pip", "setuptools", "wheel", "pkg_resources", "_distutils_hack", "distutils-precedence")
# What the engine never imports.
LEFT_OUT = (
    "triton", "mypy", "mypyc", "pandas", "scipy", "pyarrow", "matplotlib", "fonttools", "fontTools", "statsmodels",
    "datasets", "pillow", "PIL", "hypothesis", "pytest", "_pytest", "ruff", "hydra", "docker", "specaccept",
    "__editable__", "scipy_stubs", "kiwisolver", "contourpy", "xdist", "execnet", "librt", "ast_serialize",
    "__pycache__", "narwhals", "6ec57f84", "formulaic", "multiprocess", "hypothesispy",
)  # fmt: skip
SLIMMED = ("/torch/include/", "/torch/test/", "/torch/bin/protoc", "/torch/bin/test_")
EXCLUDED = (
    "./var/cache/apt/*",
    "./var/lib/apt/lists/*",
    "./usr/share/doc/*",
    "./usr/share/man/*",
    "./usr/share/locale/*",
)


def key() -> str:
    content = (ROOT / "requirements.lock").read_bytes() + Path(__file__).read_bytes()
    return hashlib.sha256(content).hexdigest()[:12]


def name(kind: str) -> str:
    """kind: python or torch."""
    return f"{REPOSITORY}/{kind}:{key()}"


def rootfs(cache: Path) -> Path:
    """A tar of the Debian system."""
    tar = cache / "bookworm.tar"
    if not tar.exists():
        folder = cache / "bookworm"
        shutil.rmtree(folder, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder)]
        with (cache / "debootstrap.log").open("wb") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
        part = tar.with_suffix(".part")
        excluded = [f"--exclude={pattern}" for pattern in EXCLUDED]
        subprocess.run(["tar", "-C", str(folder), *excluded, "-cf", str(part), "."], check=True)
        os.replace(part, tar)
        shutil.rmtree(folder)
    return tar


def layer(tar: tarfile.TarFile, system: Path, names: list[str]) -> None:
    """One file system: the Debian one, with `names` of this environment in its Python."""
    with tarfile.open(system) as source:
        for member in source:
            tar.addfile(member, source.extractfile(member) if member.isreg() else None)
    conf = tarfile.TarInfo("./etc/pip.conf")
    conf.size = len(PIP)
    tar.addfile(conf, io.BytesIO(PIP.encode()))
    for name in names:
        tar.add(SITE / name, f".{TO}/{name}", filter=root_owned)


def root_owned(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if any(part in info.name for part in SLIMMED):
        return None
    info.uid = info.gid = 0
    info.mode |= 0o444 if info.isreg() else 0o555
    return info


def imported(client: docker.DockerClient, to: str, system: Path, names: list[str]) -> None:
    """Stream the file system into an image: written once, by the engine."""
    out, into = os.pipe()

    def write() -> None:
        with os.fdopen(into, "wb") as sink, tarfile.open(fileobj=sink, mode="w|", bufsize=1 << 20) as tar:
            layer(tar, system, names)

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(out, "rb") as stream:
        repository, tag = to.split(":")
        client.api.import_image_from_data(iter(lambda: stream.read(1 << 20), b""), repository=repository, tag=tag)
    writer.join()


def missing(client: docker.DockerClient, kind: str) -> bool:
    try:
        client.images.get(name(kind))
    except ImageNotFound:
        return True
    return False


def forget(client: docker.DockerClient) -> None:
    """Bases of another key, and what was built on them. This engine serves these tests alone."""
    for image in client.images.list():
        for tag in image.tags:
            if tag.startswith((REPOSITORY, "specaccept/")):
                client.images.remove(tag, force=True)
    client.images.prune(filters={"dangling": True})


def make(client: docker.DockerClient, cache: Path) -> None:
    if missing(client, "torch"):
        forget(client)
    names = [path.name for path in SITE.iterdir()]
    builders = [name for name in names if name.split("-")[0] in BUILDERS]
    kept = [name for name in names if not name.startswith((*LEFT_OUT, *BUILDERS))]
    for kind, chosen in (("python", builders), ("torch", builders + kept)):
        if missing(client, kind):
            imported(client, name(kind), rootfs(cache), chosen)


if __name__ == "__main__":
    os.umask(0o022)
    make(docker.DockerClient(os.environ["SPECACCEPT_DOCKER_HOST"], timeout=600), Path(sys.argv[1]))
