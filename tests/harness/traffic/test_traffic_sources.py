import dataclasses
import gzip
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.traffic import NAMES, SUFFIX, Item, Traffic, TrafficError, load, sources
from harness.traffic.base import content_sha256, shuffled

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("SPECACCEPT_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "gsm8k" / "test.jsonl").exists(), reason="SPECACCEPT_DATA holds no data sets"
)


def gsm8k_row(i, split="test"):
    return {
        "question": f"{split} {i}: how many is {i} + {i}\u2028?",
        "answer": f"{i} + {i} = <<{i}+{i}>>\n#### {2 * i:,}",
    }


def small(split, rows):
    return dataclasses.replace(split, rows=len(rows), sha256=content_sha256(rows, split.fields))


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
    """A small data set in the files of the real one, pinned as the real one is."""
    test, train = [gsm8k_row(i + 600) for i in range(40)], [gsm8k_row(i, "train") for i in range(80)]
    train[5] = test[3]  # a leak: the scored question must not calibrate
    for name, rows in (("test.jsonl", test), ("train.jsonl", train)):
        (tmp_path / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    monkeypatch.setattr(sources, "GSM8K_TEST", small(sources.GSM8K_TEST, test))
    monkeypatch.setattr(sources, "GSM8K_TRAIN", small(sources.GSM8K_TRAIN, train))
    return SimpleNamespace(folder=str(tmp_path), test=test, train=train)


def test_gsm8k_items(gsm8k):
    traffic = load({"name": "gsm8k", "data": gsm8k.folder, "seed": 7})
    assert sorted(item.id for item in traffic.items) == sorted(f"gsm8k/test/{i}" for i in range(40))
    first = traffic.items[0]
    index = int(first.id.rpartition("/")[2])
    assert first.messages == ({"role": "user", "content": f"{gsm8k.test[index]['question']}\n{SUFFIX}"},)
    assert first.reference == str(2 * (index + 600))
    assert (first.task, first.max_new_tokens, first.thinking) == ("math", 512, False)
    assert all("," not in item.reference for item in traffic.items)


def test_limit_is_a_prefix_of_a_seeded_shuffle(gsm8k):
    whole = [item.id for item in load({"name": "gsm8k", "data": gsm8k.folder}).items]
    order = list(range(40))
    random.Random(980406).shuffle(order)  # the published protocol's words
    assert whole == [f"gsm8k/test/{i}" for i in order]
    assert [item.id for item in load({"name": "gsm8k", "data": gsm8k.folder, "limit": 9}).items] == whole[:9]
    assert [item.id for item in load({"name": "gsm8k", "data": gsm8k.folder, "seed": 1}).items] != whole


def test_warmup_and_calibration_are_train_rows_that_are_not_measured(gsm8k):
    traffic = load({"name": "gsm8k", "data": gsm8k.folder, "warmup": 37, "calibration": 42})
    aside = traffic.warmup + traffic.calibration
    assert len({item.id for item in aside}) == 79  # all of train but the leaked row
    assert all(item.id.startswith("gsm8k/train/") for item in aside)
    assert "gsm8k/train/5" not in {item.id for item in aside}


def test_published_cohorts(gsm8k):
    options = {"name": "gsm8k", "data": gsm8k.folder, "calibration_split": "test", "warmup": 3, "calibration": 8}
    traffic = load(options | {"limit": 20})
    order = shuffled(40, 980406)
    assert [item.id for item in traffic.calibration] == [f"gsm8k/test/{i}" for i in order[:8]]
    assert traffic.warmup == traffic.calibration[:3]
    assert [item.id for item in traffic.items] == [f"gsm8k/test/{i}" for i in order[8:28]]


def test_suffix_is_configurable(gsm8k):
    traffic = load({"name": "gsm8k", "data": gsm8k.folder, "suffix": "Be brief.", "limit": 1})
    assert traffic.items[0].messages[0]["content"].endswith("\nBe brief.")
    assert traffic.provenance["suffix"] == "Be brief."


def test_hub_and_folder_give_the_same_traffic(gsm8k, monkeypatch):
    asked = []

    def load_dataset(repo, config, *, split, revision):
        asked.append((repo, config, split, revision))
        return [dict(row, extra=1) for row in getattr(gsm8k, split)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    hub, folder = load({"name": "gsm8k"}), load({"name": "gsm8k", "data": gsm8k.folder})
    revision = "740312add88f781978c0658806c59bc2815b9866"
    assert asked == [("openai/gsm8k", "main", split, revision) for split in ("test", "train")]
    assert (hub.items, hub.warmup, hub.calibration) == (folder.items, folder.warmup, folder.calibration)
    assert hub.provenance["content_sha256"] == folder.provenance["content_sha256"]
    assert (hub.provenance["source"], folder.provenance["source"]) == ("hub", f"folder {Path(gsm8k.folder).name}")
    assert json.loads(json.dumps(hub.provenance)) == hub.provenance
    assert str(Path(gsm8k.folder).parent) not in json.dumps(folder.provenance)


def test_offline_hub_says_what_to_do(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(TrafficError, match=r"data=FOLDER holding test.jsonl and train.jsonl$") as caught:
        load({"name": "gsm8k"})
    assert "\n" not in str(caught.value)


def test_unresolvable_hub_is_read_from_the_cache_alone(monkeypatch):
    import datasets
    from huggingface_hub import constants

    seen = []
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE

    def load_dataset(*args, **kwargs):
        seen.append((constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise FileNotFoundError

    def getaddrinfo(*args):
        raise OSError("name or service not known")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    monkeypatch.setattr(sources, "getproxies", dict)
    with pytest.raises(TrafficError, match="FileNotFoundError"):
        load({"name": "humaneval"})
    assert seen == [(True, True)]
    assert before == (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("600: how many", "600: how much", 1), "content"),
        (lambda text: "\n".join(text.split("\n")[1:]), "expected 40 rows of openai/gsm8k test, found 39"),
        (lambda text: "\n".join(reversed(text.strip().split("\n"))), "content"),
        (lambda text: text[: len(text) // 2 + 9], r"test.jsonl: line 2\d: expected JSON$"),
        (
            lambda text: text.replace('"question"', '"q"', 1),
            "line 1: expected an object with the texts question, answer$",
        ),
        (lambda text: "\n5\n" + text, "line 2: expected an object"),
        (lambda text: text.replace("601:", "\\ud800", 1), "line 2: expected an object with the texts"),
        (lambda text: "[" * 100_000 + "\n" + text, "line 1: expected JSON$"),
    ],
)
def test_other_rows_than_the_pinned_ones_are_refused(gsm8k, damage, message):
    path = Path(gsm8k.folder) / "test.jsonl"
    path.write_text(damage(path.read_text()))
    with pytest.raises(TrafficError, match=message):
        load({"name": "gsm8k", "data": gsm8k.folder})


def test_a_file_that_is_not_text_is_named_and_never_quoted(gsm8k):
    path = Path(gsm8k.folder) / "test.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[6] = b'{"question": "\xff' + b"secret" * 10_000
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(TrafficError) as caught:
        load({"name": "gsm8k", "data": gsm8k.folder})
    assert str(caught.value) == f"traffic.data: {path}: line 7: expected UTF-8"


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"PK" + raw, lambda raw: raw[:20] + bytes(99)])
def test_a_damaged_archive_is_named(tmp_path, damage):
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"task_id": "x"}\n' * 99)))
    with pytest.raises(TrafficError, match=r"HumanEval\.jsonl\.gz: expected a complete gzip file, found [A-Za-z]+$"):
        load({"name": "humaneval", "data": str(tmp_path)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gsm9k"}, "expected one of .*gsm8k.*, found 'gsm9k'"),
        ({"name": "gsm8k", "data": "no/such/folder"}, "expected test.jsonl in no/such/folder"),
        ({"name": "gsm8k", "calibration_split": "dev"}, "traffic.calibration_split.*'dev'"),
        ({"name": "generated", "limit": 0}, "traffic.limit"),
        ({"name": "generated", "limit": 10**6}, "traffic.limit: expected 1 to .* found 1000000"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(TrafficError, match=message):
        load(options)


def test_limit_beyond_the_data_is_refused(gsm8k):
    with pytest.raises(TrafficError, match="expected 1 to 40 for gsm8k, found 41"):
        load({"name": "gsm8k", "data": gsm8k.folder, "limit": 41})


def test_humaneval_from_a_compressed_file(tmp_path, monkeypatch):
    rows = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f"def f{i}(x):\n",
            "canonical_solution": "    return x\n",
            "test": "def check(candidate):\n    assert candidate(1) == 1\n",
            "entry_point": f"f{i}",
        }
        for i in range(6)
    ]
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setattr(sources, "HUMANEVAL", small(sources.HUMANEVAL, rows))
    traffic = load(SimpleNamespace(name="humaneval", data=str(tmp_path), limit=4, warmup=2, calibration=3))
    assert (len(traffic.items), len(traffic.warmup), len(traffic.calibration)) == (4, 2, 3)
    item = traffic.items[0]
    assert (item.task, item.thinking) == ("code", True)
    assert item.reference["tests"][0].endswith(f"\ncheck({item.reference['entry_point']})")
    assert item.reference["prelude"] in item.messages[0]["content"]
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(TrafficError, match="a complete gzip file"):
        load({"name": "humaneval", "data": str(tmp_path)})


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("generated")])
def test_generated_traffic(name):
    traffic = load({"name": name, "limit": 10, "seed": 3, "warmup": 4, "calibration": 6})
    assert [len(items) for items in (traffic.items, traffic.warmup, traffic.calibration)] == [10, 4, 6]
    tasks = [item.task for item in traffic.items]
    kinds = {"generated": ["math", "code"] * 5, "generated-math": ["math"] * 10, "generated-code": ["code"] * 10}
    assert tasks == kinds[name]
    assert [item.id for item in load({"name": name, "limit": 3, "seed": 3}).items] == [i.id for i in traffic.items[:3]]
    assert load({"name": name, "limit": 10, "seed": 3}).provenance == traffic.provenance
    assert load({"name": name, "limit": 10, "seed": 4}).items != traffic.items
    for item in traffic.items:
        assert item.messages[0]["content"]
        assert item.task == "math" or item.reference["tests"]


def test_an_item_in_two_sets_is_refused():
    item = Item("a", "math", ({"role": "user", "content": "?"},), "1", 8, False)
    with pytest.raises(TrafficError, match="warmup item a is also measured"):
        Traffic("t", [item], [item], [], {})
    with pytest.raises(TrafficError, match="calibration item b is also measured"):  # the same prompt by another name
        Traffic("t", [item], [], [dataclasses.replace(item, id="b")], {})
    with pytest.raises(TrafficError, match="once"):
        Traffic("t", [item, item], [], [], {})


def test_content_hash_sees_rows_and_order_not_layout():
    rows = [{"a": "1", "b": "é"}, {"a": "2", "b": ""}]
    assert content_sha256(rows, ("a", "b")) == content_sha256([{"b": "é", "a": "1", "c": 0}, rows[1]], ("b", "a"))
    assert content_sha256(rows, ("a", "b")) != content_sha256(rows[::-1], ("a", "b"))


@needs_data
def test_the_real_gsm8k_is_the_pinned_one():
    traffic = load({"name": "gsm8k", "data": str(DATA / "gsm8k")})
    assert len(traffic.items) == 1_319
    assert traffic.provenance["rows"] == {"test": 1_319, "train": 7_473}
    assert all(float(item.reference) == float(item.reference) for item in traffic.items)


@needs_data
def test_the_real_humaneval_is_the_pinned_one():
    assert len(load({"name": "humaneval", "data": str(DATA / "humaneval")}).items) == 164
