"""A model's tokenizer and chat template without torch: `tokenizers` and Jinja, loaded in milliseconds.

Prompts are rendered and encoded once, here, and sent as ids; output text is only ever decoded from the engine's ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Fast

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")


class TokenizerError(ValueError):
    """A folder without a usable tokenizer or chat template."""


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _raise(message: str) -> None:
    raise TemplateError(message)


class Tokenizer:
    """tokenizer.json and the chat template of a model folder.

    special: values of bos_token, eos_token, ... that a template may use.  stop_ids: what ends an answer, from
    generation_config.json, else config.json, else the tokenizer's eos_token. vocabulary: ids are below it; the model's
    may be padded beyond the tokenizer's.
    """

    def __init__(
        self, fast: Fast, template: str, special: dict[str, str], stop_ids: list[int], vocabulary: int = 0
    ) -> None:
        self.fast = fast
        self.special = special
        self.stop_ids = stop_ids
        self.vocabulary = max(vocabulary, 1 + max(fast.get_vocab().values(), default=-1))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        self.template = environment.from_string(template)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(f"tokenizer: expected {path.name} in {folder}, found none")
        config = _json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text() if template_file.exists() else config.get("chat_template")
        if not isinstance(template, str):
            raise TokenizerError(f"tokenizer: expected a chat template in {folder}, found none")
        fast = Fast.from_file(str(path))
        special = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = config.get(name)
            special[name] = token["content"] if isinstance(token, dict) else token
        model = _json(folder / "config.json")
        size = model.get("vocab_size", (model.get("text_config") or {}).get("vocab_size"))
        eos = _json(folder / "generation_config.json").get("eos_token_id", model.get("eos_token_id"))
        if eos is None and special["eos_token"]:
            eos = fast.token_to_id(special["eos_token"])
        stop_ids = [eos] if isinstance(eos, int) else list(eos or [])
        return cls(fast, template, {name: token for name, token in special.items() if token}, stop_ids, size or 0)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt's text. `tokenize=True` is refused: ids come from `encode`, once."""
        if tokenize:
            raise TokenizerError("tokenizer: apply_chat_template expects tokenize=False, found True")
        return self.template.render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **self.special, **variables
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
