"""The committed tiny pair: sizes, fields that engines read, tokenizer, chat template, and weights that work."""

import json
import sys
from pathlib import Path
from random import Random

import pytest
import torch

from harness.traffic.generated import code, math, split

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints"
sys.path.insert(0, str(FOLDER))

import data  # noqa: E402
from model import Target, TargetConfig  # noqa: E402
from train import DRAFT, TARGET, Answer, answers, describe, right, speculate  # noqa: E402

from harness.engines.reference.dspark import DSparkDraft  # noqa: E402

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<think>", "</think>")


def read(*parts: str) -> dict:
    return json.loads(FOLDER.joinpath(*parts).read_text())


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER / TARGET)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return Target.from_folder(FOLDER / TARGET)


@pytest.fixture(scope="module")
def greedy(target: Target) -> dict[str, list[Answer]]:
    """The target's greedy answers to a few test problems of each task."""
    stop, made = data.tokenizer().token_to_id("<|im_end|>"), {}
    for task in ("math", "code"):
        first = split("test").start
        made[task] = answers(target, task, range(first, first + 8), data.prompts((task, first, 8)), stop, 8)
    return made


# ---- files


def test_every_file_is_under_16_mb() -> None:
    sizes = {p.name: p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()}
    assert {"model.safetensors", "tokenizer.json"} <= sizes.keys()
    assert max(sizes.values()) < 16e6


def test_target_has_at_most_8_million_parameters_in_bf16() -> None:
    from safetensors.torch import load_file

    tensors = load_file(FOLDER / TARGET / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert sum(t.numel() for t in tensors.values()) <= 8_000_000
    assert "lm_head.weight" not in tensors


def test_target_config_is_what_every_engine_reads() -> None:
    config = read(TARGET, "config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["head_dim"] == 64
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 2048
    generation = read(TARGET, "generation_config.json")
    assert generation["do_sample"] is False
    assert generation["eos_token_id"] == [data.tokenizer().token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]


def test_draft_config_fits_the_target() -> None:
    config, target = read(DRAFT, "config.json"), read(TARGET, "config.json")
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["block_size"] == 7
    assert config["mask_token_id"] == data.tokenizer().token_to_id("<|mask|>") < target["vocab_size"]
    assert max(config["target_layer_ids"]) < target["num_hidden_layers"] - 1
    assert config["num_target_layers"] == target["num_hidden_layers"]
    assert config["markov_head_type"] == "vanilla"
    assert 32 <= config["markov_rank"] <= 64
    assert not config["enable_confidence_head"]
    # LightLLM keeps the draft's KV in the target's slots and takes the target's rope; SGLang takes the draft's own.
    for field in ("hidden_size", "num_key_value_heads", "head_dim", "vocab_size", "rope_theta"):
        assert config[field] == target[field], field


def test_calibration_holds_a_valid_policy() -> None:
    from adapters.policy import Policy

    found = read(DRAFT, "calibration.json")
    policy = Policy.from_json(json.dumps(found["policy"]))
    assert policy.rule == "asd"
    assert policy.budget == policy.gate > 0
    assert policy.max_mismatches == 1
    assert policy.suffix_value == "normalized"
    first = split("calibration").start
    assert sum(item["seeds"][1] - item["seeds"][0] for item in found["items"].values()) == 32
    assert all(item["seeds"][0] == first for item in found["items"].values())


def test_readme_tells_the_numbers_of_the_training_log() -> None:
    log, text = read("training.json"), (FOLDER / "README.md").read_text()
    for task in ("math", "code"):
        assert f"{log[f'test_{task}']['accuracy']:.1%}".replace("%", " %") in text
        assert f"{log[f'test_{task}']['tokens_per_step']:.2f}" in text
    assert f"{log['calibration']['policy']['budget']:.4f}" in text


# ---- tokenizer


def test_vocabulary(tokenizer) -> None:
    assert len(tokenizer) == read(TARGET, "config.json")["vocab_size"] <= 2048
    for text in SPECIAL:
        assert tokenizer.encode(text) == [tokenizer.convert_tokens_to_ids(text)]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize(
    "text", ["", " a  b\t\n\n x", "naïve Zoë 日本語 🤗 \x00\x7f", "def f(x):\n    return x[::-1]\n", "12345 6.7 $8 9%"]
)
def test_any_text_round_trips(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_unicode_round_trips(tokenizer) -> None:
    rng = Random(5)
    for _ in range(200):
        points = [
            rng.choice((rng.randrange(32, 127), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))
            for _ in range(20)
        ]
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone(tokenizer) -> None:
    assert [t.strip("Ġ") for t in tokenizer.tokenize("a 2048") if t.strip("Ġ").isdigit()] == list("2048")
    assert not [t for t in tokenizer.get_vocab() if sum(c.isdigit() for c in t) > 1]


def test_chat_template_both_ways(tokenizer) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
        {"role": "user", "content": "more"},
    ]

    def render(**options) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)

    turns = (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render() == render(enable_thinking=True) == turns
    assert render(enable_thinking=False) == turns + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("module", [math, code])
def test_training_rendered_prompts_as_the_template_does(tokenizer, module) -> None:
    made = module.problem(3)
    text = tokenizer.apply_chat_template(
        list(made.messages), tokenize=False, add_generation_prompt=True, enable_thinking=made.thinking
    )
    assert data.opening(made) == text
    assert data.prompts((module.__name__.rsplit(".", 1)[1], 3, 1)) == [tokenizer.encode(text)]


def test_packed_rows_hold_whole_documents() -> None:
    ids, marks = data.shard((0, 64, 0.5))
    assert ids.shape == marks.shape
    wanted = {tuple(p + a) for task in ("math", "code") for p, a in data.documents(task, range(32))}
    for row, mark in zip(ids, marks, strict=True):
        numbers = mark & (data.IN_LOSS - 1)
        for number in range(1, numbers.max() + 1):
            assert tuple(row[numbers == number].tolist()) in wanted


# ---- weights


def test_target_equals_transformers(target: Target) -> None:
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(FOLDER / TARGET, dtype=torch.float32)
    ids = torch.tensor([data.prompts(("math", split("test").start, 1))[0]])
    with torch.no_grad():
        hidden, kept = target(ids, keep=(1, 3))
        found = other(ids, output_hidden_states=True)
    torch.testing.assert_close(target.logits(hidden), found.logits, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(kept, torch.cat([found.hidden_states[i + 1] for i in (1, 3)], -1), atol=1e-3, rtol=1e-4)


def test_generation_is_that_of_single_requests() -> None:
    torch.manual_seed(0)
    target = Target(TargetConfig(num_hidden_layers=2))
    for p in target.parameters():
        torch.nn.init.normal_(p, std=0.2)
    prompts = [[5, 6, 7, 8], [9] * 11, [3]]
    together = target.generate(prompts, 6, stop=1)
    for prompt, output in zip(prompts, together, strict=True):
        ids = list(prompt)
        for token in output:
            with torch.no_grad():
                assert target.logits(target(torch.tensor([ids]))[0])[0, -1].argmax() == token
            ids.append(token)


def test_the_pair_answers_and_is_accelerated(target: Target, greedy: dict[str, list[Answer]]) -> None:
    class Here:
        map = staticmethod(lambda f, jobs, chunksize=1: [f(job) for job in jobs])

    draft = DSparkDraft.from_folder(FOLDER / DRAFT, target)
    stop = data.tokenizer().token_to_id("<|im_end|>")
    for task, made in greedy.items():
        assert all(a.output[-1] == stop for a in made)
        texts = [data.tokenizer().decode(a.output) for a in made]
        good = right(made, Here) if task == "math" else [bool("```python" in t) for t in texts]
        assert sum(good) >= 4, task
        found = describe(speculate(target, draft, made))
        assert 2.5 <= found["tokens_per_step"] <= 7, task
