"""The target in plain PyTorch (Qwen3 arithmetic and parameter names), for training and for batched generation.

What leaves this file is a folder that transformers loads as Qwen3ForCausalLM; a test compares the two.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TargetConfig:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    def to_json(self, eos: int, pad: int) -> dict[str, object]:
        """config.json: rope both as transformers 5 writes it and as SGLang and LightLLM read it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "max_window_layers": self.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "use_cache": True,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


class Block(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        attention = {
            "q_proj": nn.Linear(c.hidden_size, q, bias=False),
            "k_proj": nn.Linear(c.hidden_size, kv, bias=False),
            "v_proj": nn.Linear(c.hidden_size, kv, bias=False),
            "o_proj": nn.Linear(q, c.hidden_size, bias=False),
            "q_norm": nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps),
            "k_norm": nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps),
        }
        mlp = {
            "gate_proj": nn.Linear(c.hidden_size, c.intermediate_size, bias=False),
            "up_proj": nn.Linear(c.hidden_size, c.intermediate_size, bias=False),
            "down_proj": nn.Linear(c.intermediate_size, c.hidden_size, bias=False),
        }
        self.self_attn, self.mlp = nn.ModuleDict(attention), nn.ModuleDict(mlp)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.head_dim = c.head_dim

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H] -> q [B, heads, T, d], k and v [B, kv heads, T, d], rotated."""
        a, h = self.self_attn, self.input_layernorm(x)
        q, k, v = (a[name](h).unflatten(-1, (-1, self.head_dim)) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = a["q_norm"](q), a["k_norm"](k)
        return _rotate(q, rope).transpose(1, 2), _rotate(k, rope).transpose(1, 2), v.transpose(1, 2)

    def close(self, x: Tensor, attended: Tensor) -> Tensor:
        """attended [B, T, heads * d] -> the block's output."""
        x = x + self.self_attn["o_proj"](attended)
        h, m = self.post_attention_layernorm(x), self.mlp
        return x + m["down_proj"](F.silu(m["gate_proj"](h)) * m["up_proj"](h))


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (t.to(x.dtype).unsqueeze(-2) for t in rope)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Target(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        inverse = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)
        angle = torch.outer(torch.arange(c.max_position_embeddings, dtype=torch.float32), inverse)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)
            if "o_proj" in name or "down_proj" in name:
                nn.init.zeros_(p)

    # The draft borrows these two, as it would from transformers' class.
    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.embed_tokens.weight)

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, keep: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """ids [B, T] -> last hidden [B, T, H] (before `norm`) and the outputs of layers `keep`, concatenated.

        mask [B, 1, T, T] bool, True = seen; None: causal (right padding needs no more).
        """
        x, kept = self.embed_tokens(ids), []
        rope = (self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        for index, layer in enumerate(self.layers):
            q, k, v = layer.qkv(x, rope)
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            x = layer.close(x, y.transpose(1, 2).flatten(2))
            if index in keep:
                kept.append(x)
        return x, torch.cat(kept, -1) if kept else None

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], limit: int, stop: int, temperature: float = 0.0) -> list[list[int]]:
        """Batched continuation of every prompt: ids up to and with `stop`, at most `limit`. 0 = greedy."""
        c, device = self.config, self.embed_tokens.weight.device
        dtype = (
            torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else self.norm.weight.dtype
        )
        batch, width = len(prompts), max(map(len, prompts))
        shape = (batch, c.num_key_value_heads, width + limit, c.head_dim)
        cache = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in self.layers
        ]
        ids = torch.tensor([[stop] * (width - len(p)) + p for p in prompts], device=device)  # padded on the left
        pads = torch.tensor([width - len(p) for p in prompts], device=device)
        places = torch.arange(width + limit, device=device)
        seen = places >= pads[:, None]
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        own = torch.eye(width, dtype=torch.bool, device=device)  # a pad sees itself: no empty row
        mask = ((causal & seen[:, None, :width]) | own)[:, None]
        out = torch.full((batch, limit), stop, device=device)
        done = torch.zeros(batch, dtype=torch.bool, device=device)
        groups, at = c.num_attention_heads // c.num_key_value_heads, 0
        for step in range(limit):
            size = ids.shape[1]
            # Few distinct shapes: the cache is read up to a multiple of 64, what lies past `at` hidden.
            reach = min(-(-(at + size) // 64) * 64, width + limit)
            hidden = ~(seen[:, :reach] & (places[:reach] <= at))[:, None, None]
            x, rope = self.embed_tokens(ids), (self.cos[at : at + size], self.sin[at : at + size])
            for layer, (keys, values) in zip(self.layers, cache, strict=True):
                q, k, v = layer.qkv(x, rope)
                keys[:, :, at : at + size], values[:, :, at : at + size] = k, v
                if size == 1:  # the query heads of one KV head become its rows
                    q = q.to(dtype).reshape(batch, c.num_key_value_heads, groups, c.head_dim)
                    scores = (q @ keys[:, :, :reach].mT).float() * c.head_dim**-0.5
                    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(dtype)
                    y = (weights @ values[:, :, :reach]).reshape(batch, 1, -1)
                else:
                    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
                    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
                x = layer.close(x, y)
            logits = self.logits(x[:, -1]).float()
            if temperature > 0:
                noise = torch.empty_like(logits).exponential_()
                token = ((logits / temperature).softmax(-1) / noise).argmax(-1)
            else:
                token = logits.argmax(-1)
            out[:, step] = torch.where(done, stop, token)
            done |= token == stop
            ids, at = out[:, step : step + 1], at + size
            if step % 16 == 15 and bool(done.all()):
                break
        rows = out[:, : step + 1].tolist()
        return [row[: row.index(stop) + 1] if stop in row else row for row in rows]

    # ---- folders

    def save_folder(self, path: Path, eos: int, end_of_text: int) -> None:
        """config.json, generation_config.json and bf16 model.safetensors."""
        from safetensors.torch import save_file

        path.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{n}": p.detach().to("cpu", torch.bfloat16, copy=True) for n, p in self.named_parameters()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(self.config.to_json(eos, end_of_text), indent=2) + "\n")
        generation = {"do_sample": False, "eos_token_id": [eos, end_of_text], "pad_token_id": end_of_text}
        (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    @classmethod
    def from_folder(cls, path: Path, device: torch.device | str = "cpu") -> Target:
        """The exported (bf16-rounded) weights, in float32."""
        from safetensors.torch import load_file

        raw = json.loads((path / "config.json").read_text())
        target = cls(TargetConfig(**{name: raw[name] for name in TargetConfig.__dataclass_fields__}))
        target.load_state_dict(
            {n.removeprefix("model."): t.float() for n, t in load_file(path / "model.safetensors").items()}
        )
        return target.to(device)
