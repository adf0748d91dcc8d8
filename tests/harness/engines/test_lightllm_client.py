"""The LightLLM client against a small server of its API, with the adapter's own files beside it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from adapters.lightllm import exchange
from adapters.policy import Policy
from adapters.telemetry import Telemetry
from harness.engines import connect
from harness.engines.base import EngineError, Request
from harness.engines.lightllm import LightLLMClient, body, installed_version

ASD = Policy("asd", 2.0, 2.0, 1, "normalized")
DOUBLE = Path(__file__).parents[2] / "adapters/lightllm/double"


class Engine:
    """Echoes ids 100.. under ASD: every second block relaxes one draft of regret 0.5. `fault` spoils one thing."""

    def __init__(self, folder):
        self.telemetry = Telemetry("lightllm", "lightllm", "lightspec+test", ASD)
        self.telemetry.armed = True
        self.journal, self.fault, self.asked = exchange.Journal(folder, 0), "", []
        self.info = {"model_dir": "T", "mtp_draft_model_dir": ["D"], "running_max_req_size": 16}
        exchange.Responder(folder, 0, 1, self.telemetry.snapshot).start()

    def generate(self, asked: dict) -> dict:
        self.asked.append(asked)
        parameters = asked["parameters"]
        n = parameters["max_new_tokens"]
        counters = self.telemetry.of(ASD)
        counters.requests += 1
        counters.blocks += n // 2
        counters.relaxed += n // 4
        record = {
            "tag": parameters["seed"],
            "policy": ASD.key,
            "blocks": n // 2,
            "drafts_verified": 7 * (n // 2),
            "accepted": n // 2,
            "strict_accepted": n // 2 - n // 4,
            "relaxed": n // 4,
            "regret_charged": 0.5 * (n // 4),
            "budget_exhausted": 0,
            "committed_tokens": n - 1 if self.fault != "committed" else n - 5,
            "histogram": [0, n // 2],
            "step_lengths": [1] * (n // 2),
        }
        if self.fault == "cached":
            record["committed_tokens"] = n
        if self.fault == "nan":
            record["regret_charged"] = float("nan")
        if self.fault == "text":
            record["blocks"] = "4"
        if self.fault != "silent":
            self.journal.write(record)
        if self.fault == "counter":
            counters.blocks = "4"
        totals = {  # the engine's own, with the step in flight at the end
            "mtp_verify_step_num": n // 2 + 1 if self.fault != "few" else 1,
            "mtp_verify_token_num": 8 * (n // 2 + 1) if self.fault != "negative-total" else 0,
            "mtp_accepted_token_num": n // 2 if self.fault != "few" else 0,
        }
        tokens = [
            {"id": -1 if self.fault == "negative" else 100 + i, "logprob": -0.1, "prompt_cache_len": 2} | totals
            for i in range(n)
        ]
        return {
            "tokens": tokens if self.fault != "lost" else tokens[:-1],
            "count_output_tokens": n,
            "prompt_tokens": len(asked["inputs"]) + (self.fault == "prompt"),
            "finish_reason": "abort" if self.fault == "abort" else "length",
        }


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, status, value):
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self):
            self.reply(200, made.info if self.path == "/get_server_info" else "ok")

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.reply(*((500, "no memory left") if made.fault == "http" else (200, made.generate(asked))))

        def log_message(self, *unused):
            pass

    class Crowded(ThreadingHTTPServer):
        request_queue_size = 64  # of 5, the kernel resets some of two dozen connections

    server = Crowded(("127.0.0.1", 0), Handler)

    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(engine, tmp_path):
    made = LightLLMClient(engine.url, tmp_path, 5.0)
    yield made
    made.close()


def ask(n: int = 8, **more) -> Request:
    return Request(**{"rid": "r", "input_ids": [1, 2, 3], "max_new_tokens": n, "policy": ASD} | more)


def test_an_answer_and_its_record(engine, client):
    answer = client.generate(ask(8))
    assert answer.output_ids == list(range(100, 108))
    assert (answer.steps, answer.proposed, answer.accepted, answer.relaxed, answer.regret) == (4, 28, 4, 2, 1.0)
    assert (answer.finish, answer.prompt_tokens, answer.cached_tokens, answer.policy_key) == ("length", 3, 2, ASD.key)
    assert answer.step_lengths == [1, 1, 1, 1]
    sent = engine.asked[0]["parameters"]
    assert sent["do_sample"] is False
    assert sent["return_details"] is True
    assert "temperature" not in sent


def test_many_at_once_keep_their_order_and_their_records(client):
    before = client.server().snapshot.counters
    answers = client.generate_many([ask(n) for n in range(2, 26)])
    after = client.server().snapshot.counters[ASD.key]
    assert before == {}
    assert [len(answer.output_ids) for answer in answers] == list(range(2, 26))
    assert after["blocks"] == sum(answer.steps for answer in answers)
    assert after["relaxed"] == sum(answer.relaxed for answer in answers)
    assert after["requests"] == 24
    assert client.generate_many([]) == []


def test_the_server_says_what_it_is(client, engine):
    found = client.server()
    assert (found.version, found.target, found.draft, found.max_running_requests) == ("lightspec+test", "T", "D", 16)
    assert found.snapshot.armed
    assert client.healthy()
    with pytest.raises(EngineError, match="disable_dynamic_prompt_cache"):
        client.flush()
    engine.info["disable_dynamic_prompt_cache"] = True
    client.flush()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("http", "http", "no memory left"),
        ("lost", "count", "7 output ids, count_output_tokens says 8"),
        ("prompt", "count", "sent 3 prompt ids, prompt_tokens says 4"),
        ("committed", "count", "the adapter saw 3 committed"),
        ("abort", "aborted", "abort"),
        ("silent", "identity", "expected a record of request"),
        ("nan", "garbled", "regret_charged: expected a finite number"),
        ("text", "garbled", "blocks: expected an integer from 0 to .*, found '4'"),
        ("negative", "garbled", r"tokens\.id\[0\]: expected an integer from 0 to .*, found -1"),
    ],
)
def test_faults(engine, client, monkeypatch, fault, kind, words):
    monkeypatch.setattr("harness.engines.lightllm.RECORD_TIMEOUT_S", 0.05)
    engine.fault = fault
    with pytest.raises(EngineError, match=words) as caught:
        client.generate(ask(8))
    assert caught.value.kind == kind


def test_counters_that_are_no_numbers(engine, client):
    engine.fault = "counter"
    client.generate(ask(8))
    with pytest.raises(EngineError, match=r"\.blocks: expected an integer from 0 to .*, found '4'") as caught:
        client.server()
    assert caught.value.kind == "garbled"


def test_a_policy_of_its_own_is_refused(client):
    with pytest.raises(EngineError, match=r"policy: expected this server's asd"):
        client.generate(ask(policy=Policy("strict")))
    with pytest.raises(EngineError, match=r"policy: chain is unsupported \(the sampled id"):
        client.generate(ask(policy=Policy("chain"), temperature=1.0))
    assert client.generate(ask(policy=None)).policy_key == ASD.key


def test_a_first_id_that_no_prompt_gave_has_no_step_lengths(engine, client):
    """The prompt was cached to its last id, so the first id is a step's and id 0 belongs to no prefill."""
    engine.fault = "cached"
    answer = client.generate(ask(8))
    assert (answer.step_lengths, answer.steps) == (None, 4)


def test_a_request_asked_again_under_its_seed(client):
    """The same sampled request twice, its first record not fetched yet: one record each."""
    first = ask(8, temperature=1.0, seed=77, policy=None)
    client._post("/generate", body(first, 77), 5.0)
    assert [client.generate(first).steps for _ in range(2)] == [4, 4]


@pytest.fixture
def bare(engine):
    """A client of the same engine without an adapter."""
    engine.telemetry.armed = False
    made = connect("lightllm", engine.url, unarmed=True)
    yield made
    made.close()


def test_an_unarmed_engine_is_told_by_its_own_totals(engine, bare):
    answer = bare.generate(ask(8, policy=None))
    assert answer.output_ids == list(range(100, 108))
    assert (answer.steps, answer.proposed, answer.accepted, answer.cached_tokens) == (5, 35, 4, 2)
    assert (answer.policy_key, answer.relaxed, answer.regret, answer.histogram, answer.step_lengths) == (
        None,
        0,
        0.0,
        [],
        None,
    )
    assert [len(a.output_ids) for a in bare.generate_many([ask(n, policy=None) for n in (4, 6, 8)])] == [4, 6, 8]
    engine.info["model_name"] = "default_model_name"
    found = bare.server()
    assert (found.target, found.draft, found.snapshot, found.nonce) == ("T", "D", None, None)
    engine.info["model_name"] = "this launch"
    assert bare.server().nonce == "this launch"


def test_an_unarmed_engine_has_no_policy(bare):
    with pytest.raises(EngineError, match="policy: expected none of an unarmed engine") as caught:
        bare.generate(ask())
    assert caught.value.kind == "identity"


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("few", "count", "8 output ids, the engine counted 1 steps and 0 accepted drafts"),
        ("negative-total", "garbled", "mtp_verify_token_num - mtp_verify_step_num: expected an integer from 0"),
        ("lost", "count", "7 output ids"),
    ],
)
def test_an_unarmed_engine_must_account_for_its_ids(engine, bare, fault, kind, words):
    engine.fault = fault
    with pytest.raises(EngineError, match=words) as caught:
        bare.generate(ask(8, policy=None))
    assert caught.value.kind == kind


def test_an_armed_client_needs_the_folder():
    with pytest.raises(ValueError, match="SPECACCEPT_TELEMETRY_DIR, found none"):
        connect("lightllm", "http://127.0.0.1:1")


def test_the_version_of_an_unarmed_engine_is_its_checkout_s(monkeypatch, tmp_path):
    assert installed_version() == ""
    (tmp_path / "lightllm").mkdir()  # a folder of that name is no engine
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version() == ""
    monkeypatch.syspath_prepend(str(DOUBLE))
    assert installed_version().startswith("lightspec+seams.")


def test_sampling_is_spelt_out():
    sent = body(ask(policy=None, temperature=0.7), 5)["parameters"]
    assert (sent["do_sample"], sent["temperature"], sent["top_p"], sent["top_k"], sent["seed"]) == (
        True,
        0.7,
        1.0,
        -1,
        5,
    )
    assert body(ask(), 6)["parameters"]["seed"] == 6


def test_not_armed(tmp_path, engine):
    client = LightLLMClient(engine.url, tmp_path / "elsewhere", 0.1)
    with pytest.raises(EngineError, match="not armed"):
        client.generate(ask())
    client.close()
