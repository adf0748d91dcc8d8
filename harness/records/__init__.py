"""One directory per run, created exclusively, appended to, sealed at the end; nothing measured is ever overwritten."""

from harness.records.run import Run
from harness.records.schema import METRIC_VERSION, SCHEMA_VERSION, Record, Row

__all__ = ["METRIC_VERSION", "SCHEMA_VERSION", "Record", "Row", "Run"]
