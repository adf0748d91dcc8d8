"""Qwen3 layers over a slot KV cache: the forward pass of the target, and of the draft's block.

Written for few PyTorch calls per layer, since on small models and small batches those are the time:
- q, k and v are one matrix, so are gate and up; a residual is added by the same call that projects (addmm).
- rope is one complex product: the rows of q and k are reordered at load so that the two halves Qwen3 rotates lie side
  by side. Scores do not change, as both reorder alike. The attention scale sits in the q norm's weight.
- in float32 a norm's weight is folded into the matrix behind it, and x / rms(x) is x / hypot(|x|, sqrt(eps H)).
A pass takes its rows flat, [N, H]; only attention knows which rows belong together (`Rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def argmax(x: Tensor) -> Tensor:
    """First index of the largest value of each row; a NaN is the largest. On the CPU numpy is ten times faster."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.from_numpy(x.numpy().argmax(-1))
    return x.argmax(-1)


def columns(matrix: Tensor) -> Tensor:
    """matrix [out, in] -> [in, out]. A CPU multiplies few rows much faster by a contiguous one."""
    return matrix.t() if matrix.is_cuda else matrix.t().contiguous()


class Norm:
    """RMSNorm. fold: leave the weight to the matrix behind it, which gets it from `folded` (float32 only)."""

    def __init__(self, weight: Tensor, eps: float, fold: bool = False) -> None:
        self.weight, self.eps = weight, eps
        self.fold = fold and weight.dtype == torch.float32
        self.floor = torch.tensor((eps * weight.numel()) ** 0.5, device=weight.device)
        self.scale = weight * weight.numel() ** 0.5

    def folded(self, matrix: Tensor) -> Tensor:
        """matrix [out, H] -> what to multiply a normalised row with, [H, out]."""
        return columns((matrix.double() * self.scale.double()).to(matrix.dtype) if self.fold else matrix)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        y = x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        return y if self.fold else y.mul_(self.scale)


def side_by_side(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder every head's rows from [a_0 .. a_h, b_0 .. b_h] to [a_0, b_0, a_1, b_1, ...]. weight [heads * d, ...]."""
    rest = weight.shape[1:]
    return weight.view(-1, 2, head_dim // 2, *rest).transpose(1, 2).reshape(-1, *rest)


def head_norm(x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
    """x [..., heads, d], weight [heads, d] float32 (times sqrt(d)): float32 RMSNorm per head."""
    x = x.float()
    return x.div(torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)).mul_(weight)


def rotate_pairs(x: Tensor, rope: Tensor) -> Tensor:
    """x [N, ..., d] float32, contiguous, rope [N, ..., d/2] complex64 -> x, rotated in place."""
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(rope)
    return x


def rope_pairs(inverse_frequencies: Tensor, scaling: float, positions: int) -> Tensor:
    """[positions, 1, d/2] complex64."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32, device=inverse_frequencies.device), inverse_frequencies
    )
    return torch.polar(torch.full_like(angles, scaling), angles)[:, None]


class Rows(NamedTuple):
    """What the rows of a pass are.

    rope [N, 1, d/2] complex64 and write [N, kv_heads] int64 (where K and V go in the flat cache) say where each row is.
    Decode: requests in slots 0..slots-1, equally many rows each, see the first `width` positions of their slot through
    mask [slots, 1, rows, width] (additive; None: all of it). Prefill: `lengths`, causal segments from position 0.
    """

    rope: Tensor
    write: Tensor
    slots: int = 0
    width: int = 0
    mask: Tensor | None = None
    lengths: tuple[int, ...] = ()


class Layer(NamedTuple):
    qkv_norm: Norm
    qkv: Tensor  # [H, (heads + 2 kv_heads) d]
    qk_weight: Tensor  # [heads + kv_heads, d]
    out: Tensor  # [heads d, H]
    mlp_norm: Norm
    gate_up: Tensor  # [H, 2 I]
    down: Tensor  # [I, H]


def fuse(layer: Any, head_dim: int, eps: float) -> Layer:
    """A Qwen3 decoder layer (transformers' names) as the matrices above."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv_norm = Norm(layer.input_layernorm.weight.detach(), eps, fold=True)
    mlp_norm = Norm(layer.post_attention_layernorm.weight.detach(), eps, fold=True)
    q, k = (side_by_side(p.weight.detach(), head_dim) for p in (attention.q_proj, attention.k_proj))
    heads, kv_heads = q.shape[0] // head_dim, k.shape[0] // head_dim
    q_norm, k_norm = (side_by_side(n.weight.detach().float(), head_dim) for n in (attention.q_norm, attention.k_norm))
    return Layer(
        qkv_norm,
        qkv_norm.folded(torch.cat([q, k, attention.v_proj.weight.detach()])),
        torch.cat(
            [q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1) * head_dim**0.5]
        ),  # sqrt(d) * d^-1/2 = 1 for q
        columns(attention.o_proj.weight.detach()),
        mlp_norm,
        mlp_norm.folded(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])),
        columns(mlp.down_proj.weight.detach()),
    )


class Stack:
    """Qwen3 decoder layers and their cache: K and V [layers, slots, kv_heads, positions, d], zeros at first."""

    def __init__(
        self,
        layers: Sequence[Any],
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        rope: Tensor,
        release: bool = False,
    ) -> None:
        """release: take the weights out of `layers` one by one, so that the model is never in memory twice."""
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.layers = []
        for layer in layers:
            self.layers.append(fuse(layer, head_dim, eps))
            if release:
                layer.to("meta")
        self.rope = rope
        weight = self.layers[0].qkv
        self.device, self.dtype = weight.device, weight.dtype
        self.floor = torch.tensor((eps * head_dim) ** 0.5, device=self.device)

    def allocate(self, slots: int, positions: int, quantum: int = 1) -> Stack:
        """quantum: attention spans are rounded up to a multiple of it (README, Determinism)."""
        self.quantum, positions = quantum, -(-positions // quantum) * quantum
        shape = (len(self.layers), slots, self.kv_heads, positions, self.head_dim)
        self.k, self.v = (torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        self.flat = [
            (k.view(-1, self.head_dim), v.view(-1, self.head_dim)) for k, v in zip(self.k, self.v, strict=True)
        ]
        heads = torch.arange(slots * self.kv_heads, device=self.device) * positions
        self.base = heads.view(slots, 1, self.kv_heads)
        self.keys = torch.arange(positions, device=self.device)
        return self

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another."""
        for cache in (self.k, self.v):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def decode_rows(self, positions: Tensor, width: int, causal: bool) -> Rows:
        """positions [n, R] of the next R tokens of slots 0..n-1; width: last position of any + 1."""
        count, rows = positions.shape
        mask = None
        width = -(-width // self.quantum) * self.quantum
        if causal or count > 1 or self.quantum > 1:  # else `width` ends where the only block does
            last = positions if causal else positions[:, -1:]
            hidden = self.keys[:width] > last[..., None]
            mask = torch.zeros(hidden.shape, device=self.device, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None].expand(-1, -1, rows, -1)
        write = (self.base[:count] + positions[..., None]).view(-1, self.kv_heads)
        return Rows(self.rope[positions.reshape(-1)], write, count, width, mask)

    def prefill_rows(self, slots: Sequence[int], lengths: Sequence[int]) -> Rows:
        positions = torch.cat([self.keys[:length] for length in lengths])
        index = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(self.device)
        write = self.base[index, 0] + positions[:, None]
        return Rows(self.rope[positions], write, lengths=tuple(lengths))

    def __call__(self, x: Tensor, rows: Rows, capture: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """x [N, H] -> x after the last layer, and after each layer of `capture` (0-based)."""
        captured = []
        n, turned = self.heads, self.heads + self.kv_heads
        for index, layer in enumerate(self.layers):
            qkv = torch.mm(layer.qkv_norm(x), layer.qkv).view(x.shape[0], -1, self.head_dim)
            qk = rotate_pairs(head_norm(qkv[:, :turned], layer.qk_weight, self.floor), rows.rope).to(x.dtype)
            q, k, v = qk[:, :n], qk[:, n:], qkv[:, turned:]
            for cache, new in zip(self.flat[index], (k, v), strict=True):
                cache.index_put_((rows.write,), new)
            out = self.attend(index, rows, q) if rows.slots else self.attend_segments(rows, q, k, v)
            x = torch.addmm(x, out, layer.out)
            gate, up = torch.mm(layer.mlp_norm(x), layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
            if index in capture:
                captured.append(x)
        return x, captured

    def attend(self, index: int, rows: Rows, q: Tensor) -> Tensor:
        """q [slots * R, heads, d] over the cache -> [slots * R, heads * d]."""
        q = q.view(rows.slots, -1, self.heads, self.head_dim).transpose(1, 2)
        k, v = (cache[index, : rows.slots, :, : rows.width] for cache in (self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.mask, scale=1.0, enable_gqa=True)
        return out.transpose(1, 2).reshape(rows.rope.shape[0], -1)

    def attend_segments(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [N, heads or kv_heads, d]: every segment causally over itself -> [N, heads * d]."""
        parts = (t.transpose(0, 1)[None].split(rows.lengths, 2) for t in (q, k, v))
        outs = [
            F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=1.0, enable_gqa=True).transpose(1, 2)
            for a, b, c in zip(*parts, strict=True)
        ]
        return torch.cat(outs, 1).view(q.shape[0], -1)


class Target:
    """A Qwen3ForCausalLM of transformers as a Stack, with embedding and lm_head, and what the draft reads of it."""

    def __init__(
        self,
        model: Any,
        capture: Sequence[int],
        slots: int,
        positions: int,
        quantum: int = 1,
        release: bool = False,
    ) -> None:
        """capture: layers whose outputs the draft takes as context; positions: KV entries of one slot."""
        c = model.config
        rotary = model.model.rotary_emb
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        rope = rope_pairs(rotary.inv_freq.float(), rotary.attention_scaling, positions)
        self.stack = Stack(
            model.model.layers, c.num_attention_heads, c.num_key_value_heads, head_dim, c.rms_norm_eps, rope, release
        ).allocate(slots, positions, quantum)
        self.capture = tuple(capture)
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head = columns(model.get_output_embeddings().weight.detach())  # [H, V]
        self.vocabulary = self.head.shape[1]
        self.norm = Norm(model.model.norm.weight.detach(), c.rms_norm_eps)

    def logits(self, x: Tensor) -> Tensor:
        """x [N, H] after the last layer -> [N, V] float32."""
        return torch.mm(self.norm(x), self.head).float()

    def verify(self, tokens: Tensor, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """tokens, positions [n, R] -> logits [n, R, V] float32 and the draft's context [n * R, L * H]."""
        rows = self.stack.decode_rows(positions, width, causal=True)
        x, captured = self.stack(F.embedding(tokens.view(-1), self.embedding), rows, self.capture)
        return self.logits(x).view(*tokens.shape, -1), torch.cat(captured, -1)

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Whole prompts into their slots -> logits of each last row [n, V] and context of all rows [N, L * H]."""
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.stack.device)
        rows = self.stack.prefill_rows(slots, lengths)
        x, captured = self.stack(F.embedding(tokens, self.embedding), rows, self.capture)
        last = torch.tensor(lengths, device=self.stack.device).cumsum(0) - 1
        # A CPU multiplies fewer than four rows by other code, with other rounding, than more.
        last = F.pad(last, (0, max(0, 8 - len(lengths))))
        return self.logits(x[last])[: len(lengths)], torch.cat(captured, -1)
