"""Arming without the engine: the hook, the seam check on mutated trees, the refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace

import lightllm_rig as rig
import pytest

from adapters.lightllm import __main__ as command
from adapters.lightllm import seams

ASD = json.dumps({"rule": "asd", "budget": 2.0, "max_mismatches": 1})
PACKAGES = str(Path(command.__file__).resolve().parents[2])


@pytest.fixture
def tree(tmp_path):
    shutil.copytree(rig.DOUBLE, tmp_path / "tree")
    return tmp_path / "tree"


def edit(tree: Path, module: str, old: str, new: str) -> None:
    path = seams.file_of(tree, module)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("tree", rig.TREES, ids=str)
def test_known_trees_fit(tree):
    assert seams.drift(tree) == []
    assert seams.engine_version(tree).startswith(seams.layout_of(tree) + "+seams.")


@pytest.mark.parametrize(
    ("module", "old", "new", "named"),
    [
        (seams.KERNELS, "def mtp_verify(", "def mtp_verify_v3(", "mtp_verify: expected a function, found none"),
        (seams.KERNELS, "new_next_token_ids, b_req_idx)", "ids, b_req_idx)", "found (req_to_next_token_ids"),
        (seams.SPECULATIVE, ", mtp_verify\n", "\nimport math as mtp_verify_v3\n", "mtp_verify imported by name"),
        (seams.SPECULATIVE, "b_mtp_index=None", "b_mtp_index=None, logits=None", "verify_mtp_tokens: expected"),
        (seams.SAMPLER, "eos_id=(2,))", "eos_id, generator)", "sample: expected (logits, reqs, eos_id), found"),
        (seams.BACKEND, "def _post_handle", "def _finish", "_post_handle: expected a function"),
        (seams.NORMAL, "import sample", "import sample as pick", "chunked_prefill.impl: expected sample"),
        (seams.BATCH, "req_obj, output_len", "req_obj, length", "InferReqUpdatePack.__init__: expected"),
        (seams.SPECULATIVE, "accept_lengths_cpu, verify", "lengths, verify", "record_request_mtp_metrics: expected"),
        (seams.BATCH, "update_mtp_verify_step_num(", "add_step(", "InferReq.update_mtp_verify_step_num: expected a"),
    ],
)
def test_drift_is_named(tree, module, old, new, named):
    edit(tree, module, old, new)
    assert any(named in line for line in seams.drift(tree)), seams.drift(tree)


def test_added_parameters_with_defaults_are_passed_on(tree):
    edit(tree, seams.SAMPLER, "eos_id=(2,))", "eos_id=(2,), b_mtp_index=None)")
    assert seams.drift(tree) == []


def python(code: str, tree: Path, environ: dict[str, str]) -> subprocess.CompletedProcess:
    """A new interpreter with the launcher's sitecustomize."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPECACCEPT", "PYTHON", "DSV41"))}
    clean |= {"PYTHONPATH": str(tree)} | environ
    command.armed_environment(clean)
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60)


def test_unset_the_hook_is_inert(tree):
    code = "import sys, lightllm; print([n for n in sys.modules if n.startswith('adapters.lightllm.seams')])"
    plain, armed = python(code, tree, {}), python(code, tree, {"SPECACCEPT_POLICY": ASD})
    assert plain.returncode == armed.returncode == 0, plain.stderr + armed.stderr
    assert plain.stdout.startswith("[]")
    assert armed.stdout.startswith("['adapters.lightllm.seams']")


def test_the_hook_imports_no_torch_and_is_idempotent(tree):
    code = (
        "import sys; from adapters.lightllm import hook; hook.install(); hook.install(); import lightllm;"
        "print(sum(isinstance(f, hook.PostImport) for f in sys.meta_path), 'torch' in sys.modules)"
    )
    done = python(code, tree, {"SPECACCEPT_POLICY": ASD})
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_the_hidden_sitecustomize_still_runs(tree, tmp_path):
    (tree / "sitecustomize.py").write_text("print('mine')")
    done = python("import lightllm", tree, {"SPECACCEPT_POLICY": ASD})
    assert done.stdout == "mine\n", done.stderr


@pytest.mark.parametrize(("policy", "installed"), [(ASD, "True"), ("", "False"), (None, "False")])
def test_the_pth_file_installs_the_hook(tmp_path, policy, installed):
    shutil.copy(seams.__file__.replace("seams.py", "specaccept-lightllm.pth"), tmp_path)
    code = (
        f"import site, sys; site.addsitedir({str(tmp_path)!r}); site.addsitedir({str(tmp_path)!r});"
        "print('PostImport' in [type(f).__name__ for f in sys.meta_path], 'torch' in sys.modules)"
    )
    environ = {"PYTHONPATH": PACKAGES, "PATH": os.environ["PATH"]}
    environ |= {} if policy is None else {"SPECACCEPT_POLICY": policy}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [installed, "False"], done.stderr


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_an_installation_carries_the_pth_file(tmp_path, how):
    """Beside the packages, where `site` reads it; the launcher's folder travels too."""
    project = tmp_path / "project"
    shutil.copytree(Path(PACKAGES) / "adapters", project / "adapters", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(Path(PACKAGES) / name, project)
    build = "build_wheel" if how == "wheel" else "build_editable"
    code = f"from setuptools import build_meta; build_meta.{build}({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    place = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))
    assert [n for n in names if n.endswith(f".data/data/{place}/specaccept-lightllm.pth")]
    assert how == "editable" or "adapters/lightllm/site/sitecustomize.py" in names


def test_every_process_refuses_a_drifted_tree(tree):
    edit(tree, seams.KERNELS, "def mtp_verify(", "def mtp_verify_v3(")
    done = python("import lightllm; print('serving')", tree, {"SPECACCEPT_POLICY": ASD})
    assert done.returncode == 1
    assert done.stdout == ""
    assert "specaccept: refused: lightspec: " in done.stderr
    assert "mtp_verify: expected a function, found none" in done.stderr
    assert python("import lightllm; print('serving')", tree, {}).stdout == "serving\n"


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ('{"rule": "asd", "bugdet": 1}', "unknown field 'bugdet'"),
        ('{"rule": "block"}', "block is unsupported (argmax drafts)"),
        ('{"rule": "block-engine"}', "block-engine is unsupported (argmax drafts)"),
        ('{"rule": "chain"}', "chain is unsupported"),
    ],
)
def test_policies_that_cannot_run_here_are_refused(tree, policy, named):
    done = python("import lightllm", tree, {"SPECACCEPT_POLICY": policy})
    assert done.returncode == 1
    assert named in done.stderr


def test_a_verify_cap_is_refused(tree):
    done = python("import lightllm", tree, {"SPECACCEPT_POLICY": ASD, "DSV41_VERIFY_CAP": "3"})
    assert (done.returncode, "DSV41_VERIFY_CAP" in done.stderr) == (1, True)


START = """
from types import SimpleNamespace
from lightllm.server.api_start import normal_or_p_d_start
args = SimpleNamespace(mtp_mode=%r)
normal_or_p_d_start(args)
print(args.started)
"""


@pytest.mark.parametrize(("mode", "code"), [("dspark", 0), (None, 1), ("dflash2", 1)])
def test_the_launcher_refuses_before_it_starts_anything(tree, mode, code):
    done = python(START % mode, tree, {"SPECACCEPT_POLICY": ASD})
    assert done.returncode == code, done.stderr
    assert (done.stdout == "True\n") == (code == 0)
    assert ("--mtp_mode: expected" in done.stderr) == (code == 1)


GOOD = {"mtp_mode": "dspark", "run_mode": "normal", "output_constraint_mode": "none", "diverse_mode": False}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mtp_mode": None}, "nothing is verified"),
        ({"mtp_mode": "dflash2"}, "its path was not read"),
        ({"run_mode": "prefill"}, "decode node"),
        ({"output_constraint_mode": "xgrammar"}, "may leave the grammar"),
        ({"first_token_constraint_mode": True}, "--first_token_constraint_mode"),
        ({"token_healing_mode": True}, "--token_healing_mode"),
        ({"diverse_mode": True}, "--diverse_mode"),
        ({"use_reward_model": True}, "--use_reward_model"),
        ({"target_vocab_topk_sampling": 8}, "--target_vocab_topk_sampling"),
    ],
)
def test_refusals_name_the_flag_and_the_reason(tree, change, named):
    assert seams.refusals(SimpleNamespace(**GOOD), tree, {}) == []
    (reason,) = seams.refusals(SimpleNamespace(**(GOOD | change)), tree, {})
    assert named in reason
    with pytest.raises(seams.Refused, match="specaccept: refused: "):
        seams.require_arguments(SimpleNamespace(**(GOOD | change)), tree, {})


@pytest.mark.parametrize("mode", ["dspark", "dflash"])
def test_block_drafters_need_fa3_and_hopper(tree, mode):
    """The reason, and what runs instead."""

    def reasons(backend, *gpus):
        args = SimpleNamespace(**(GOOD | {"mtp_mode": mode, "llm_decode_att_backend": backend}))
        return seams.refusals(args, tree, {}, list(gpus))

    assert reasons(["fa3"], "NVIDIA H200") == reasons(["auto"]) == []
    assert reasons(["triton"], "NVIDIA H200") == [
        f"--llm_decode_att_backend: expected fa3 for --mtp_mode {mode}, found triton; --mtp_mode eagle3 runs on Triton"
    ]
    (reason,) = reasons(["fa3"], "NVIDIA H100 80GB HBM3", "NVIDIA L20")
    assert "found NVIDIA L20; --mtp_mode eagle3 runs on Triton" in reason
    eagle = SimpleNamespace(**(GOOD | {"mtp_mode": "eagle3", "llm_decode_att_backend": ["triton"]}))
    assert seams.refusals(eagle, tree, {}, ["NVIDIA L20"]) == []


def test_the_fused_decode_graph_is_refused_until_switched_off(tree):
    seams.file_of(tree, seams.FUSED).write_text("")
    (reason,) = seams.refusals(SimpleNamespace(**GOOD), tree, {})
    assert seams.FUSED_OFF in reason
    assert seams.refusals(SimpleNamespace(**GOOD), tree, {seams.FUSED_OFF: "1"}) == []


def test_the_sampled_path_of_dflash2_is_refused(tree):
    seams.file_of(tree, seams.SAMPLED_PATH).write_text("class SpecEngine:\n    def plan_decode(self): ...\n")
    seams._tree.cache_clear()
    assert seams.refusals(SimpleNamespace(**GOOD), tree, {}) == []
    seams.file_of(tree, seams.SAMPLED_PATH).write_text("class SpecEngine:\n    def sample_and_verify(self): ...\n")
    seams._tree.cache_clear()
    (reason,) = seams.refusals(SimpleNamespace(**GOOD), tree, {})
    assert "DFlash2 sampled path" in reason


def test_dynamic_verify_and_overlap_are_not_refused(tree):
    both = GOOD | {"mtp_dynamic_verify": True, "enable_decode_microbatch_overlap": True}
    assert seams.refusals(SimpleNamespace(**both), tree, {}) == []


def test_check_command(tree, capsys):
    assert command.main(["check", str(tree)]) == 0
    edit(tree, seams.BACKEND, "def init_model", "def load_model")
    seams._tree.cache_clear()
    assert command.main(["check", str(tree)]) == 1
    assert "ModeBackend.init_model: expected a function, found none" in capsys.readouterr().out
    assert command.main(["serv"]) == 2


def test_the_environment_variable_reaches_the_children(tree):
    environ = {"PYTHONPATH": str(tree)}
    command.armed_environment(environ)
    command.armed_environment(environ)
    assert environ["PYTHONPATH"].split(os.pathsep) == [str(command.SITE), PACKAGES, str(tree)]
