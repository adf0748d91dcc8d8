"""What a request may ask for, and the probabilities and draws of sampled requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adapters.policy import CUSTOM_PARAM, Policy, PolicyError

FIRST_REJECTIONS = f"{CUSTOM_PARAM}_first_rejections"
GREEDY_BELOW = 1e-6  # a smaller temperature means greedy, as in SGLang


class RequestError(ValueError):
    """A request field outside its domain: HTTP 400."""


def _check(ok: bool, field: str, expected: str, found: Any) -> None:
    if not ok:
        raise RequestError(f"{field}: expected {expected}, found {found!r}")


def _number(field: str, value: Any, kind: Any, low: float, high: float = float("inf")) -> Any:
    name = "an integer" if kind is int else "a number"
    bounds = f"{name} >= {low:g}" if high == float("inf") else f"{name} in {low:g}..{high:g}"
    ok = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
    found = f"an integer of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >= 1 << 64 else value
    _check(ok, field, bounds, found)
    return value


def token_ids(field: str, value: Any, vocabulary: int) -> list[int]:
    ok = isinstance(value, list) and all(type(i) is int and 0 <= i < vocabulary for i in value)
    _check(ok, field, f"a list of ids in 0..{vocabulary - 1}", value if not isinstance(value, list) else value[:8])
    return value


def within(policy: Policy, vocabulary: int) -> Policy:
    """The policy, whose ids must be tokens: a span that cannot open would be strict. Raises PolicyError."""
    for name in ("think_start", "think_end"):
        value = getattr(policy, name)
        if value is not None and value >= vocabulary:
            raise PolicyError(f"policy.{name}: expected an id below {vocabulary}, found {value}")
    return policy


@dataclass(frozen=True)
class Sampling:
    """SGLang's sampling_params, as far as this engine has them, and the acceptance policy asked for (None: default).

    temperature 0: greedy. top_k -1: off. seed None: the engine chooses one from the order of arrival.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_new_tokens: int = 128
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    policy: Policy | None = None
    first_rejections: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @classmethod
    def from_json(cls, raw: Any, vocabulary: int) -> Sampling:
        _check(isinstance(raw, Mapping), "sampling_params", "an object", raw)
        given = {key: value for key, value in raw.items() if value is not None}
        known = {"temperature", "top_k", "top_p", "max_new_tokens", "ignore_eos", "stop_token_ids", "sampling_seed"}
        unknown = sorted(given.keys() - known - {"custom_params"})
        if unknown:
            raise RequestError(
                f"sampling_params.{unknown[0]}: this engine does not have it; it has {', '.join(sorted(known))}"
            )
        at, out = "sampling_params.", cls()
        if "temperature" in given:
            out = replace(
                out, temperature=float(_number(at + "temperature", given["temperature"], (int, float), 0, 1000))
            )
        if "top_k" in given:
            k = _number(at + "top_k", given["top_k"], int, -1)
            _check(k != 0, at + "top_k", "-1 or an integer >= 1", k)
            out = replace(out, top_k=k)
        if "top_p" in given:
            p = float(_number(at + "top_p", given["top_p"], (int, float), 0, 1))
            _check(p > 0, at + "top_p", "a number in (0, 1]", p)
            out = replace(out, top_p=p)
        if "max_new_tokens" in given:
            out = replace(out, max_new_tokens=_number(at + "max_new_tokens", given["max_new_tokens"], int, 1))
        if "ignore_eos" in given:
            _check(isinstance(given["ignore_eos"], bool), at + "ignore_eos", "true or false", given["ignore_eos"])
            out = replace(out, ignore_eos=given["ignore_eos"])
        if "stop_token_ids" in given:
            stops = token_ids(at + "stop_token_ids", given["stop_token_ids"], vocabulary)
            out = replace(out, stop_token_ids=tuple(stops))
        if "sampling_seed" in given:
            out = replace(out, seed=_number(at + "sampling_seed", given["sampling_seed"], int, 0, 2**63 - 1))
        custom = given.get("custom_params", {})
        _check(isinstance(custom, Mapping), at + "custom_params", "an object", custom)
        if custom.get(CUSTOM_PARAM) is not None:
            try:
                policy = Policy.from_json(custom[CUSTOM_PARAM])
                out = replace(out, policy=within(policy, vocabulary))
            except PolicyError as error:
                raise RequestError(f"sampling_params.custom_params.{CUSTOM_PARAM}: {error}") from None
        if FIRST_REJECTIONS in custom:
            wanted = custom[FIRST_REJECTIONS]
            _check(isinstance(wanted, bool), f"{at}custom_params.{FIRST_REJECTIONS}", "true or false", wanted)
            out = replace(out, first_rejections=wanted)
        return out


def target_probs(logits: Tensor, params: Sequence[Sampling]) -> Tensor:
    """logits [n, ..., V] float32 -> probabilities after temperature, then top-k, then top-p of what top-k left."""
    shape = (len(params),) + (1,) * (logits.ndim - 1)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device).view(shape)

    p = torch.softmax(logits / column([s.temperature for s in params]), -1)
    size = logits.shape[-1]
    ks = [s.top_k if 0 < s.top_k < size else size for s in params]
    if all(k == size for k in ks) and all(s.top_p >= 1 for s in params):
        return p
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(size, device=p.device) >= column([float(k) for k in ks]), 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    top_p = column([s.top_p for s in params])
    cut = (before >= top_p) & (top_p < 1)
    cut[..., 0] = False  # a top_p that is 0 in float32 still leaves the likeliest token
    ordered = ordered.masked_fill(cut, 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, ordered)


def draw(probs: Tensor, noise: Tensor) -> Tensor:
    """probs, noise [n, V], noise Exp(1) -> ids [n], distributed as probs: the winner of an exponential race."""
    return torch.where(probs > 0, probs / noise, -1.0).argmax(-1)
