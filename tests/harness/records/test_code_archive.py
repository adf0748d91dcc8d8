"""Which commit code is of where there is no git: against git itself."""

import json
import os
import subprocess

import pytest

from harness.config import ROOT
from harness.records.archive import ARCHIVAL, STAMP, TEMPLATE, tree, without_git

FILES = {
    "a.py": "x = 1\n",
    "a/b.py": "",
    "a-b/c.txt": "c",
    "a.d/e": "e\n",
    "run": "#!/bin/sh\n",
    "deep/er/still/f.json": "{}",
    "results/runs/1/engine.log": "kept\n",
    ".gitignore": "*.log\n!results/runs/**/engine.log\n__pycache__/\n/.scratch/\n# a comment\n",
    ".gitattributes": f"{ARCHIVAL} export-subst\n",
    ARCHIVAL: TEMPLATE,
}


@pytest.fixture
def archive(tmp_path):
    """A repository, and the folder its archive was unpacked into: (folder, commit)."""
    repository, unpacked = tmp_path / "repository", tmp_path / "unpacked"
    for name, text in FILES.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (repository / "run").chmod(0o755)
    (repository / "link").symlink_to("a.py")
    unpacked.mkdir()
    identity = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    own = os.environ | identity | {"GIT_CONFIG_GLOBAL": os.devnull}

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=repository, env=own, capture_output=True, check=True).stdout

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    subprocess.run(["tar", "x", "-C", str(unpacked)], input=git("archive", "HEAD"), check=True)
    assert tree(unpacked).hex() == git("rev-parse", "HEAD^{tree}").decode().strip()
    return unpacked, git("rev-parse", "HEAD").decode().strip()


def test_an_unpacked_archive_is_its_commit(archive):
    folder, commit = archive
    assert without_git(folder, "") == {"commit": commit, "dirty": False}
    (folder / "a" / "__pycache__").mkdir()
    (folder / "a" / "__pycache__" / "b.pyc").touch()
    (folder / "any.log").touch()
    (folder / "empty").mkdir()
    assert without_git(folder, "") == {"commit": commit, "dirty": False}


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "a.py").write_text("x = 2\n"),
        lambda folder: (folder / "new.py").touch(),
        lambda folder: (folder / "a" / "b.py").unlink(),
        lambda folder: (folder / "run").chmod(0o644),
        lambda folder: (folder / "results" / "runs" / "1" / "engine.log").write_text("longer\n"),
    ],
)
def test_whether_a_changed_archive_has_other_code_is_unknown(archive, change):
    folder, commit = archive
    change(folder)
    assert without_git(folder, "") == {"commit": commit, "dirty": "unknown"}


def test_a_copy_of_a_working_tree_is_what_its_stamp_says(tmp_path):
    stamp = {"commit": "c" * 40, "dirty": False, "sha256": "5" * 64}
    (tmp_path / STAMP).write_text(json.dumps(stamp))
    assert without_git(tmp_path, "5" * 64) == {"commit": "c" * 40, "dirty": False}
    assert without_git(tmp_path, "6" * 64) == {"commit": "c" * 40, "dirty": True}


@pytest.mark.parametrize("text", [None, TEMPLATE, "commit: main\ntree: x\n"])
def test_nothing_that_says_it_is_nothing_known(tmp_path, text):
    if text is not None:
        (tmp_path / ARCHIVAL).write_text(text)
    assert without_git(tmp_path, "") == {"commit": None, "dirty": None}


def test_this_project_has_the_file_that_archives_fill_in():
    assert (ROOT / ARCHIVAL).read_text() == TEMPLATE or without_git(ROOT, "")["commit"]
    assert f"{ARCHIVAL} export-subst" in (ROOT / ".gitattributes").read_text()
