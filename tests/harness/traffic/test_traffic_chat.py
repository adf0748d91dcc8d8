import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from harness.engines.tokenizer import Tokenizer
from harness.traffic import Item
from harness.traffic.chat import render

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = """{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
ITEMS = [
    Item("a", "math", ({"role": "user", "content": "2 + 2 is\nhow much? \\boxed{}"},), "4", 8, False),
    Item(
        "b", "code", ({"role": "system", "content": "é {{x}} {% y %}"}, {"role": "user", "content": " "}), {}, 8, True
    ),
    Item("c", "math", ({"role": "user", "content": "an <|end|> in the text"},), "4", 8, False),
]


def made(folder):
    """A byte-level BPE with chat markers, as model folders hold it."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>", "<think>", "</think>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["user assistant how much is 2 + 2"] * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>", pad_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["made", "tiny-qwen3"])
def folder(request, tmp_path_factory):
    if request.param == "made":
        return made(tmp_path_factory.mktemp("tokenizer"))
    path = ROOT / "recipes" / "checkpoints" / "tiny-qwen3"
    if not (path / "tokenizer.json").exists():
        pytest.skip("tiny-qwen3 holds no tokenizer")
    return path


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_the_light_path_gives_the_ids_of_transformers(folder, item):
    heavy = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [dict(m) for m in item.messages]
    options = {"add_generation_prompt": True, "enable_thinking": item.thinking}
    expected = heavy.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert render(Tokenizer.from_folder(folder), item) == list(expected)
    assert render(heavy, item) == list(expected)
    assert len(expected) > 4


def test_thinking_decides_the_prompt(folder):
    tokenizer = Tokenizer.from_folder(folder)
    item = ITEMS[0]
    thinking = Item("t", "math", item.messages, "4", 8, True)
    assert render(tokenizer, item) != render(tokenizer, thinking)
    assert "<think>\n\n</think>" in tokenizer.decode(render(tokenizer, item), skip_special_tokens=False)


def test_rendering_needs_no_torch():
    code = (
        "import sys, harness.traffic.chat, harness.engines.tokenizer\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
