"""The measurement script's exchange of functions: what it puts back is the engine's own, and in again the adapter's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightllm_rig as rig
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import device_toggle

from adapters.lightllm import hook, patch

STEP = {"_post_handle", "_sample_and_scatter_token", "_get_next_token_ranks", "mtp_verify", "sample"}
STEP |= {"_async_copy_next_token_infos_to_pin_mem", "scatter_mtp_next_tokens"}


@pytest.mark.parametrize(("name", "exchanged"), [("b0", {"_post_handle"}), ("walk", STEP)])
def test_functions_change_place_between_requests(name, exchanged, monkeypatch, tmp_path):
    server = device_toggle.Armed.__new__(device_toggle.Armed)
    server.name, server.pipe, server.orders = name, tmp_path / "orders", 0
    os.mkfifo(server.pipe)
    monkeypatch.setenv(device_toggle.PIPE, str(server.pipe))
    monkeypatch.setattr(hook, "_patch", hook._patch)  # both are put back at the end
    monkeypatch.setattr(patch.Engine, "serve", patch.Engine.serve)
    with monkeypatch.context() as patched:
        patched.setattr(hook, "install", lambda: None)
        exec(device_toggle.MODULE, {})
    with rig.armed(rig.DOUBLE, device_toggle.POLICIES[name], monkeypatch) as modules:
        context, backend = modules.batch.g_infer_context, modules.backend.ModeBackend
        context.infer_req_ids = []
        modules.patch.engine().serve(0, 1)
        ours = backend._post_handle
        assert set(server.run("engine")) == exchanged
        assert backend._post_handle is ours.__wrapped__
        assert modules.normal.sample.__code__.co_filename != modules.patch.__file__
        context.infer_req_ids = [1]  # not while a request is in the engine
        monkeypatch.setattr(device_toggle, "FOLLOWED_S", 0.05)
        with pytest.raises(RuntimeError, match=r"order 2 \(adapter\) was not followed"):
            server.run("adapter")
        assert backend._post_handle is ours.__wrapped__
        context.infer_req_ids = []
        monkeypatch.setattr(device_toggle, "FOLLOWED_S", 20.0)
        server.run("adapter")
        assert backend._post_handle is ours
        del modules.patch.Engine.follows


def test_intervals_of_ratios():
    rng = np.random.default_rng(0)
    engine = rng.normal(1.0, 0.02, size=(60, 2))
    found = device_toggle.interval(engine.sum(1), 1.1 * engine.sum(1))
    assert found["ratio"] == pytest.approx(1 / 1.1, abs=1e-4)
    assert found["low"] == pytest.approx(found["high"], abs=1e-4)
    rows = []
    for a, b in engine.tolist():
        asked = [("engine", a), ("adapter", 1.02 * a), ("adapter", 1.02 * b), ("engine", b)]
        rows.append({"same": True, "decode": asked, "wall": asked})
    told = device_toggle.summary(["sample"], rows, 100)
    assert told["decode"]["adapter over engine"]["ratio"] == pytest.approx(1 / 1.02, abs=1e-3)
    assert told["decode"]["again"]["low"] < 1 < told["decode"]["again"]["high"]
    assert told["ids equal"] == told["prompts"] == 60
