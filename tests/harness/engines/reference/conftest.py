from __future__ import annotations

import pytest
from reference_pair import make_target
from transformers import Qwen3ForCausalLM


@pytest.fixture(scope="session")
def target() -> Qwen3ForCausalLM:
    return make_target()
