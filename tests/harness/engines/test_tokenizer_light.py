"""The tokenizer without torch gives the ids of transformers' own."""

import json
from pathlib import Path

import pytest

from harness.engines.tokenizer import Tokenizer, TokenizerError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tom has 3 apples \u2013 and 2 é pears?\n"},
]


@pytest.mark.parametrize("thinking", [True, False])
def test_same_ids_as_transformers(pair, thinking):
    from transformers import PreTrainedTokenizerFast

    folder = Path(pair["target"])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs.chat_template = (folder / "chat_template.jinja").read_text()
    ours = Tokenizer.from_folder(folder)
    options = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": thinking}
    text = ours.apply_chat_template(MESSAGES, **options)
    assert text == theirs.apply_chat_template(MESSAGES, **options)
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.stop_ids == [257]


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_template(pair, tmp_path):
    (tmp_path / "tokenizer.json").write_text((Path(pair["target"]) / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(TokenizerError, match="chat template"):
        Tokenizer.from_folder(tmp_path)


def test_ids_are_made_once(pair):
    with pytest.raises(TokenizerError, match="tokenize=False"):
        Tokenizer.from_folder(Path(pair["target"])).apply_chat_template(MESSAGES, tokenize=True)
