"""The HTTP face: SGLang's native subset, errors, streaming, and the server as a process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch
from reference_pair import make_draft, make_target
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adapters.policy import Policy
from harness.engines.base import Request as Ask
from harness.engines.native import NativeClient
from harness.engines.reference.__main__ import main

READY = "specaccept reference engine ready on "
ASD = {"rule": "asd", "budget": 6.0, "gate": 4.0, "max_mismatches": 2, "suffix_value": "suffix"}
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A random pair with a tokenizer of 97 words."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target()
    target.save_pretrained(root / "target")
    make_draft(target).save_folder(root / "draft", torch.float32)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(root / "target")
    return root / "target", root / "draft"


def start(target: Path, draft: Path, *args: str, **environment: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "harness.engines.reference",
        "--model-path",
        str(target),
        "--draft-path",
        str(draft),
    ]
    return subprocess.Popen(
        [*command, "--port", "0", "--threads", "1", *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def url(folders):
    server = start(
        *folders,
        "--max-total-tokens",
        "100",
        "--max-running-requests",
        "2",
        SPECACCEPT_NONCE="n1",
        SPECACCEPT_POLICY='{"rule": "strict"}',
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line.startswith(READY), server.communicate()
    yield line.removeprefix(READY).strip()
    server.send_signal(signal.SIGTERM)
    out, error = server.communicate(timeout=30)
    assert (server.returncode, out, error) == (0, "", "")


def post(url: str, **body) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=body, timeout=60)


def greedy(n: int = 12, **more) -> dict:
    return {"temperature": 0, "max_new_tokens": n, "ignore_eos": True, **more}


def info(url: str) -> dict:
    return httpx.get(f"{url}/server_info").json()


def test_generate_answers_as_sglang_does(url, folders):
    answer = post(url, input_ids=[5, 6, 7], rid="mine", sampling_params=greedy()).json()
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 12, 0)
    assert meta["spec_accept_length"] == 12 / meta["spec_verify_ct"]
    assert meta["spec_num_proposed_drafts"] == 7 * meta["spec_verify_ct"]
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    assert meta["specaccept"]["policy"] == "strict"
    lengths = meta["specaccept"]["step_lengths"]
    assert [lengths.count(n) for n in range(8)] == meta["spec_correct_drafts_histogram"]
    assert answer["text"].split() == [f"w{i}" for i in answer["output_ids"] if i != 1]
    target = make_target()
    expected = target.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answer["output_ids"] == expected[0, 3:].tolist()


def test_the_stop_id_ends_ids_but_is_not_in_the_text(url):
    whole = post(url, input_ids=[5, 6, 7], sampling_params=greedy()).json()["output_ids"]
    stop = whole[4]
    answer = post(url, input_ids=[5, 6, 7], sampling_params=greedy(ignore_eos=False, stop_token_ids=[stop])).json()
    ids = answer["output_ids"]
    assert ids == whole[: len(ids)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[-1]}
    assert len(answer["text"].split()) == len(ids) - 1


def test_list_of_inputs_with_a_policy_each(url):
    params = [greedy(), greedy(custom_params={"specaccept": ASD}), greedy()]
    prompts = [[5, 6, 7], [5, 6, 7], [9, 10]]
    answers = post(url, input_ids=prompts, rid=["a", "b", "c"], sampling_params=params).json()
    assert [a["meta_info"]["id"] for a in answers] == ["a", "b", "c"]
    assert answers[1]["meta_info"]["specaccept"]["policy"] == Policy.from_json(ASD).key
    alone = [
        post(url, input_ids=p, sampling_params=s).json()["output_ids"] for p, s in zip(prompts, params, strict=True)
    ]
    assert [a["output_ids"] for a in answers] == alone


def test_the_harness_client_reads_it(url):
    client = NativeClient(url)
    asks = [Ask(rid=f"x{i}", input_ids=(4, 5, 6 + i), max_new_tokens=9, policy=Policy.from_json(ASD)) for i in range(3)]
    one, many = client.generate(asks[0]), client.generate_many(asks)
    assert one.output_ids == many[0].output_ids
    assert client.healthy()
    client.flush()
    assert client.server().max_running_requests == 2
    client.close()


def test_streaming_is_cumulative_and_ends_with_done(url):
    whole = post(url, input_ids=[8, 9], sampling_params=greedy(30)).json()
    with httpx.stream(
        "POST", f"{url}/generate", json={"input_ids": [8, 9], "stream": True, "sampling_params": greedy(30)}, timeout=60
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 30}
    for part, following in pairwise(parts):
        assert part["meta_info"]["finish_reason"] is None
        assert following["output_ids"][: len(part["output_ids"])] == part["output_ids"]
        assert following["text"].startswith(part["text"])


def test_server_info_carries_the_snapshot(url):
    before = info(url)
    post(url, input_ids=[5, 6], sampling_params=greedy(custom_params={"specaccept": ASD}))
    after = info(url)
    snapshot = after["specaccept"]
    assert (after["max_running_requests"], after["max_total_tokens"]) == (2, 100)
    assert (snapshot["schema"], snapshot["adapter"], snapshot["nonce"], snapshot["armed"]) == (
        1,
        "reference",
        "n1",
        True,
    )
    assert snapshot["default_policy"] == {"rule": "strict"}
    assert "adapters/rules/asd/naive.py" in snapshot["files"]
    key = Policy.from_json(ASD).key
    old = before["specaccept"]["counters"].get(key, {"requests": 0, "committed_tokens": 0})
    assert snapshot["counters"][key]["requests"] == old["requests"] + 1
    assert snapshot["counters"][key]["committed_tokens"] == old["committed_tokens"] + 12


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input_ids": [5]}, None),
        ({"sampling_params": {}}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [97]}, "input_ids"),
        ({"input_ids": [[5], []]}, r"input_ids\[1\]"),
        ({"input_ids": ["w5"]}, "input_ids"),
        ({"text": "w5"}, "text"),
        ({"input_ids": [5], "rid": 3}, "rid"),
        ({"input_ids": [5], "rid": "\ud800"}, "rid: expected at most 256 printable"),
        ({"input_ids": [5], "sampling_params": {"temperature": 10**400}}, "temperature: .* of 1329 bits"),
        ({"input_ids": [5], "sampling_params": {"min\ud800p": 1}}, "does not have it"),
        ({"input_ids": [[5], [6]], "rid": "one"}, "rid"),
        ({"input_ids": [[5], [6]], "rid": ["one", "one"]}, "rid"),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "sampling_params"),
        ({"input_ids": [[5]], "stream": True}, "stream"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 100}}, "max_total_tokens"),
        (
            {"input_ids": [5], "sampling_params": {"custom_params": {"specaccept": {"rule": "asd", "gate": "x"}}}},
            "policy.gate",
        ),
        ({"input_ids": [5], "sampling_params": {"min_p": 0.1}}, "min_p"),
    ],
)
def test_bad_requests_name_the_field(url, body, field):
    params = body.get("sampling_params") or {}
    if isinstance(params, dict):
        body["sampling_params"] = {"max_new_tokens": 2, **params}
    response = httpx.post(f"{url}/generate", content=json.dumps(body))  # ASCII carries what UTF-8 cannot
    if field is None:
        assert response.status_code == 200
        return
    assert response.status_code == 400
    assert re.search(field, response.json()["error"]["message"])


@pytest.mark.parametrize("path", ["/generate", "/abort_request"])
@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"[]", b"3", b"\xff", b'{"rid": [1], "input_ids": {}}'])
def test_a_body_that_is_not_a_json_request_is_a_400(url, path, content):
    response = httpx.post(f"{url}{path}", content=content)
    assert response.status_code == 400
    assert re.match("body|rid|input_ids", response.json()["error"]["message"])


def test_parameters_that_are_no_object_are_a_400(url):
    assert post(url, input_ids=[5], sampling_params=[]).status_code == 400


def test_a_client_that_leaves_frees_the_slots(url):
    """Both slots are taken by requests whose clients hang up; the next one is served."""
    bodies = [{"input_ids": [5, 6], "stream": True, "sampling_params": greedy(90)} for _ in range(2)]
    for body in bodies:
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as response:
            next(response.iter_lines())
    assert len(post(url, input_ids=[7, 8], sampling_params=greedy(5)).json()["output_ids"]) == 5


def test_sigterm_in_the_middle_of_a_request_ends_it_and_exits_zero(folders):
    server = start(*folders, "--max-total-tokens", "500")
    assert server.stdout is not None
    url = server.stdout.readline().removeprefix(READY).strip()
    seen: list[httpx.Response] = []
    body = {"input_ids": [[5, 6 + i % 80] for i in range(400)], "sampling_params": greedy(400)}
    client = threading.Thread(target=lambda: seen.append(httpx.post(f"{url}/generate", json=body, timeout=60)))
    client.start()
    while not info(url)["specaccept"]["counters"].get("strict", {}).get("committed_tokens"):
        time.sleep(0.01)
    server.send_signal(signal.SIGTERM)
    client.join()
    out, error = server.communicate(timeout=30)
    assert (server.returncode, out, error) == (0, "", "")
    assert {a["meta_info"]["finish_reason"]["type"] for a in seen[0].json()} >= {"abort"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no target", "model-path"),
        ("no draft config", "config.json"),
        ("bad policy", "SPECACCEPT_POLICY"),
        ("limit", "max-total-tokens"),
        ("revision", "model-path: expected no revision of a folder, found 'main'"),
        ("draft revision", "draft-path: expected no revision of a folder, found 'main'"),
        ("not qwen3", "model_type"),
        ("no such type", "model-path"),
        ("a tensor is missing", "missing_keys"),
        ("target cut short", "model-path"),
        ("draft cut short", "draft folder"),
    ],
)
def test_what_cannot_be_served_exits_with_one_line(folders, tmp_path, change, said, capsys, monkeypatch):
    target, draft = folders
    args = ["--port", "0"]
    if change == "no target":
        target = tmp_path / "nothing"
    elif change == "no draft config":
        draft = tmp_path
    elif change == "bad policy":
        monkeypatch.setenv("SPECACCEPT_POLICY", '{"rule": "asd", "budget": -1}')
    elif change == "limit":
        args += ["--max-total-tokens", "100000"]
    elif "revision" in change:
        args += [f"--{change.replace(' ', '-')}", "main"]
    elif change in ("not qwen3", "no such type"):
        target = tmp_path
        kind = {"model_type": "llama" if change == "not qwen3" else "qwen99"}
        config = json.loads((folders[0] / "config.json").read_text()) | kind
        (target / "config.json").write_text(json.dumps(config))
    else:
        target, draft = (Path(shutil.copytree(f, tmp_path / f.name)) for f in folders)
        file = (draft if "draft" in change else target) / "model.safetensors"
        if change == "a tensor is missing":
            tensors = load_file(file)
            del tensors["model.norm.weight"]
            save_file(tensors, file, {"format": "pt"})
        else:
            file.write_bytes(file.read_bytes()[:-100])
    status = main(["--model-path", str(target), "--draft-path", str(draft), *args])
    out, error = capsys.readouterr()
    assert (status, out) == (1, "")
    assert len(error.strip().splitlines()) == 1
    assert said in error


def test_a_bad_folder_is_the_exit_status_of_the_process(tmp_path):
    server = start(tmp_path, tmp_path)
    out, error = server.communicate(timeout=120)
    assert (server.returncode, out) == (1, "")
    assert error.startswith("reference engine: model-path: expected a config.json")
