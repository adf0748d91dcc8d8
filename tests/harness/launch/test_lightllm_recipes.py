"""LightLLM's recipes: what each start command says, and what is refused before anything starts."""

from __future__ import annotations

import sys

import pytest

from adapters.policy import RULES
from harness.config import load, member
from harness.launch import capability
from harness.launch.capability import missing, unsupported, unsupported_rule
from harness.launch.command import command

EAGLE3 = ("model.draft=/e", "model.draft_kind=eagle3", "model.block_size=4")
HEADS = ("model.draft=/m", "model.draft_kind=mtp-heads", "model.block_size=2")


def flags(engine: str, *overrides: str, armed: bool = True) -> dict[str, str]:
    argv = command(load([f"engine={engine}", *overrides]), 8000, armed=armed)
    start = ["adapters.lightllm", "serve"] if armed else ["lightllm.server.api_server"]
    assert argv[: 2 + len(start)] == [sys.executable, "-m", *start]
    return dict(zip(argv, [*argv[1:], ""], strict=True))


@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize(
    ("engine", "overrides", "mode", "step", "attention"),
    [
        ("lightllm", (), "dspark", "7", "fa3"),
        ("lightllm-dynamic", (), "dspark", "7", "fa3"),
        ("lightllm-eagle3", EAGLE3, "eagle3", "4", "triton"),
        ("lightllm-mtp", HEADS, "eagle_with_att", "2", "triton"),
    ],
)
def test_each_recipe_starts_its_mode(engine, overrides, mode, step, attention, armed):
    found = flags(engine, *overrides, armed=armed)
    assert (found["--mtp_mode"], found["--mtp_step"]) == (mode, step)
    assert found["--llm_prefill_att_backend"] == found["--llm_decode_att_backend"] == attention
    assert ("--mtp_dynamic_verify" in found) == (engine == "lightllm-dynamic")
    assert unsupported(load([f"engine={engine}", *overrides])) is None


@pytest.mark.parametrize(("engine", "kind"), [("lightllm-eagle3", "eagle3"), ("lightllm-mtp", "mtp-heads")])
def test_a_draft_of_another_kind_is_refused(engine, kind):
    reason = unsupported(load([f"engine={engine}"]))
    assert reason == f"its draft is of kind dspark, {engine} takes {kind}"


def test_rules_that_cannot_run_are_refused_before_a_server_starts():
    for rule in ("block", "block-engine", "chain"):
        reason = unsupported(load(["engine=lightllm", f"policy={rule}"]))
        assert reason is not None
        assert reason.startswith(f"{rule} is unsupported (")
    lightllm = member("engine", "lightllm")
    assert {rule for rule in RULES if unsupported_rule(lightllm, rule) is None} == {"strict", "asd"}
    assert unsupported_rule(lightllm, "block") == "argmax drafts"
    assert unsupported_rule(member("engine", "reference"), "block") is None


@pytest.mark.parametrize(("card", "runs"), [("NVIDIA H200", True), ("NVIDIA L20", False)])
def test_dspark_needs_fa3(monkeypatch, card, runs):
    """Refused with the reason and what runs instead; the EAGLE3 recipe does not mind."""
    monkeypatch.setattr(capability, "gpus", lambda: (capability.Gpu(card, 46.0),))
    lacks = "; ".join(missing(load(["engine=lightllm"])))
    assert ("FlashAttention 3 only, engine=lightllm-eagle3 runs on any GPU" in lacks) == (not runs)
    assert (f"found {card}" in lacks) == (not runs)
    assert "found" not in "; ".join(missing(load(["engine=lightllm-eagle3", *EAGLE3])))


def test_only_the_dynamic_recipe_has_no_fixed_width():
    names = ("lightllm", "lightllm-eagle3", "lightllm-mtp", "lightllm-dynamic")
    assert [member("engine", name).fixed_width for name in names] == [True, True, True, False]
    assert {member("engine", name).kind for name in names} == {"lightllm"}
