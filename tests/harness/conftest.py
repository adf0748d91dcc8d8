"""A folder that looks like a model pair, and runs of the harness against the fake engine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from adapters.telemetry import file_hashes
from harness import __main__ as cli
from harness.interrupt import SIGNALS

HERE = Path(__file__).parent
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> dict[str, str]:
    """target and draft folders with a byte-level tokenizer and no weights."""
    root = tmp_path_factory.mktemp("pair")
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Tokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    for name in ("target", "draft"):
        folder = root / name
        folder.mkdir()
        fast.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"block_size": 7, "eos_token_id": 257}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {name: str(root / name) for name in ("target", "draft")}


@pytest.fixture
def overrides(pair, tmp_path) -> list[str]:
    """The command line of a run on the fake engine, records in tmp_path."""
    return [
        "traffic=generated-math",
        "limit=6",
        f"out={tmp_path / 'results'}",
        f"model.target={pair['target']}",
        f"model.draft={pair['draft']}",
        "model.calibration=null",
        "engine.module=fake_engine",
        "engine.request_timeout_s=5",
        "launch.stop_timeout_s=5",
    ]


@pytest.fixture
def harness(overrides, monkeypatch, capfd):
    """Run the command line in this process: (status, stdout, stderr). Faults of the engine by name."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def run(*more: str, fault: str = "none", after: int = 0) -> tuple[int, str, str]:
        monkeypatch.setenv("FAKE_FAULT", fault)
        monkeypatch.setenv("FAKE_AFTER", str(after))
        file_hashes.cache_clear()  # of a process that lives longer than one run
        status = cli.main([*overrides, *more])
        out, err = capfd.readouterr()
        return status, out, err

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def ticks(tmp_path, monkeypatch) -> str:
    """A pipe to read from: a byte per generation of the fake engine, its end is the end of the engine."""
    path = str(tmp_path / "ticks")
    os.mkfifo(path)
    monkeypatch.setenv("FAKE_TICKS", path)
    return path


@pytest.fixture
def server(pair):
    """Start the fake engine with a fault, as a server of someone else: its URL."""
    started = []

    def start(fault: str = "none", after: int = 0, model: str = pair["target"]) -> str:
        argv = [sys.executable, "-m", "fake_engine", "--host", "127.0.0.1", "--port", "0"]
        argv += ["--model-path", model, "--draft-path", pair["draft"]]
        environment = os.environ | {"PYTHONPATH": str(HERE), "FAKE_FAULT": fault, "FAKE_AFTER": str(after)}
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        return process.stdout.readline().split()[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
