"""python -m harness.launch.images: the images of recipes/docker-images.

    build IMAGE [--base-image REFERENCE] [--tag TAG]   from the pinned base, or from another one
    refresh [BASE...]                                   resolve the tags in bases.yaml to digests at their registries
    pins                                                what is pinned, and what is not yet
    push IMAGE REPOSITORY                               push it; prints the reference by digest to launch it with

A base is built from by digest only. An unresolved pin is refused, never guessed.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from adapters import __version__
from harness.config import RECIPES, ROOT, ConfigError, ImageConfig, choices, member
from harness.launch.base import LaunchError
from harness.launch.docker_daemon import PULL_TIMEOUT_S, adapter_digest, connected, default_tag, explain, explained

FOLDER = RECIPES / "docker-images"
BASES = FOLDER / "bases.yaml"
UNRESOLVED = "unresolved"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
CONTEXT = ("adapters", "harness", "recipes/docker-images", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@dataclass(frozen=True)
class Base:
    """image: repository:tag, what a refresh asks for. digest: what it was, None while unresolved."""

    name: str
    image: str
    digest: str | None

    @property
    def reference(self) -> str:
        """Repository and digest. Raises LaunchError for an unresolved pin."""
        if self.digest is None:
            raise LaunchError(
                f"base {self.name}: {self.image} is not pinned to a digest: run "
                f"`python -m harness.launch.images refresh {self.name}`, or give a base with --base-image"
            )
        return f"{repository(self.image)}@{self.digest}"


def repository(reference: str) -> str:
    """Without tag and digest. A registry's port is not a tag."""
    name = reference.partition("@")[0]
    head, slash, tail = name.rpartition("/")
    return head + slash + tail.partition(":")[0]


def bases(path: Path = BASES) -> dict[str, Base]:
    """Raises LaunchError naming the field that is wrong."""
    found = {}
    for name, entry in (yaml.safe_load(path.read_text()) or {}).items():
        if not isinstance(entry, dict) or set(entry) != {"image", "digest"}:
            raise LaunchError(f"{path.name}: {name}: expected image and digest, found {entry!r}")
        digest = entry["digest"]
        if digest != UNRESOLVED and not DIGEST.fullmatch(str(digest)):
            raise LaunchError(f"{path.name}: {name}.digest: expected sha256:... or {UNRESOLVED}, found {digest!r}")
        found[name] = Base(name, entry["image"], None if digest == UNRESOLVED else digest)
    return found


def refresh(client: Any, names: Sequence[str] = (), path: Path = BASES) -> dict[str, str]:
    """Write the digest each tag stands for now, in place and all or nothing. Returns the changed ones."""
    known = bases(path)
    if unknown := sorted(set(names) - set(known)):
        raise LaunchError(f"{path.name}: expected one of {', '.join(known)}, found {unknown[0]}")
    text, changed = path.read_text(), {}
    for name in names or known:
        base = known[name]
        with explained(f"{base.image}", "the registry does not have it"):
            digest = client.images.get_registry_data(base.image).id
        if digest != base.digest:
            changed[name] = digest
        block = re.compile(rf"(^{re.escape(name)}:\n(?:[ ]+.*\n)*?[ ]+digest: )\S+", re.MULTILINE)
        text, count = block.subn(rf"\g<1>{digest}", text)
        assert count == 1, name
    path.write_text(text)
    return changed


def image(name: str) -> ImageConfig:
    """A member of recipes/image that can be built."""
    if name not in (buildable := [each for each in choices("image") if each != "auto"]):
        raise LaunchError(f"image: expected one of {', '.join(buildable)}, found {name!r}")
    return member("image", name)


def context() -> io.BytesIO:
    """The build context: always the same bytes for the same files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for top in CONTEXT:
            path = ROOT / top
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file() and "__pycache__" not in file.parts:
                    info = tarfile.TarInfo(file.relative_to(ROOT).as_posix())
                    info.size, info.mode = file.stat().st_size, 0o755 if file.name == "entrypoint" else 0o644
                    with file.open("rb") as content:
                        tar.addfile(info, content)
    stream.seek(0)
    return stream


def build(
    client: Any,
    config: ImageConfig,
    base_image: str | None = None,
    tag: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> str:
    """Build an image; returns its tag. Raises LaunchError with what the build refused."""
    from harness.records.provenance import code, commit_time

    base = base_image or _base(config).reference
    tag = tag or default_tag(config)
    state = code()
    revision = (state["commit"] or f"content-{state['sha256'][:12]}") + ("-dirty" if state["dirty"] else "")
    arguments = {
        "BASE_IMAGE": base,
        "VERSION": __version__,
        "REVISION": revision,
        "CREATED": commit_time() or "unknown",
        "ADAPTER": adapter_digest(),
    }
    if config.folder_takes_engine:
        arguments["ENGINE"] = config.engine
    with explained(f"build {config.name}", f"base {base} is not here and cannot be pulled"):
        lines = client.api.build(
            fileobj=context(),
            custom_context=True,
            encoding=None,
            dockerfile=f"recipes/docker-images/{config.folder}/Dockerfile",
            buildargs=arguments,
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
        )
        _follow(config.name, lines, report)
    return tag


def _base(config: ImageConfig) -> Base:
    known = bases()
    if config.name not in known:
        raise LaunchError(f"bases.yaml: expected an entry {config.name}, found none")
    return known[config.name]


def _follow(name: str, lines: Any, report: Callable[[str], None]) -> None:
    refused: list[str] = []
    for line in lines:
        if text := str(line.get("stream", "")).strip():
            report(text)
            refused += [part for part in text.splitlines() if "specaccept: refused:" in part]
        if "error" in line:
            why = "; ".join(part.split("specaccept: refused: ", 1)[1] for part in refused)
            raise LaunchError(f"image {name}: {f'refused: {why}' if refused else explain(line['error'])}")


def push(client: Any, reference: str, to: str) -> str:
    """Push a local image to a repository; returns the reference by digest."""
    with explained(f"push {reference}"):
        found = client.images.get(reference)
        tag = reference.rpartition(":")[2] if ":" in reference.rpartition("/")[2] else "latest"
        found.tag(to, tag)
        digest = None
        for line in client.api.push(to, tag=tag, stream=True, decode=True):
            if "error" in line:
                raise LaunchError(f"docker: push {to}:{tag}: {explain(line['error'])}")
            digest = (line.get("aux") or {}).get("Digest", digest)
    if digest is None:
        raise LaunchError(f"docker: push {to}:{tag}: expected a digest, the registry gave none")
    return f"{to}@{digest}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.launch.images", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("image")
    building.add_argument("--base-image")
    building.add_argument("--tag")
    refreshing = commands.add_parser("refresh")
    refreshing.add_argument("base", nargs="*")
    commands.add_parser("pins")
    pushing = commands.add_parser("push")
    pushing.add_argument("image")
    pushing.add_argument("repository")
    given = parser.parse_args(arguments)
    try:
        _run(given)
    except (LaunchError, ConfigError) as error:
        print(f"specaccept: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace) -> None:
    if given.command == "pins":
        for base in bases().values():
            print(f"{base.name:16} {base.image:40} {base.digest or UNRESOLVED}")
        return
    if given.command == "build" and given.base_image is None:
        _base(image(given.image)).reference  # noqa: B018  refused before an engine is asked for
    with connected(PULL_TIMEOUT_S) as client:
        if given.command == "build":
            tag = build(client, image(given.image), given.base_image, given.tag, lambda line: print(line, flush=True))
            print(f"{tag} {client.images.get(tag).id}")
        elif given.command == "refresh":
            changed = refresh(client, given.base)
            print("\n".join(f"{name} {digest}" for name, digest in changed.items()) or "every pin as it was")
        else:
            print(push(client, default_tag(image(given.image)), given.repository))


if __name__ == "__main__":
    sys.exit(main())
