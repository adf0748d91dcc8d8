"""task=site: results/site/index.html, again, from the records."""

from __future__ import annotations

import os

from harness.config import Config
from harness.publish.site import SITE
from harness.publish.tables import write
from harness.tasks import PASS


def run(config: Config) -> int:
    config.results.mkdir(parents=True, exist_ok=True)
    write(config.results, only=SITE)
    print(f"written: {os.path.relpath(config.results / SITE)}")
    return PASS
