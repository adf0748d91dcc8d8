"""The DSpark block draft for a Qwen3 target, in plain PyTorch.

What one proposal is, with K = block_size and s = the number of tokens already in the target's KV cache:

- The *anchor* is the last committed token, at position s: its id is known, its target hidden state is not yet.
- Context: for every position < s the hidden states *after* the target layers `target_layer_ids` (0-based, before the
  final norm) are concatenated, ctx = hidden_norm(fc(.)). Every draft layer takes its context K/V from this same ctx by
  its own k_proj/v_proj (k_norm and rope at the token's own position; no input_layernorm). There is no context query.
- Block: inputs [anchor, mask, ..., mask] (K rows, embedding of the target) at positions s .. s+K-1. Its rows see the
  whole context and *all* K rows of their block (no causal mask), through Qwen3 layers.
- Row i, after `norm` and the target's lm_head, gives the base logits of draft token i, at position s+1+i.
- The Markov head adds a bias that depends on the token before: d_0 from the anchor, d_i from d_{i-1}. vanilla:
  w2 @ w1[prev]; gated: w2 @ (sigmoid(gate_proj[h_i; w1[prev]]) * w1[prev]); rnn: a GRU-like state over the block.
- The confidence head (optional, unused by fixed-width verification) reads [h_i; w1[prev]].
- h_i is the row *after* `norm` (as SGLang and DeepSpec; LightLLM feeds its gated, rnn and confidence heads the row
  before it, so only a vanilla head without confidence means the same in all three).
- The rope is that of the draft's own config (as SGLang; LightLLM borrows the target's: keep them equal).

Parameter names are those of the public Qwen3DSparkModel checkpoints. Embedding and lm_head are borrowed from the
target; `save_folder` writes copies of them, since LightLLM reads them from the draft's folder.

Sources: SGLang 0.5.16 models/{dflash,dspark}.py and speculative/dspark_components, DeepSpec modeling/dspark, LightLLM
models/qwen3_dspark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MARKOV_HEADS = ("vanilla", "gated", "rnn")
ARCHITECTURE = "Qwen3DSparkModel"
BORROWED = ("embed_tokens.weight", "lm_head.weight")


class DraftError(ValueError):
    """A draft folder that cannot be used: names the field or the tensor, what was expected, what was found."""


def _require(ok: bool, field: str, expected: str, found: Any) -> None:
    if not ok:
        raise DraftError(f"draft config.{field}: expected {expected}, found {found!r}")


@dataclass(frozen=True)
class DraftConfig:
    """The fields of a Qwen3DSparkModel's config.json that change its arithmetic."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.type == "int"):
            value = getattr(self, name)
            smallest = 0 if name == "mask_token_id" else 1
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= smallest
            _require(ok, name, f"an integer >= {smallest}", value)
        _require(
            self.mask_token_id < self.vocab_size, "mask_token_id", f"< vocab_size {self.vocab_size}", self.mask_token_id
        )
        ids = self.target_layer_ids
        last = self.num_target_layers - 1
        ok = bool(ids) and all(isinstance(i, int) and 0 <= i < last for i in ids) and list(ids) == sorted(set(ids))
        _require(ok, "target_layer_ids", f"increasing layer ids in 0..{last - 1} (not the target's last layer)", ids)
        _require(
            self.markov_head_type in MARKOV_HEADS, "markov_head_type", " or ".join(MARKOV_HEADS), self.markov_head_type
        )
        groups_ok = self.num_attention_heads % self.num_key_value_heads == 0
        _require(groups_ok, "num_key_value_heads", f"a divisor of {self.num_attention_heads}", self.num_key_value_heads)
        _require(self.head_dim % 2 == 0, "head_dim", "an even number", self.head_dim)

    @classmethod
    def from_folder(cls, path: Path) -> DraftConfig:
        if not (path / "config.json").is_file():
            raise DraftError(f"draft folder {path}: expected a config.json, found none")
        return cls.from_json(json.loads((path / "config.json").read_text()))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DraftConfig:
        """Read config.json. Nested `dflash_config` and `dspark_config` take precedence, as in SGLang."""
        raw = {**raw, **(raw.get("dflash_config") or {}), **(raw.get("dspark_config") or {})}
        architectures = raw.get("architectures") or []
        _require(ARCHITECTURE in architectures, "architectures", f"[{ARCHITECTURE!r}]", architectures)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        _require(kind == "default", "rope_parameters.rope_type", "default", kind)
        kinds = sorted(set(raw.get("layer_types") or ["full_attention"]))
        _require(kinds == ["full_attention"], "layer_types", "full_attention only", kinds)
        _require(raw.get("hidden_act", "silu") == "silu", "hidden_act", "silu", raw.get("hidden_act"))
        _require(not raw.get("attention_bias"), "attention_bias", "false", raw.get("attention_bias"))
        values = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        values.setdefault("rope_theta", rope.get("rope_theta"))
        if values.get("head_dim") is None and values.get("num_attention_heads"):
            values["head_dim"] = raw.get("hidden_size", 0) // values["num_attention_heads"]
        required = [f.name for f in fields(cls) if f.name not in cls.__dict__]
        missing = [name for name in required if values.get(name) is None]
        _require(not missing, missing[0] if missing else "", "a value", None)
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """A config.json that SGLang, LightLLM and transformers' readers of Qwen3 configs understand."""
        own = {f.name: getattr(self, f.name) for f in fields(self)} | {"target_layer_ids": list(self.target_layer_ids)}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            **own,
            # transformers 5 reads rope_parameters; SGLang 0.5.16 and LightLLM read the top-level rope_theta.
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_scaling": None,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "num_anchors": 1,
        }


class Attention(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def query(self, x: Tensor, rope: Tensor) -> Tensor:
        """[..., N, H] -> [..., heads, N, d], normalised and rotated."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        return rotate(q, rope).transpose(-3, -2)

    def key_value(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """[..., N, H] -> two of [..., kv_heads, N, d]; the key normalised and rotated."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(k, rope).transpose(-3, -2), v.transpose(-3, -2)


class MLP(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = MLP(c)


class MarkovHead(nn.Module):
    """The bias that the previous token puts on a draft position's logits."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.kind, rank = c.markov_head_type, c.markov_rank
        self.markov_w1 = nn.Embedding(c.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, c.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(c.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + c.hidden_size, 3 * rank)

    def step(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """prev_ids [...] int64, hidden [..., H] -> bias [..., V] and the state for the next position (rnn only)."""
        previous = self.markov_w1(prev_ids)
        if self.kind == "vanilla":
            return self.markov_w2(previous), None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], -1)))
            return self.markov_w2(gate * previous), None
        state = torch.zeros_like(previous) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat([state, previous, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return self.markov_w2(torch.tanh(out)), gate * state + (1 - gate) * torch.tanh(candidate)

    def block(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced: prev_ids [..., K], hidden [..., K, H] -> biases [..., K, V]."""
        if self.kind != "rnn":
            return self.step(prev_ids, hidden)[0]
        biases: list[Tensor] = []
        state: Tensor | None = None
        for k in range(prev_ids.shape[-1]):
            bias, state = self.step(prev_ids[..., k], hidden[..., k, :], state)
            biases.append(bias)
        return torch.stack(biases, -2)


class ConfidenceHead(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(c.hidden_size + c.markov_rank * c.confidence_head_with_markov, 1)


def rope_table(theta: float, head_dim: int, positions: int, device: torch.device | str = "cpu") -> Tensor:
    """[positions, 2, head_dim // 2] float32: cosines, sines."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), inverse)
    return torch.stack([angle.cos(), angle.sin()], 1)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x [..., N, heads, d] and rope [..., N, 2, d/2] (rows of a table): the half-split rotation of Qwen3."""
    cos, sin = rope.to(x.dtype).unsqueeze(-3).unbind(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Blocks(NamedTuple):
    """Teacher-forced proposals at A anchors of B sequences.

    hidden [B, A, K, H] after `norm`; base_logits and logits (Markov-corrected) [B, A, K, V]; labels [B, A, K] int64,
    the tokens that the rows predict; valid [B, A, K] bool, False where the label lies past the sequence (not to be
    trained on); confidence [B, A, K] logits or None.
    """

    hidden: Tensor
    base_logits: Tensor
    logits: Tensor
    labels: Tensor
    valid: Tensor
    confidence: Tensor | None


class DSparkDraft(nn.Module):
    """The draft's parameters, and its two forms: `forward_blocks` (differentiable, many anchors) and `context_kv` +
    `block_hidden` + `propose` (one block per sequence over a context KV)."""

    rope: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.layers: Any = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        table = rope_table(config.rope_theta, config.head_dim, config.max_position_embeddings + config.block_size)
        self.register_buffer("rope", table, persistent=False)
        self._borrowed: tuple[Tensor, Tensor] | None = None

    # ---- folders

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        target: nn.Module,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> DSparkDraft:
        """Load config.json and *.safetensors. `target` lends its embedding and lm_head and must fit the config."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(path)
        config = DraftConfig.from_folder(path)
        shards = sorted(path.glob("*.safetensors"))
        if not shards:
            raise DraftError(f"draft folder {path}: expected *.safetensors, found none")
        draft = cls(config)
        try:
            tensors = {name: t for shard in shards for name, t in load_file(shard).items() if name not in BORROWED}
        except SafetensorError as error:
            raise DraftError(f"draft folder {path}: {error}") from None
        if draft.confidence_head is None:
            tensors = {name: t for name, t in tensors.items() if not name.startswith("confidence_head.")}
        expected = draft.state_dict()
        for name in sorted(expected.keys() ^ tensors.keys()):
            found = "none" if name in expected else "an unknown tensor"
            raise DraftError(
                f"draft folder {path}: {name}: expected {'one' if name in expected else 'none'}, found {found}"
            )
        for name, tensor in tensors.items():
            if tensor.shape != expected[name].shape:
                shapes = f"expected shape {list(expected[name].shape)}, found {list(tensor.shape)}"
                raise DraftError(f"draft folder {path}: {name}: {shapes}")
        draft.load_state_dict(tensors)
        return draft.to(device=device, dtype=dtype).attach(target)

    def save_folder(self, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and model.safetensors, with copies of the borrowed tensors for engines that want them."""
        from safetensors.torch import save_file

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        tensors = dict(self.state_dict()) | dict(zip(BORROWED, self.borrowed, strict=True))
        tensors = {name: t.detach().to("cpu", dtype, copy=True).contiguous() for name, t in tensors.items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = self.config.to_json() | {
            "dtype": str(dtype).removeprefix("torch."),
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def attach(self, target: nn.Module) -> DSparkDraft:
        """Borrow embedding and lm_head of a transformers causal LM. They stay the target's: not in state_dict."""
        embedding = target.get_input_embeddings().weight  # type: ignore[operator]
        head = target.get_output_embeddings().weight  # type: ignore[operator]
        layers, c = target.config.num_hidden_layers, self.config  # type: ignore[union-attr]
        _require(c.num_target_layers == layers, "num_target_layers", f"the target's {layers}", c.num_target_layers)
        _require(c.vocab_size == head.shape[0], "vocab_size", f"the target's {head.shape[0]}", c.vocab_size)
        _require(c.hidden_size == head.shape[1], "hidden_size", f"the target's {head.shape[1]}", c.hidden_size)
        self._borrowed = (embedding, head)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> DSparkDraft:
        rope = self.rope
        super()._apply(fn, recurse)  # the rope table stays float32 whatever dtype the weights take
        self.rope = rope.to(self.rope.device)
        return self

    @property
    def borrowed(self) -> tuple[Tensor, Tensor]:
        """(embedding [V, H], lm_head [V, H])."""
        if self._borrowed is None:
            raise DraftError("draft: expected a target to borrow embedding and lm_head from, found none (call attach)")
        return self._borrowed

    # ---- shared pieces

    def project_context(self, context_hidden: Tensor) -> Tensor:
        """Concatenated target hidden states [..., L*H] -> ctx [..., H]."""
        return self.hidden_norm(self.fc(context_hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Base logits [..., V] of rows after `norm` [..., H]."""
        return F.linear(hidden, self.borrowed[1].to(hidden.dtype))

    def embed_block(self, anchor_ids: Tensor) -> Tensor:
        """anchor_ids [...] int64 -> inputs [..., K, H]: the anchor, then K-1 masks."""
        masks = anchor_ids.new_full((*anchor_ids.shape, self.config.block_size), self.config.mask_token_id)
        masks[..., 0] = anchor_ids
        return F.embedding(masks, self.borrowed[0]).to(self.fc.weight.dtype)

    def confidence(self, hidden: Tensor, prev_ids: Tensor) -> Tensor | None:
        """Confidence logits [..., K] of rows [..., K, H] and the tokens before them [..., K]."""
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(prev_ids).to(hidden.dtype)], -1)
        return self.confidence_head.proj(hidden).squeeze(-1)

    # ---- training: many anchors per sequence, differentiable

    def forward_blocks(self, input_ids: Tensor, context_hidden: Tensor, anchors: Tensor) -> Blocks:
        """Teacher-forced blocks.

        input_ids [B, T] int64; context_hidden [B, T, L*H], hidden states after `target_layer_ids` (transformers:
        `hidden_states[i + 1]`), concatenated; anchors [B, A] int64, positions in 0..T-1 of the anchor tokens. Position
        p of the context is seen by the block of anchor a iff p < a, exactly as at inference.
        """
        length = input_ids.shape[1]
        count, k, heads = anchors.shape[1], self.config.block_size, self.config.num_attention_heads
        groups = heads // self.config.num_key_value_heads
        ctx = self.project_context(context_hidden)
        x = self.embed_block(input_ids.gather(1, anchors)).flatten(1, 2)  # [B, A*K, H]
        offsets = torch.arange(k, device=anchors.device)
        block_rope = self.rope[(anchors[..., None] + offsets).flatten(1)]
        ctx_rope = self.rope[:length]
        hidden_context = torch.arange(length, device=anchors.device) >= anchors.repeat_interleave(k, 1)[..., None]
        for layer in self.layers:
            h = layer.input_layernorm(x)
            q = layer.self_attn.query(h, block_rope)  # [B, heads, A*K, d]
            k_ctx, v_ctx = (t.repeat_interleave(groups, 1) for t in layer.self_attn.key_value(ctx, ctx_rope))
            k_own, v_own = (t.repeat_interleave(groups, 1) for t in layer.self_attn.key_value(h, block_rope))
            k_own, v_own = (t.unflatten(2, (count, k)) for t in (k_own, v_own))  # [B, heads, A, K, d]
            to_context = (q @ k_ctx.mT).masked_fill(hidden_context[:, None], float("-inf"))
            to_block = (q.unflatten(2, (count, k)) @ k_own.mT).flatten(2, 3)
            scores = torch.cat([to_context, to_block], -1).float() * self.config.head_dim**-0.5
            weights = scores.softmax(-1).to(q.dtype)  # the block sees itself: no row is empty
            out = weights[..., :length] @ v_ctx
            out = out + (weights[..., length:].unflatten(2, (count, k)) @ v_own).flatten(2, 3)
            x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden = self.norm(x).unflatten(1, (count, k))
        at = anchors[..., None] + offsets
        previous, labels = (
            input_ids[:, None].expand(-1, count, -1).gather(2, i.clamp(max=length - 1)) for i in (at, at + 1)
        )
        base = self.logits(hidden)
        corrected = base + self.markov_head.block(previous, hidden)
        return Blocks(hidden, base, corrected, labels, at + 1 < length, self.confidence(hidden, previous))

    # ---- inference: one block per sequence over a context KV

    def context_kv(self, context_hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """context_hidden [B, N, L*H] at positions [B, N] -> per layer K and V [B, kv_heads, N, d]."""
        ctx = self.project_context(context_hidden)
        return [layer.self_attn.key_value(ctx, self.rope[positions]) for layer in self.layers]

    def block_hidden(self, anchor_ids: Tensor, lengths: Tensor, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """anchor_ids [B], lengths [B] (context tokens = the anchor's position), context per layer [B, kv_heads, T, d],
        T >= max(lengths) (what lies past a row's length is not read) -> rows after `norm` [B, K, H]."""
        k = self.config.block_size
        x = self.embed_block(anchor_ids)
        rope = self.rope[lengths[:, None] + torch.arange(k, device=lengths.device)]
        size = context[0][0].shape[2]
        seen = torch.arange(size, device=lengths.device) < lengths[:, None]
        seen = F.pad(seen, (0, k), value=True)[:, None, None]
        for layer, (k_ctx, v_ctx) in zip(self.layers, context, strict=True):
            h = layer.input_layernorm(x)
            q = layer.self_attn.query(h, rope)
            k_own, v_own = layer.self_attn.key_value(h, rope)
            keys, values = torch.cat([k_ctx, k_own], 2), torch.cat([v_ctx, v_own], 2)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
            x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def propose(self, anchor_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy drafts of rows [B, K, H]: ids [B, K] int64 and corrected logits [B, K, V]."""
        base = self.logits(hidden)
        ids: list[Tensor] = []
        corrected: list[Tensor] = []
        previous, state = anchor_ids, None
        for i in range(self.config.block_size):
            bias, state = self.markov_head.step(previous, hidden[:, i], state)
            corrected.append(base[:, i] + bias)
            previous = corrected[-1].argmax(-1)
            ids.append(previous)
        return torch.stack(ids, 1), torch.stack(corrected, 1)
