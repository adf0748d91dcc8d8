"""The embedded reference engine: a Qwen3 target and its DSpark draft in plain PyTorch, served over HTTP."""

import os

# OpenMP reads this when torch is first imported. Threads that wait for each other by spinning stall a step for whole
# time slices as soon as any other process wants their core; asleep, they cost a few microseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
