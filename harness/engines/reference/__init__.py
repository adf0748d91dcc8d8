"""The embedded reference engine: a Qwen3 target and its DSpark draft in plain PyTorch, served over HTTP."""
