"""Counters by file: question, answer, ranks merged, and who does not answer."""

from __future__ import annotations

import json
import threading

import pytest

from adapters.lightllm import exchange
from adapters.policy import Policy
from adapters.telemetry import Telemetry

ASD = Policy("asd", 2.0)


def telemetry(relaxed: int, armed: bool = True) -> Telemetry:
    made = Telemetry("lightllm", "lightllm", "test", ASD)
    made.armed = armed
    counters = made.of(ASD)
    counters.relaxed, counters.regret_charged = relaxed, relaxed / 2
    counters.fall_back("sampled request")
    return made


def answering(folder, *ranks, world=None):
    """Every rank answers one question, then stops."""
    responders = [exchange.Responder(folder, n, world or len(ranks), t.snapshot) for n, t in enumerate(ranks)]
    stop = threading.Event()

    def poll():
        while not stop.wait(0.005):
            for responder in responders:
                responder.answer()

    thread = threading.Thread(target=poll)
    thread.start()
    return stop, thread


@pytest.fixture
def served(tmp_path):
    running = []

    def start(*ranks, world=None):
        running.append(answering(tmp_path, *ranks, world=world))
        return tmp_path

    yield start
    for stop, thread in running:
        stop.set()
        thread.join()


def test_counters_of_ranks_are_summed(served):
    found = exchange.ask(served(telemetry(3), telemetry(4)), 5)
    assert found["counters"][ASD.key]["relaxed"] == 7
    assert found["counters"][ASD.key]["regret_charged"] == 3.5
    assert found["counters"][ASD.key]["fallbacks"] == {"sampled request": 2}
    assert (found["ranks"], found["armed"], found["adapter"], found["schema"]) == (2, True, "lightllm", 1)
    assert found["default_policy"] == ASD.to_json()


def test_each_question_gets_a_new_answer(served):
    source = telemetry(1)
    folder = served(source)
    assert exchange.ask(folder, 5)["counters"][ASD.key]["relaxed"] == 1
    source.of(ASD).relaxed = 9
    assert exchange.ask(folder, 5)["counters"][ASD.key]["relaxed"] == 9


def test_an_old_answer_is_no_answer(tmp_path):
    (tmp_path / "rank-0.json").write_text(json.dumps({"world": 1, "answers": "yesterday", "counters": {}}))
    with pytest.raises(exchange.NoAnswer, match="found 0"):
        exchange.ask(tmp_path, 0.1)


def test_a_missing_rank_is_named(served):
    with pytest.raises(exchange.NoAnswer, match=r"expected 2 ranks to answer within 0\.2 s, found 1"):
        exchange.ask(served(telemetry(1), world=2), 0.2)


def test_an_unarmed_rank_is_named(served):
    with pytest.raises(exchange.NoAnswer, match="rank 1: armed: expected True as rank 0, found False"):
        exchange.ask(served(telemetry(1), telemetry(1, armed=False)), 5)


def test_no_folder(tmp_path):
    with pytest.raises(exchange.NoAnswer, match="expected a folder"):
        exchange.ask(tmp_path / "none", 0.1)


def test_records_of_requests_are_found_by_tag(tmp_path):
    follower = exchange.Follower(tmp_path)
    with pytest.raises(exchange.NoAnswer, match="expected a record of request 7"):
        follower.take(7, 0.01)
    journals = [exchange.Journal(tmp_path, rank) for rank in (0, 1)]
    for n in range(4):
        journals[n % 2].write({"tag": n, "blocks": n * n})
    assert [follower.take(n, 1)["blocks"] for n in (3, 0, 2)] == [9, 0, 4]
    journals[0].file.write('{"tag": 9, "blo')  # a line still being written
    journals[0].file.flush()
    with pytest.raises(exchange.NoAnswer):
        follower.take(9, 0.01)
    journals[0].file.write('cks": 81}\n')
    assert follower.take(9, 1)["blocks"] == 81
    assert follower.take(1, 1)["blocks"] == 1
    with pytest.raises(exchange.NoAnswer):  # taken once
        follower.take(1, 0.01)


def test_a_question_is_answered_once(tmp_path):
    responder = exchange.Responder(tmp_path, 0, 1, telemetry(1).snapshot)
    assert not responder.answer()
    (tmp_path / exchange.ASK).write_text("token")
    assert responder.answer()
    assert not responder.answer()
    assert json.loads((tmp_path / "rank-0.json").read_text())["answers"] == "token"
