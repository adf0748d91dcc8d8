"""A random pair with a byte-level tokenizer, as folders: loads in a second and answers in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from harness.engines.reference.dspark import DraftConfig, DSparkDraft

VOCABULARY = 258
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(root: Path) -> dict[str, str]:
    """target and draft below `root`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=257,
        initializer_range=0.2,
    )
    target = Qwen3ForCausalLM(config).eval()
    draft = DSparkDraft(
        DraftConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=VOCABULARY,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=10000.0,
            block_size=7,
            mask_token_id=2,
            target_layer_ids=(0, 2),
            num_target_layers=4,
            markov_rank=8,
            max_position_embeddings=4096,
        )
    )
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    target.save_pretrained(root / "target")
    draft.attach(target).eval().save_folder(root / "draft", dtype=torch.float32)
    for name in ("target", "draft"):
        _tokenizer(root / name)
    return {name: str(root / name) for name in ("target", "draft")}


def _tokenizer(folder: Path) -> None:
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Tokenizer(models.BPE(alphabet, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
