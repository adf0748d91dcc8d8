"""A random Qwen3 target and DSpark draft, small enough for exact comparisons."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from harness.engines.reference.dspark import DraftConfig, DSparkDraft


def make_target(seed: int = 0, vocab: int = 97, layers: int = 4) -> Qwen3ForCausalLM:
    """Random weights spread widely enough that logits are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=1,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def make_draft(target: Qwen3ForCausalLM, seed: int = 1, kind: str = "vanilla", confidence: bool = False) -> DSparkDraft:
    torch.manual_seed(seed)
    c = target.config
    config = DraftConfig(
        hidden_size=c.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=c.vocab_size,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=10000.0,
        block_size=7,
        mask_token_id=2,
        target_layer_ids=(0, 2),
        num_target_layers=c.num_hidden_layers,
        markov_rank=8,
        markov_head_type=kind,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence,
        max_position_embeddings=c.max_position_embeddings,
    )
    draft = DSparkDraft(config)
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return draft.attach(target).eval()
