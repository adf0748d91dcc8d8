"""The engine on a CUDA device: the ids of the CPU, every rule, both types."""

from __future__ import annotations

import pytest
import torch
from reference_pair import make_draft, make_target

from adapters.policy import Policy
from harness.engines.reference.engine import Request
from harness.engines.reference.loading import Options, build
from harness.engines.reference.sampling import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 17, 9, 30, 12)]

RELAXED = (Policy("relaxed-topk", top_n=10, delta=0.6), Policy("relaxed-ratio", top_n=3, ratio=0.2))
LOOSE = (
    Policy("typical", epsilon=0.09, alpha=0.3),
    Policy("thresholds", threshold_single=0.3, threshold_acc=0.5),
    Policy("entropy", alpha=0.4, tau=0.95),
)


def serve(device: str, dtype: torch.dtype, policy: Policy, slots: int = 3, **sampling) -> list[Request]:
    target = make_target().to(device, dtype)
    draft = make_draft(make_target()).to(device, dtype).attach(target)
    engine = build(target, draft, Options("t", "d", device=device, slots=slots, limit=100))
    params = Sampling(**{"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, "policy": policy, **sampling})
    return list(engine.generate([Request(str(i), p, params) for i, p in enumerate(PROMPTS)]))


@pytest.mark.parametrize(
    "policy", [Policy("strict"), Policy("asd", 0.0), Policy("asd", 20.0, 8.0, 2), *RELAXED], ids=str
)
def test_float32_gives_the_ids_of_the_cpu(policy):
    ours, cpu = serve("cuda", torch.float32, policy), serve("cpu", torch.float32, policy)
    assert [r.output for r in ours] == [r.output for r in cpu]
    assert [r.spent for r in ours] == pytest.approx([r.spent for r in cpu], abs=1e-2)


@pytest.mark.parametrize("slots", [1, 5])
def test_bfloat16_serves_every_rule(slots):
    for policy, temperature in (
        (Policy("strict"), 0.0),
        (Policy("asd", 5.0), 0.0),
        (Policy("chain"), 1.0),
        (Policy("block"), 0.7),
        *((policy, 0.0) for policy in RELAXED),
        *((policy, 1.0) for policy in LOOSE),
    ):
        requests = serve("cuda", torch.bfloat16, policy, slots, temperature=temperature, seed=1, top_p=0.9)
        assert all(len(r.output) == 40 and r.policy == policy for r in requests)


@pytest.mark.parametrize("policy", [Policy("chain"), Policy("block"), *LOOSE], ids=str)
def test_a_seed_fixes_a_sampled_request(policy):
    first, again = (serve("cuda", torch.float32, policy, temperature=1.0, seed=3) for _ in range(2))
    assert [r.output for r in first] == [r.output for r in again]
