"""Arming against the real wheel: hooks in place, drift and unserved servers refused, malformed policies answered."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace

import pytest
import sglang
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.dflash_utils import validate_dflash_request
from toy_engine import ToyWorker, blocks, decode, prefilled, request, server_args

from adapters.arm import Arming, Refused
from adapters.policy import REFERENCE_ONLY, REFERENCE_RULES, RULES, Policy, PolicyError
from adapters.sglang import plugin, seams
from adapters.sglang.adapter import HOOKS, OPEN, is_hooked

OLD = not seams.since(sglang.__version__, seams.NATIVE_BLOCK_SINCE)  # no block verification of its own
ALWAYS = set(REFERENCE_RULES) | ({"block-engine"} if OLD else set())  # refused on every server of this release
WIDE, BLOCK = Policy("asd", budget=2.0), Policy("block")


def test_every_seam_of_this_release_is_as_the_table_says_and_hooked(adapter):
    paths = seams.check(sglang.__version__)
    assert set(HOOKS) < set(paths)
    for name, method in HOOKS.items():
        assert is_hooked(paths[name], method), name


@pytest.mark.parametrize(
    ("name", "module"),
    [("accept", "dspark_verify"), ("finalize", "TargetVerifyExecutor"), ("greedy", "dspark_accept")],
)
def test_a_parameter_list_that_changed_is_refused_by_name(adapter, monkeypatch, name, module):
    path = seams.expected(sglang.__version__)[name][0]
    owner, _, attribute = path.rpartition(".")
    assert module in owner
    monkeypatch.setattr(seams.resolve(owner), attribute, lambda *, bs, something_new: None)
    with pytest.raises(Refused, match=rf"{attribute}: expected parameters .* found \['bs', 'something_new'\]"):
        seams.check(sglang.__version__)


def test_a_name_that_is_gone_is_refused_by_name(adapter, monkeypatch):
    path = seams.expected(sglang.__version__)["payload"][0]
    owner, _, attribute = path.rpartition(".")
    monkeypatch.delattr(seams.resolve(owner), attribute)
    with pytest.raises(Refused, match=r"_GenerationStreamAccumulator\.to_payload: expected a callable"):
        seams.check(sglang.__version__)


@pytest.mark.parametrize("version", ["0.5.15.post1", "0.5.24", "0.5.23.dev1", "1.0.0"])
def test_another_release_is_refused(version):
    with pytest.raises(Refused, match=f"sglang {version}: expected one of 0.5.16"):
        seams.expected(version)


def test_a_hook_that_was_not_applied_keeps_the_worker_from_starting(adapter, monkeypatch):
    path = seams.expected(sglang.__version__)["resolve"][0]
    owner, _, attribute = path.rpartition(".")
    wrapper = getattr(seams.resolve(owner), attribute)
    monkeypatch.setattr(seams.resolve(owner), attribute, wrapper.__wrapped__)
    adapter.arming = Arming(default=WIDE)
    with pytest.raises(Refused, match="_resolve_spec_v2_tokens: expected the hook resolve"):
        adapter.worker_start(lambda *a: None, ToyWorker(5), server_args())
    assert not adapter.telemetry.armed


def test_an_accept_that_does_not_relax_keeps_the_worker_from_starting(adapter, monkeypatch):
    accept = seams.resolve(seams.expected(sglang.__version__)["greedy"][0].rpartition(".")[0])
    monkeypatch.setattr(accept.AcceptGreedy, "execute", classmethod(lambda cls, **kw: native(accept, **kw)))
    with pytest.raises(Refused, match="accept greedy: expected lengths"):
        adapter.arm(ToyWorker(5), server_args())


def native(accept, *, candidates, target_logits, verify_num_draft_tokens):
    top = target_logits.argmax(-1).view(candidates.shape)
    length = (candidates[:, 1:] == top[:, :-1]).cumprod(1).sum(1)
    return length, top.gather(1, length[:, None])[:, 0], length * 0


@pytest.mark.parametrize(
    ("attribute", "value", "rules", "why"),
    [
        ("_simulate_acc_len", 3.0, set(RULES), "SGLANG_SIMULATE_ACC_LEN"),
        ("_verify_epilogue", object(), {"asd"}, "inside the verify CUDA graph"),
        ("_greedy_draft", True, {"block", "block-engine"}, "SGLANG_DSPARK_USE_GREEDY_DRAFT"),
        ("_sampling_accept_graph", object(), {"block", "block-engine"}, "SAMPLING_ACCEPT_GRAPH"),
        ("_rejection_noise", object(), {"block", "block-engine"}, "BLOCKWISE_REJECTION"),
    ],
)
def test_what_a_server_cannot_honour_is_refused_at_start_or_at_admission(adapter, attribute, value, rules, why):
    worker = ToyWorker(5)
    setattr(worker, attribute, value)
    adapter.arm(worker, server_args())
    assert set(adapter.refused) == rules | ALWAYS
    for policy in (WIDE, BLOCK):
        message = validate_dflash_request(request(policy=policy), True)
        assert (message is not None) == (policy.rule in rules)
        assert message is None or why in message
        adapter.arming = Arming(default=policy)
        if policy.rule in rules:
            with pytest.raises(Refused, match=why):
                adapter.arm(worker, server_args())


@pytest.mark.parametrize(
    "policy", [Policy("typical", epsilon=0.09, alpha=0.3), Policy("relaxed-ratio", top_n=3, ratio=0.5)], ids=str
)
def test_a_rule_of_the_reference_engine_is_refused_by_name(adapter, policy):
    adapter.arm(ToyWorker(5), server_args())
    assert validate_dflash_request(request(policy=policy), True).endswith(f"{policy.rule} is {REFERENCE_ONLY}")
    adapter.arming = Arming(default=policy)
    with pytest.raises(Refused, match=f"{policy.rule} is {REFERENCE_ONLY}"):
        adapter.arm(ToyWorker(5), server_args())


@pytest.mark.parametrize(
    "changed",
    [{"disaggregation_mode": "decode"}, {"pp_size": 2}, {"tokenizer_worker_num": 2}, {"enable_dp_attention": True}],
)
def test_a_layout_without_proof_is_refused(adapter, changed):
    adapter.arm(ToyWorker(5), server_args(**changed))
    assert set(adapter.refused) == set(RULES)
    assert next(iter(changed)) in adapter.refused["asd"]


def test_the_engines_own_block_verification_is_told_apart(adapter):
    worker = ToyWorker(5)
    worker._verify_executor._block_verification = True
    adapter.arm(worker, server_args())
    assert set(adapter.refused) == ALWAYS | {"chain"}
    req = request("r", 0.7, WIDE)
    assert adapter.state(req).key == "block-engine"


def test_ranks_that_the_engine_does_not_align_are_aligned_here(adapter, monkeypatch):
    group = SimpleNamespace(world_size=2, rank_in_group=0)
    monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: group)
    adapter.arm(ToyWorker(5), server_args(tp_size=2))
    assert adapter.worker.group is group
    assert adapter.worker.broadcasts == (sglang.__version__ in ("0.5.16", "0.5.17", "0.5.18"))
    monkeypatch.setenv("SGLANG_SPEC_TP_SYNC", "init")
    adapter.arm(ToyWorker(5), server_args(tp_size=2))
    assert "SGLANG_SPEC_TP_SYNC" in adapter.refused["asd"]


def test_a_policy_on_a_server_without_dspark_is_refused(adapter):
    adapter.scheduler_start(lambda *a: None, None)  # nothing asked for: any server may start
    adapter.arming = Arming(default=WIDE)
    with pytest.raises(Refused, match="--speculative-algorithm DSPARK"):
        adapter.scheduler_start(lambda *a: None, None)


def test_without_a_policy_a_worker_that_cannot_arm_serves_on_and_refuses_requests(adapter, monkeypatch):
    monkeypatch.setattr(adapter, "version", "0.5.99")
    adapter.worker_start(lambda *a: None, ToyWorker(5), server_args())
    assert not adapter.telemetry.armed
    assert validate_dflash_request(request(), True) is None
    assert "0.5.99" in validate_dflash_request(request(policy=WIDE), True)
    req, worker = request(), ToyWorker(5)
    prefilled(worker, [req], [1])
    assert len(worker.forward_batch_generation(decode([req], [1], *blocks(0, 1, 5, 24))).next_token_ids) == 6


# -- the plugin itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{"SPECACCEPT_POLICY": json.dumps(WIDE.to_json())}, {"DSV41_BLOCK_VERIFY": "1"}])
def test_a_plugin_that_cannot_install_ends_the_process_where_a_policy_was_asked_for(adapter, monkeypatch, environ):
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    with pytest.raises(SystemExit, match=r"sglang 0\.5\.99: expected one of"):
        plugin.register(environ)


def test_a_malformed_policy_ends_the_process(adapter):
    with pytest.raises(SystemExit, match=r"policy\.budget: expected"):
        plugin.register({"SPECACCEPT_POLICY": '{"rule": "asd", "budget": -1}'})


def test_on_an_unknown_release_only_requests_with_a_policy_are_refused(adapter, monkeypatch):
    hooks = []
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    monkeypatch.setattr(HookRegistry, "register", lambda path, hook, kind: hooks.append((path, hook)))
    plugin.register({})
    [(path, hook)] = hooks
    assert path.endswith("SamplingParams.verify")
    hook(lambda *a: None, SimpleNamespace(custom_params=None), 99)
    with pytest.raises(ValueError, match=r"not armed: sglang 0\.5\.99"):
        hook(lambda *a: None, SimpleNamespace(custom_params={"specaccept": {"rule": "strict"}}), 99)


# -- admission -----------------------------------------------------------------------------------------------------

MALFORMED = [
    ({"rule": "asd", "budget": "2"}, "policy.budget: expected"),
    ({"rule": "asd", "bugdet": 2}, "policy: unknown field 'bugdet'"),
    ({"rule": "lax"}, "policy.rule: expected one of"),
    ("asd", "policy: expected a JSON object"),
]


@pytest.mark.parametrize(("value", "why"), MALFORMED)
def test_a_malformed_request_policy_is_the_clients_error_in_both_processes(adapter, worker, monkeypatch, value, why):
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.get_parallel", lambda: SimpleNamespace(tp_rank=1))
    params = SamplingParams(temperature=0.0, custom_params={"specaccept": value})
    with pytest.raises(ValueError, match=r"sampling_params\.custom_params\.specaccept: ") as caught:
        params.verify(1000)
    assert why in str(caught.value)
    req = Req(rid="r", origin_input_text="", origin_input_ids=array("q", [1]), sampling_params=params)
    message = validate_dflash_request(req, True)
    assert why in message
    req.set_finish_with_abort(message)  # what the scheduler does with it
    assert (req.to_finish.to_json()["type"], req.to_finish.to_json()["status_code"]) == ("abort", 400)
    assert adapter.state(req) is None


def test_over_http_a_malformed_policy_is_a_400_that_names_the_field(adapter, monkeypatch):
    http_server = pytest.importorskip("sglang.srt.entrypoints.http_server")

    class Manager:
        """The engine's parsing of sampling parameters, without its queue."""

        async def generate_request(self, obj, request):
            params = SamplingParams(**obj.sampling_params)
            params.normalize(None)
            params.verify(1000)
            yield {"text": ""}

    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=Manager()))
    serve = getattr(http_server, "serve_generate_request", http_server.generate_request)
    codes = []
    for policy in ({"rule": "asd", "budget": -1}, {"rule": "asd", "budget": 1}):
        obj = SimpleNamespace(stream=False, sampling_params={"custom_params": {"specaccept": policy}})
        response = asyncio.run(serve(obj, SimpleNamespace(headers={})))
        codes.append(response.status_code)
        if response.status_code == 400:
            assert "sampling_params.custom_params.specaccept: policy.budget: expected" in response.body.decode()
    assert codes == [400, 200]


def test_policies_are_remembered_within_bounds(adapter):
    text = json.dumps(WIDE.to_json())
    for padded in (text, text + " " * 10**6):  # the same policy, and a megabyte that nobody should keep
        assert adapter.requested({"specaccept": padded}) == WIDE
    for n in range(2 * OPEN):
        assert adapter.requested({"specaccept": {"rule": "asd", "budget": n / 4}}).budget == n / 4
    assert len(adapter.policies) == OPEN
    assert max(map(len, adapter.policies)) < OPEN
    assert adapter.requested({"specaccept": {"rule": "asd", "budget": 1}}) is not None  # true == 1 in Python
    with pytest.raises(PolicyError, match="budget"):
        adapter.requested({"specaccept": {"rule": "asd", "budget": True}})


def test_other_custom_params_are_left_alone(adapter, worker):
    params = SamplingParams(temperature=0.0, custom_params={"thinking_budget": 3})
    params.verify(1000)
    req = Req(rid="r", origin_input_text="", origin_input_ids=array("q", [1]), sampling_params=params)
    assert validate_dflash_request(req, True) is None
    assert adapter.state(req) is None
