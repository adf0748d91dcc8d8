"""An EAGLE3 draft of the tiny target, for engine=lightllm-eagle3: one layer, fitted to the target's argmax.

    python recipes/checkpoints/eagle3.py --out FOLDER        about a minute on one GPU

It is unrolled while it is trained, as it drafts: its own output takes the place of the target's hidden states.
The folder is in the format LightLLM loads (`model_type: qwen3`, `target_layer_ids`, q and k norms, whole vocabulary).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import data  # noqa: E402
from model import Target, TargetConfig, _rotate  # noqa: E402

READS = (1, 3, 4)  # layer outputs of the target, from 0
FIRST_SEED = 600_000_000  # of the train split, beyond what the pair was trained on


class Layer(nn.Module):
    """The one layer: attention over [embedding; hidden], both normed, residual on hidden."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        H, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        sizes = {"q_proj": (2 * H, q), "k_proj": (2 * H, kv), "v_proj": (2 * H, kv), "o_proj": (q, H)}
        attention: dict[str, nn.Module] = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        attention |= {name: nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps) for name in ("q_norm", "k_norm")}
        inner = c.intermediate_size
        mlp = {"gate_proj": (H, inner), "up_proj": (H, inner), "down_proj": (inner, H)}
        self.self_attn = nn.ModuleDict(attention)
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in mlp.items()})
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, nn.RMSNorm(H, eps=c.rms_norm_eps))
        self.head_dim, self.groups = c.head_dim, c.num_attention_heads // c.num_key_value_heads

    def qkv(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """embedded, hidden [B, T, H] -> q, k, v [B, heads, T, d], KV heads repeated."""
        a = self.self_attn
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        q, k, v = (a[name](x).unflatten(-1, (-1, self.head_dim)) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = _rotate(a["q_norm"](q), rope), _rotate(a["k_norm"](k), rope)
        k, v = (t.repeat_interleave(self.groups, 2) for t in (k, v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def close(self, hidden: Tensor, attended: Tensor) -> Tensor:
        x = hidden + self.self_attn["o_proj"](attended)
        h, m = self.post_attention_layernorm(x), self.mlp
        return x + m["down_proj"](F.silu(m["gate_proj"](h)) * m["up_proj"](h))


class Eagle3(nn.Module):
    def __init__(self, target: Target) -> None:
        super().__init__()
        self.config = c = target.config
        self.fc = nn.Linear(len(READS) * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(c)])
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.embed_tokens = nn.Embedding.from_pretrained(target.embed_tokens.weight.detach().clone(), freeze=True)
        for name, p in self.named_parameters():
            if p.ndim == 2 and "embed" not in name:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            nn.init.zeros_(self.layers[0].get_submodule(name).weight)
        self.lm_head.weight.data.copy_(target.embed_tokens.weight.data)

    def forward(self, ids: Tensor, read: Tensor, rope: tuple[Tensor, Tensor], steps: int) -> list[Tensor]:
        """ids [B, T], read [B, T, 3H] of the target -> logits [B, T - 1, V] of each draft step.

        Row t of step k was given id t + 1 and predicts id t + 2; drafts of one block are rows p, p + 1, ... of steps
        0, 1, .... At step k a row sees the target's states up to row t - k, behind it the draft's own.
        """
        layer, embedded = self.layers[0], self.embed_tokens(ids[:, 1:])
        rope = (rope[0][: embedded.shape[1]], rope[1][: embedded.shape[1]])
        hidden, logits, own = self.fc(read[:, :-1]), [], []
        T = hidden.shape[1]
        rows = torch.arange(T, device=ids.device)
        for k in range(steps):
            q, key, value = layer.qkv(embedded, hidden, rope)
            if k == 0:
                keys, values = key, value
            else:
                own.append((key, value))
            scores = (q @ keys.mT).masked_fill(rows > (rows[:, None] - k), float("-inf"))
            late = [(a.roll(k - j, 2), b.roll(k - j, 2)) for j, (a, b) in enumerate(own, 1)]
            columns = torch.cat([scores, *[(q * a).sum(-1, keepdim=True) for a, _ in late]], -1)
            weights = (columns.float() * layer.head_dim**-0.5).softmax(-1).to(values.dtype)
            y = weights[..., :T] @ values
            for j, (_, b) in enumerate(late):
                y = y + weights[..., T + j : T + j + 1] * b
            hidden = layer.close(hidden, y.transpose(1, 2).flatten(2))
            logits.append(self.lm_head(self.norm(hidden)))
            hidden = F.pad(hidden, (0, 0, 1, 0))[:, :T]  # the next step's row starts from the one before
        return logits

    def save_folder(self, path: Path) -> None:
        from safetensors.torch import save_file

        path.mkdir(parents=True, exist_ok=True)
        tensors = {n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in self.named_parameters()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        raw = self.config.to_json(0, 0) | asdict(self.config)
        raw |= {"architectures": ["Eagle3Qwen3Model"], "num_hidden_layers": 1, "layer_types": ["full_attention"]}
        raw |= {"tie_word_embeddings": False, "target_layer_ids": list(READS), "max_window_layers": 1}
        for name in ("eos_token_id", "pad_token_id"):
            del raw[name]
        (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def batches(documents: list[tuple[list[int], list[int]]], rows: int, device: torch.device, seed: int):
    """ids [B, T] and the places of answer ids [B, T], for ever; documents of a batch are of similar length."""
    rng = Random(seed)
    ordered = sorted(documents, key=lambda d: len(d[0]) + len(d[1]))
    groups = [ordered[i : i + rows] for i in range(0, len(ordered) - rows + 1, rows)]
    while True:
        rng.shuffle(groups)
        for group in groups:
            width = -(-max(len(p) + len(a) for p, a in group) // 32) * 32
            ids, answer = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.bool)
            for row, (p, a) in enumerate(group):
                ids[row, : len(p) + len(a)] = torch.tensor(p + a)
                answer[row, len(p) : len(p) + len(a)] = True
            yield ids.to(device), answer.to(device)


def loss_of(logits: list[Tensor], wanted: Tensor, answer: Tensor, decay: float = 0.8) -> tuple[Tensor, Tensor]:
    """wanted [B, T]: the target's argmax after each id. Cross-entropy, later steps weighing less; drafts accepted."""
    label, place = wanted[:, 1:], answer[:, 1:].clone()
    place[:, :-1] &= answer[:, 2:]  # id t + 2 is an answer's
    total, match = logits[0].new_zeros(()), []
    for k, each in enumerate(logits):
        one = F.cross_entropy(each.flatten(0, 1).float(), label.flatten(), reduction="none").view(label.shape)
        total = total + decay**k * (one * place).sum() / place.sum()
        match.append(((each.argmax(-1) == label) & place)[:, k:])
    size = match[-1].shape[1]
    run = torch.stack([m[:, :size] for m in match]).int().cumprod(0).sum(0)
    return total, run[place[:, :size]].float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=12_000, help="of each task")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, at most")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--unroll", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.from_folder(HERE / "tiny-qwen3", device).requires_grad_(False)
    seeds = range(FIRST_SEED, FIRST_SEED + args.documents)
    found = data.documents("math", seeds) + data.documents("code", seeds)
    draft = Eagle3(target).to(device)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    source, begin = batches(found, args.rows, device, 0), time.monotonic()
    for step in range(args.steps):
        ids, answer = next(source)
        with torch.no_grad():
            hidden, read = target(ids, keep=READS)
            wanted = target.logits(hidden).argmax(-1)
        assert read is not None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = draft(ids, read, (target.cos, target.sin), args.unroll)
        loss, accepted = loss_of(logits, wanted, answer)
        loss.backward()
        progress = max((step + 1) / args.steps, (time.monotonic() - begin) / args.seconds)
        for group in adam.param_groups:
            group["lr"] = 2e-3 * min((step + 1) / 50, max(1 - progress, 0.0) + 1e-3)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step % 100 == 0 or progress >= 1:
            took = time.monotonic() - begin
            scores = f"loss {float(loss.detach()):.3f}, {float(accepted):.2f} of {args.unroll} accepted"
            print(f"step {step}: {scores}, {took:.0f} s", flush=True)
        if progress >= 1:
            break
    draft.save_folder(args.out)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
