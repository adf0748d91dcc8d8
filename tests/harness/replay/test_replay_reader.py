"""Captures that do not hold together are refused with the shard named; what is whole is read."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from adapters.capture import Blocks, CaptureError, Recorder, Settings, recorder
from adapters.capture.layout import FULL
from harness.replay import parquet, reader, table

ABOUT = {
    "engine": {"name": "test"},
    "target": {"name": "t"},
    "draft": {"name": "d"},
    "tokenizer": {"sha256": None},
    "policy": None,
    "logits": "raw",
    "temperature_applied": False,
}
K, V = 3, 11


def add(made, numbers, steps, seed=0, length=None):
    """One block of each numbered request."""
    n = len(numbers)
    z = torch.randn(n, K + 1, V, generator=torch.Generator().manual_seed(seed))
    top = z.argmax(-1)
    length = [K] * n if length is None else length
    bonus = top[:, K].tolist()
    made.add(Blocks(numbers, steps, [0] * n, [0] * n, [1.0] * n, top[:, 0], top[:, :K], z, top, length, bonus))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three shards of two blocks with full rows; two requests of three steps."""
    monkeypatch.setattr(recorder, "SHARD_BLOCKS", 2)
    monkeypatch.setattr(recorder, "BATCH_BLOCKS", 2)
    made = Recorder(Settings(tmp_path, rows=1.0), "test", K, V, ABOUT)
    numbers = [made.enter(rid, "strict", prompt=[1]) for rid in ("a", "b")]
    for step in range(3):
        add(made, numbers, [step, step], seed=step)
    made.end(numbers[0], 3, 2)
    made.end(numbers[1], 2, K + 1)  # its third step ran past the end
    made.close()
    assert made.error is None
    return made.folder


def edit(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def relist(folder, name):
    """Give the manifest the hash and size of a file as it lies there: the file alone is wrong then."""
    content = (folder / name).read_bytes()

    def change(manifest):
        for shard in manifest["shards"]:
            for entry in (shard, shard["rows"]):
                if entry["name"] == name:
                    entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    edit(folder, change)


def test_a_whole_capture_is_read_as_it_was(folder):
    found = reader.read(folder)
    assert (found.blocks, found.closed, found.notes) == (6, True, [])
    counted, notes = table.select(found, "strict")
    assert notes == []
    assert dict(zip(counted.rids, counted.count.tolist(), strict=True)) == {"a": 3, "b": 2}
    assert np.minimum(counted.length + 1, counted.cut).tolist() == [K + 1, K + 1, 2, K + 1, K + 1]


def flipped(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(bytes(content))


def truncated(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-8])


def missing(folder, name):
    (folder / name).unlink()


def not_safetensors(folder, name):
    (folder / name).write_bytes(b"text")
    relist(folder, name)


@pytest.mark.parametrize("name", ["blocks-00001.safetensors", "rows-00002.safetensors"])
@pytest.mark.parametrize(
    ("damage", "told"),
    [(flipped, "altered"), (truncated, "truncated or overwritten"), (missing, "found none")],
)
def test_a_damaged_shard_is_named(folder, name, damage, told):
    damage(folder, name)
    with pytest.raises(CaptureError, match=name) as error:
        reader.read(folder)
    assert told in str(error.value)


def test_a_shard_that_is_no_safetensors_file_is_named(folder):
    not_safetensors(folder, "blocks-00001.safetensors")
    with pytest.raises(CaptureError, match=r"test-0/blocks-00001.safetensors: expected a safetensors shard"):
        reader.read(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t, m: (t, m | {"version": 3}), "version: expected 2, found 3"),
        (lambda t, m: ({n: x for n, x in t.items() if n != "lse"}, m), "lse: expected a column"),
        (lambda t, m: (t | {"draft": t["draft"][:, :2].contiguous()}, m), "draft: expected I32"),
        (lambda t, m: (t | {"rank": t["rank"].float()}, m), "rank: expected I32"),
    ],
)
def test_a_shard_of_another_format_is_named(folder, change, told):
    name = "blocks-00001.safetensors"
    with reader.safe_open(folder / name, "numpy") as opened:
        metadata = json.loads(opened.metadata()["specaccept"])
    tensors, metadata = change(load_file(folder / name), metadata)
    save_file(tensors, folder / name, {"specaccept": json.dumps(metadata)})
    relist(folder, name)
    with pytest.raises(CaptureError, match=name) as error:
        reader.read(folder)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.update(version=3), "version: expected 1 or 2, found 3"),
        (lambda m: m.update(format="other"), "format: expected specaccept-capture"),
        (lambda m: m.pop("K"), "K: expected int, found None"),
        (lambda m: m.update(rate="all"), "rate: expected float"),
        (lambda m: m["shards"][1].update(name="../blocks-00001.safetensors"), "shards[1]"),
        (lambda m: m["shards"][1].pop("sha256"), "shards[1]"),
        (lambda m: m["shards"].reverse(), "shards[0]"),
    ],
)
def test_a_manifest_of_another_format_is_refused(folder, change, told):
    edit(folder, change)
    with pytest.raises(CaptureError) as error:
        reader.read(folder)
    assert told in str(error.value)


def test_full_rows_are_read_by_shard(folder):
    rows = reader.read_rows(folder, 1)
    z = torch.randn(2, K + 1, V, generator=torch.Generator().manual_seed(1))
    np.testing.assert_array_equal(rows["target_logits"], z)
    assert set(rows) == {"target_logits"}


def test_no_capture_is_an_error(tmp_path):
    with pytest.raises(CaptureError, match=r"manifest\.json"):
        reader.read(tmp_path)


def test_what_follows_a_dropped_block_is_left_out(tmp_path):
    made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
    number = made.enter("a", "strict")
    for step in (0, 1, 3, 4):
        add(made, [number], [step], seed=step)
    made.end(number, 5, 1)
    made.close()
    counted, notes = table.select(reader.read(tmp_path), "strict")
    assert counted.step.tolist() == [0, 1]
    assert notes == ["2 blocks behind a dropped one were left out"]


def test_probes_and_warm_up_are_no_part_of_it(tmp_path):
    made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
    numbers = [made.enter(rid, "strict") for rid in ("probe-0", "warmup-strict-x", "strict-y-3")]
    add(made, numbers, [0, 0, 0])
    made.close()
    found = reader.read(tmp_path)
    assert table.policies(found) == {"strict": 1}
    assert table.select(found, "strict")[0].rids == ["strict-y-3"]


@pytest.mark.parametrize(("limit", "cut"), [(10, [9, 6, 2]), (11, [10, 7, 2]), (None, [table.NO_CUT] * 2 + [2])])
def test_a_block_commits_no_more_than_is_left(tmp_path, limit, cut):
    """Blocks of 3, 4 and 4 tokens behind the prefill's one; of the last, two were kept."""
    made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
    number = made.enter("a", "strict", **({} if limit is None else {"max_new_tokens": limit}))
    for step, length in enumerate((2, 3, 3)):
        add(made, [number], [step], seed=step, length=[length])
    made.end(number, 3, 2)
    made.close()
    counted, _ = table.select(reader.read(tmp_path), "strict")
    assert counted.cut.tolist() == cut
    assert counted.limits.tolist() == [limit or 0]


def test_what_an_engine_asks_itself_is_left_out_where_a_harness_names_its_requests(tmp_path):
    rids = ["0" * 32, "warmup-a", "strict-a-1"]
    for count, kept in ((3, ["strict-a-1"]), (1, ["0" * 32])):
        folder = tmp_path / str(count)
        made = Recorder(Settings(folder), "test", K, V, ABOUT)
        add(made, [made.enter(rid, "strict") for rid in rids[:count]], [0] * count)
        made.close()
        assert table.select(reader.read(folder), "strict")[0].rids == kept


def test_captures_of_one_engine_are_one_and_others_are_not(tmp_path):
    for policy in ("strict", "asd"):
        made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
        number = made.enter(f"r-{policy}", policy)
        add(made, [number], [0])
        made.end(number, 1, K + 1)
        made.close()
    found = reader.read(tmp_path)
    assert table.policies(found) == {"strict": 1, "asd": 1}
    assert table.select(found, "asd")[0].rids == ["r-asd"]
    with pytest.raises(CaptureError, match="policy block"):
        table.select(found, "block")
    edit(tmp_path / "test-1", lambda m: m.update(target={"name": "other"}))
    with pytest.raises(CaptureError, match=r"test-1/manifest\.json: target: expected that of test-0"):
        reader.read(tmp_path)


def test_a_server_that_was_asked_nothing_is_left_out(tmp_path):
    Recorder(Settings(tmp_path), "test", K, None, ABOUT).close()
    with pytest.raises(CaptureError, match="vocabulary"):
        reader.read(tmp_path)
    made = Recorder(Settings(tmp_path), "test", K, V, ABOUT)
    add(made, [made.enter("r", "strict")], [0])
    made.close()
    assert [path.name for path in reader.read(tmp_path).folders] == ["test-1"]


def test_a_capture_of_v1_is_read(folder):
    for number in range(3):
        path = folder / f"blocks-{number:05d}.safetensors"
        with safe_open(path, "pt") as opened:
            news = json.loads(opened.metadata()["specaccept"]) | {"version": 1}
        columns = load_file(path)
        assert (columns["flags"] == FULL).all()
        columns["flags"] &= ~FULL
        save_file(columns, path, metadata={"specaccept": json.dumps(news)})
        relist(folder, path.name)
    edit(folder, lambda manifest: manifest.pop("rows_share") and manifest.update(version=1))
    assert reader.read(folder).blocks == 6
    assert reader.read_rows(folder, 2)["target_logits"].shape == (2, K + 1, V)


def test_parquet_has_a_row_per_verified_draft(folder):
    made = parquet.export(folder)
    assert [path.name for path in made] == [f"positions-{n:05d}.parquet" for n in range(3)]
    assert parquet.export(folder) == []  # made already
    rows = [row for path in made for row in pq.read_table(path).to_pylist()]
    columns = reader.read(folder).columns
    assert len(rows) == columns["live"].sum() == 18
    assert [row["draft"] for row in rows] == columns["draft"].ravel().tolist()
    assert {row["rid"] for row in rows} == {"a", "b"}
    assert [row["draft_index"] for row in rows[:K]] == list(range(K))
    index = json.loads((folder / "parquet.json").read_text())
    for path in made:
        assert index["files"][path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    made[1].unlink()
    assert parquet.export(folder) == [made[1]]
