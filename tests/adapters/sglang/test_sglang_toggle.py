"""The measuring plugin against the real wheel: off is the engine's own code, all of it, and on is the adapter's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import sglang
import toggle_plugin
from toggle_plugin import ONCE, Toggle
from toy_engine import blocks, decode, prefilled, request

from adapters.policy import Policy
from adapters.sglang import seams
from adapters.sglang.adapter import HOOKS, INNER, SPARE, is_hooked


def test_off_and_on_again(adapter, worker):
    paths = {name: path for name, path in seams.check(sglang.__version__).items() if name in HOOKS}
    toggle = Toggle(sglang.__version__)
    toggle.serve("off-1")
    try:
        assert {name for name, path in paths.items() if is_hooked(path, HOOKS[name])} == set(ONCE)
        from sglang.srt.speculative.dspark_components import dspark_verify

        assert dspark_verify.accept_draft_tokens is seams.resolve(paths["accept"])
        req = request("r", policy=Policy("strict"))
        prefilled(worker, [req], [1])
        drafts, logits = blocks(0, 1, 5, 24)
        worker.forward_batch_generation(decode([req], [1], drafts, logits))
        assert not hasattr(req, "_specaccept")  # no hook of the adapter saw it
        toggle.serve(["on-2"])
        assert {name for name, path in paths.items() if not is_hooked(path, HOOKS[name])} == set(INNER + SPARE)
        toggle.serve("off-3")
    finally:
        toggle.serve("on-4")
    assert {name for name, path in paths.items() if not is_hooked(path, HOOKS[name])} == set(INNER + SPARE)


def test_a_flipped_request_changes_sides_on_its_way_and_leaves_its_times(adapter, worker, monkeypatch, tmp_path):
    monkeypatch.setenv(toggle_plugin.OUT, str(tmp_path / "flips"))
    toggle = Toggle(sglang.__version__)
    sides = []
    modes = [SimpleNamespace(is_decode=lambda n=n: n > 0) for n in range(14)]
    batches = [SimpleNamespace(forward_mode=mode, reqs=[None] * 2) for mode in modes]
    try:
        toggle.admitted(lambda *_a: None, None, SimpleNamespace(rid="flip-3-0"))
        for batch in batches:  # a prefill and thirteen steps
            toggle.step(lambda *_a: sides.append(toggle.on), None, batch)
        toggle.admitted(lambda *_a: None, None, SimpleNamespace(rid="on-1"))
    finally:
        toggle.set(True)
    assert sides == [True, *[True] * 3, *[False] * 6, *[True] * 4]
    [steps] = [json.loads(line) for line in (tmp_path / "flips").read_text().splitlines()]
    assert [step[1:] for step in steps] == [[on, n // 3, 2] for n, on in enumerate(sides[1:])]
    assert toggle.every == 0


def test_what_a_flipped_request_says(tmp_path):
    """Steps of 3 ms with the hooks, 2 ms without; the first step of a segment, and one of fewer requests, left out."""
    from device_toggle import flipped, segments

    at, lines = 0, []
    for on in (True, False, False, True) * 3:
        for n in range(4):
            lines.append((at, on, len(lines) // 4, 8 if len(lines) > 2 else 1))  # two wait for the others
            at += 50_000_000 if n == 0 else 3_000_000 if on else 2_000_000
    lines += [(at + n, True, 12, 8) for n in range(2)]
    few = [(at, on, segment, 7) for at, on, segment, _ in lines]
    (tmp_path / "flips").write_text(json.dumps(lines) + "\n" + json.dumps(few) + "\n")
    found = segments(tmp_path / "flips", 8)
    assert found == [(on, 3.0 if on else 2.0) for on in (True, False, False, True) * 2]
    summary = flipped(found)
    assert summary["ms_per_step"] == {"on": 3.0, "off": 2.0}
    assert (summary["on/off, steps per second"]["ratio"], summary["on/on"]["ratio"]) == (0.66667, 1.0)
    assert flipped(found[:3]) == {"rows": 0}


def test_a_run_that_is_ended_keeps_the_groups_before(tmp_path, monkeypatch):
    import device_toggle

    group = [(i * 10**6, (i // 3) % 4 in (0, 3), i // 3, 2) for i in range(16)]
    file, asked, written = tmp_path / "flips", [], []

    def call(url, path, body):  # as the plugin does: a group's steps are written when another request comes
        if asked:
            with file.open("a") as out:
                out.write(json.dumps(group) + "\n")
        asked.append(body["rid"])
        if len(asked) == 4:
            raise SystemExit(143)
        return 200, {}

    monkeypatch.setattr(device_toggle, "call", call)
    with pytest.raises(SystemExit):
        device_toggle.flips("", None, [[1], [2]], 2, 1e9, 3, 8, file, written.append)
    rows = [found.get("on/off, steps per second", {"rows": 0})["rows"] for found in written]
    assert rows == [0, 1, 2]


def test_flips_say_whether_b0_is_within_the_bar_where_there_are_some():
    from device_steps import within_bar

    rounds = {batch: {"against_unarmed": {"asd-b0": {"ratio": ratio}}} for batch, ratio in (("1", 1.005), ("8", 1.05))}
    assert within_bar({"batches": rounds}, "unarmed") == {"1": True, "8": False}
    flips = {"8": {"on/off, steps per second": {"ratio": 0.999}}, "32": {"on/off, steps per second": {"ratio": 0.98}}}
    found = within_bar({"batches": rounds, "flips": flips | {"1": {"rows": 0}}}, "unarmed")
    assert found == {"1": True, "8": True, "32": False}
    assert within_bar({"batches": {}}, "unarmed") == {}  # nothing measured: main fails
