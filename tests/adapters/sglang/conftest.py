"""The wheel under test lives in an environment of its own (requirements-*.txt here); elsewhere these tests skip."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

FOUND = importlib.util.find_spec("sglang") is not None
REASON = "sglang is not installed here: tests/adapters/sglang/run VERSION makes an environment that has it"


def _stub_torchvision() -> None:
    """The CPU build of torch has no torchvision beside it in that environment; SGLang imports a few names of it."""
    from transformers.utils.import_utils import DummyObject, is_torchvision_available

    if is_torchvision_available():  # also fills transformers' cache, before the stubs would change its answer
        return
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io")
    modules = {name: types.ModuleType(name) for name in names}
    for module in modules.values():
        module.InterpolationMode = types.SimpleNamespace(NEAREST=0, BILINEAR=2, BICUBIC=3)
        module.pil_to_tensor = module.decode_jpeg = None
    modules[names[0]].__path__ = modules[names[1]].__path__ = []
    modules[names[0]].transforms, modules[names[1]].functional = modules[names[1]], modules[names[2]]
    sys.modules |= modules
    # transformers' placeholder for a class that needs torchvision raises on use; SGLang registers processors with it.
    plain = DummyObject.__getattribute__
    DummyObject.__getattribute__ = lambda cls, key: (lambda *a, **k: None) if key == "register" else plain(cls, key)


if FOUND:
    _stub_torchvision()


class Skipped(pytest.Module):
    def collect(self):
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Only a missing engine skips: one that is there and does not import is a failure."""
    return None if FOUND else Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def armed(tmp_path_factory):
    return arm_plugin(tmp_path_factory.mktemp("site"))


def arm_plugin(site):
    """The adapter as the engine loads it: entry point, load_plugins, HookRegistry. Hooks stay for the process."""
    info = site / "specaccept-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specaccept-under-test\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nspecaccept = adapters.sglang.plugin:register\n")
    sys.path.insert(0, str(site))
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    sys.path.remove(str(site))
    hooks = [hook for found in HookRegistry._hooks.values() for _, hook, _ in found]
    owners = {id(hook.__self__): hook.__self__ for hook in hooks if hasattr(hook, "__self__")}
    assert len(owners) == 1
    return next(iter(owners.values()))


@pytest.fixture
def adapter(armed, monkeypatch):
    """That adapter as a process starts with it: no default policy, no worker, empty ledger and counters."""
    from adapters.arm import Arming
    from adapters.sglang.adapter import put
    from adapters.telemetry import Telemetry

    monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: types.SimpleNamespace(world_size=1))
    armed.arming = Arming()
    armed.telemetry = Telemetry("sglang", "sglang", armed.version)
    armed.worker = armed.ledger = armed.step = armed.differences = None
    armed.open, armed.served, armed.policies, armed.plain = {}, set(), {}, True
    put(armed.inner + armed.spare, True)
    armed.refused, armed.caps, armed.native_sampled = {}, {}, "chain"
    return armed


@pytest.fixture
def worker(adapter):
    """An armed toy worker of block 5."""
    from toy_engine import ToyWorker, server_args

    made = ToyWorker(5)
    adapter.arm(made, server_args())
    return made
