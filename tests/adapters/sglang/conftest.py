"""The wheel under test lives in an environment of its own (requirements-*.txt here); elsewhere these tests skip."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

HERE = __file__.rpartition("/")[0]
FOUND = importlib.util.find_spec("sglang") is not None
REASON = "sglang is not installed here: tests/adapters/sglang/run VERSION makes an environment that has it"


def _stub_torchvision() -> None:
    """The CPU build of torch has no torchvision beside it in that environment; SGLang imports three names of it."""
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():  # also fills transformers' cache, before the stubs would change its answer
        return
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    modules = {name: types.ModuleType(name) for name in names}
    for module in modules.values():
        module.InterpolationMode = types.SimpleNamespace(NEAREST=0, BILINEAR=2, BICUBIC=3)
        module.pil_to_tensor = None
    modules[names[0]].transforms, modules[names[1]].functional = modules[names[1]], modules[names[2]]
    sys.modules |= modules


if FOUND:
    _stub_torchvision()


def pytest_collection_modifyitems(items):
    if not FOUND:
        for item in items:
            if str(item.path).startswith(HERE):
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def armed(tmp_path_factory):
    """The adapter as the engine loads it: entry point, load_plugins, HookRegistry. Hooks stay for the session."""
    site = tmp_path_factory.mktemp("site")
    info = site / "specaccept-0.0.0.dist-info"
    info.mkdir()
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
def adapter(armed):
    """That adapter as a process starts with it: no default policy, no worker, empty ledger and counters."""
    from adapters.arm import Arming
    from adapters.telemetry import Telemetry

    armed.arming = Arming()
    armed.telemetry = Telemetry("sglang", "sglang", armed.version)
    armed.worker = armed.ledger = armed.step = None
    armed.refused, armed.caps, armed.native_sampled = {}, {}, "chain"
    return armed


@pytest.fixture
def worker(adapter):
    """An armed toy worker of block 5."""
    from toy_engine import ToyWorker

    made = ToyWorker(5)
    adapter.arm(made, server_args())
    return made


def server_args(**changed):
    plain = {"disaggregation_mode": "null", "pp_size": 1, "tokenizer_worker_num": 1, "tp_size": 1}
    plain["enable_dp_attention"] = False
    return types.SimpleNamespace(**plain | changed)
