"""task=tables: results/README.md and its plots, again, from the records."""

from __future__ import annotations

import os

from harness.config import Config
from harness.publish.tables import README, write
from harness.tasks import PASS


def run(config: Config) -> int:
    config.results.mkdir(parents=True, exist_ok=True)
    write(config.results)
    print(f"written: {os.path.relpath(config.results / README)}")
    return PASS
