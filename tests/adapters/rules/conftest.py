"""Both paths in one process: the oracles on CPU tensors, the kernels on the GPU or, without one, in the interpreter.

Triton decides when a function is decorated, so the variable must be set while Triton and the kernels are imported, and
only then: set any longer, it would send every other test of the process through the interpreter.
"""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    if before != "1" and "triton.language" in sys.modules:
        raise RuntimeError("triton was imported, uninterpreted, before the kernels' tests: run them first")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # noqa: F401  Triton imports it lazily, at the first launch

    import adapters.rules.asd.triton
    import adapters.rules.block.triton
    import adapters.rules.rowstats.triton  # noqa: F401

    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["oracle", "kernel"])
def path(request) -> str:
    return request.param
