"""The page in a real browser: phone and desktop, light and dark."""

import shutil

import chromium
import pytest
from publish_rig import again, bench, config_of

from harness.publish.site import SITE
from harness.publish.tables import write

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"none of {', '.join(chromium.NAMES)} is installed")
VIEWS = [(390, 844, "light"), (390, 844, "dark"), (1280, 900, "light"), (1280, 900, "dark")]
SHOWN = "[...document.querySelectorAll('#small tr[data-policy]:not(.drawer)')].filter(row => row.offsetParent)"


@pytest.fixture(scope="module")
def site(measured, tmp_path_factory):
    """A page with everything on it: two questions, a sweep, a newer failure, a question without a pass."""
    root = tmp_path_factory.mktemp("site") / "results"
    shutil.copytree(measured, root)

    def other_engine(record):
        config_of(record)["engine"]["name"] = "sglang"

    def swept(number):
        def change(record):
            record["workload"]["sweep"] = {"id": "0123456789ab", "point": {"policy.budget": number}, "points": 9}
            record["arms"]["asd"]["policy"]["budget"] = float(number)
            found = record["summary"]["arms"]["asd"]["change"]
            found["tps"].update(value=0.01 * number, low=0.01 * number - 0.02, high=0.01 * number + 0.02)
            found["accuracy"]["change"].update(value=-0.001 * number**2, low=-0.1, high=0.1)

        return change

    def failed(record):
        record["verdict"] = {"outcome": "fail", "reasons": ["asd-b0: 6 of 6 outputs differ"]}

    def unsettled(record):
        failed(record)
        config_of(record)["seed"] = 7

    again(root, other_engine, "99991231T000000Z-00000000")
    again(root, failed, "99991231T000001Z-00000001")
    again(root, unsettled, "99991231T000002Z-00000002")
    for number in range(1, 7):
        again(root, swept(number), f"99991231T00001{number}Z-0000001{number}")
    write(root)
    return root


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = chromium.Chromium(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[2]}")
def view(request, browser, site):
    width, height, scheme = request.param
    browser.open((site / SITE).as_uri(), width, height, scheme)
    return browser, width, scheme


def test_the_page_fits_and_works(view, site):
    browser, width, scheme = view
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width  # tables scroll in boxes of their own
    paper = {"light": "rgb(252, 252, 250)", "dark": "rgb(21, 23, 26)"}[scheme]
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == paper

    arms = len(bench(site).record.arms)
    assert browser.ask(f"{SHOWN}.length") == 2 * arms
    choose = (
        "{{ const one = document.querySelector('select[name={}]'); one.value = '{}'; "
        "one.dispatchEvent(new Event('input', {{bubbles: true}})) }}"
    )
    browser.ask(choose.format("engine", "sglang"))
    assert browser.ask(f"{SHOWN}.length") == arms
    browser.ask(choose.format("policy", "asd"))
    assert browser.ask(f"{SHOWN}.map(row => row.dataset.policy)") == ["asd"]
    assert browser.ask("document.querySelector('#filter output').textContent") == f"1 of {2 * arms} rows"
    browser.ask("document.querySelector('#filter button').click(), new Promise(done => setTimeout(done))")
    assert browser.ask(f"{SHOWN}.length") == 2 * arms

    drawer = "document.querySelector('#small details.provenance')"
    assert browser.ask(f"{drawer}.open") is False
    browser.ask(f"{drawer}.querySelector('summary').focus()")
    browser.press("Enter", 13, "\r")
    assert browser.ask(f"{drawer}.open") is True
    first = browser.ask("document.querySelector('#small tbody').id")
    assert f"runs/{first}/record.json" in browser.ask(f"{drawer}.querySelector('a').href")
    assert first in browser.ask(f"{drawer}.innerText")
    assert browser.ask(f"{drawer}.querySelector('.facts').getBoundingClientRect().right") <= width

    adapters = "document.querySelector('details[id^=adapter-]')"
    browser.ask(f"location.hash = {adapters}.id, new Promise(done => setTimeout(done, 50))")
    assert browser.ask(f"{adapters}.open") is True
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(("file://", "data:"))] == []
    assert len([url for url in browser.requests() if url.startswith("file://")]) == 1  # the page itself


def test_everything_is_named_and_large_enough(view):
    browser, width, _ = view
    named = "[...document.querySelectorAll('svg[role=img], [role=region], nav, form')].map(e => e.ariaLabel)"
    assert all(browser.ask(named))
    assert browser.ask("[...document.querySelectorAll('select')].every(one => one.labels.length === 1)") is True
    small = (
        "[...document.querySelectorAll('body *')].filter(e => e.offsetParent && e.childNodes.length === 1 && "
        "e.firstChild.nodeType === 3 && parseFloat(getComputedStyle(e).fontSize) < 11).map(e => e.outerHTML)"
    )
    assert browser.ask(small) == []
    outside = (
        "[...document.querySelectorAll('main *, header *, footer *')].filter(e => e.offsetParent && "
        "!e.closest('.box') && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML)"
    )
    assert browser.ask(outside) == []
    marks = browser.ask("document.querySelectorAll('.scatter .point').length")
    assert marks == 6
    edges = "[...document.querySelectorAll('.scatter svg, .scatter text')].map(e => e.getBoundingClientRect())"
    found = browser.ask(f"{edges}.map(box => [box.left, box.right])")
    assert all(left >= 0 and right <= width for left, right in found)  # no label is cut off
