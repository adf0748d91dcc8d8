import hashlib
import json
from pathlib import Path

import adapters
from adapters.policy import Policy
from adapters.telemetry import SCHEMA, Telemetry, file_hashes

ASD = Policy("asd", budget=2.0, gate=2.0, max_mismatches=1, suffix_value="normalized")


def test_the_snapshot_is_json_and_names_what_runs():
    telemetry = Telemetry("reference", "specaccept-reference", "1", ASD)
    telemetry.armed = True
    found = json.loads(json.dumps(telemetry.snapshot({"SPECACCEPT_NONCE": "n1"})))
    assert found["schema"] == SCHEMA
    assert (found["adapter"], found["engine"]) == ("reference", {"name": "specaccept-reference", "version": "1"})
    assert (found["nonce"], found["armed"], found["counters"]) == ("n1", True, {})
    assert Policy.from_json(found["default_policy"]) == ASD
    assert Telemetry("reference", "e", "1").snapshot({})["nonce"] is None


def test_counters_are_kept_by_policy_and_copied_into_the_snapshot():
    telemetry = Telemetry("reference", "e", "1")
    telemetry.of(ASD).relaxed += 2
    telemetry.of(ASD.key).regret_charged += 0.5
    telemetry.of(ASD).fall_back("sampled request")
    telemetry.of(ASD).fall_back("sampled request")
    before = telemetry.snapshot({})
    telemetry.of(ASD).fall_back("sampled request")
    assert before["counters"][ASD.key]["relaxed"] == 2
    assert before["counters"][ASD.key]["regret_charged"] == 0.5
    assert before["counters"][ASD.key]["fallbacks"] == {"sampled request": 2}
    telemetry.reset()
    assert telemetry.snapshot({})["counters"] == {}


def test_every_adapter_file_is_hashed_by_its_content():
    root = Path(adapters.__file__).parent
    files = file_hashes()
    assert set(files) == {f"adapters/{p.relative_to(root).as_posix()}" for p in root.rglob("*.py")}
    assert files["adapters/policy.py"] == hashlib.sha256((root / "policy.py").read_bytes()).hexdigest()
