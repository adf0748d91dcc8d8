"""The recipe tree: every file composes, every wrong value is one line that names its field."""

import json
import math

import pytest

from harness.config import GROUPS, KINDS, RECIPES, Config, ConfigError, choices, load, member

NEEDS = {  # members that cannot stand alone
    "attach": ["url=http://127.0.0.1:1"],
    "replay": ["capture=/tmp"],
    "rejudge": ["run=/tmp", "why=x"],
}
MEMBERS = [(group, name) for group in GROUPS for name in choices(group)]


@pytest.mark.parametrize(("group", "name"), MEMBERS, ids=lambda value: value)
def test_every_member_composes(group, name):
    config = load([f"{group}={name}", *NEEDS.get(name, [])])
    assert isinstance(config, Config)
    assert getattr(config, group).name == name
    assert type(member(group, name)) is KINDS[group]
    json.loads(json.dumps(config.resolved(), allow_nan=False))


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment_composes(name):
    config = load([f"experiment={name}"])
    json.dumps(config.resolved(), allow_nan=False)
    assert config.resolved() != load().resolved()


def test_the_published_cohorts():
    config = load(["experiment=asd-deepseek-v4-flash"])
    assert (config.model.name, config.engine.name, config.policy.name) == ("deepseek-v4-flash", "sglang", "asd")
    assert (config.traffic.limit, config.traffic.calibration_split, config.task.warmup) == (500, "test", 10)
    assert (config.policy.budget, config.policy_source) == (2.0625, "recipe")
    assert load(["experiment=asd-deepseek-v4-flash", "limit=5", "policy=strict"]).traffic.limit == 5


def test_no_file_is_left_out():
    known = {RECIPES / group / f"{name}.yaml" for group, name in MEMBERS}
    folders = {path.parent for path in known}
    assert {path for folder in folders for path in folder.iterdir()} == known


def test_defaults_are_the_documented_ones():
    config = load()
    names = [getattr(config, group).name for group in GROUPS]
    assert names == ["tiny-qwen3", "asd", "reference", "process", "auto", "generated", "bench", "default"]


def test_published_policies():
    asd, stable = member("policy", "asd"), member("policy", "asd-stable")
    assert (asd.budget, asd.gate, asd.max_mismatches, asd.suffix_value) == (2.0625, 2.0625, 1, "normalized")
    assert (stable.budget, stable.gate, stable.max_mismatches, stable.suffix_value) == (8.0, 0.25, 2, "suffix")
    assert member("policy", "asd-b0").policy.is_strict
    assert {name: member("policy", name).temperature for name in ("chain", "block")} == {"chain": 1.0, "block": 1.0}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model=gpt-5", ["model:", "tiny-qwen3", "qwen3-14b", "'gpt-5'"]),
        ("policy=lax", ["policy:", "asd-stable", "'lax'"]),
        ("engine=vllm", ["engine:", "reference, sglang", "'vllm'"]),
        ("experiment=none", ["experiment:", "asd-qwen3-14b", "'none'"]),
        ("task=train", ["task:", "tables-check", "'train'"]),
        ("mdoel=tiny-qwen3", ["'mdoel'", "model", "traffic"]),
        ("limit=many", ["limit", "'many'"]),
        ("limit=0", ["limit", ">= 1", "found 0"]),
        ("policy.budget=-1", ["policy.budget", "-1"]),
        ("policy.budget=.nan", ["policy.budget", "nan"]),
        ("policy.temperature=0.7", ["policy.temperature", "0.7"]),
        ("policy.rule=lax", ["policy.rule", "'lax'"]),
        ("policy.suffix_value=prefix", ["policy.suffix_value", "'prefix'"]),
        ("model.dtype=int3", ["model.dtype", "bfloat16", "'int3'"]),
        ("model.target=null", ["model.target"]),
        ("task.chunk=0", ["task.chunk", "found 0"]),
        ("task.quantile=1.5", ["task.quantile", "1.5"]),
        ("task.unknown=1", ["task", "unknown"]),
        ("engine.request_timeout_s=0", ["engine.request_timeout_s", "found 0"]),
        ("traffic.max_new_tokens=0", ["traffic.max_new_tokens", "found 0"]),
        *((f"{group}.name=qwen3-14b", [f"{group}.name", f"expected {group}="]) for group in GROUPS),
        ("++model.name=qwen3-14b", ["model.name", "expected model="]),
        ("~model.name", ["model.name", "expected model="]),
        ("++model.policies.asd.name=strict", ["model.policies.asd", "'name'"]),
        ("data=/tmp", ["data", "gsm8k or humaneval", "traffic=generated"]),
        ("traffic.data=/tmp", ["data", "gsm8k or humaneval", "traffic=generated"]),
        ("launch=attach", ["url", "launch=attach"]),
        ("url=http://127.0.0.1:1", ["url", "launch=attach"]),
        ("limit", ["NAME=VALUE"]),
        ("limit=[1", ["NAME=VALUE"]),
    ],
)
def test_a_wrong_value_is_one_line(override, words):
    with pytest.raises(ConfigError) as caught:
        load([override])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("path", ["/data/a b/c=d", "../x", "it's/here", "a,b", "{x}", "tail\\"])
def test_paths_are_taken_verbatim(path):
    assert load([f"out={path}"]).out == path
    assert load(["traffic=gsm8k", f"data={path}"]).data == path


def test_a_frozen_calibration_replaces_a_calibrated_policy_only(tmp_path):
    frozen = {"rule": "asd", "budget": 0.5, "gate": 0.75, "max_mismatches": 1, "suffix_value": "normalized"}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"policy": frozen, "items": 32}))
    own = f"model.calibration={path}"

    config = load([own])
    assert (config.policy.budget, config.policy.gate) == (0.5, 0.75)
    assert "calibration" in config.policy_source

    config = load([own, "policy.budget=3"])
    assert (config.policy.budget, config.policy.gate) == (3.0, 0.75)
    assert "command line" in config.policy_source

    config = load([own, "policy=asd-stable"])
    assert (config.policy.budget, config.policy_source) == (8.0, "recipe")


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy=asd-b0", "policy.budget=4"],
        ["policy=strict", "policy.rule=asd", "policy.budget=4"],
        ["policy=chain", "policy.rule=block"],
        ["policy=asd-b0", "++model.policies.asd-b0.budget=4"],
    ],
)
def test_no_policy_takes_the_name_of_a_fixed_arm(overrides):
    with pytest.raises(ConfigError, match=f"^policy: {overrides[0][7:]} is an arm of its own, expected .*, found .*$"):
        load(overrides)


def test_a_fixed_arm_as_the_policy_is_itself():
    assert load(["policy=asd-b0"]).policy.policy.is_strict
    assert load(["policy=chain", "policy.temperature=0.7"]).policy.temperature == 0.7


def test_a_calibration_that_is_not_text_is_not_quoted(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_bytes(b'{"policy": "\xff' + b"secret" * 1000)
    with pytest.raises(ConfigError, match=r"calibration\.json: expected a JSON object") as caught:
        load([f"model.calibration={path}"])
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_broken_calibration_is_an_error(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text('{"policy": {"rule": "asd", "budgett": 1}}')
    with pytest.raises(ConfigError, match="budgett"):
        load([f"model.calibration={path}"])


def test_a_model_may_name_its_own_policy():
    config = load(["policy=asd-stable", "++model.policies.asd-stable.budget=4"])
    assert (config.policy.budget, config.policy.gate) == (4.0, 0.25)
    assert config.policy_source == "model tiny-qwen3"


@pytest.mark.parametrize("name", choices("task"))
def test_a_make_target_names_its_task(name):
    assert load([f"task={name.replace('-', '_')}", *NEEDS.get(name, [])]).task.name == name


def test_how_many_items():
    assert load().traffic.limit == 60
    assert load(["task=gate"]).traffic.limit == 200
    assert load(["task=gate", "limit=7"]).traffic.limit == 7
    assert load(["task=gate", "traffic=gsm8k"]).traffic.limit is None
    assert load(["traffic=gsm8k", "limit=20"]).traffic.limit == 20


def test_infinity_is_null_in_the_record():
    config = load(["policy=asd-b0"])
    assert math.isinf(config.policy.gate)
    assert config.resolved()["policy"]["gate"] is None


def test_the_record_does_not_say_where_files_lay(tmp_path):
    text = json.dumps(load([f"data={tmp_path}", f"out={tmp_path}", "traffic=gsm8k"]).resolved())
    assert str(tmp_path.parent) not in text
