"""Every fault of the fake engine is in the table, every line is what happens, and the README shows the table."""

from collections import Counter

import pytest
from fake_engine import FAULTS
from fault_table import README, TABLE, Fault, markdown


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.name)
def test_a_fault_has_the_outcome_of_the_table(measure, fault: Fault):
    status, said, runs = measure(fault)
    assert fault.said in said
    assert status == fault.status
    (run,) = runs
    assert run.problems == []
    assert run.record.status == fault.record
    assert sorted(Counter(row.error for row in run.rows if row.error).items()) == sorted(fault.rows)
    assert all(row.outcome is None for row in run.rows if row.error)
    if fault.record == "failed":
        assert run.record.verdict is None
        assert "verdict" not in said
    else:
        assert run.record.verdict.outcome == ("pass", "fail", "inconclusive")[status]


def test_every_fault_is_in_the_table_once():
    assert sorted(fault.name for fault in TABLE) == sorted(FAULTS)


def test_the_readme_is_the_table():
    assert README.read_text() == markdown()
