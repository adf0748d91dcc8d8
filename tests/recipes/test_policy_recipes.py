"""The policies of recipes/policy: every rule has one, with the numbers of its publication and where they come from."""

from __future__ import annotations

import pytest

from adapters.policy import FIELDS, GREEDY_RULES, RULES, Policy
from harness.config import choices, load, member
from harness.engines.checkpoint import tokenizer

PUBLISHED = {
    "typical": {"epsilon": 0.09, "alpha": 0.3},
    "relaxed-topk": {"top_n": 10, "delta": 0.6},
    "relaxed-ratio": {"top_n": 3, "ratio": 0.5},
    "thresholds": {"threshold_single": 0.01, "threshold_acc": 0.01},
    "entropy": {"alpha": 0.4, "tau": 0.95},
}
THINKERS = [name for name, names in FIELDS.items() if "think_end" in names]


def test_every_rule_has_a_recipe():
    assert {member("policy", name).rule for name in choices("policy")} == set(RULES)
    assert set(PUBLISHED) == set(FIELDS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_numbers(name):
    found = member("policy", name)
    assert found.policy == Policy(name, **PUBLISHED[name])
    assert found.source
    assert not found.policy.is_lossless
    assert (found.temperature == 0) == (found.rule in GREEDY_RULES)


@pytest.mark.parametrize("name", THINKERS)
def test_the_tiny_pair_relaxes_inside_its_own_thinking(name):
    config = load([f"policy={name}"])
    words = tokenizer(config.model.target).fast
    assert (config.policy.think_start, config.policy.think_end) == (
        words.token_to_id("<think>"),
        words.token_to_id("</think>"),
    )
    assert "model tiny-qwen3" in config.policy_source
    everywhere = load([f"policy={name}", "policy.think_start=null", "policy.think_end=null"])
    assert everywhere.policy.policy == Policy(name, **PUBLISHED[name])
    assert "command line" in everywhere.policy_source


@pytest.mark.parametrize("name", THINKERS)
def test_the_dense_qwen3_targets_share_their_thinking_ids(name):
    ids = [load([f"model={model}", f"policy={name}"]).policy for model in ("qwen3-4b", "qwen3-8b", "qwen3-14b")]
    assert {(policy.think_start, policy.think_end) for policy in ids} == {(151667, 151668)}
