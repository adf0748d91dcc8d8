"""Capture against brute force: the shards hold what the steps held, whatever was dropped, left out or killed."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.capture import Blocks, CaptureError, Drawn, Recorder, Settings, recorder, stats
from adapters.capture.layout import COLUMNS, DRAWN, FULL, SAMPLED, shapes
from adapters.capture.settings import takes
from adapters.rules.block import naive as block
from adapters.rules.rowstats import naive as rowstats
from harness.replay import reader

ROOT = Path(__file__).parents[3]
ABOUT = {
    "engine": {"name": "test"},
    "target": {"name": "t"},
    "draft": {"name": "d"},
    "tokenizer": {"sha256": None},
    "policy": None,
    "logits": "raw",
    "temperature_applied": False,
}
K, V = 4, 40


def draw_logits(g: torch.Generator, n: int, vocabulary: int = V) -> torch.Tensor:
    """On a coarse grid, so that ties happen; some rows masked, some not a number, some all alike."""
    z = torch.randint(-6, 7, (n, K + 1, vocabulary), generator=g).float() / 2
    z[torch.rand(z.shape, generator=g) < 0.1] = -math.inf
    odd = torch.rand(n, K + 1, generator=g)
    z[odd < 0.05] = 1.5
    z[(odd >= 0.05) & (odd < 0.08), 3] = math.nan
    return z


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from([3, 16, 17, 40]), st.booleans())
def test_row_statistics_are_those_of_the_oracle(seed, vocabulary, hot):
    g = torch.Generator().manual_seed(seed)
    z = draw_logits(g, 6, vocabulary) if vocabulary > 3 else torch.randn(6, K + 1, 3, generator=g)
    drafts = torch.randint(-1, vocabulary + 1, (6, K), generator=g)
    inverse = 1 / (0.3 + torch.rand(6, generator=g)) if hot else None
    found = stats.of_logits(z, drafts, z.argmax(-1), inverse)
    ids = torch.cat([drafts, torch.full((6, 1), -1)], 1)
    wide = None if inverse is None else inverse[:, None].expand(-1, K + 1)
    wanted = rowstats.measure(z, ids, wide)
    names = {"z_max": "peak", "argmax": "top", "ties": "ties", "lse": "lse", "entropy": "entropy"}
    for mine, theirs in names.items():
        torch.testing.assert_close(found[mine], getattr(wanted, theirs), equal_nan=True, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["rank"], wanted.rank[:, :K])
    torch.testing.assert_close(found["z_x"], wanted.z[:, :K], equal_nan=True, atol=0, rtol=0)
    raw = rowstats.measure(z, ids).entropy
    torch.testing.assert_close(found["entropy_raw"], raw, equal_nan=True, atol=1e-5, rtol=1e-5)
    ordered = z.sort(-1, descending=True).values[..., : min(16, vocabulary)]
    torch.testing.assert_close(found["top_logits"], ordered, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(z.gather(2, found["top_ids"].long()), ordered, equal_nan=True, atol=0, rtol=0)


def odd_rows(g: torch.Generator, n: int, vocabulary: int) -> torch.Tensor:
    """[n, vocabulary]: plain, on a grid, of bfloat16, masked down to a few, alike, infinite, not a number, zeros of
    both signs."""
    z = 3 * torch.randn(n, vocabulary, generator=g)
    kind = torch.randint(0, 9, (n,), generator=g)
    z[kind == 1] = z[kind == 1].round()
    z[kind == 2] = z[kind == 2].bfloat16().float()
    few = torch.rand(n, vocabulary, generator=g) < 20 / vocabulary
    z[(kind == 3)[:, None] & ~few] = -math.inf
    z[kind == 4] = 1.5
    z[kind == 5, : vocabulary // 3] = math.inf
    z[(kind == 6)[:, None] & few] = math.nan
    z[kind == 7] = torch.where(few[kind == 7], 0.0, -0.0)
    z[kind == 8] = -math.inf
    return z


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from([5, 16, 1024, 1088, 2000, 2048, 4160]), st.integers(1, 12))
def test_the_largest_are_those_of_torch(seed, vocabulary, n):
    g = torch.Generator().manual_seed(seed)
    z, scratch = odd_rows(g, 2 * n, vocabulary).view(2, n, vocabulary), stats.Scratch()
    top = min(16, vocabulary)
    for rows in (z, z.flip(0, 1)):  # the second time in memory that holds the first
        values, ids = stats.largest(rows, scratch)
        torch.testing.assert_close(values, rows.topk(top, -1).values, equal_nan=True, atol=0, rtol=0)
        torch.testing.assert_close(rows.gather(2, ids), values, equal_nan=True, atol=0, rtol=0)
        assert (ids.sort(-1).values.diff() > 0).all()


def test_the_largest_of_a_large_vocabulary():
    g = torch.Generator().manual_seed(0)
    z = odd_rows(g, 18, 151_936)
    values, ids = stats.largest(z, stats.Scratch())
    torch.testing.assert_close(values, z.topk(16).values, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(z.gather(1, ids), values, equal_nan=True, atol=0, rtol=0)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 2**31))
def test_rank_and_ties_are_counted_where_the_largest_do_not_tell(seed):
    g = torch.Generator().manual_seed(seed)
    z = odd_rows(g, 6 * (K + 1), 1088).view(6, K + 1, 1088)
    drafts = torch.randint(-1, 1089, (6, K), generator=g)
    found = stats.of_logits(z, drafts, z.argmax(-1), None)
    wanted = rowstats.measure(z, torch.cat([drafts, torch.full((6, 1), -1)], 1), None)
    torch.testing.assert_close(found["rank"], wanted.rank[:, :K])
    torch.testing.assert_close(found["ties"], wanted.ties)


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.integers(0, 2**31))
def test_the_sums_of_block_verification_are_the_oracles(seed):
    g = torch.Generator().manual_seed(seed)
    q = torch.softmax(2 * torch.randn(5, K, V, generator=g), -1)
    p = torch.softmax(2 * torch.randn(5, K + 1, V, generator=g), -1)
    p[0, 1] = torch.nn.functional.one_hot(torch.tensor(3), V)
    drafts = torch.multinomial(q.view(-1, V), 1, generator=g).view(5, K)
    found = stats.of_probs(drafts, p, q)
    w, h = block.thresholds(drafts, p, q, torch.full((5,), K))
    S = found["excess"][:, 1:]
    torch.testing.assert_close(torch.where(S > 0, S / (S + 1 - w[:, 1:K]), 0.0), h[:, 1:K], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["excess"][:, 0], (p[:, 0] - q[:, 0]).clamp(min=0).sum(-1))
    torch.testing.assert_close(
        (found["log_p"] - found["log_q"]).exp(), block.ratios(block.at(p, drafts), block.at(q, drafts))
    )


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.booleans())
def test_the_same_sums_in_memory_that_is_used_again(seed, odd):
    g, scratch = torch.Generator().manual_seed(seed), stats.Scratch()
    for _ in range(2):
        q = torch.softmax(2 * torch.randn(5, K, V, generator=g), -1)
        p = torch.softmax(2 * torch.randn(5, K + 1, V, generator=g), -1)
        p[torch.rand(p.shape, generator=g) < 0.3] = 0.0
        if odd:
            p[1, 0, 3], q[2, 1, 4], q[3, 2] = math.nan, math.nan, math.inf
        drafts = torch.randint(-1, V + 1, (5, K), generator=g)
        before = p.clone(), q.clone()
        for name, own in stats.of_probs(drafts, p, q, scratch).items():
            wanted = stats.of_probs(drafts, p, q)[name]
            torch.testing.assert_close(own, wanted, atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close((p, q), before, equal_nan=True, atol=0, rtol=0)  # the engine's: read only


def steps(seed: int, requests: int, count: int):
    """Steps of a varying company, some requests of which are sampled: (rows, Blocks without numbers, raw tensors)."""
    g = torch.Generator().manual_seed(seed)
    taken = [0] * requests
    for _ in range(count):
        rows = [n for n in range(requests) if torch.rand((), generator=g) < 0.7] or [0]
        n = len(rows)
        z, drafts = draw_logits(g, n), torch.randint(0, V, (n, K), generator=g)
        drawn = [i for i, row in enumerate(rows) if row % 2]
        p, q = (torch.softmax(torch.randn(len(drawn), k, V, generator=g), -1) for k in (K + 1, K))
        coins = torch.rand(len(drawn), K, generator=g)
        blocks = Blocks(
            requests=rows,
            steps=[taken[row] for row in rows],
            positions=[10 * row + taken[row] for row in rows],
            flags=[DRAWN | SAMPLED if row % 2 else 0 for row in rows],
            temperatures=[0.5 if row % 2 else 1.0 for row in rows],
            anchors=torch.randint(0, V, (n,), generator=g),
            drafts=drafts,
            logits=z,
            top=z.argmax(-1),
            length=torch.randint(0, K + 1, (n,), generator=g).tolist(),
            bonus=torch.randint(0, V, (n,), generator=g),
            live=torch.randint(0, K + 1, (n,), generator=g) if seed % 2 else None,
            drawn=Drawn(drawn, p, q, coins) if drawn else None,
        )
        for row in rows:
            taken[row] += 1
        yield rows, blocks


def record(folder, seed, monkeypatch, rate, rows=1.0, shard=16, requests=6, count=30):
    monkeypatch.setattr(recorder, "SHARD_BLOCKS", shard)
    monkeypatch.setattr(recorder, "BATCH_BLOCKS", 8)
    made = Recorder(Settings(folder, rate, rows), "test", K, V, ABOUT)
    numbers = [made.enter(f"r{n}", "chain" if n % 2 else "strict") for n in range(requests)]
    kept = []
    for own, blocks in steps(seed, requests, count):
        blocks.requests = [numbers[row] for row in own]
        kept.append(blocks)
        made.add(blocks)
    made.close()
    assert made.error is None
    return made, numbers, kept


def test_a_first_step_that_is_long_in_coming_costs_nothing(tmp_path):
    """A shard of requests alone, from before any logits told how wide the vocabulary is."""
    made = Recorder(Settings(tmp_path, 1.0, 0.0), "test", K, None, ABOUT)
    number = made.enter("r", "strict")
    assert made.sync(60)
    made.add(one_block(made, number))
    made.close()
    found = reader.read(tmp_path)
    assert [shard["blocks"] for shard in found.manifest["shards"]] == [0, 1]
    assert (list(found.requests), len(found.columns["request"])) == ([number], 1)


@pytest.mark.parametrize(("rate", "rows"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_block_is_in_the_shards_as_it_was(tmp_path, monkeypatch, seed, rate, rows):
    made, numbers, kept = record(tmp_path, seed, monkeypatch, rate, rows)
    whole = {number for number in range(6) if takes(rows, number // 2)}  # two policies by turns
    assert len(whole) == (6 if rows == 1 else 4)
    found = reader.read(tmp_path, tuple(COLUMNS))
    assert (found.closed, found.dropped, len(found.manifest["shards"]) > 2) == (True, 0, True)
    assert sum(number >= 0 for number in numbers) == len(found.requests) == (6 if rate == 1 else 4)
    full = [reader.read_rows(made.folder, n) for n in range(len(found.manifest["shards"]))]
    logits = np.concatenate([part["target_logits"] for part in full])
    p, q = (np.concatenate([part[name] for part in full if name in part]) for name in ("target_probs", "draft_probs"))
    at = full_at = drawn_at = 0
    for blocks in kept:
        inverse = 1 / torch.tensor(blocks.temperatures)
        wanted = stats.of_logits(blocks.logits, blocks.drafts, blocks.top, inverse)
        own = (
            {}
            if blocks.drawn is None
            else stats.of_probs(blocks.drafts[blocks.drawn.rows], blocks.drawn.p, blocks.drawn.q)
        )
        for i, number in enumerate(blocks.requests):
            if number < 0:
                continue
            row = {name: array[at] for name, array in found.columns.items()}
            is_full = number in whole
            if is_full:
                np.testing.assert_array_equal(logits[full_at], blocks.logits[i])
            full_at += is_full
            flags = blocks.flags[i] | (FULL if is_full else 0)
            host = (number, blocks.steps[i], blocks.positions[i], flags, blocks.temperatures[i])
            assert tuple(row[n] for n in ("request", "step", "position", "flags", "temperature")) == host
            assert (row["length"], row["bonus"]) == (blocks.length[i], blocks.bonus[i])
            assert row["live"] == (K if blocks.live is None else blocks.live[i])
            assert row["anchor"] == blocks.anchors[i]
            for name in ("argmax", "ties", "rank", "z_x", "z_max", "lse", "entropy", "top_logits"):
                np.testing.assert_allclose(row[name], wanted[name][i], rtol=1e-5, atol=1e-6, err_msg=name)
            if blocks.flags[i] & DRAWN:
                j = blocks.drawn.rows.index(i)
                for name in ("log_p", "log_q", "excess"):
                    np.testing.assert_allclose(row[name], own[name][j], rtol=1e-5, atol=1e-6, err_msg=name)
                np.testing.assert_array_equal(row["coin"], blocks.drawn.coins[j])
                if is_full:
                    np.testing.assert_array_equal(p[drawn_at], blocks.drawn.p[j])
                    np.testing.assert_array_equal(q[drawn_at], blocks.drawn.q[j])
                drawn_at += is_full
            else:
                assert (row["log_q"] == 0).all()
                assert np.isnan(row["excess"]).all()
                assert np.isnan(row["coin"]).all()
            at += 1
    assert at == found.blocks == made.blocks
    assert (full_at, drawn_at) == (len(logits), len(p))


def one_block(made, number, step=0):
    z = torch.zeros(1, K + 1, V)
    return Blocks([number], [step], [0], [0], [1.0], z[0, :1, 0].long(), z[:, :K, 0].long(), z, z.argmax(-1), [0], [0])


def test_what_came_is_on_disk_when_asked_for(tmp_path):
    made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
    number = made.enter("r", "strict")
    for step in range(3):
        made.add(one_block(made, number, step))
        if step == 2:
            made.end(number, 3, 1)
        assert made.sync(60)
        found = reader.read(tmp_path)
        assert (found.blocks, found.closed, found.ends) == (step + 1, False, {number: (3, 1)} if step == 2 else {})
    assert made.sync(60)  # nothing new: no shard
    assert len(reader.read(tmp_path).manifest["shards"]) == 3
    made.close()
    assert not made.sync(60)


def test_a_pause_ends_the_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "WAKE_SECONDS", 0.01)
    made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
    flushed, flush = threading.Event(), made._flush

    def flush_and_say():
        flush()
        if made.blocks:
            flushed.set()

    monkeypatch.setattr(made, "_flush", flush_and_say)
    made.add(one_block(made, made.enter("r", "strict")))
    assert flushed.wait(60)
    assert reader.read(tmp_path).blocks == 1
    made.close()


ENDED = """
    import os, signal, sys, threading
    sys.path[:0] = sys.argv[2:]
    from pathlib import Path
    from adapters.capture import Recorder, Settings
    from test_capture_recorder import ABOUT, K, V, one_block
    made = Recorder(Settings(Path(sys.argv[1])), "test", K, V, ABOUT)
    assert made.close_at_sigterm() and not made.close_at_sigterm()
    number = made.enter("r", "strict")
    for step in range(50):
        made.add(one_block(made, number, step))
    write = made._write
    made._write = lambda *args: (asked.wait(), write(*args))[1]
    asked = threading.Event()
    for _ in range(2):  # a launcher that asks its servers to end, and then each of them again
        os.kill(os.getpid(), signal.SIGTERM)
    asked.set()
    while True:  # an engine's loop goes on meanwhile
        made.add(one_block(made, number, step))
"""


def test_a_process_ended_by_sigterm_closes_its_capture(tmp_path):
    arguments = [str(tmp_path), str(ROOT), str(Path(__file__).parent)]
    done = subprocess.run([sys.executable, "-c", dedent(ENDED), *arguments], timeout=120)
    assert done.returncode == -signal.SIGTERM
    found = reader.read(tmp_path)
    assert (found.closed, found.dropped, found.columns["step"][:50].tolist()) == (True, 0, list(range(50)))


def test_arms_by_turns_are_captured_alike(tmp_path):
    made = Recorder(Settings(tmp_path, 0.5), "test", K, V, ABOUT)
    taken = [made.enter(f"r{n}", "strict" if n % 2 else "asd") for n in range(40)]
    made.close()
    assert sum(n >= 0 for n in taken[::2]) == sum(n >= 0 for n in taken[1::2]) == 10


def test_what_a_full_queue_takes_no_more_is_counted(tmp_path):
    made = Recorder(Settings(tmp_path, queue_mb=1), "test", K, 1 << 16, ABOUT)  # a block of 1.25 MiB
    number = made.enter("r", "strict")
    z = torch.zeros(1, K + 1, 1 << 16)
    blocks = Blocks([number], [0], [0], [0], [1.0], z[0, :1, 0].long(), z[:, :K, 0].long(), z, z.argmax(-1), [0], [0])
    for _ in range(3):
        made.add(blocks)
    made.close()
    assert (made.dropped, made.blocks, made.error) == (3, 0, None)
    assert reader.read(tmp_path).dropped == 3
    assert "dropped" in reader.read(tmp_path).notes[0]


def test_a_capture_that_breaks_ends_without_the_engine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recorder, "SHARD_BLOCKS", 1)

    def full(path, content):
        if path.suffix == ".safetensors":
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(recorder, "_write_whole", full)
    made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
    number = made.enter("r", "strict")
    for _, blocks in steps(0, 1, 3):
        blocks.requests, blocks.flags = [number], [0]
        made.add(blocks)
    made.close()
    assert "No space left" in made.error
    assert "capture stopped" in capsys.readouterr().err
    before = made.dropped
    made.add(blocks)
    assert made.dropped == before + 1
    found = json.loads((made.folder / "manifest.json").read_text())
    assert "No space left" in found["error"]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A recorder whose writer works only when it is asked, what measured each batch, and one block after another."""
    monkeypatch.setattr(recorder, "WAKE_SECONDS", 3600)
    made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
    number, threads, measure = made.enter("r", "strict"), [], recorder._of_cpu

    def measured(steps, own):
        threads.append((threading.current_thread().name, len(steps)))
        return measure(steps, own)

    monkeypatch.setattr(recorder, "_of_cpu", measured)
    assert made.sync()  # its first turn is over
    yield made, threads, lambda first, count: [made.add(one_block(made, number, first + n)) for n in range(count)]
    made.close()


def test_on_a_cpu_the_engines_thread_measures_and_the_writer_only_what_is_left(engine):
    made, threads, run = engine
    here = threading.current_thread().name
    run(0, 130)
    assert threads == [(here, 64), (here, 64)]
    assert made.sync()
    assert threads[2:] == [("specaccept-capture", 2)]
    run(130, 1)
    made.measure()  # a benchmark's: what is queued, now
    assert threads[3:] == [(here, 1)]
    made.close()
    found = reader.read(made.folder)
    assert (found.closed, found.columns["step"].tolist()) == (True, list(range(131)))


def test_the_engines_thread_does_not_wait_for_the_writer(engine):
    made, threads, run = engine
    with made._measuring:  # as while the writer measures
        run(0, 70)
    assert threads == []
    run(70, 1)
    assert [count for _, count in threads] == [64, 7]  # in order, as soon as it can
    assert made.sync()
    assert reader.read(made.folder).columns["step"].tolist() == list(range(71))


def test_what_breaks_in_the_engines_thread_ends_the_capture_alone(engine, monkeypatch, capsys):
    made, _, run = engine

    def broken(*_):
        raise RuntimeError("no such row")

    monkeypatch.setattr(recorder, "_of_cpu", broken)
    run(0, 66)  # the engine serves on
    made.close()
    assert (made.error, made.dropped) == ("RuntimeError: no such row", 2)
    assert "capture stopped: RuntimeError: no such row" in capsys.readouterr().err
    found = json.loads((made.folder / "manifest.json").read_text())
    assert (found["error"], found["closed"]) == (made.error, False)
    assert not made._queue


KILLED = """
    import os, signal, sys, torch
    sys.path[:0] = sys.argv[2:]
    from pathlib import Path
    from adapters.capture import Recorder, Settings, recorder
    from test_capture_recorder import ABOUT, K, V, steps
    recorder.SHARD_BLOCKS = 16
    made = Recorder(Settings(Path(sys.argv[1]), rows=1.0), "test", K, V, ABOUT)
    numbers = [made.enter(f"r{n}", "chain") for n in range(6)]
    write = recorder._write_whole
    def killed_in_the_fourth(path, content):
        if path.name == "rows-00003.safetensors":
            path.with_name("rows-00003.safetensors").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)
    recorder._write_whole = killed_in_the_fourth
    for own, blocks in steps(1, 6, 400):
        blocks.requests = [numbers[row] for row in own]
        made.add(blocks)
    made.close()
"""


def test_a_killed_writer_leaves_its_whole_shards(tmp_path):
    arguments = [str(tmp_path), str(ROOT), str(Path(__file__).parent)]
    done = subprocess.run([sys.executable, "-c", dedent(KILLED), *arguments], timeout=120)
    assert done.returncode == -signal.SIGKILL
    found = reader.read(tmp_path)
    assert found.closed is False
    assert len(found.manifest["shards"]) == 3
    assert found.blocks == sum(shard["blocks"] for shard in found.manifest["shards"]) >= 48
    assert "up to its last whole shard" in found.notes[0]
    assert "blocks-00003.safetensors, rows-00003.safetensors" in found.notes[1]
    wanted = [b for _, b in steps(1, 6, 400)]
    drafts = torch.cat([b.drafts for b in wanted])[: found.blocks]
    np.testing.assert_array_equal(found.columns["draft"], drafts)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SPECACCEPT_CAPTURE_RATE", "0", "a number in (0, 1]"),
        ("SPECACCEPT_CAPTURE_RATE", "nan", "a number in (0, 1]"),
        ("SPECACCEPT_CAPTURE_ROWS", "yes", "0, 1 or a share"),
        ("SPECACCEPT_CAPTURE_ROWS", "1.5", "0, 1 or a share"),
        ("SPECACCEPT_CAPTURE_QUEUE_MB", "1.5", "a whole number"),
    ],
)
def test_a_wrong_variable_is_named(name, value, told):
    with pytest.raises(CaptureError, match=name) as error:
        Settings.from_environment({"SPECACCEPT_CAPTURE": "somewhere", name: value})
    assert told in str(error.value)


@pytest.mark.parametrize(("said", "share"), [("", 0), ("0", 0), ("on", 1), ("1", 1), ("0.02", 0.02)])
def test_rows_are_a_share(said, share):
    found = Settings.from_environment({"SPECACCEPT_CAPTURE": "somewhere", "SPECACCEPT_CAPTURE_ROWS": said})
    assert found == Settings(Path("somewhere"), rows=share)


def test_off_is_off_and_a_variable_without_a_folder_is_an_error():
    assert Settings.from_environment({}) is None
    with pytest.raises(CaptureError, match="SPECACCEPT_CAPTURE_ROWS: expected SPECACCEPT_CAPTURE beside it"):
        Settings.from_environment({"SPECACCEPT_CAPTURE_ROWS": "1"})


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.floats(0.01, 1), st.integers(1, 400))
def test_the_rate_is_the_share_of_requests(rate, count):
    taken = [takes(rate, n) for n in range(count)]
    assert taken[0]
    assert abs(sum(taken) - rate * count) <= 1 + 1e-9


def test_a_folder_that_takes_nothing_refuses_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match=r"SPECACCEPT_CAPTURE: .*file"):
        Recorder(Settings(tmp_path / "file"), "test", K, V, ABOUT)


def test_packed_columns_unpack():
    g = torch.Generator().manual_seed(0)
    z = draw_logits(g, 3)
    columns = stats.of_logits(z, torch.randint(0, V, (3, K), generator=g), z.argmax(-1), None)
    columns |= {"anchors": torch.arange(3, dtype=torch.int32)}
    widths = [(name, tensor[0].numel()) for name, tensor in columns.items()]
    found = recorder._unpack(recorder._pack(columns, 3).view(-1), widths, 3)
    for name, tensor in columns.items():
        torch.testing.assert_close(found[name], tensor, equal_nan=True, atol=0, rtol=0)
        if name in COLUMNS:
            assert tuple(found[name].shape) == shapes(3, K, V)[name]


def overwrite(blocks):
    """What an engine's next step does to the buffers of this one."""
    drawn = blocks.drawn
    parts = (blocks.anchors, blocks.drafts, blocks.logits, blocks.top, blocks.bonus, blocks.live)
    for tensor in (*parts, *(() if drawn is None else (drawn.p, drawn.q, drawn.coins))):
        if tensor is not None:
            tensor.zero_()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_way_of_a_gpu_ends_in_the_same_columns(tmp_path, monkeypatch, seed):
    """Without one: packing, pinned memory and its reuse, rows left out, buffers overwritten, on CPU tensors."""
    monkeypatch.setattr(recorder, "_pinned", lambda words: torch.full((words,), -1, dtype=torch.int32))
    monkeypatch.setattr(recorder, "_sent", lambda tensor, device: tensor.clone())
    monkeypatch.setattr(recorder, "_recorded", lambda: type("Event", (), {"synchronize": lambda self: None})())
    found = []
    for way in ("_on_cpu", "_on_device"):
        made = Recorder(Settings(tmp_path / way, 0.6, 1.0), "test", K, V, ABOUT)
        monkeypatch.setattr(made, "_on_cpu", getattr(made, way))
        numbers = [made.enter(f"r{n}", "chain") for n in range(6)]
        for own, blocks in steps(seed, 6, 40):
            blocks.requests = [numbers[row] for row in own]
            made.add(blocks)
            if way == "_on_device":
                overwrite(blocks)
        made.close()
        assert (made.error, made.dropped) == (None, 0)
        found.append(reader.read(tmp_path / way, tuple(COLUMNS)).columns | reader.read_rows(made.folder, 0))
    for name, array in found[0].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_captures_what_a_cpu_captures(tmp_path, monkeypatch):
    def on_gpu(value):
        return value.cuda() if isinstance(value, torch.Tensor) else value

    monkeypatch.setattr(recorder, "SHARD_BLOCKS", 16)
    found, stream = [], torch.cuda.Stream()
    for place in ("cpu", "gpu"):
        made = Recorder(Settings(tmp_path / place, 0.6, 1.0), "test", K, V, ABOUT)
        numbers = [made.enter(f"r{n}", "chain") for n in range(6)]
        for own, blocks in steps(1, 6, 60):
            blocks.requests = [numbers[row] for row in own]
            with torch.cuda.stream(stream), torch.inference_mode(len(blocks.steps) % 2 == 0):
                if place == "gpu":
                    for name in ("anchors", "drafts", "logits", "top", "bonus", "live"):
                        setattr(blocks, name, on_gpu(getattr(blocks, name)))
                    if (d := blocks.drawn) is not None:
                        blocks.drawn = Drawn(d.rows, d.p.cuda(), d.q.cuda(), d.coins.cuda())
                made.add(blocks)
                if place == "gpu":
                    overwrite(blocks)
        made.close()
        assert (made.error, made.dropped) == (None, 0)
        shards = [reader.read_rows(made.folder, n) for n in range(len(made.shards))]  # a device's end elsewhere
        rows = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
        found.append((reader.read(tmp_path / place, tuple(COLUMNS)), rows))
    (cpu, cpu_rows), (gpu, gpu_rows) = found
    for name, array in cpu.columns.items():
        if name != "top_ids":  # of equal logits any
            np.testing.assert_allclose(gpu.columns[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, array in cpu_rows.items():
        np.testing.assert_array_equal(gpu_rows[name], array)
