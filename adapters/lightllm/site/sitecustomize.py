"""Arms every Python process below `python -m adapters.lightllm serve`, which puts this folder first on PYTHONPATH.

For a PYTHONPATH or --target installation, where no .pth file is read. The sitecustomize that this one hides still runs.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))

from adapters.lightllm import hook  # noqa: E402

hook.install()

_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
