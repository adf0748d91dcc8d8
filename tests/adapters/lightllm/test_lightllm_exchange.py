"""Counters by file: question, answer, ranks merged, and who does not answer."""

from __future__ import annotations

import json
import os
import select
import threading
from types import SimpleNamespace

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


@pytest.fixture
def served(tmp_path):
    """Ranks that answer for as long as the test process lives, asleep in between."""

    def start(*ranks, world=None):
        for n, each in enumerate(ranks):
            exchange.Responder(tmp_path, n, world or len(ranks), each.snapshot).start()
        return tmp_path

    return start


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
    journals[0].file.write(b'{"tag": 9, "blo')  # a line still being written
    with pytest.raises(exchange.NoAnswer):
        follower.take(9, 0.01)
    journals[0].file.write(b'cks": 81}\n')
    assert follower.take(9, 1)["blocks"] == 81
    assert follower.take(1, 1)["blocks"] == 1
    with pytest.raises(exchange.NoAnswer):  # taken once
        follower.take(1, 0.01)


def test_a_question_is_answered_once_and_nobody_is_woken_without_one(tmp_path):
    asked = []
    responder = exchange.Responder(tmp_path, 0, 1, lambda: asked.append(1) or telemetry(1).snapshot())
    assert select.select([responder.asked], [], [], 0)[0] == []
    exchange._question(responder.pipe, "early")
    exchange._question(responder.pipe, "token")
    responder.answer()
    assert json.loads((tmp_path / "rank-0.json").read_text())["answers"] == ["early", "token"]
    assert asked == [1]
    assert select.select([responder.asked], [], [], 0)[0] == []


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "ask-0")
    (tmp_path / "ask-1").write_text("a file of that name")
    with pytest.raises(exchange.NoAnswer, match="found 0"):
        exchange.ask(tmp_path, 0.1)
    assert (tmp_path / "ask-1").read_text() == "a file of that name"


def test_questions_that_nobody_answers_do_not_fill_up(tmp_path):
    responder = exchange.Responder(tmp_path, 0, 1, telemetry(1).snapshot)
    for n in range(3000):  # more than a pipe holds
        exchange._question(responder.pipe, f"{n:032}")
    responder.answer()
    assert json.loads((tmp_path / "rank-0.json").read_text())["answers"]


def test_a_capture_is_told_by_the_first_rank_only(served):
    one, other = telemetry(1), telemetry(1)
    one.capture = {"folder": "lightllm-0"}
    assert exchange.ask(served(one, other), 5)["capture"] == {"folder": "lightllm-0"}


@pytest.mark.parametrize("newer", [0, 1])
def test_a_field_that_only_one_rank_has_is_named(served, newer):
    class Newer:
        def snapshot(self):
            return telemetry(1).snapshot() | {"later": 1}

    ranks = [telemetry(1), telemetry(1)]
    ranks[newer] = Newer()
    want = ("expected 1 as rank 0, found None", "expected None as rank 0, found 1")[newer]
    with pytest.raises(exchange.NoAnswer, match=f"rank 1: later: {want}"):
        exchange.ask(served(*ranks), 5)


@pytest.mark.parametrize("junk", [b"\n", b"\xff\xfe\n", b" " * 5000 + b"\n"])
def test_what_is_no_question_does_not_end_the_answering(served, junk):
    folder = served(telemetry(1))
    end = os.open(folder / "ask-0", os.O_WRONLY)
    os.write(end, junk)
    os.close(end)
    assert exchange.ask(folder, 5)["armed"]


def test_an_answer_that_failed_is_given_when_asked_again(served, monkeypatch, capfd):
    """A full disk, say, that is not full for ever."""
    monkeypatch.setattr(exchange, "REPEAT_S", 0.02)

    class Failing:
        left = 2

        def snapshot(self):
            self.left -= 1
            if self.left >= 0:
                raise OSError("no space")
            return telemetry(1).snapshot()

    assert exchange.ask(served(Failing()), 5)["armed"]
    assert "question not answered: OSError: no space" in capfd.readouterr().err


def test_what_an_earlier_server_left_is_replaced(tmp_path):
    """A file, or a pipe that the earlier one, still alive, would read from."""
    (tmp_path / "ask-0").write_text("")
    earlier, later = [], []
    for seen in (earlier, later):
        exchange.Responder(tmp_path, 0, 1, lambda seen=seen: seen.append(1) or telemetry(1).snapshot()).start()
    for _ in range(5):
        exchange.ask(tmp_path, 5)
    assert (len(earlier), len(later)) == (0, 5)


def test_two_who_ask_at_once_are_both_answered(tmp_path):
    """Neither their order in the pipe nor an answer that comes before the first one looked takes it from him."""
    responder = exchange.Responder(tmp_path, 0, 1, telemetry(1).snapshot)
    for together in (True, False):
        exchange._question(responder.pipe, "one")
        if not together:
            responder.answer()
        exchange._question(responder.pipe, "other")
        responder.answer()
        found = exchange._answer(tmp_path / "rank-0.json")
        assert {"one", "other"} <= set(found["answers"])


def test_two_readers_do_not_starve_each_other(served, monkeypatch):
    """As processes, which do not wait for each other. Nobody repeats himself."""
    monkeypatch.setattr(exchange, "REPEAT_S", 600)
    folder, answers = served(telemetry(1)), []

    def reader():
        answers.extend(exchange._ask(folder, 5)["armed"] for _ in range(20))

    threads = [threading.Thread(target=reader) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 60


def test_a_pipe_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "ask-0").symlink_to("ask-0")
    with pytest.raises(exchange.NoAnswer, match=r"ask-0"):
        exchange.ask(tmp_path, 0.1)


def test_an_answer_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "rank-0.json").symlink_to("rank-0.json")
    with pytest.raises(exchange.NoAnswer, match=r"rank-0\.json"):
        exchange.ask(tmp_path, 0.1)


def test_a_line_that_is_written_in_part_is_an_error(tmp_path):
    journal = exchange.Journal(tmp_path, 0)
    journal.file = SimpleNamespace(write=lambda line: len(line) - 1)
    with pytest.raises(OSError, match="No space left"):
        journal.write({"tag": 1})
