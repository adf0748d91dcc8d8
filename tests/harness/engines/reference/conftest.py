from __future__ import annotations

import pytest
import torch
from reference_pair import make_target
from transformers import Qwen3ForCausalLM

# Small tensors on shared cores: a second thread only waits.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> Qwen3ForCausalLM:
    return make_target()
