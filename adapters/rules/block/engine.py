"""Block verification or token rejection inside an engine's step: seeds, steps, temperatures by slot, static buffers.

    state = SampledState("block", slots=256, K=7, rows=64, vocabulary=151936, device="cuda")
    state.assign([slot], seeds=[request_seed], temperature=[0.7])        # a request enters; outside a graph
    step = state.from_logits(draft_ids, target_logits, draft_logits, slots)   # in the step, capturable, no host sync

Coins are counter-based (noise.py): replicas that see the same tensors commit the same tokens,
and each step of a slot, graph replays included, draws anew. On CPU tensors the same object runs the oracle
(the kernels under TRITON_INTERPRET=1). A slot of -1 pads: not read, not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from adapters.rules.block import naive
from adapters.rules.block.noise import CHUNK, of_pieces, of_tokens, uniform
from adapters.rules.common import COUNTERS, FLOATS, INTS, MAX_DRAFTS, RuleError, check, prefix_length, use_kernel


class Step(NamedTuple):
    """Views of the state's buffers, overwritten by its next step.

    length [B] int32: drafts committed. bonus [B] int64. ids [B, K+1] int64: the drafts up to length, then the bonus.
    """

    length: Tensor
    bonus: Tensor
    ids: Tensor


class SampledState:
    """Static buffers for `slots` request slots and steps of up to `rows` requests of K drafts (K <= 15).

    seeds, steps [slots] int64; temperature, draft_temperature [slots] float32 (only from_logits reads them);
    counts [slots, len(COUNTERS)] int64 since the slot was assigned, accepted drafts under strict_accepted.
    Beside the logits it needs under 0.4 % of their size. Raises RuleError naming the field.
    """

    def __init__(
        self,
        rule: Literal["block", "chain"],
        slots: int,
        K: int,
        rows: int,
        vocabulary: int,
        device: torch.device | str,
        chunk: int = CHUNK,
    ) -> None:
        if rule not in ("block", "chain"):
            raise RuleError(f"rule: expected block or chain, found {rule!r}")
        if not 1 <= K <= MAX_DRAFTS:
            raise RuleError(f"K: expected 1..{MAX_DRAFTS} drafts, found {K}")
        if chunk < 16 or chunk & (chunk - 1):
            raise RuleError(f"chunk: expected a power of two >= 16, found {chunk}")
        device = torch.empty(0, device=device).device
        self.rule, self.K, self.rows, self.vocabulary, self.chunk = rule, K, rows, vocabulary, chunk
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.steps = torch.zeros(slots, dtype=torch.int64, device=device)
        self.temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self.draft_temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self.counts = torch.zeros(slots, len(COUNTERS), dtype=torch.int64, device=device)
        self._length = torch.zeros(rows, dtype=torch.int32, device=device)
        self._bonus = torch.zeros(rows, dtype=torch.int64, device=device)
        self._ids = torch.zeros(rows, K + 1, dtype=torch.int64, device=device)
        self._space = None
        if use_kernel(self._length):
            import adapters.rules.block.triton as kernel  # Triton only where it is used

            self._space = kernel.Workspace(rows, K, vocabulary, device, chunk)

    def assign(
        self,
        slots: Sequence[int],
        seeds: Sequence[int],
        temperature: Sequence[float] | None = None,
        draft_temperature: Sequence[float] | None = None,
    ) -> None:
        """Give slots to new requests. draft_temperature: default the target's. Copies from the host."""
        n, device = len(slots), self.seeds.device
        for slot in slots:
            if not 0 <= slot < len(self.seeds):
                raise RuleError(f"slots: expected 0..{len(self.seeds) - 1}, found {slot}")
        warm = [1.0] * n if temperature is None else list(temperature)
        drafted = warm if draft_temperature is None else list(draft_temperature)
        for field, values in (("temperature", warm), ("draft_temperature", drafted)):
            for value in values:
                if not 0 < value < float("inf"):
                    raise RuleError(f"{field}: expected a number > 0 (greedy requests take asd), found {value}")
        index = torch.tensor(list(slots), dtype=torch.int64, device=device)
        signed = [(seed & (2**64 - 1)) - (2**64 if (seed >> 63) & 1 else 0) for seed in seeds]
        self.seeds[index] = torch.tensor(signed, dtype=torch.int64, device=device)
        self.temperature[index] = torch.tensor(warm, dtype=torch.float32, device=device)
        self.draft_temperature[index] = torch.tensor(drafted, dtype=torch.float32, device=device)
        self.steps[index] = 0
        self.counts[index] = 0

    def from_probs(
        self,
        draft_ids: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor | None,
        slots: Tensor,
        live: Tensor | None = None,
    ) -> Step:
        """draft_ids [B, K] int; target_probs [B, K+1, V] after top-k, top-p; draft_probs [B, K, V] or None, one-hot."""
        return self._run(draft_ids, target_probs, draft_probs, slots, live, False)

    def from_logits(
        self,
        draft_ids: Tensor,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        slots: Tensor,
        live: Tensor | None = None,
    ) -> Step:
        """Raw logits [B, K+1, V] and [B, K, V] (None: argmax drafts, one-hot), divided by the slots' temperatures."""
        return self._run(draft_ids, target_logits, draft_logits, slots, live, True)

    def _run(
        self, draft_ids: Tensor, target: Tensor, draft: Tensor | None, slots: Tensor, live: Tensor | None, logits: bool
    ) -> Step:
        B, K, V = len(slots), self.K, self.vocabulary
        kind = "logits" if logits else "probs"
        check("slots", slots, (B,), INTS, draft_ids)
        if self.rows < B:
            raise RuleError(f"slots: expected at most {self.rows} requests, found {B}")
        check("draft_ids", draft_ids, (B, K), INTS, self.seeds)
        check(f"target_{kind}", target, (B, K + 1, V), FLOATS, draft_ids)
        if draft is not None:
            check(f"draft_{kind}", draft, (B, K, V), FLOATS, draft_ids)
        if live is not None:
            check("live", live, (B,), INTS, draft_ids)
        for field, tensor in (("draft_ids", draft_ids), (f"target_{kind}", target), (f"draft_{kind}", draft)):
            if tensor is not None and tensor.stride(-1) != 1:
                raise RuleError(f"{field}: expected contiguous rows, found strides {list(tensor.stride())}")
        step = Step(self._length[:B], self._bonus[:B], self._ids[:B])
        if self._space is None:
            self._oracle(step, draft_ids, target, draft, slots, live, logits)
            return step
        import adapters.rules.block.triton as kernel

        launch = kernel.Launch(
            draft_ids, target, draft, step.length, step.bonus, logits, self.rule == "chain", self.temperature,
            self.draft_temperature, slots, live, None, None, self.seeds, self.steps, step.ids, self.counts,
        )  # fmt: skip
        kernel.verify(launch, self._space)
        return step

    def _oracle(
        self,
        step: Step,
        draft_ids: Tensor,
        target: Tensor,
        draft: Tensor | None,
        slots: Tensor,
        live: Tensor | None,
        logits: bool,
    ) -> None:
        """Request by request through the functions of naive.py."""
        K, V = self.K, self.vocabulary
        for b, slot in enumerate(slots.tolist()):
            if slot < 0:
                step.length[b], step.bonus[b] = 0, 0
                continue
            n = K if live is None else min(max(int(live[b]), 0), K)
            ids, p = draft_ids[b : b + 1].long(), target[b : b + 1].float()
            if logits:
                p = (p / self.temperature[slot]).softmax(-1)
            if draft is None:
                q = naive.one_hot(ids, V, p.dtype)
            else:
                q = draft[b : b + 1].float()
                q = (q / self.draft_temperature[slot]).softmax(-1) if logits else q
                naive.check_drafted(naive.at(q, ids), torch.tensor([n]))
            seed, at, position = self.seeds[slot], self.steps[slot], torch.arange(K)
            eta, drafted = uniform(seed, at, position)[None], position[None] < n
            if self.rule == "block":
                w, h = naive.thresholds(ids, p, q, torch.tensor([n]))
                good = (eta <= h[:, 1:]) & (h[:, 1:] > 0) & drafted
                tau = int((good * (position + 1)).amax())
            else:
                h = naive.ratios(naive.at(p, ids), naive.at(q, ids)).clamp(max=1)
                tau, w = int(prefix_length((eta <= h) & (h > 0) & drafted)), torch.ones(1, K + 1)
            row = min(tau, K - 1)
            mass = naive.correction(p[:, tau], q[:, row], w[:, tau], torch.tensor([tau == n]))[0]
            bonus = self._draw(mass, seed, at, tau)
            step.length[b], step.bonus[b] = tau, bonus
            step.ids[b, : n + 1] = bonus
            step.ids[b, :tau] = ids[0, :tau]
            self.counts[slot, :3] += torch.tensor([1, n, tau])
            self.steps[slot] += 1

    def _draw(self, mass: Tensor, seed: Tensor, step: Tensor, row: int) -> Tensor:
        """A race among chunks by their mass, then inside the winning one. mass [V] -> id."""
        chunks = [part.clamp(min=0).nan_to_num().sum() for part in mass.split(self.chunk)]
        totals = torch.stack(chunks)
        noise = of_pieces(seed, step, row, torch.arange(len(totals)))
        first = int(naive.race(totals[None], noise[None])) * self.chunk
        tokens = torch.arange(first, min(first + self.chunk, len(mass)))
        noise = of_tokens(seed, step, row, tokens, self.chunk)
        return tokens[naive.race(mass[tokens][None], noise[None])[0]]
