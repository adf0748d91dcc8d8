"""Arms, servers, dtypes and thresholds of a configuration: what is refused, and what follows."""

import pytest

from adapters.policy import Policy
from harness.config import ConfigError, load
from harness.launch.capability import unsupported
from harness.launch.command import command, printable
from harness.tasks.arms import by_server, plan, rounds

UNARMED = ["engine=sglang", "arms=[unarmed,strict,asd]"]


def names(groups):
    return [[arm.name for arm in group] for group in groups]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["arms=[strict]"], ["arms: expected two or more"]),
        (["arms=[strict,strict]"], ["arms: expected two or more, each once"]),
        (["arms=[strict,lax]"], ["arms: expected some of", "asd-stable", "unarmed", "'lax'"]),
        (["arms=[strict,chain]"], ["arms: expected policies of one temperature", "chain 1"]),
        (["arms=[strict,asd]", "policy=asd-stable"], ["expected policy=asd-stable among them"]),
        (["arms=[unarmed,strict]"], ["arms: unarmed: the embedded engine accepts by this project's rules alone"]),
        (["task=gate", "task.baseline=unarmed"], ["arms: unarmed: the embedded engine"]),
        ([*UNARMED, "launch=attach", "url=http://127.0.0.1:1"], ["expected launch=process"]),
        (["task=gate", "arms=[strict,asd]"], ["arms: of a bench", "task.baseline"]),
        (["task.baseline=lax"], ["task.baseline: expected one of strict, unarmed, found 'lax'"]),
        (["task.concurrency=0"], ["task.concurrency", "found 0"]),
        (["task.mix_sampled=1.5"], ["task.mix_sampled: expected a share", "1.5"]),
        (["task.seconds=0"], ["task.seconds", "found 0"]),
        (["launch=docker", "launch.together=true"], ["launch.together: belongs to launch=process"]),
        (["verdict.accuracy_drop=-1"], ["verdict.accuracy_drop", "found -1"]),
        (["verdict.alpha=1"], ["verdict.alpha", "found 1"]),
        (["task=gate", "task.aa=true"], ["task.aa: belongs to task=bench, found it with task=gate"]),
        (["task.repeat=true"], ["task.repeat: belongs to task=gate, found it with task=bench"]),
        (["verdict=lax"], ["verdict: expected one of armed-cost, default, published"]),
        (["++model.dtypes.sglang=int3"], ["model.dtype", "'int3'"]),
    ],
)
def test_a_wrong_value_is_one_line(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_named_arms_are_settled_like_the_policy():
    """tiny-qwen3 has a calibration, which replaces the published q25 wherever it is named; the command line wins."""
    found = {arm.name: arm for arm in plan(load(["arms=[strict,asd-b0,asd,asd-stable]"]))}
    own = load().policy
    assert found["asd"].policy == own.policy != Policy("asd", 2.0625, 2.0625, 1, "normalized")
    assert "calibration" in found["asd"].source
    assert (found["asd-stable"].policy.budget, found["asd-stable"].source) == (8.0, "recipe")
    (_, asd) = plan(load(["arms=[strict,asd]", "policy.budget=4"]))
    assert (asd.policy.budget, "command line" in asd.source) == (4.0, True)


def test_chain_takes_the_temperature_of_what_it_is_compared_with():
    arms = plan(load(["arms=[chain,block]", "policy=block", "policy.temperature=0.7"]))
    assert [arm.temperature for arm in arms] == [0.7, 0.7]
    arms = plan(load([*UNARMED[:1], "arms=[unarmed,chain]"]))
    assert [(arm.key, arm.temperature, arm.greedy) for arm in arms] == [("unarmed", 1.0, False), ("chain", 1.0, False)]


def test_which_arms_share_a_server():
    config = load(UNARMED)
    arms = plan(config)
    assert names(by_server(config, arms)) == [["unarmed"], ["strict", "asd"]]
    assert names(by_server(config, [*arms, arms[0].again()])) == [["unarmed"], ["strict", "asd"], ["unarmed-again"]]
    assert names(by_server(config, [*arms[1:], arms[1].again()])) == [["strict", "asd", "strict-again"]]
    single = load(["engine=lightllm", "arms=[strict,asd]"])
    assert names(by_server(single, plan(single))) == [["strict"], ["asd"]]


@pytest.mark.parametrize("again", [False, True])
def test_servers_one_after_another_or_side_by_side(again):
    config = load(UNARMED)
    arms = plan(config) + ([plan(config)[0].again()] if again else [])
    (apart) = [names(groups) for groups in rounds(config, arms)]
    assert apart == [[["unarmed"]], [["strict", "asd"]], [["unarmed-again"]]]
    (together,) = rounds(load([*UNARMED, "launch.together=true"]), arms)
    assert names(together) == [["unarmed"], ["strict", "asd"], *([["unarmed-again"]] if again else [])]
    (shared,) = rounds(load(), plan(load()))
    assert names(shared) == [["strict", "asd-b0", "asd"]]


def test_an_engine_without_its_adapter_is_started_without_it():
    lightllm = load(["engine=lightllm"])
    assert "-m adapters.lightllm serve --" in printable(command(lightllm, 1))
    assert "-m lightllm.server.api_server --" in printable(command(lightllm, 1, armed=False))
    sglang = load(["engine=sglang"])
    assert command(sglang, 1, armed=False) == command(sglang, 1)  # inert without SPECACCEPT_POLICY


@pytest.mark.parametrize(("engine", "flag"), [("sglang", "--dtype"), ("lightllm", "--data_type")])
def test_dtype_is_the_engines_matter(engine, flag):
    assert f"{flag} bfloat16" in printable(command(load([f"engine={engine}"]), 1))
    assert f"{flag} float16" in printable(command(load([f"engine={engine}", "model.dtype=float16"]), 1))
    assert "--dtype" not in printable(command(load(), 0))


def test_a_pinned_revision_reaches_the_engine():
    pinned = ["model=qwen3-8b", "model.revision=abc", "model.draft_revision=def"]
    line = printable(command(load([*pinned, "engine=sglang"]), 1))
    assert "--revision abc" in line
    assert "--speculative-draft-model-revision def" in line
    line = printable(command(load([*pinned, "engine=reference"]), 0))
    assert "--revision abc" in line
    assert "--draft-revision def" in line
    assert "revision" in unsupported(load([*pinned, "engine=lightllm"]))
    assert "revision" not in printable(command(load(["engine=sglang"]), 1))
