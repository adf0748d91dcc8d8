"""The measuring plugin against the real wheel: off is the engine's own code, all of it, and on is the adapter's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import sglang
import toggle_plugin
from toggle_plugin import ONCE, Toggle
from toy_engine import blocks, decode, prefilled, request

from adapters.policy import Policy
from adapters.sglang import seams
from adapters.sglang.adapter import HOOKS, INNER, is_hooked


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
        assert {name for name, path in paths.items() if not is_hooked(path, HOOKS[name])} == set(INNER)
        toggle.serve("off-3")
    finally:
        toggle.serve("on-4")
    assert {name for name, path in paths.items() if not is_hooked(path, HOOKS[name])} == set(INNER)


def test_a_flipped_request_changes_sides_on_its_way_and_leaves_its_times(adapter, worker, monkeypatch, tmp_path):
    monkeypatch.setenv(toggle_plugin.OUT, str(tmp_path / "flips"))
    toggle = Toggle(sglang.__version__)
    sides = []
    batches = [SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda n=n: n > 0)) for n in range(14)]
    try:
        toggle.admitted(lambda *_a: None, None, SimpleNamespace(rid="flip-3-0"))
        for batch in batches:  # a prefill and thirteen steps
            toggle.step(lambda *_a: sides.append(toggle.on), None, batch)
        toggle.admitted(lambda *_a: None, None, SimpleNamespace(rid="on-1"))
    finally:
        toggle.set(True)
    assert sides == [True, *[True] * 3, *[False] * 6, *[True] * 4]
    [steps] = [json.loads(line) for line in (tmp_path / "flips").read_text().splitlines()]
    assert [on for _, on, _ in steps] == sides[1:]
    assert [segment for *_, segment in steps] == [n // 3 for n in range(13)]
    assert toggle.every == 0
