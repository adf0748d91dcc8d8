"""The reference engine beside transformers' own generation: one process, same weights, same threads, same prompts.

    python -m harness.engines.reference.benchmark [--threads 1] [--prompts 16] [--new-tokens 128] [--random]

Batch 1: every prompt goes through each contender in turn, so that whatever else the machine does meets all of them.
transformers cannot use a DSpark draft; its assisted generation is the one that needs no second model, prompt lookup
(`prompt_lookup_num_tokens` = the draft's block size). Batches: strict at 1, 8, 16 and 32 slots on one list of requests.
`--random` replaces the pair by random weights of the usual tiny size, whose drafts are never accepted: the step rates
mean something, the token rates do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adapters.policy import Policy
from harness.engines.reference.dspark import DraftConfig, DraftError, DSparkDraft
from harness.engines.reference.engine import Engine, Request
from harness.engines.reference.loading import LoadError, Options, build, check_target, eos_ids, load_target, set_threads
from harness.engines.reference.sampling import Sampling

ROOT = Path(__file__).parents[3]
PAIR = ROOT / "recipes/checkpoints"
Q25 = Policy("asd", budget=2.0625, gate=2.0625, max_mismatches=1, suffix_value="normalized")  # the published one
SLOTS = (1, 8, 16, 32)


def random_pair() -> tuple[Any, DSparkDraft]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )
    target = Qwen3ForCausalLM(config).eval()
    draft = DraftConfig(256, 768, 2, 4, 2, 64, 2048, 1e-6, 10000.0, 7, 2, (0, 2, 4), 6, 64)
    return target, DSparkDraft(draft).attach(target)


def read_pair(target: Path, draft: Path, dtype: torch.dtype, device: str) -> tuple[Any, DSparkDraft]:
    check_target(target)
    model = load_target(target, dtype, device)
    return model, DSparkDraft.from_folder(draft, model, dtype, device)


def policy_of(draft: Path) -> Policy:
    """The pair's own calibrated policy, where its folder has one."""
    file = draft / "calibration.json"
    return Policy.from_json(json.loads(file.read_text())["policy"]) if file.is_file() else Q25


def prompts_of(folder: Path, count: int) -> list[list[int]]:
    """Rendered prompts of the generated traffic."""
    from harness.engines.tokenizer import Tokenizer
    from harness.traffic import load
    from harness.traffic.chat import render

    tokenizer = Tokenizer.from_folder(folder)
    return [render(tokenizer, item) for item in load({"name": "generated", "limit": count}).items]


def request(prompt: list[int], new_tokens: int, policy: Policy | None = None, ignore_eos: bool = False) -> Request:
    params = Sampling(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=ignore_eos, policy=policy)
    return Request("benchmark", prompt, params)


def batch_one(model: Any, engine: Engine, asd: Policy, prompts: list[list[int]], new_tokens: int) -> None:
    device, eos = engine.device, sorted(engine.eos) or None
    done: list[Request] = []

    def transformers(**more: Any) -> Callable[[list[int]], list[int]]:
        def run(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt], device=device)
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    eos_token_id=eos,
                    pad_token_id=0,
                    **more,
                )
            return out[0, len(prompt) :].tolist()

        return run

    def ours(policy: Policy | None) -> Callable[[list[int]], list[int]]:
        def run(prompt: list[int]) -> list[int]:
            done.extend(engine.generate([request(prompt, new_tokens, policy)]))
            return done[-1].output

        return run

    contenders = {
        "transformers greedy": transformers(),
        "transformers prompt lookup": transformers(prompt_lookup_num_tokens=engine.drafts),
        "reference strict": ours(None),
        "reference asd": ours(asd),
    }
    seconds, tokens = dict.fromkeys(contenders, 0.0), dict.fromkeys(contenders, 0)
    outputs: dict[str, list[list[int]]] = {name: [] for name in contenders}
    for index, prompt in enumerate([prompts[0], *prompts]):  # the first round warms up
        for name, run in contenders.items():
            started = time.perf_counter()
            out = run(prompt)
            if index:
                seconds[name] += time.perf_counter() - started
                tokens[name] += len(out)
                outputs[name].append(out)
    baseline = tokens["transformers greedy"] / seconds["transformers greedy"]
    print(f"\nbatch 1, {len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} ids")
    print(f"{'':28s} {'tokens/s':>9s} {'ratio':>6s} {'tokens':>7s}  same ids as transformers greedy")
    for name in contenders:
        rate = tokens[name] / seconds[name]
        same = sum(a == b for a, b in zip(outputs[name], outputs["transformers greedy"], strict=True))
        print(f"{name:28s} {rate:9.1f} {rate / baseline:6.2f} {tokens[name]:7d}  {same}/{len(prompts)}")
    for key in ("strict", asd.key):
        of = [r for r in done[2:] if r.policy.key == key]
        steps = sum(r.steps for r in of)
        print(f"tokens per step, {key}: {sum(len(r.output) for r in of) / max(steps, 1):.2f}")


def batches(
    model: Any, draft: DSparkDraft, options: Options, prompts: list[list[int]], new_tokens: int, fixed: bool
) -> None:
    print(f"\n{'slots':>5s} {'tokens/s':>9s} {'steps/s':>8s} {'request-steps/s':>15s} {'prefill ids/s':>13s}")
    for slots in SLOTS:
        engine = build(model, draft, Options(options.target, options.draft, slots=slots, limit=options.limit))
        count = max(2 * slots, 4)
        work = [prompts[i % len(prompts)] for i in range(count)]
        engine.generate([request(p, 1) for p in work[:2]])
        started = time.perf_counter()
        engine.generate([request(p, 1) for p in work])
        prefill = time.perf_counter() - started
        before = engine.steps
        requests = [request(p, new_tokens, ignore_eos=fixed) for p in work]
        started = time.perf_counter()
        engine.generate(requests)
        wall = time.perf_counter() - started
        decode = max(wall - prefill, 1e-9)
        steps, pairs = engine.steps - before, sum(r.steps for r in requests)
        ids = sum(len(r.output) for r in requests)
        rate = sum(map(len, work)) / prefill
        print(f"{slots:5d} {ids / wall:9.1f} {steps / decode:8.1f} {pairs / decode:15.1f} {rate:13.0f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.engines.reference.benchmark")
    parser.add_argument("--model-path", type=Path, default=PAIR / "tiny-qwen3")
    parser.add_argument("--draft-path", type=Path, default=PAIR / "tiny-qwen3-dspark-block7")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="default: 1 for a small target")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--random", action="store_true", help="random weights instead of a pair")
    args = parser.parse_args()
    try:
        if args.random:
            model, draft = random_pair()
            ids = torch.Generator().manual_seed(1)
            prompts = [torch.randint(3, 2048, (180,), generator=ids).tolist() for _ in range(args.prompts)]
        else:
            model, draft = read_pair(args.model_path, args.draft_path, getattr(torch, args.dtype), args.device)
            prompts = prompts_of(args.model_path, args.prompts)
        set_threads(model, args.threads)
        limit = max(map(len, prompts)) + args.new_tokens
        options = Options(str(args.model_path), str(args.draft_path), slots=1, limit=limit)
        engine = build(model, draft, options)
    except (LoadError, DraftError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    size = sum(p.numel() for p in model.parameters()) / 1e6
    where = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    )
    print(f"target {size:.1f} M parameters, {args.dtype}, {where}, eos {sorted(eos_ids(model))}")
    batch_one(model, engine, Q25 if args.random else policy_of(args.draft_path), prompts, args.new_tokens)
    batches(model, draft, options, prompts, args.new_tokens, args.random)
    return 0


if __name__ == "__main__":
    sys.exit(main())
