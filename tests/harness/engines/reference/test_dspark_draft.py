"""The draft: its training form, its inference form, an independent loop and its folder agree."""

from __future__ import annotations

import json

import pytest
import torch
from reference_pair import make_draft, make_target
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from harness.engines.reference.dspark import DraftConfig, DraftError, DSparkDraft


def context_of(target, draft, ids):
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in draft.config.target_layer_ids], -1)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_training_form_equals_inference_form(target, kind):
    draft = make_draft(target, kind=kind, confidence=True)
    ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    anchors = torch.tensor([[0, 3, 17, 38], [1, 9, 25, 39]])
    hidden = context_of(target, draft, ids)
    with torch.no_grad():
        blocks = draft.forward_blocks(ids, hidden, anchors)
        context = draft.context_kv(hidden, torch.arange(40).expand(2, -1))
        for a in range(anchors.shape[1]):
            rows = draft.block_hidden(ids.gather(1, anchors)[:, a], anchors[:, a], context)
            torch.testing.assert_close(rows, blocks.hidden[:, a], rtol=1e-4, atol=1e-5)
            # Fed its own greedy drafts as previous tokens, the teacher-forced Markov head gives the proposal's logits.
            drafts, corrected = draft.propose(ids.gather(1, anchors)[:, a], rows)
            previous = torch.cat([ids.gather(1, anchors)[:, a, None], drafts[:, :-1]], 1)
            forced = draft.logits(rows) + draft.markov_head.block(previous, rows)
            torch.testing.assert_close(forced, corrected, rtol=1e-4, atol=1e-5)
    assert blocks.confidence is not None
    assert blocks.confidence.shape == (2, 4, 7)


def test_labels_follow_the_anchor_and_stop_at_the_end(target):
    draft = make_draft(target)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        blocks = draft.forward_blocks(ids, context_of(target, draft, ids), torch.tensor([[4, 16, 19]]))
    assert blocks.labels[0, 0].tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert blocks.valid.sum(-1).tolist() == [[7, 3, 0]]


def test_block_equals_a_loop_written_from_the_definition(target):
    """One block by scalar loops over heads and rows: positions, context, non-causal block, Markov bias."""
    draft = make_draft(target).double()
    draft.attach(target.double())
    ids = torch.randint(0, 97, (1, 12), generator=torch.Generator().manual_seed(2))
    start = 9
    context = context_of(target, draft, ids)
    try:
        with torch.no_grad():
            blocks = draft.forward_blocks(ids, context, torch.tensor([[start]]))
            rope = target.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(32)[None])
            embedding = target.get_input_embeddings().weight
            x = torch.stack([embedding[ids[0, start]]] + [embedding[draft.config.mask_token_id]] * 6)
            ctx = draft.hidden_norm(context[0, :start] @ draft.fc.weight.T)

            def turned(t, at):
                cos, sin = (r[:, at] for r in rope)
                return apply_rotary_pos_emb(t[None, None], t[None, None], cos, sin)[0][0, 0]

            for layer in draft.layers:
                h, out = layer.input_layernorm(x), torch.zeros(7, 64, dtype=torch.float64)
                attention = layer.self_attn
                for head in range(4):
                    rows, kv_rows = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
                    both = torch.cat([ctx, h])
                    k = attention.k_norm(both @ attention.k_proj.weight[kv_rows].T)
                    k = torch.cat([turned(k[:start], slice(0, start)), turned(k[start:], slice(start, start + 7))])
                    v = both @ attention.v_proj.weight[kv_rows].T
                    q = turned(attention.q_norm(h @ attention.q_proj.weight[rows].T), slice(start, start + 7))
                    out[:, rows] = (q @ k.T / 4).softmax(-1) @ v
                x = x + out @ attention.o_proj.weight.T
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits = draft.norm(x) @ target.get_output_embeddings().weight.T
            previous = ids[0, start : start + 3]
            bias = draft.markov_head.markov_w1.weight[previous] @ draft.markov_head.markov_w2.weight.T
        # target.rotary_emb computes its angles in float32
        torch.testing.assert_close(blocks.base_logits[0, 0], logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(blocks.logits[0, 0, :3], logits[:3] + bias, rtol=1e-5, atol=1e-5)
    finally:
        target.float()


def test_gradients_reach_every_parameter_but_the_borrowed(target):
    draft = make_draft(target, kind="gated", confidence=True)
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(8))
    blocks = draft.forward_blocks(ids, context_of(target, draft, ids), torch.tensor([[3, 11], [0, 5]]))
    loss = torch.nn.functional.cross_entropy(blocks.logits.flatten(0, 2), blocks.labels.flatten())
    (loss + blocks.confidence.square().mean()).backward()
    assert [n for n, p in draft.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    assert not any("embed" in n or "lm_head" in n for n, _ in draft.named_parameters())


@pytest.mark.parametrize("confidence", [False, True])
def test_folder_round_trip(target, tmp_path, confidence):
    draft = make_draft(target, confidence=confidence)
    draft.save_folder(tmp_path, dtype=torch.float32)
    again = DSparkDraft.from_folder(tmp_path, target)
    assert again.config == draft.config
    assert again.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(again.state_dict()[n], t) for n, t in draft.state_dict().items())
    assert again.rope.dtype == torch.float32
    assert DSparkDraft.from_folder(tmp_path, target, dtype=torch.bfloat16).rope.dtype == torch.float32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mask_token_id", None),
        ("mask_token_id", 97),
        ("block_size", 0),
        ("markov_rank", 0),
        ("markov_head_type", "lstm"),
        ("target_layer_ids", [0, 3]),
        ("target_layer_ids", []),
        ("target_layer_ids", [2, 0]),
        ("architectures", ["Qwen3ForCausalLM"]),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("attention_bias", True),
        ("vocab_size", 96),
        ("num_target_layers", 5),
    ],
)
def test_bad_config_is_an_error_that_names_the_field(target, tmp_path, field, value):
    make_draft(target).save_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftError, match=field if field != "vocab_size" else "vocab_size|markov_w1"):
        DSparkDraft.from_folder(tmp_path, target)


def test_missing_and_unknown_tensors_are_errors(target, tmp_path):
    from safetensors.torch import load_file, save_file

    make_draft(target).save_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for change in (
        {k: v for k, v in tensors.items() if k != "fc.weight"},
        tensors | {"fc.bias": torch.ones(32)},
    ):
        save_file(change, tmp_path / "model.safetensors")
        with pytest.raises(DraftError, match=r"fc\."):
            DSparkDraft.from_folder(tmp_path, target)


def test_nested_config_takes_precedence():
    target = make_target()
    raw = make_draft(target).config.to_json()
    raw |= {"markov_rank": None, "dspark_config": {"markov_rank": 8}, "dflash_config": {"block_size": 5}}
    config = DraftConfig.from_json(raw)
    assert (config.markov_rank, config.block_size) == (8, 5)
