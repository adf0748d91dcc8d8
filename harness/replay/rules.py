"""Every policy on a table of blocks, in numpy: what adapters/rules decides from full rows, from the captured scalars.

`survival` gives P(accept length > i) of every block: 0 or 1 for a rule without coins, and for one with coins the exact
probability, which takes their place. `coins` puts them back, so that a block is decided as the engine decided it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adapters.policy import Policy
from harness.replay.table import Array, Table

WITH_COINS = ("chain", "block", "thresholds", "entropy")


class Unsupported(ValueError):
    """Why a policy cannot be replayed on this capture."""


def survival(policy: Policy, table: Table, coins: Array | None = None) -> Array:
    """[N, K]: the probability that a block accepts more than i drafts. bool where no coin is left.

    coins [N, K]: the eta of each draft; None: integrated out. Raises Unsupported.
    """
    if policy.rule == "asd":
        return reached(asd(policy, table), table.drafts)
    if policy.rule not in RULES:
        raise Unsupported(f"{policy.rule}: the engine's own kernel; its rule is another policy's")
    found = RULES[policy.rule](policy, table)
    if policy.rule == "block":
        return _reached_by_block(found) if coins is None else _last_good((coins <= found) & (found > 0))
    if policy.rule not in WITH_COINS:
        return np.logical_and.accumulate(found & table.verified, axis=1)
    chance = np.where(table.verified & (found > 0), found, 0.0)  # what is not a number accepts nothing
    if coins is None:
        return np.multiply.accumulate(chance, axis=1)
    return np.logical_and.accumulate((coins <= chance) & (chance > 0), axis=1)


def nearest_coin(policy: Policy, table: Table, coins: Array) -> Array:
    """[N]: how near to its threshold a coin of each block lies, as a share of the threshold; inf without any."""
    chance = RULES[policy.rule](policy, table)
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.abs(coins - chance) / chance
    return np.where(table.verified & (chance > 0) & (chance < 1), gap, np.inf).min(1)


def reached(length: Array, drafts: int) -> Array:
    """lengths [N] -> [N, K] bool: more than i."""
    return length[:, None] > np.arange(drafts)


def tokens(survive: Array, table: Table) -> Array:
    """Expected tokens of each block, [N] float64: accepted drafts and the bonus, at most what the request had room
    for."""
    room = np.arange(1, table.drafts + 1) < table.cut[:, None]
    return 1.0 + np.where(room, survive, 0).sum(1, dtype=np.float64)


# -- greedy rules: [N, K] bool, which drafts pass


def strict(policy: Policy, table: Table) -> Array:
    return table.matched


def relaxed_topk(policy: Policy, table: Table) -> Array:
    """x within the top_n of p, and p(x) >= p(top) - delta; only inside a thinking span where the policy names one."""
    assert policy.top_n is not None
    assert policy.delta is not None
    if (table.temperature != 1).any():
        raise Unsupported(f"{policy.rule}: of p at temperature 1; the capture has p at the requests' own")
    p_x = np.exp(table.z_x - table.lse[:, :-1])
    p_top = np.exp(table.z_max[:, :-1] - table.lse[:, :-1])
    near = (table.rank < policy.top_n) & (p_x >= p_top - np.float32(policy.delta))
    return table.matched | (near & _span(policy, table))


def relaxed_ratio(policy: Policy, table: Table) -> Array:
    """x within the top_n, and p(x) >= ratio p(top), which is a gap of logits."""
    assert policy.top_n is not None
    assert policy.ratio is not None
    near = (table.rank < policy.top_n) & (table.regret <= np.float32(-np.log(policy.ratio)))
    return table.matched | (near & _span(policy, table))


def _span(policy: Policy, table: Table) -> Array:
    if policy.think_start is None or policy.think_end is None:
        return np.ones((1, 1), bool)
    return table.inside(policy.think_start, policy.think_end)[:, :-1]


def typical(policy: Policy, table: Table) -> Array:
    """p(x) > min(epsilon, alpha exp(-H)), p and H of softmax(z / T)."""
    assert policy.epsilon is not None
    assert policy.alpha is not None
    T = table.temperature[:, None]
    p_x = np.exp(table.z_x / T - table.lse[:, :-1])
    return p_x > np.minimum(np.float32(policy.epsilon), np.float32(policy.alpha) * np.exp(-table.entropy[:, :-1]))


# -- rules with a coin: [N, K], the chance that a draft passes


def _ratio(table: Table) -> Array:
    """p(x)/q(x) of every draft; q = 1 where it was not drawn."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.exp(table.log_p.astype(np.float64) - table.log_q)


def chain(policy: Policy, table: Table) -> Array:
    return np.minimum(_ratio(table), 1.0)


def thresholds(policy: Policy, table: Table) -> Array:
    """coin <= p(x) / threshold_acc, or p(x) >= threshold_single."""
    assert policy.threshold_single is not None
    assert policy.threshold_acc is not None
    p_x = np.exp(table.log_p.astype(np.float64))
    chance = np.minimum(p_x / max(policy.threshold_acc, 1e-9), 1.0)
    return np.where(p_x >= policy.threshold_single, 1.0, chance)


def entropy(policy: Policy, table: Table) -> Array:
    """coin min(exp(-alpha H), tau) <= p(x)/q(x), H of the raw logits."""
    assert policy.alpha is not None
    assert policy.tau is not None
    if np.isnan(np.where(table.verified, table.entropy_raw[:, :-1], 0)).any():
        raise Unsupported(f"{policy.rule}: of the raw logits' entropy, which the capture does not have in every row")
    scale = np.minimum(np.exp(-policy.alpha * table.entropy_raw[:, :-1].astype(np.float64)), policy.tau)
    return np.minimum(_ratio(table) / scale, 1.0)


def block(policy: Policy, table: Table) -> Array:
    """h [N, K]: the chance that draft i + 1 is one the block may stop behind; 0 where it was not verified. Functions of
    the drafts alone."""
    K, live = table.drafts, table.live
    ratio = _ratio(table)
    ratio = np.where(ratio >= 0, ratio, 0.0)
    w, h = np.ones(len(table)), np.zeros((len(table), K))
    for i in range(1, K + 1):
        w = np.minimum(w * ratio[:, i - 1], 1.0)
        last = np.where(live == i, w, 0.0)
        if i == K:
            h[:, i - 1] = last
            break
        S = _excess(table, w, i)
        with np.errstate(invalid="ignore", divide="ignore"):
            inner = np.where(S > 0, S / (S + 1 - w), 0.0)
        h[:, i - 1] = np.where(live > i, inner, last)
    return h


def _excess(table: Table, w: Array, i: int) -> Array:
    """S_i = sum_v max(w p - q, 0) in row i: captured where drafts were drawn, by hand where q is one-hot."""
    p_x = np.exp(table.log_p[:, i].astype(np.float64))
    one_hot = w * (1 - p_x) + np.maximum(w * p_x - 1, 0)
    return np.where(table.drawn, table.excess[:, i], one_hot)


def _reached_by_block(h: Array) -> Array:
    """P(tau > i): some coin behind draft i is good. The coins are independent."""
    return 1 - np.multiply.accumulate((1 - h)[:, ::-1], axis=1)[:, ::-1]


def _last_good(good: Array) -> Array:
    """[N, K]: some good draft at i or behind it."""
    return np.logical_or.accumulate(good[:, ::-1], axis=1)[:, ::-1]


# -- ASD: a ledger per request, so blocks in order


def asd(policy: Policy, table: Table) -> Array:
    """Accept lengths [N] int64 of a walk in float32, one step of all requests at a time.

    The ledger is charged in every captured block, as if the policy had met each of them.
    """
    budget, gate = np.float32(policy.budget), np.float32(policy.gate)
    cap = 2**31 - 1 if policy.max_mismatches is None else policy.max_mismatches
    order = np.argsort(-table.count, kind="stable")  # requests with most steps first: those still running are a prefix
    first, count = table.first[order], table.count[order]
    spent = np.zeros(len(order), np.float32)
    length = np.zeros(len(table), np.int64)
    matched, regret, live = table.matched, table.regret, table.live
    running = np.searchsorted(-count, -np.arange(1, 1 + int(count.max(initial=0))), side="right")
    for step, active in enumerate(running):
        rows = first[:active] + step
        length[rows] = _walk(
            matched[rows], regret[rows], live[rows], spent[:active], budget, gate, cap, policy.suffix_value
        )
    return length


def _walk(
    matched: Array,
    regret: Array,
    live: Array,
    spent: Array,
    budget: np.float32,
    gate: np.float32,
    cap: int,
    suffix_value: str,
) -> Array:
    """One block of each request; spent [n] float32 is charged in place."""
    n, K = matched.shape
    going, relaxed, length = np.ones(n, bool), np.zeros(n, np.int64), np.zeros(n, np.int64)
    own = live.astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        for i in range(K):
            left = own - np.float32(i)
            value = left / own if suffix_value == "normalized" else left
            r = regret[:, i]
            after = spent + r
            fits = (spent < budget) & (after <= budget) & (r >= 0) & (r <= gate * value) & (relaxed < cap)
            here = going & (i < live)
            charged = here & ~matched[:, i] & fits & np.isfinite(r)
            spent[charged] = after[charged]
            relaxed += charged
            going = here & (matched[:, i] | charged)
            if not going.any():
                break
            length += going
    return length


RULES: dict[str, Callable[[Policy, Table], Array]] = {
    "strict": strict,
    "relaxed-topk": relaxed_topk,
    "relaxed-ratio": relaxed_ratio,
    "typical": typical,
    "chain": chain,
    "block": block,
    "thresholds": thresholds,
    "entropy": entropy,
}
