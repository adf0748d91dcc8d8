"""The HTTP client: what an answer must account for, and the kind of every failure."""

import pytest

from adapters.policy import Policy
from harness.engines.base import EngineError, Request
from harness.engines.native import NativeClient, _generation

ASD = Policy("asd", 2.0, 2.0, 1, "normalized")


def ask(n: int = 0, **more) -> Request:
    return Request(**{"rid": f"r{n}", "input_ids": [1, 2, 3 + n], "max_new_tokens": 16, "policy": ASD} | more)


@pytest.fixture
def connect(server):
    clients = []

    def make(*fault, **after) -> NativeClient:
        clients.append(NativeClient(server(*fault, **after)))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_answers_one_and_many(connect):
    client = connect()
    requests = [ask(n) for n in range(5)]
    single = [client.generate(request) for request in requests]
    many = client.generate_many(requests)
    assert [answer.output_ids for answer in many] == [answer.output_ids for answer in single]
    assert all(answer.policy_key == ASD.key for answer in many)
    assert len({answer.wall_s for answer in many}) == 1  # a list has one wall
    assert client.generate_many([]) == []
    counters = client.server().snapshot.counters[ASD.key]
    assert counters["requests"] == 10
    assert counters["blocks"] == sum(answer.steps for answer in single + many)
    client.flush()
    assert client.healthy()


def test_finish_and_seed(connect):
    client = connect()
    assert client.generate(ask(max_new_tokens=3)).finish == "length"
    assert client.generate(ask(max_new_tokens=64)).finish == "stop"
    sampled = {"policy": Policy("chain"), "temperature": 1.0}
    first, again, other = (client.generate(ask(seed=seed, **sampled)).output_ids for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("usage", "count", "completion_tokens"),
        ("http", "http", "no memory left"),
        ("hang", "timeout", "0.5 s"),
        ("drip", "timeout", "0.5 s"),
        ("truncated", "connection", "/generate"),
        ("garbled", "garbled", "JSON"),
        ("aborted", "aborted", "out of slots"),
        ("die", "connection", "/generate"),
        ("negative-id", "garbled", r"output_ids\[0\]: expected an integer from 0 to 2147483647, found -1"),
        (
            "huge-id",
            "garbled",
            r"output_ids\[0\]: .*, found 1180591620717411303424",
        ),
        ("real-id", "garbled", r"output_ids\[0\]: .*, found 7.0"),
        ("nan", "garbled", "regret: expected a finite number >= 0, found nan"),
        ("late", "garbled", "e2e_latency: expected a finite number >= 0, found 'soon'"),
        ("text-count", "garbled", "spec_verify_ct: expected an integer from 0 to .*, found '3'"),
    ],
)
def test_a_failure_has_its_kind(connect, fault, kind, words):
    client = connect(fault)
    with pytest.raises(EngineError, match=words) as caught:
        client.generate(ask(deadline_s=0.5))
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


def test_nobody_listens(connect):
    client = NativeClient("http://127.0.0.1:1")
    assert not client.healthy()
    with pytest.raises(EngineError) as caught:
        client.generate(ask())
    assert caught.value.kind == "connection"
    client.close()


def test_an_unarmed_engine_is_refused(connect):
    with pytest.raises(EngineError, match="not armed") as caught:
        connect("unarmed").server()
    assert caught.value.kind == "identity"


def test_counters_that_are_no_numbers_are_garbled(connect):
    client = connect("text-counter")
    client.generate(ask())
    with pytest.raises(
        EngineError, match=r"counters\..*\.blocks: expected an integer from 0 to .*, found '12'"
    ) as caught:
        client.server()
    assert caught.value.kind == "garbled"


def test_a_malformed_policy_names_its_field(connect):
    client = connect()
    body = {
        "input_ids": [1],
        "sampling_params": {"max_new_tokens": 1, "custom_params": {"specaccept": {"rule": "lax"}}},
    }
    with pytest.raises(EngineError, match=r"status 400.*policy\.rule"):
        client._post("/generate", body, 5)


@pytest.mark.parametrize(
    ("lengths", "found"),
    [(None, None), ([2, 0, 3], [2, 0, 3]), ([2, 3], "2 and 5"), ([2, 0, 2], "3 and 4"), ([2, 0, -1], "garbled")],
)
def test_the_lengths_of_the_steps_add_up_or_are_an_error(lengths, found):
    own = {} if lengths is None else {"step_lengths": lengths}
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "spec_verify_ct": 3,
        "spec_num_correct_drafts": 5,
        "specaccept": own,
    }
    body = {"output_ids": [7, 8], "meta_info": meta}
    if isinstance(found, str):
        with pytest.raises(EngineError, match=found):
            _generation(body, ask(), 0.0, 0.1)
    else:
        assert _generation(body, ask(), 0.0, 0.1).step_lengths == found


INFO = {
    "version": "0.5.16",
    "model_path": "t",
    "weight_version": "n0nce",
    "internal_states": [{"dspark_info_record": {"verify_ct": 3}}],
}


def test_an_unarmed_engine_describes_itself(monkeypatch):
    client = NativeClient("http://127.0.0.1:1", unarmed=True)
    monkeypatch.setattr(client, "_get", lambda path: INFO)
    found = client.server()
    assert (found.snapshot, found.nonce) == (None, "n0nce")
    monkeypatch.setattr(client, "_get", lambda path: INFO | {"weight_version": "default"})
    assert client.server().nonce is None


def test_an_unarmed_engine_that_has_the_adapter_is_refused(connect):
    armed = connect()
    client = NativeClient(armed.url, unarmed=True)
    with pytest.raises(EngineError, match=r"identity: /server_info: expected no snapshot"):
        client.server()
    with pytest.raises(EngineError, match=r"identity: r0: policy: expected none"):
        client.generate(ask())
    with pytest.raises(EngineError, match=r"identity: r1: policy: expected none"):
        client.generate_many([ask(policy=None), ask(1)])
    with pytest.raises(EngineError, match=r"identity: meta_info\.specaccept: expected none"):
        client.generate(ask(policy=None))  # it answers, and names the rule that served
    client.close()


@pytest.mark.parametrize(("own", "proposed"), [({}, 21), ({"drafts_verified": 9}, 9)])
def test_the_drafts_of_a_capped_block_are_those_that_are_live(own, proposed):
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "spec_verify_ct": 3,
        "spec_num_proposed_drafts": 21,
        "specaccept": own,
    }
    assert _generation({"output_ids": [7, 8], "meta_info": meta}, ask(), 0.0, 0.1).proposed == proposed
