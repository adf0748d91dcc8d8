"""Train the pair's byte-level BPE tokenizer on generated problems and write the files that hold it.

    python recipes/checkpoints/tokenizer.py

Fixed seeds: the same text, so the same merges. Every byte is in the vocabulary, so any UTF-8 text round-trips; digits
stand alone, as in Qwen's tokenizers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from harness.traffic.generated import code, math  # noqa: E402

FOLDER = HERE / "tiny-qwen3"
VOCABULARY = 2048
ENDOFTEXT, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
THINK, END_THINK = "<think>", "</think>"
SPECIAL = (ENDOFTEXT, IM_START, IM_END, MASK)
PROBLEMS = 12_000

# Qwen's split: words with a leading space, single digits, runs of punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ChatML with Qwen3's switch: enable_thinking=False closes an empty thinking block in the prompt; thinking of earlier
# turns is left out.
CHAT_TEMPLATE = """\
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < last.user and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def texts() -> Iterator[str]:
    for seed in range(PROBLEMS):
        for module in (math, code):
            made = module.problem(seed)
            yield made.prompt
            yield made.solution(Random(seed)).replace(THINK, "").replace(END_THINK, "")


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - 2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    # As Qwen3 has them: one token each, yet ordinary text, which decoding keeps.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (THINK, END_THINK)])
    return tokenizer


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    tokenizer = train()
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": ENDOFTEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens in {FOLDER}")


if __name__ == "__main__":
    main()
