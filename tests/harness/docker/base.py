"""The two base images of the container tests, made here because no registry can be reached.

`python`: Debian bookworm by debootstrap, its Python, and this environment's pip and setuptools. `torch`: the same with
what the embedded engine needs of this environment (Debian's Python 3.11 and this one share their ABI).
Kept by the content of requirements.lock and of this file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
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


def layer(client: docker.DockerClient, base: str, to: str, script: str, names: list[str]) -> None:
    """Commit `base` with `names` of this environment copied into its Python, then `script` run."""
    copy = f'cp -a "$@" {TO}/ && {script}'
    container = client.containers.create(
        base,
        ["sh", "-ec", copy, "sh", *[f"/site/{each}" for each in names]],
        volumes={str(SITE): {"bind": "/site", "mode": "ro"}},
        network_mode="none",
    )
    try:
        container.start()
        status = container.wait()["StatusCode"]
        if status != 0:
            raise RuntimeError(f"{to}: status {status}: {container.logs()[-500:].decode()}")
        repository, tag = to.split(":")
        container.commit(repository, tag, changes=['CMD ["/bin/sh"]'])
    finally:
        container.remove(force=True)


def missing(client: docker.DockerClient, kind: str) -> bool:
    try:
        client.images.get(name(kind))
    except ImageNotFound:
        return True
    return False


def make(client: docker.DockerClient, cache: Path) -> None:
    if missing(client, "python"):
        with rootfs(cache).open("rb") as tar:
            client.api.import_image_from_data(tar, repository=REPOSITORY + "/debian", tag=key())
        own = [path.name for path in SITE.iterdir() if path.name.split("-")[0] in BUILDERS]
        script = f"printf '{PIP}' > /etc/pip.conf"
        layer(client, f"{REPOSITORY}/debian:{key()}", name("python"), script, own)
    if missing(client, "torch"):
        kept = [path.name for path in SITE.iterdir() if not path.name.startswith((*LEFT_OUT, *BUILDERS))]
        slim = " ".join(f"{TO}/torch/{part}" for part in ("include", "test", "bin"))
        layer(client, name("python"), name("torch"), f"rm -rf {slim}", kept)


if __name__ == "__main__":
    os.umask(0o022)
    make(docker.DockerClient(os.environ["SPECACCEPT_DOCKER_HOST"], timeout=600), Path(sys.argv[1]))
