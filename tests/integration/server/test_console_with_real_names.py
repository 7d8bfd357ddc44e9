"""The console in Chromium before a cluster after a busy day: what fits, how things are named, and what is said.

One server and one browser serve all tests. Nothing changes in its cluster, so the tests need no order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import axe_playwright_python
import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support import busy_cluster
from tests.support.console_lab import Lab, console_lab
from tests.support.job_log_scene import JOB

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
WIDTHS = (1440, 1280, 1024, 768, 390)
PLACES = (
    "/",
    "/runs",
    "/runs?each=1",
    "/approvals",
    "/alerts",
    "/alerts?each=1",
    "/explain",
    "/playbooks?whole=1",
    "/playbooks/gpu-temperature-high?whole=1",
    "/jobs",
    f"/jobs/{JOB}",
    "/jobs/llm-3",
    f"/jobs/{busy_cluster.LONG_JOB}",
    f"/jobs/{quote(busy_cluster.UNICODE_JOB, safe='')}",
    "/nodes",
    "/nodes/node-1",
    f"/nodes/{busy_cluster.NODES[3]}",
    "/report?whole=1",
    "/audit",
    "/settings",
)
STATUSES = ("succeeded", "failed", "waiting", "awaiting_approval", "observed", "not_started")
TOO_WIDE = """all => all.filter((each) => each.scrollWidth > each.clientWidth + 1)
    .map((each) => `${each.nodeName}.${each.className} by ${each.scrollWidth - each.clientWidth}`)"""
TOO_NARROW = """all => all.filter((each) => each.innerText.length > 40 && each.offsetWidth < 150)
    .map((each) => each.innerText)"""
UUID = re.compile("GPU-[0-9a-f]{8}-[0-9a-f]{4}")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with console_lab(is_busy=True) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(lab: Lab) -> tuple[str, ...]:
    """Every page, and a run in each state and of each kind of target."""
    with httpx.Client(base_url=lab.url, headers={"authorization": "Bearer look"}, timeout=60) as client:
        asked = [{"status": status} for status in STATUSES] + [{"playbook": "training-loss-spike"}]
        found = [client.get("/history", params={**each, "limit": "1"}).json()["items"][0] for each in asked]
    return (*PLACES, *(f"/runs/{run['run_id']}" for run in found))


@pytest.fixture
def page(browser: Browser, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A signed-in operator's page at the time of the cluster."""
    options: dict[str, Any] = {"color_scheme": getattr(request, "param", "light")}
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.clock.set_fixed_time(busy_cluster.START)
    page.goto(f"{lab.url}/login")
    page.fill("#token", "op")
    page.click("button.primary")
    expect(page).to_have_url(f"{lab.url}/")
    yield page
    context.close()


def test_every_page_fits_every_width(page: Page, lab: Lab, pages: tuple[str, ...]) -> None:
    """Nothing scrolls sideways, and from 1280 px the header takes one line."""
    wrong = []
    for path in pages:
        answer = page.goto(lab.url + path)
        assert answer is not None
        assert answer.status == 200, path
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            wide = page.locator("html, main, .wide, .panel, .top, .facts").evaluate_all(TOO_WIDE)
            wrong += [(path, width, element) for element in wide]
            height = page.locator(".top").evaluate("each => each.offsetHeight")
            if width >= 1280 and height > 50:
                wrong.append((path, width, f"the header is {height} px high"))
    assert wrong == []


def test_numbers_are_not_wrapped_and_text_columns_are_wide_enough(page: Page, lab: Lab) -> None:
    """A number in a table stays on one line; a column of sentences is wide enough for words."""
    for path in ("/", "/runs", "/approvals", "/alerts", "/jobs"):
        page.goto(lab.url + path)
        for width in (1440, 1280, 1024):
            page.set_viewport_size({"width": width, "height": 900})
            tall = page.locator("td.num time, td.acts button").evaluate_all(
                "all => all.filter((each) => each.offsetHeight > 40).map((each) => each.outerHTML)"
            )
            assert (path, width, tall) == (path, width, [])
            narrow = page.locator("table td.what").evaluate_all(TOO_NARROW)
            assert (path, width, narrow) == (path, width, [])


def test_short_words_are_not_wrapped(page: Page, lab: Lab) -> None:
    """A mode, a status and a usual alert name stay on one line on a desktop screen."""
    for path in ("/playbooks?whole=1", "/alerts", "/runs", "/nodes/node-1?whole=1"):
        page.goto(lab.url + path)
        for width in (1440, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            words = page.locator("td.mark-of, .st").or_(
                page.locator("td.name").filter(has_text=re.compile("^GPUTemperatureHigh$"))
            )
            broken = words.evaluate_all(
                "all => all.filter((each) => each.clientHeight > 0 && (() => { const range = document.createRange();"
                " range.selectNodeContents(each); return range.getBoundingClientRect().height > 34; })())"
                ".map((each) => each.outerHTML)"
            )
            assert (path, width, broken) == (path, width, [])


def test_a_phone_shows_the_current_page(page: Page, lab: Lab) -> None:
    """The navigation bar is scrolled to it."""
    page.set_viewport_size({"width": 390, "height": 844})
    for path in ("/", "/jobs", "/nodes", "/audit", "/settings"):
        page.goto(lab.url + path)
        expect(page.locator(".top nav [aria-current]")).to_be_in_viewport(ratio=0.9)


def test_nodes_with_other_names_share_a_heading_and_equal_changes_a_link(page: Page, lab: Lab) -> None:
    """A rack has more than one node; a job's changes are counted by action."""
    page.goto(f"{lab.url}/nodes")
    headings = page.locator("main h2").all_inner_texts()
    assert [text.split()[0].lower() for text in headings[:2]] == ["node", "other"]
    page.goto(f"{lab.url}/jobs")
    changed = page.locator("#job-llm-3 td[data-name=Changed]")
    expect(changed.get_by_role("link")).to_have_count(1)
    expect(changed).to_have_text(re.compile(r"^job\.scale_lr \d+×\s*$"))


def test_a_gpu_is_named_by_its_node_and_index_instead_of_its_uuid(page: Page, lab: Lab) -> None:
    """Lists and titles do so; the UUID appears under the pointer and on the run's own page."""
    uuid = busy_cluster.gpu_uuid("node-2", 3)
    for path in ("/", "/runs", "/approvals"):
        page.goto(lab.url + path)
        named = page.locator("#main .target").filter(has_text="GPU")
        assert not [text for text in named.all_inner_texts() if UUID.search(text)]
    page.goto(f"{lab.url}/approvals")
    asked = page.locator(".ask").filter(has_text="Cool GPU 3")
    expect(asked.locator(".target")).to_have_text("node-2 · GPU 3")
    expect(asked.locator(".target")).to_have_attribute("title", uuid)
    asked.get_by_role("link", name="gpu-temperature-high").click()
    expect(page).to_have_title(re.compile("gpu-temperature-high on node-2 · GPU 3"))
    expect(page.locator("main")).to_contain_text(uuid)


def test_a_question_lists_its_steps_in_words_with_the_buttons_below(page: Page, lab: Lab) -> None:
    """An alternative follows its condition, and does not read as a second action."""
    page.goto(f"{lab.url}/approvals")
    asked = page.locator(".ask").filter(has_text="Cool GPU 3")
    assert asked.locator("ol li").all_inner_texts() == [
        "Lower the power limit of GPU 3 on node-2 to 80 %",
        "If the alert still fires after 3 min: lower the power limit of GPU 3 on node-2 to 60 %",
    ]
    steps, button = asked.locator("ol").bounding_box(), asked.get_by_role("button", name="Approve").bounding_box()
    assert steps is not None
    assert button is not None
    assert button["y"] > steps["y"] + steps["height"]
    expect(asked).to_contain_text("This reaches 1 GPU on node-2.")


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_every_page_with_real_names_is_accessible(page: Page, lab: Lab, pages: tuple[str, ...]) -> None:
    """axe finds no violations."""
    for path in pages:
        if JOB in path or "whole" in path:  # long texts, which other tests show to axe
            continue
        page.goto(lab.url + path)
        page.evaluate(AXE)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert [(path, each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
