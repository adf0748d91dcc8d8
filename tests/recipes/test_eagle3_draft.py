"""The unrolled EAGLE3 draft against drafting one id after another, and the folder that LightLLM loads."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints"
sys.path.insert(0, str(FOLDER))

from eagle3 import READS, Eagle3  # noqa: E402
from model import Target, TargetConfig  # noqa: E402

SMALL = TargetConfig(vocab_size=50, hidden_size=32, intermediate_size=48, head_dim=8, max_position_embeddings=64)
T, K = 10, 4


def draft_of(target: Target) -> Eagle3:
    torch.manual_seed(1)
    draft = Eagle3(target)
    for p in draft.parameters():  # o_proj and down_proj start at 0: they would hide the attention
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.2)
    return draft.eval()


def one_by_one(draft: Eagle3, target: Target, ids: list[int], p: int) -> list[torch.Tensor]:
    """Logits of K drafts after row p, as an engine drafts: with a cache, the last hidden state fed back."""
    layer = draft.layers[0]
    _, read = target(torch.tensor([ids]), keep=READS)
    keys, values, found = [], [], []
    hidden = None
    for t in range(p + K):
        state = draft.fc(read[:, t : t + 1]) if t <= p else hidden
        rope = (target.cos[t : t + 1], target.sin[t : t + 1])
        q, k, v = layer.qkv(draft.embed_tokens(torch.tensor([[ids[t + 1]]])), state, rope)
        keys.append(k)
        values.append(v)
        scores = q @ torch.cat(keys, 2).mT * layer.head_dim**-0.5
        y = scores.softmax(-1) @ torch.cat(values, 2)
        hidden = layer.close(state, y.transpose(1, 2).flatten(2))
        if t >= p:
            found.append(draft.lm_head(draft.norm(hidden))[0, 0])
    return found


def test_the_unrolled_rows_are_what_drafting_gives():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = Target(SMALL).eval()
    draft = draft_of(target)
    ids = torch.randint(0, 50, (T,)).tolist()
    with torch.no_grad():
        _, read = target(torch.tensor([ids]), keep=READS)
        steps = draft(torch.tensor([ids]), read, (target.cos, target.sin), K)
        for p in range(T - K):
            for k, want in enumerate(one_by_one(draft, target, ids, p)):
                torch.testing.assert_close(steps[k][0, p + k], want, atol=1e-5, rtol=1e-5)


def test_the_folder_has_what_lightllm_reads(tmp_path):
    draft = draft_of(Target(SMALL))
    draft.save_folder(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert (config["model_type"], config["num_hidden_layers"], config["target_layer_ids"]) == ("qwen3", 1, list(READS))
    assert config["rope_theta"] == SMALL.rope_theta
    assert tensors["fc.weight"].shape == (32, 32 * len(READS))
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (4 * 8, 2 * 32)
    block = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.o_proj", "self_attn.q_norm")
    assert {f"layers.0.{name}.weight" for name in block} < set(tensors)
    assert {"embed_tokens.weight", "norm.weight", "lm_head.weight"} < set(tensors)
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
