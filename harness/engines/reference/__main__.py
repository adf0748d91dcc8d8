"""python -m harness.engines.reference --model-path T --draft-path D: serve a Qwen3 target with its DSpark draft."""

from __future__ import annotations

import argparse
import sys

from adapters.policy import Policy, PolicyError


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected >= 1, found {text}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.engines.reference", description=__doc__)
    parser.add_argument("--model-path", required=True, help="Qwen3 target: a folder or a hub id")
    parser.add_argument("--draft-path", required=True, help="its Qwen3DSparkModel draft: a folder or a hub id")
    parser.add_argument("--revision", help="of the target's hub id: a branch, tag or commit")
    parser.add_argument("--draft-revision", help="of the draft's hub id")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0: a free one, printed when ready")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--max-running-requests", type=int, default=16, help="slots of the KV cache (default 16)")
    parser.add_argument("--max-total-tokens", type=int, help="longest prompt + output of one request")
    parser.add_argument("--threads", type=positive, help="CPU threads of one operation (default: 1 for a small target)")
    parser.add_argument("--seed", type=int, default=0, help="of sampled requests without a sampling_seed")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="CPU, float32: one thread and padded attention, so that a request's numbers do not depend on its company",
    )
    args = parser.parse_args(arguments)
    try:
        default = Policy.from_environment()
        from harness.engines.reference.dspark import DraftError
        from harness.engines.reference.loading import LoadError, Options, load
        from harness.engines.reference.server import serve
    except PolicyError as error:
        print(f"reference engine: SPECACCEPT_POLICY: {error}", file=sys.stderr)
        return 1
    if args.deterministic and args.threads not in (None, 1):
        print(f"reference engine: threads: expected 1 with --deterministic, found {args.threads}", file=sys.stderr)
        return 1
    options = Options(
        args.model_path,
        args.draft_path,
        args.dtype,
        args.device,
        args.max_running_requests,
        args.max_total_tokens,
        args.seed,
        args.deterministic,
        1 if args.deterministic else args.threads,
        args.revision,
        args.draft_revision,
    )
    try:
        engine, tokenizer = load(options, default)
        return serve(engine, tokenizer, options, args.host, args.port)
    except (LoadError, DraftError, OSError) as error:
        print(f"reference engine: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
