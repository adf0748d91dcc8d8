"""What a record is called, and which other records answer the same question. Pure functions of record and recipes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from harness.config import KINDS, Config, choices, member, plain
from harness.publish.parts import Link
from harness.records import Record
from harness.records.judgement import Judged
from harness.records.schema import digest

MODEL_FIELDS = ("target", "draft", "revision", "draft_revision", "dtype", "block_size")
# How long one waits for an engine, and where a server listens, change no number.
NOT_MEASURED = ("ready_timeout_s", "request_timeout_s", "stop_timeout_s", "port", "publish", "hub_cache", "offline")
UNSEEN = "not verified"
REQUIRED = {"launch": {"name": "process"}}  # fields without a usable default
_NONE = object()
SETTLED = ("name", "data", "limit", "seed")  # of traffic: the command line's, said in words of their own


def key(record: Record) -> tuple[str, ...]:
    """What a row stands for: two runs of one key answer the same question. The last part is all that is measured."""
    seen = [record.identity.engine, record.identity.image_digest, (record.server or {}).get("max_running_requests")]
    return (*asked(record), digest(seen))


def asked(record: Record) -> tuple[str, ...]:
    """The part of `key` that is known before an engine answers."""
    config, identity, workload = record.identity.config, record.identity, record.workload
    names = (record.task, model(record), config["engine"]["name"], config["traffic"]["name"])
    measured = {
        "target": _content(identity.target) or identity.target.get("reported"),
        "draft": _content(identity.draft) or identity.draft.get("reported"),
        "model": {"dtype": dtype(config), "block_size": config["model"].get("block_size")},
        **{group: _kept(group, config.get(group) or {}) for group in ("engine", "launch", "image", "task")},
        "traffic": _kept("traffic", config["traffic"], ("data", "limit")),
        "data": identity.data.get("content_sha256"),
        "items": workload["items"],  # what a limit comes to
        "concurrency": [workload.get("concurrency"), workload.get("order")],
        "seed": config.get("seed"),
        "arms": {name: [arm.policy, arm.temperature] for name, arm in record.arms.items()},
        "machine": [record.environment.get("cpu"), record.environment.get("cores"), record.environment.get("gpus")],
    }
    return (*names, digest(measured))


def dtype(config: Mapping[str, Any]) -> str:
    """What the engine was told; auto: what it takes the checkpoint for."""
    kind = config["engine"].get("base") or config["engine"]["name"]
    return (config["model"].get("dtypes") or {}).get(kind, config["model"]["dtype"])


def _kept(group: str, found: Mapping[str, Any], settled: Collection[str] = ()) -> dict[str, Any]:
    """Without what has its default: a field that is younger than a record makes no other question of it."""
    usual = plain(asdict(KINDS[group](**REQUIRED.get(group, {}))))
    skip = {*NOT_MEASURED, *settled}
    return {
        name: value
        for name, value in found.items()
        if name not in skip and (name == "name" or usual.get(name, _NONE) != value)
    }


def _content(found: Mapping[str, Any]) -> str | None:
    return found.get("revision") or found.get("sha256")


def model(record: Record) -> str:
    """The recipe's name where target and draft are the recipe's, else what the target is: never another's name."""
    config, identity = record.identity.config["model"], record.identity
    if is_recipe(record):
        return config["name"] + (" (as the server reports)" if is_reported(record) else "")
    revision = f", {(_content(identity.target) or UNSEEN)[:12]}"
    target, draft = (PurePosixPath(found["path"]).name for found in (identity.target, identity.draft))
    return f"custom: {target} ({draft}{revision})"


def is_recipe(record: Record) -> bool:
    config = record.identity.config["model"]
    if config["name"] not in choices("model"):
        return False
    recipe = member("model", config["name"])
    same = all(getattr(recipe, name) == config[name] for name in MODEL_FIELDS)
    # A folder may have the path of a hub id: it has no commit, and is not what the recipe means.
    sides = ((recipe.target, record.identity.target), (recipe.draft, record.identity.draft))
    return same and all(
        path.startswith("recipes/") or found.get("revision") or found.get("reported") for path, found in sides
    )


def is_reported(record: Record) -> bool:
    """An attached server says which model it has; its content is out of sight."""
    return any(found.get("reported") for found in (record.identity.target, record.identity.draft))


def title(record: Record) -> str:
    """Model, engine, traffic and whatever makes this run another one than its recipes ask for."""
    config = record.identity.config
    launched = record.launch or {}
    replicas = f", {launched['replicas']} replicas" if launched.get("replicas", 1) > 1 else ""
    foreign = ", adapter differs from this checkout" if launched.get("foreign_adapter") else ""
    where = f" (attached server{foreign})" if launched.get("attached") else ""
    where = f" (docker{replicas})" if launched.get("kind") == "docker" else where
    where = f" ({launched['replicas']} servers an arm)" if launched.get("kind") == "process" and replicas else where
    more = "".join(f", {name}" for name in unusual(record))
    return f"{model(record)} on {config['engine']['name']}{where}, {traffic(record)}{more}"


def traffic(record: Record) -> str:
    """`gsm8k, 200 of 1,319 items`."""
    count = len(record.workload["items"])
    total = (record.identity.data.get("rows") or {}).get("test", count)
    of = f" of {total:,}" if count < total and record.task != "calibrate" else ""
    return f"{record.identity.config['traffic']['name']}, {count:,}{of} items"


def unusual(record: Record) -> list[str]:
    """What a reader must know before any number: the cap, the seed, the temperature."""
    config = record.identity.config
    cap, seed = config["traffic"].get("max_new_tokens"), config.get("seed")
    mixed = record.workload.get("mixed", {})  # between the others, and compared with nothing
    temperatures = sorted({arm.temperature for name, arm in record.arms.items() if name not in mixed} - {0.0})
    return [
        *([f"exactly {fixed} tokens"] if (fixed := record.workload.get("fixed_tokens")) else []),
        *([f"at most {cap} tokens"] if cap and not fixed else []),
        *([f"seed {seed}"] if seed != Config().seed else []),
        *(f"temperature {value:g}" for value in temperatures),
    ]


def workload(record: Record) -> str:
    """Everything that decides what is asked, and every field that is not the recipe's."""
    config, data = record.identity.config, record.identity.data
    cap = config["traffic"].get("max_new_tokens")
    temperatures = sorted({arm.temperature for arm in record.arms.values()})
    facts = [
        f"seed {config.get('seed')}",
        f"at most {cap} tokens" if cap else "the traffic's own token cap",
        f"temperature {', '.join(f'{value:g}' for value in temperatures)}",
        f"concurrency {record.workload.get('concurrency', 'unknown')} ({record.workload.get('order', 'unknown')})",
        f"dtype {dtype(config)}",
    ]
    if "suffix" in data:
        facts.append(f'suffix "{data["suffix"]}"')
    changed = [*_limit(record), *([] if config.get("seed") == Config().seed else [facts[0].replace(" ", "=")])]
    changed += changes(record)
    return ", ".join(facts) + ". " + (f"Other than the recipes: {', '.join(changed)}" if changed else "As the recipes")


def changes(record: Record) -> list[str]:
    """`group.field=value` for what a run was asked for beyond its recipes, as the recipes are now."""
    found = []
    for group in ("model", "engine", "traffic"):
        config = record.identity.config[group]
        skip = SETTLED if group == "traffic" else ("name", "policies", "engines", "calibration", "requires")
        usual = plain(asdict(member(group, config["name"]))) if config["name"] in choices(group) else None
        if usual is None:
            found.append(f"{group}={config['name']} (no longer a recipe)")
            continue
        for name, value in config.items():
            if name in usual and name not in skip and usual[name] != value:
                found += _differing(f"{group}.{name}", usual[name], value)
    return found


def brief(record: Record, most: int = 2) -> list[str]:
    """`changes` for a table's cell: more engine flags than `most` are a number, and the run's record has them."""
    found = changes(record)
    flags = [text for text in found if text.startswith("engine.flags.")]
    if len(flags) <= most:
        return found
    return [*(text for text in found if text not in flags), f"{len(flags)} engine flags of its own"]


def _differing(name: str, usual: Any, value: Any) -> list[str]:
    """Of a mapping only the entries that differ; one that is gone is null, as an override would take it away."""
    if not (isinstance(usual, Mapping) and isinstance(value, Mapping)):
        return [f"{name}={_short(value)}"]
    changed = {key: value.get(key) for key in [*value, *usual] if usual.get(key) != value.get(key)}
    return [f"{name}.{key}={_override(found)}" for key, found in changed.items()]


def _override(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else _short(value)


def _limit(record: Record) -> list[str]:
    """`limit=3`: fewer or more items than the recipes of traffic and task ask for."""
    config = record.identity.config
    if config["traffic"]["name"] not in choices("traffic") or record.task not in choices("task"):
        return []
    usual = member("traffic", config["traffic"]["name"]).limit
    usual = (usual and member("task", record.task).limit) or usual
    found = config["traffic"].get("limit")
    whole = usual is None and len(record.workload["items"]) == (record.identity.data.get("rows") or {}).get("test")
    return [] if found == usual or whole else [f"limit={found}"]


def _short(value: Any) -> str:
    """Of a path the last part: where it lay says nothing."""
    text = str(value)
    return PurePosixPath(text).name if text.startswith("/") else text


def models(record: Record) -> str:
    parts = [("target", record.identity.target), ("draft", record.identity.draft)]
    return ", ".join(f"{name} {found['path']} {(_content(found) or UNSEEN)[:12]}" for name, found in parts)


def machine(record: Record) -> str:
    found = record.environment
    names = [gpu["name"] for gpu in found["gpus"]]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    own = record.identity.config.get("launch", {}).get("cores")
    pinned = f" ({own} for each server alone)" if own else ""
    return f"{found['cpu']}, {found['cores']} cores{pinned}" + (f", {counted}" if counted else ", no GPU")


def code(record: Record) -> str:
    """What measured, and what judged where that was done again."""
    return commit(record.identity.code) + (f", {again}" if (again := judged_again(record)) else "")


def commit(found: Mapping[str, Any]) -> str:
    text = f"commit {found['commit'][:12]}" if found["commit"] else f"content {found['sha256'][:12]}"
    return text + (" (changes unknown)" if found["dirty"] == "unknown" else " with changes" if found["dirty"] else "")


def judged_again(record: Record) -> str:
    """Of a run whose verdict is not the first: whose it is, why there is another, and what the first was."""
    if not isinstance(record, Judged):
        return ""
    made = record.judgement
    which = f" (judgement {made.number})" if made.number > 1 else ""
    first = record.first.outcome if record.first else "none"
    return f"judged again{which} at {commit(made.code)}: {made.why}; first verdict: {first}"


def thresholds(record: Record) -> str:
    """What a verdict asks beyond proofs, drift, loops and the A/A row, by the recipe's name."""
    asked_for = record.identity.config.get("verdict") or {}
    names = ("tps_gain", "tps_cost", "accuracy_drop", "length_change")
    found = [f"{name} {asked_for[name]:g}" for name in names if asked_for.get(name) is not None]
    return f"{asked_for['name']}: {', '.join(found)}" if found else "no threshold"


def link(record: Record) -> Link:
    return Link(record.id, f"runs/{record.id}/record.json")
