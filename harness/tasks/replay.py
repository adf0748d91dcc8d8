"""task=replay capture=DIR: every policy on one capture, and what a bench's step times make of it.

The policy that ran is decided again from the capture first: a replay that does not give the engine's own accept
lengths, block for block, is a failed one (1); where nothing could be compared it is inconclusive (2).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from adapters.capture.layout import CaptureError
from adapters.policy import ENGINE_RULES, Policy, PolicyError
from harness.config import Config, ConfigError, arm_policy, choices
from harness.engines.checkpoint import CheckpointError, small_files
from harness.engines.tokenizer import Tokenizer, TokenizerError
from harness.records.provenance import code
from harness.records.run import sha256
from harness.records.schema import Verdict
from harness.replay import parquet, pictures, predict, reader, record
from harness.replay.console import report
from harness.replay.estimate import Named, Outcome, compare, phases, reproduced
from harness.replay.record import Entry, Replay
from harness.replay.table import Table, policies, select
from harness.tasks import STATUS
from harness.tasks.errors import TaskError

THINK = ("<think>", "</think>")
GRID_SUFFIX = "normalized"
LIMITS = (
    "Accept length, not accuracy: no answer was generated under any policy but the one that was captured.",
    "Within a block exact: its drafts and the target's rows behind them do not depend on the policy. Across blocks "
    "not: a block begins where the captured policy left off, so a state that another policy would reach is not seen, "
    "and one that it would skip is counted.",
    "ASD's budget is charged in every captured block. Live it buys fewer, longer steps, so its ledger lasts longer "
    "than here.",
    "Rules with coins are exact expectations over them. The prompt's own token counts for no step; a block that "
    "ended its request counts the tokens that were kept.",
)
LENGTHS = {
    "all": "The longest answer that each request allowed is known: no block counts more tokens than were left of it.",
    "none": "The capture (format v1) does not say how long answers might become. Where one was cut there, the blocks "
    "before the end may count more tokens than were left: answers that were cut read up to about 1 % high.",
    "some": "The longest answer allowed is known of {known} of {requests} requests; the others, where cut, read high.",
}
GRID = (
    "The grid has {points} policies, each with a 95 % interval of its own, not corrected for their number: about "
    "{chance:.0f} of them would miss their value by chance, and the best of them reads too high. Choose on one set of "
    "prompts, confirm on another."
)


def run(config: Config) -> int:
    assert config.capture is not None
    path = Path(config.capture).expanduser()
    try:
        capture = reader.read(path)
        key = config.replay.policy or _default(policies(capture))
        benches, live, costs = _runs(config)
        shared = [*dict.fromkeys(bench.record.id for bench in [*benches, *live])] if config.replay.shared else []
        if config.replay.shared and not shared:
            raise ConfigError("replay.shared: expected runs whose prompts are shared (replay.times), found none")
        table, notes = select(capture, key, predict.prompts_of([*benches, *live]) if shared else None)
        if not len(table):
            raise CaptureError(f"capture: policy {key}: expected verified blocks, found none")
        _same_model(config, capture.manifest)
        think, note = _think_ids(config, capture.manifest)
        named = [*_named(config), *_grid(config)]
        if not named:
            raise ConfigError("replay.policies: expected at least one policy, or a grid of asd_budgets, found none")
        baseline = _baseline(named, table)
        asked = predict.asked(capture.manifest, capture.requests, table)
        for name, found in (("times", benches), ("costs", costs)):
            predict.usable(found, asked, f"replay.{name}")
        if config.replay.parquet:
            notes += _export(path)
    except CaptureError as error:
        raise TaskError(str(error)) from None
    print(f"specaccept: {len(named)} policies on {len(table):,} blocks", file=sys.stderr)
    outcomes = compare(named, table, baseline, think)
    ran = next((each.policy for each in named if each.policy.key == key), None) or _of_key(capture.manifest, key)
    again = _again(ran, table, key)
    masks = phases(table, think)
    folder, created = record.new_folder(config.results, capture.sha256)
    made = Replay(
        id=folder.name,
        created=created,
        code=code(),
        capture=_about(capture, table, key) | ({"shared": shared} if shared else {}),
        baseline=baseline,
        policies=[_entry(outcome, grid=i >= len(named) - len(_grid(config))) for i, outcome in enumerate(outcomes)],
        reproduced=again,
        pictures=pictures.numbers(table, masks),
        prediction=predict.predict(outcomes, benches, live, asked, costs) if benches else None,
        limits=[*LIMITS, _lengths(table), *_kind_limits(table), *_of_shared(shared), *_of_grid(len(_grid(config)))],
        notes=[*capture.notes, *notes, *([note] if note else [])],
        verdict=_verdict(again),
    )
    record.write(folder, made, pictures.draw(made.policies, made.pictures))
    report(made)
    print(f"verdict: {made.verdict.outcome}" + "".join(f"\n  {reason}" for reason in made.verdict.reasons))
    print(f"record:  {os.path.relpath(folder)}")
    return STATUS[made.verdict.outcome]


def _runs(config: Config) -> tuple[list[predict.Bench], list[predict.Bench], list[predict.Bench]]:
    """Of replay.times, live (else times) and costs."""
    asked = config.replay
    found = {name: getattr(asked, name) or [] for name in ("times", "live", "costs")}
    if (alone := [name for name in found if found[name]]) and not found["times"]:
        raise ConfigError(f"replay.{alone[0]}: expected replay.times, whose step times predict, found none")
    times, live, costs = ([predict.load(run, f"replay.{name}") for run in runs] for name, runs in found.items())
    return times, live or times, costs


def _default(found: dict[str, int]) -> str:
    """The policy whose blocks are read where none is named: a lossless one, if there is one."""
    if lossless := {key: count for key, count in found.items() if key in ("strict", "chain")}:
        return max(lossless, key=lambda key: lossless[key])
    if len(found) == 1:
        return next(iter(found))
    raise CaptureError(f"capture: replay.policy: expected one of {', '.join(found) or 'none'}, found nothing")


def _named(config: Config) -> list[Named]:
    """The policies of the recipes, settled for the model."""
    names = choices("policy") if config.replay.policies is None else config.replay.policies
    if unknown := [name for name in names if name not in choices("policy")]:
        raise ConfigError(f"replay.policies: expected some of {', '.join(choices('policy'))}, found {unknown[0]!r}")
    order = {name: place for place, name in enumerate(("strict", "asd-b0", "asd", "asd-stable", "chain", "block"))}
    if config.replay.policies is None:
        names = sorted(names, key=lambda name: (order.get(name, len(order)), name))
    found = [Named(name, arm_policy(config, name)[0].policy) for name in names]
    # An engine's own kernel decides as the rule that it implements: a row only where it was asked for.
    return [each for each in found if config.replay.policies is not None or each.policy.rule not in ENGINE_RULES]


def _grid(config: Config) -> list[Named]:
    asked = config.replay
    try:
        return [
            Named(f"B={B:g} g={g:g} m={m}", Policy("asd", float(B), float(g), int(m), GRID_SUFFIX))
            for B, g, m in product(asked.asd_budgets, asked.asd_gates, asked.asd_caps)
        ]
    except PolicyError as error:
        raise ConfigError(f"replay.asd_budgets, asd_gates, asd_caps: {error}") from None


def _baseline(named: Sequence[Named], table: Table) -> str:
    """strict for greedy requests, chain for sampled ones; else the first policy named."""
    wanted = "chain" if table.sampled else "strict"
    return next((each.name for each in named if each.policy.rule == wanted), named[0].name)


def _of_key(manifest: dict[str, Any], key: str) -> Policy | None:
    """The policy that ran, where it is none of those replayed: the server's default has its fields."""
    default = manifest["policy"] and Policy.from_json(manifest["policy"])
    return default if default and default.key == key else None


def _again(ran: Policy | None, table: Table, key: str) -> dict[str, Any]:
    if ran is None:
        return {"policy": key, "blocks": 0, "different": 0, "why": f"the fields of {key} are not known here"}
    blocks, different, why = reproduced(ran, table)
    return {"policy": key, "blocks": blocks, "different": different, "why": why}


def _verdict(again: dict[str, Any]) -> Verdict:
    if again["different"]:
        text = (
            f"{again['policy']}: {again['different']} of {again['blocks']} blocks accept another length than the engine"
        )
        return Verdict("fail", [text])
    if not again["blocks"]:
        return Verdict("inconclusive", [f"{again['policy']}: not compared with the engine: {again['why']}"])
    return Verdict("pass", [])


def _same_model(config: Config, manifest: dict[str, Any]) -> None:
    """The policies replayed are those settled for `model`, so it must be the capture's: by the content of its
    config.json, or by name where one side does not have the file."""
    wanted = manifest["target"]
    try:
        file = small_files(config.model.target, config.model.revision) / "config.json"
        own = sha256(file) if wanted.get("config_sha256") and file.is_file() else None
    except CheckpointError:
        own = None
    names = [Path(name).name for name in (wanted["name"], config.model.target)]
    if own != wanted["config_sha256"] if own else names[0] != names[1]:
        by = f" (config.json {wanted['config_sha256'][:12]}, found {own[:12]})" if own else ""
        raise TaskError(f"model: expected that of the capture, {wanted['name']}, found {config.model.name}{by}")


def _think_ids(config: Config, manifest: dict[str, Any]) -> tuple[tuple[int, int] | None, str | None]:
    """The ids that open and close a thought, of the capture's own tokenizer; or why phases are not told apart."""
    try:
        folder = small_files(config.model.target, config.model.revision)
        words = Tokenizer.from_folder(folder)
    except (CheckpointError, TokenizerError) as error:
        return None, f"phases: {str(error).splitlines()[0]}"
    expected, found = manifest["tokenizer"].get("sha256"), sha256(folder / "tokenizer.json")
    if expected is None:
        return None, "phases: the capture does not say which tokenizer it is of"
    if expected != found:
        raise TaskError(
            f"model: expected that of the capture, {manifest['target']['name']} (tokenizer {expected[:12]}), "
            f"found {config.model.name} (tokenizer {found[:12]})"
        )
    start, end = (words.fast.token_to_id(word) for word in THINK)
    return ((start, end), None) if start is not None and end is not None else (None, "phases: the model does not think")


def _export(path: Path) -> list[str]:
    """Parquet beside the shards; a folder that takes no files is no reason not to replay."""
    try:
        made = [file for folder in reader.find(path) for file in parquet.export(folder)]
    except OSError as error:
        return [f"parquet: {error.strerror}: not written"]
    if made:
        print(f"specaccept: {len(made)} Parquet files in {path}", file=sys.stderr)
    return []


def _about(capture: reader.Capture, table: Table, key: str) -> dict[str, Any]:
    found = capture.manifest
    temperatures = table.temperature
    return {
        "folders": [folder.name for folder in capture.folders],
        "manifest_sha256": capture.sha256,
        "engine": found["engine"].get("name"),
        "engine_version": found["engine"].get("version"),
        "adapter": found["adapter"],
        "target": found["target"]["name"],
        "target_config_sha256": found["target"].get("config_sha256"),
        "draft": found["draft"]["name"],
        "tokenizer_sha256": found["tokenizer"].get("sha256"),
        "logits": found["logits"],
        "K": found["K"],
        "vocabulary": found["vocabulary"],
        "rate": found["rate"],
        "policy": key,
        "temperature": float(temperatures[0]) if table.sampled else 0.0,
        "one_temperature": bool((temperatures == temperatures[0]).all()),
        "drawn": bool(table.drawn.all()),
        "requests": len(table.first),
        "blocks": len(table),
        "positions": table.positions,
        "dropped": capture.dropped,
        "closed": capture.closed,
    }


def _lengths(table: Table) -> str:
    known, requests = int((table.limits > 0).sum()), len(table.first)
    which = "all" if known == requests else "some" if known else "none"
    return LENGTHS[which].format(known=known, requests=requests)


def _of_shared(runs: Sequence[str]) -> list[str]:
    return [f"Only the requests whose prompt was asked in {' and in '.join(runs)} too."] if runs else []


def _of_grid(points: int) -> list[str]:
    return [GRID.format(points=points, chance=max(1, 0.05 * points))] if points > 1 else []


def _kind_limits(table: Table) -> list[str]:
    """What holds of greedy, or of sampled, blocks alone."""
    if table.sampled:
        return ["Sampled requests: rules for greedy ones are asked about states that sampling reached."]
    return [
        "Greedy requests: rules for sampled ones are asked at temperature 1 about argmax drafts, q one-hot, "
        "where block verification and chain are one rule. A gain of block needs a capture of sampled requests."
    ]


def _entry(outcome: Outcome, grid: bool) -> Entry:
    return Entry(
        name=outcome.name,
        key=outcome.policy.key,
        rule=outcome.policy.rule,
        kind=outcome.kind,
        why=outcome.why,
        tokens_per_step=outcome.tokens_per_step,
        change=outcome.change,
        acceptance=outcome.acceptance,
        grid=grid,
    )
