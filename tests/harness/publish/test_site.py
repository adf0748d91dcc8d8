"""The page as a function of records: what is on it, what is not, and what an edit does."""

import re
from html.parser import HTMLParser

import msgspec
import pytest
from publish_rig import again, bench, config_of, edit

from harness.config import ROOT
from harness.engines.reference.loading import NAME
from harness.publish import parts
from harness.publish.cells import MINUS
from harness.publish.sections import Ours, published
from harness.publish.selection import select
from harness.publish.site import SITE, page
from harness.publish.tables import render, write
from harness.records import sweeps
from harness.records.read import read_all
from harness.records.schema import Verdict, digest
from harness.replay.record import Entry, Replay
from harness.replay.record import write as write_replay
from harness.stats import Estimate
from harness.tasks import find


class Page(HTMLParser):
    """Cells, attributes and text of a page. Void elements have no end."""

    VOID = ("meta", "link", "circle", "line", "rect", "wbr", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack, self.cells, self.elements = [], [], []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.stack.append(tag)
        if tag in ("td", "th", "dd"):
            self.cells.append([])

    handle_startendtag = handle_starttag

    def handle_starttag_only(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data):
        if any(tag in ("td", "th", "dd") for tag in self.stack):
            self.cells[-1].append(data)

    def having(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def text_of(results) -> str:
    return page(results, select(read_all(results)), published(results)).decode()


def main_part(text: str) -> str:
    return text.partition('<section aria-labelledby="apart">')[0]


def apart(text: str) -> str:
    return text.partition('<section aria-labelledby="apart">')[2]


def fail(record):
    record["verdict"] = {"outcome": "fail", "reasons": ["asd-b0: 6 of 6 outputs differ"]}


def test_bytes_depend_on_the_records_alone(results):
    assert render(results)[SITE] == render(results)[SITE]
    runs = read_all(results)
    assert page(results, select(runs), published(results)) == page(results, select(runs[:]), published(results))


def test_nothing_is_asked_from_outside_and_nothing_is_blank(results):
    found = Page(text_of(results))
    assert not [url for name in ("src", "href", "action") for url in found.having(name) if "//" in url]
    assert "default-src 'none'" in next(
        attributes["content"] for tag, attributes in found.elements if attributes.get("http-equiv")
    )
    assert found.cells
    assert all("".join(cell).strip() for cell in found.cells)


def test_every_arm_is_a_row_with_what_the_filters_need(results):
    record = bench(results).record
    found = Page(main_part(text_of(results)).partition('id="small"')[2].partition("</table>")[0] or "x")
    assert found.having("data-engine") == ["reference"]
    assert found.having("data-policy") == [arm for arm in record.arms for _ in ("row", "drawer")]
    text = text_of(results)
    for name, value in (("engine", "reference"), ("policy", "asd-b0")):
        choice = text.partition(f'<select name="{name}">')[2].partition("</select>")[0]
        assert f"<option>{value}</option>" in choice


def test_a_drawer_has_the_whole_provenance(results):
    record = bench(results).record
    drawer = text_of(results).partition('<details class="provenance">')[2].partition("</details>\n</details>")[0]
    known = [
        record.identity.digest,
        record.identity.plan,
        record.seal,
        record.requests_sha256,
        record.engine_log_sha256,
        record.identity.code["commit"],
        record.identity.code["sha256"],
        record.identity.target["sha256"],
        record.identity.draft["sha256"],
        record.identity.data["content_sha256"]["test"],
        record.identity.engine["version"],
        record.environment["cpu"],
        record.environment["packages"]["torch"],
        f"{SITE}#adapter-{digest(record.identity.adapter_files)[:12]}",
        f"runs/{record.id}/record.json",
        "&#34;max_running_requests&#34;",
    ]
    assert [value for value in known if value not in drawer] == []
    text = text_of(results)
    files = text.partition(f'id="adapter-{digest(record.identity.adapter_files)[:12]}"')[2].partition("</details>")[0]
    assert all(f"<dt>{name}</dt><dd><code>{value}" in files for name, value in record.identity.adapter_files.items())


def test_a_value_the_record_lacks_is_a_word(results):
    def change(record):
        record["identity"]["code"].update(commit=None, dirty=None)
        record.update(engine_log_sha256=None)

    again(results, change)
    text = text_of(results)
    assert "<dt>commit</dt><dd>not recorded</dd>" in text
    assert "<dt>dirty</dt><dd>not recorded</dd>" in text
    assert "<dt>engine log</dt><dd>none kept</dd>" in text


def test_a_newer_failure_is_told_and_replaces_nothing(results):
    good, bad = bench(results).record, again(results, fail)
    text = text_of(results)
    assert f'<tbody id="{good.id}"' in main_part(text)
    assert f'<tbody id="{bad.id}"' not in text
    assert f"{bad.id}</a>: verdict fail; asd-b0: 6 of 6 outputs differ" in main_part(text)
    assert f"{bad.id}</a>" in apart(text)


@pytest.mark.parametrize("outcome", ["fail", "inconclusive"])
def test_a_question_without_a_pass_is_apart(results, outcome):
    def change(record):
        config_of(record)["seed"] = 7
        fail(record)
        record["verdict"]["outcome"] = outcome

    bad = again(results, change)
    text = text_of(results)
    assert f'<tbody id="{bad.id}"' not in main_part(text)
    assert f'<tbody id="{bad.id}"' in apart(text)
    assert "6 of 6 outputs differ" in apart(text)
    findings = text.partition('<ul class="findings">')[2].partition("</ul>")[0]
    assert bad.id not in findings


def test_without_a_pass_the_page_says_so(tmp_path):
    text = text_of(tmp_path)
    assert "No bench outside a sweep has passed yet." in text
    assert all("".join(cell).strip() for cell in Page(text).cells)


def test_an_edit_by_hand_is_found(results, check):
    assert check() == (0, "")
    path = results / SITE
    path.write_text(path.read_text().replace("6/6 equal", "7/7 equal"))
    status, err = check()
    assert status == 1
    assert "site/index.html: line" in err
    write(results, only=SITE)
    assert check() == (0, "")


def test_a_missing_page_is_found(results, check):
    (results / SITE).unlink()
    status, err = check()
    assert status == 1
    assert "site/index.html: expected" in err


@pytest.mark.parametrize("name", ["adapter_files", "engine", "digest"])
def test_missing_provenance_fails(results, check, name):
    edit(results, "bench", lambda record: record["identity"].update({name: None}))
    write(results)
    status, err = check()
    assert status == 1
    assert f"identity.{name}: expected a value, found none (provenance)" in err


def test_the_task_writes_the_page_alone(results):
    from harness.config import load

    before = (results / "README.md").read_bytes()
    (results / "README.md").write_text("kept")
    (results / SITE).unlink()
    assert find("site")(load(["task=site", f"out={results}"])) == 0
    assert (results / "README.md").read_text() == "kept"
    (results / "README.md").write_bytes(before)
    assert (results / SITE).read_bytes() == render(results)[SITE]


def test_a_small_run_is_a_finding_only_where_there_is_no_other(results):
    first = bench(results).record.id
    findings = text_of(results).partition('<ul class="findings">')[2].partition("</ul>")[0]
    assert f'href="#{first}"' in findings

    def grown(record):
        record["workload"]["items"] = [f"item-{n}" for n in range(100)]

    large = again(results, grown).id
    text = text_of(results)
    findings = text.partition('<ul class="findings">')[2].partition("</ul>")[0]
    assert f'href="#{large}"' in findings
    assert f'href="#{first}"' not in findings
    assert (
        text.index('id="results"')
        < text.index(f'id="{large}"')
        < text.index('id="small"')
        < text.index(f'id="{first}"')
    )


def test_a_bench_that_scores_nothing_says_so_once_in_its_finding(results):
    def change(record):
        config_of(record)["seed"] = 7
        for found in record["summary"]["arms"].values():
            found["outcomes"] = dict.fromkeys(found["outcomes"], 0)
            if "change" in found:
                found["change"]["accuracy"]["change"].update(value=None, low=None, high=None)

    record = again(results, change)
    findings = text_of(results).partition('<ul class="findings">')[2].partition("</ul>")[0]
    own = next(part for part in findings.split("<li>") if f"#{record.id}" in part)
    assert own.count("not scored") == 1


def test_markup_in_a_record_is_text(results):
    again(results, lambda record: record["environment"].update(cpu="<script>alert(1)</script>"))
    text = text_of(results)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize("empty", ["", "  ", ("", " ")])
def test_an_empty_cell_is_an_error(empty):
    with pytest.raises(ValueError, match="found nothing"):
        parts.html(empty)


def point(results, number: int, tps: float, accuracy: float, **more):
    """A run of a sweep of four."""

    def change(record):
        values = {"policy.budget": float(number), "policy.max_mismatches": 1}
        record["workload"]["sweep"] = {"id": "0123456789ab", "point": values, "points": 4}
        record["arms"]["asd"]["policy"]["budget"] = float(number)
        found = record["summary"]["arms"]["asd"]["change"]
        for estimate, value in ((found["tps"], tps), (found["accuracy"]["change"], accuracy)):
            estimate.update(msgspec.to_builtins(Estimate(value, value - 0.01, value + 0.01, 6, "test")))
        record.update(more)

    return again(results, change, f"99991231T00000{number}Z-0000000{number}")


def test_a_sweep_is_one_plot_and_one_table(results):
    front = [point(results, 1, 0.05, 0.0), point(results, 2, 0.10, -0.02)]
    beaten = point(results, 3, 0.01, -0.05)
    text = text_of(results)
    assert "2 of 4" not in text
    assert "3 of 4 points (sweep 0123456789ab)" in text
    section = text.partition('<section aria-labelledby="front">')[2].partition("</section>")[0]
    svg = section.partition("<svg role=")[2].partition("</svg>")[0]
    assert len(re.findall(r'class="point front"', svg)) == 2
    assert len(re.findall(r'class="point dominated"', svg)) == 1
    assert ">B=1.0<" not in svg
    assert ">B=1<" in svg  # the front says what it is; max_mismatches never varies
    assert ">B=3<" not in svg
    assert all(f'<tbody id="{record.id}"' in section for record in (*front, beaten))
    assert not any(f'<tbody id="{record.id}" data-' in text for record in (*front, beaten))  # in no main table
    assert "1 points of sweep 0123456789ab" in apart(text)
    assert all("".join(cell).strip() for cell in Page(text).cells)
    readme = render(results)["README.md"].decode().partition("## Fronts")[2].partition("## Thinking")[0]
    assert len([line for line in readme.splitlines() if line.startswith("|") and "| front |" in line]) == 2


def test_slower_and_worse_than_the_baseline_is_on_no_front(results):
    point(results, 1, -0.05, -0.05)
    (sweep,) = select(read_all(results)).sweeps
    assert [(each.standing, each.by) for each in sweep.points] == [("dominated", "baseline")]


def test_a_failed_point_is_listed_with_its_reason_and_replaces_no_pass(results):
    good = point(results, 1, 0.05, 0.0)
    point(results, 2, 0.9, 0.9, verdict={"outcome": "fail", "reasons": ["too good"]})
    bad = again(
        results,
        lambda record: record.update(
            workload=good.workload,
            arms=msgspec.to_builtins(good.arms),
            verdict={"outcome": "fail", "reasons": ["late"]},
        ),
        "99991231T000009Z-00000009",
    )
    (sweep,) = select(read_all(results)).sweeps
    assert [each.record.id for each in sweep.points] == [good.id]
    text = apart(text_of(results))
    assert "B=2" in text
    assert "too good" in text
    assert f'<tbody id="{bad.id}"' not in text


def test_phases_are_numbers_or_the_reason_there_are_none(results):
    record = bench(results).record
    section = text_of(results).partition('<section aria-labelledby="phases">')[2].partition("</section>")[0]
    cells = ["".join(cell).strip() for cell in Page(section.partition("</p>")[2] or "x").cells]
    rows = [cells[i : i + 6] for i in range(6, len(cells), 6)]
    assert {arm for row in rows for arm in row[1].split(", ")} == set(record.arms)
    for row in rows:
        assert re.match(r"\d+\.\d\d( \[|, no)|none think|unsupported \(.+\)", row[3]), row


def test_figures_of_others_have_ours_beside_them(results):
    figures = published(ROOT / "results")
    assert any(figure.ours for figure in figures)
    record = bench(results).record
    name = record.identity.config["traffic"]["name"]
    figures[0].ours = Ours(model="tiny-qwen3", traffic=name, arm="asd")
    selection = select(read_all(results))
    section = page(results, selection, figures).decode().partition('<section aria-labelledby="stated">')[2]
    row = section.partition('<tr><th scope="row">')[2].partition("</tr>")[0]
    assert "not run" in row  # this pair has the recipe's name and not its content
    assert "not measured here" in section


def test_kernels_are_read_from_their_files_alone(results):
    assert "No kernel has been timed on a GPU." in text_of(results)
    (results / "kernels").mkdir()
    columns = "kernel,provider,V,K,B,dtype,metric,unit,p50,p20,p80,note,gpu,torch,triton,commit,timestamp"
    line = "greedy accept,{},100,7,{},float32,latency,us,{},,,{},GPU,2.11,3.6,0123456789abcdef,{}"
    rows = [
        line.format("ours", 1, "12.34", "", "2026-01-01"),
        line.format("ours", 1, "11.11", "", "2026-01-02"),
        line.format("theirs", 1, "", "unsupported (x)", "2026-01-01"),
        line.format("theirs", 16, "99", "", "2026-01-01"),
    ]
    (results / "kernels" / "gpu.csv").write_text("\n".join([columns, *rows]) + "\n")
    section = text_of(results).partition('<section aria-labelledby="kernels">')[2].partition("</section>")[0]
    cells = ["".join(cell).strip() for cell in Page(section.partition("</p>")[2] or "x").cells]
    assert cells[3:] == ["ours", "11.1", "not run", "theirs", "unsupported (x)", "99"]


def replay(results, identifier: str, outcome: str = "pass", prediction=None, **more):
    """A replay as its task leaves it."""
    values = [4.5, 4.0, 5.0]
    estimate = dict(zip(("value", "low", "high"), values, strict=True)) | {"n": 9, "method": "test"}
    entry = {"rule": "strict", "kind": "deterministic", "why": None, "acceptance": [0.5], "key": "strict"}
    each = dict.fromkeys(("all", "think"), estimate) | {"answer": None}
    none = dict.fromkeys(("all", "think", "answer"))
    made = Replay(
        id=identifier,
        created="2026-01-01T00:00:00Z",
        code={"commit": "0" * 40, "dirty": False, "sha256": "1" * 64},
        capture={"manifest_sha256": "2" * 64, "target": "pair", "engine": "sglang", "requests": 9, "blocks": 90}
        | {"policy": "strict"}
        | more,
        baseline="strict",
        policies=[
            Entry(name="strict", tokens_per_step=each, change=none, **entry),
            Entry(name="asd", tokens_per_step=each, change=dict.fromkeys(none, estimate | {"value": 0.1}), **entry),
            Entry(name="grid-1", tokens_per_step=each, change=none, grid=True, **entry),
            Entry(name="block", tokens_per_step=none, change=none, **entry | {"why": "greedy capture"}),
        ],
        reproduced={},
        pictures={},
        prediction=prediction,
        limits=["Accept length, not accuracy."],
        notes=[],
        verdict=Verdict(outcome, [] if outcome == "pass" else ["3 blocks differ"]),
    )
    folder = results / "replays" / identifier
    folder.mkdir(parents=True)
    write_replay(folder, made, b"<svg/>")
    return folder


def test_replays_are_a_table_with_their_limits_and_failures_are_apart(results, check):
    replay(results, "20260101T000000Z-00000000")
    replay(results, "20260102T000000Z-00000000", "fail")
    write(results)
    assert check() == (0, "")
    text = (results / SITE).read_text()
    section = text.partition('<section aria-labelledby="replayed">')[2].partition("</section>")[0]
    rows = Page(section.partition("</p>")[2] or "x").cells
    cells = ["".join(cell).strip() for cell in rows][6:]
    assert cells[:6] == ["strict", "4.50 [4.00, 5.00]", "4.50 [4.00, 5.00]", "no blocks", "baseline", "baseline"]
    assert cells[6:12][4:] == ["+10.0 %", "[+400.0, +500.0]"]
    assert cells[12:] == ["block", "unsupported (greedy capture)", *["unsupported"] * 4]
    assert "Accept length, not accuracy." in section
    assert "20260102T000000Z-00000000" not in section
    assert "3 blocks differ" in apart(text)
    readme = (results / "README.md").read_text().partition("## Replayed")[2]
    assert "| asd | 4.50 [4.00, 5.00] |" in readme


def test_blocks_of_each_policy_of_a_capture_are_shown(results, check):
    """Of one capture the newest of each policy: chain's blocks are not block's."""
    for day, policy in enumerate(("strict", "asd-b0", "strict"), 1):
        replay(results, f"2026010{day}T000000Z-00000000", policy=policy)
    write(results)
    assert check() == (0, "")
    section = (
        (results / SITE).read_text().partition('<section aria-labelledby="replayed">')[2].partition("</section>")[0]
    )
    shown = [name for name in ("20260101", "20260102", "20260103") if f"{name}T000000Z" in section]
    assert shown == ["20260102", "20260103"]


def test_replays_of_engines_that_people_serve_with_come_first(results):
    replay(results, "20260101T000000Z-00000000", engine=NAME, blocks=900)
    replay(results, "20260102T000000Z-00000000", manifest_sha256="3" * 64, blocks=80)
    replay(results, "20260103T000000Z-00000000", manifest_sha256="4" * 64, blocks=90)
    write(results)
    readme = (results / "README.md").read_text().partition("## Replayed")[2]
    titles = [line for line in readme.splitlines() if line.startswith("### ") and "blocks of" in line]
    assert [title.rpartition(", ")[2] for title in titles] == [f"{n} blocks of strict" for n in (90, 80, 900)]


def test_prompts_of_runs_alone_hide_no_replay_of_all_and_live_checks_are_told(results, check):
    row = {"run": "R", "batch": 1, "fitted": False, "live_tps": {"value": 500.0}, "predicted_tps": 550.0}
    rows = [
        row | {"name": "strict", "fitted": True},
        row | {"name": "asd", "predicted_own_tps": 495.0},
        row | {"name": "typical", "predicted_own_tps": None},
        row | {"name": "block", "live_tps": None},
    ]
    replay(results, "20260101T000000Z-00000000")
    replay(results, "20260102T000000Z-00000000", prediction={"rows": rows}, shared=["R"])
    write(results)
    assert check() == (0, "")
    readme = (results / "README.md").read_text().partition("## Replayed")[2]
    assert "20260101T000000Z" in readme
    assert "of strict, prompts of runs alone" in readme
    (told,) = [line for line in readme.splitlines() if "Predicted TPS" in line]
    assert "strict" not in told
    assert "run R, 1 in flight: asd live 500.0, with the baseline's step time 550.0 (+10.0 %)" in told
    assert f", with its own 495.0 ({MINUS}1.0 %); typical live 500.0, with the baseline's step time" in told
    assert told.endswith("block not run.")


@pytest.mark.parametrize("name", ["replay", "sweep"])
def test_an_edited_replay_or_sweep_is_found(results, check, name):
    if name == "replay":
        path = replay(results, "20260101T000000Z-00000000") / "replay.json"
        path.write_text(path.read_text().replace("4.5", "5.5"))
    else:
        path = sweeps.write(results, sweeps.manifest("bench", [], {"a": [1]}, [sweeps.Point({"a": 1}, "0" * 64)]))
        write(results)
        assert check() == (0, "")
        path.write_text(path.read_text().replace("bench", "gate"))
    status, err = check()
    assert status == 1
    assert path.stem in err or path.parent.name in err


def test_a_run_from_before_a_sweep_counts_for_its_point(results):
    good = bench(results).record
    points = [sweeps.Point({"policy.budget": 1}, good.identity.plan), sweeps.Point({"policy.budget": 2}, "0" * 64)]
    manifest = sweeps.manifest("bench", [], {"policy.budget": [1, 2]}, points)
    (sweep,) = select(read_all(results), [manifest]).sweeps
    assert [point.record.id for point in sweep.points] == [good.id]
    assert sweep.left_out == (({"policy.budget": 2}, None),)
    assert sweep.planned == 2
    assert select(read_all(results), [manifest]).benches[0].record.id == good.id  # and stays a bench
