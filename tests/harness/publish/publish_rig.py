"""Records as runs leave them, and as forgers do."""

import json
import shutil

import msgspec

from harness.records.read import read_all
from harness.records.run import identity_digest, plan_digest
from harness.records.schema import Record, seal


def edit(results, task: str, change, resealed: bool = True):
    """Change a record, and seal it again as a careful forger would."""
    (run,) = [run for run in read_all(results) if run.record.task == task]
    path = run.folder / "record.json"
    record = json.loads(path.read_text())
    change(record)
    if resealed:
        record["seal"] = seal(msgspec.convert(record, Record))
    path.write_text(json.dumps(record))
    return run


def bench(results):
    """The run of the fixture, which is older than any made from it."""
    return next(run for run in read_all(results) if run.record.task == "bench")


def again(results, change, name="99991231T000000Z-00000000") -> Record:
    """A second bench record, as an honest run would have left it."""
    folder = bench(results).folder
    later = folder.with_name(name)
    shutil.copytree(folder, later)
    path = later / "record.json"
    record = json.loads(path.read_text()) | {"id": later.name}
    change(record)
    found = msgspec.convert(record, Record)
    found.identity.plan = plan_digest(found.identity)
    found.identity.digest = identity_digest(found.identity)
    found.seal = seal(found)
    path.write_bytes(msgspec.json.encode(found))
    return found


def config_of(record):
    return record["identity"]["config"]
