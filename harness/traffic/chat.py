"""From messages to token ids, once; ids are what is sent, compared and recorded."""

from __future__ import annotations

from typing import Any

from harness.traffic.base import Item


def render(tokenizer: Any, item: Item) -> list[int]:
    """Token ids of an item's prompt: the tokenizer's own chat template, thinking as the item says, generation opened.

    tokenizer: `harness.engines.tokenizer.Tokenizer` or one of transformers; both spell special tokens in the rendered
    text, so encoding adds none.
    """
    text = tokenizer.apply_chat_template(
        [dict(message) for message in item.messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=item.thinking,
    )
    return list(tokenizer.encode(text, add_special_tokens=False))
