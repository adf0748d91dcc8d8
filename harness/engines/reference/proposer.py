"""The engine's form of a DSpark draft: context K/V in slots, one block of proposals per step. Semantics: dspark.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.engines.reference.dspark import DSparkDraft
from harness.engines.reference.model import (
    Norm,
    Stack,
    argmax,
    columns,
    head_norm,
    rope_pairs,
    rotate_pairs,
    side_by_side,
)

# Up to this many entries the Markov bias of every token pair is kept as a table: a row lookup instead of a product.
TABLE_ENTRIES = 1 << 24

Pick = Callable[[int, Tensor], Tensor]  # (draft index, logits [n, V] float32) -> ids [n]


def greedy(_: int, logits: Tensor) -> Tensor:
    return argmax(logits)


class Proposer:
    def __init__(self, draft: DSparkDraft, head: Tensor, slots: int, positions: int, quantum: int = 1) -> None:
        """head: the target's lm_head as it multiplies, [H, V]."""
        c = draft.config
        self.block_size = c.block_size
        self.embedding, self.head = draft.borrowed[0], head
        device = draft.fc.weight.device
        inverse = 1.0 / c.rope_theta ** (
            torch.arange(0, c.head_dim, 2, dtype=torch.float32, device=device) / c.head_dim
        )
        rope = rope_pairs(inverse, 1.0, positions)
        self.stack = Stack(
            draft.layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps, rope
        ).allocate(slots, positions, quantum)
        self.norm = Norm(draft.norm.weight.detach(), c.rms_norm_eps)
        self.fc = columns(draft.fc.weight.detach())
        self.markov = draft.markov_head
        self.table = None
        if self.markov.kind == "vanilla" and c.vocab_size**2 <= TABLE_ENTRIES:
            w1, w2 = self.markov.markov_w1.weight.detach(), self.markov.markov_w2.weight.detach()
            self.table = torch.mm(w1.float(), w2.float().t())
        self.masks = torch.full((slots, c.block_size), c.mask_token_id, device=device)
        # Context K/V of all layers at once: [all keys | all values].
        attentions = [layer.self_attn for layer in draft.layers]
        keys = torch.cat([side_by_side(a.k_proj.weight.detach(), c.head_dim) for a in attentions])
        values = torch.cat([a.v_proj.weight.detach() for a in attentions])
        self.context_norm = Norm(draft.hidden_norm.weight.detach(), c.rms_norm_eps, fold=True)
        self.context_kv = self.context_norm.folded(torch.cat([keys, values]))
        self.k_weight = torch.stack([layer.qk_weight[self.stack.heads :] for layer in self.stack.layers]).flatten(0, 1)
        layer_size = self.stack.k[0].numel() // c.head_dim
        self.layer_base = torch.arange(len(attentions), device=device)[:, None] * layer_size

    def commit(self, context: Tensor, rope: Tensor, write: Tensor) -> None:
        """Target hidden states [N, L*H] of rows at `rope`, `write` (see Rows) become context K/V of every layer."""
        s = self.stack
        kv = torch.mm(self.context_norm(torch.mm(context, self.fc)), self.context_kv)
        keys, values = kv.view(kv.shape[0], 2, -1, s.head_dim).unbind(1)
        keys = rotate_pairs(head_norm(keys, self.k_weight, s.floor), rope).to(kv.dtype)
        index = (self.layer_base + write[:, None]).flatten(1)  # [N, layers * kv_heads]
        s.k.view(-1, s.head_dim).index_put_((index,), keys)
        s.v.view(-1, s.head_dim).index_put_((index,), values)

    def commit_prompts(self, context: Tensor, slots: Sequence[int], lengths: Sequence[int]) -> None:
        rows = self.stack.prefill_rows(slots, lengths)
        self.commit(context, rows.rope, rows.write)

    def commit_block(self, context: Tensor, positions: Tensor) -> None:
        """positions [n, R]: rows past what is accepted are overwritten before they are seen."""
        s = self.stack
        write = (s.base[: len(positions)] + positions[..., None]).view(-1, s.kv_heads)
        self.commit(context, s.rope[positions.reshape(-1)], write)

    def propose(self, anchors: Tensor, positions: Tensor, width: int, pick: Pick) -> Tensor:
        """anchors [n] at positions [n, K] [:, 0]; pick chooses draft i from its logits [n, V] -> ids [n, K]."""
        n, k = positions.shape
        tokens = self.masks[:n].clone()
        tokens[:, 0] = anchors
        rows = self.stack.decode_rows(positions, width, causal=False)
        x, _ = self.stack(F.embedding(tokens.view(-1), self.embedding), rows)
        hidden = self.norm(x)
        base = torch.mm(hidden, self.head).float().view(n, k, -1)
        hidden = hidden.view(n, k, -1)
        previous, state, drafts = anchors, None, []
        for i in range(k):
            if self.table is not None:
                logits = self.table.index_select(0, previous).add_(base[:, i])
            else:
                bias, state = self.markov.step(previous, hidden[:, i], state)
                logits = bias.float().add_(base[:, i])
            previous = pick(i, logits)
            drafts.append(previous)
        return torch.stack(drafts, 1)
