"""The console in Chromium: what people do there, and what their browser is kept from.

One server and one browser serve all tests.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

from tests.support.console_lab import Lab, console_lab
from tests.support.job_log_scene import JOB, OOM, line
from trainmedic_server.domain.run import Status

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
PAGES = ("/", "/runs", "/approvals", "/alerts", "/explain", "/playbooks", "/playbooks/cool", "/jobs", "/nodes")
OF_A_JOB = (f"/jobs/{JOB}", f"/jobs/{JOB}/logs?last=1h&kernel=true", f"/jobs/{JOB}/logs?last=1h&level=warning&text=e")
MORE = ("/nodes/node-1", "/audit", "/settings", "/report", "/docs", *OF_A_JOB)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with console_lab() as started:
        yield started


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """Debian's Chromium. Without its sandbox, which root cannot have, and with nothing but this server to reach."""
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    yield browser
    browser.close()


class Watched:
    """A signed-in browser; what it complained of, and whom else it asked, is noted."""

    def __init__(self, browser: Browser, lab: Lab, secret: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url, lab.url))
        self.page.goto(f"{lab.url}/login")
        self.page.fill("#token", secret)
        self.page.click("button.primary")
        expect(self.page).to_have_url(f"{lab.url}/")
        self.page.wait_for_load_state()  # until then no script takes keys

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _asked(self, url: str, ours: str) -> None:
        if not url.startswith((ours, "data:")):
            self.elsewhere.append(url)


@pytest.fixture(params=["op"])
def seen(request: pytest.FixtureRequest, browser: Browser, lab: Lab) -> Iterator[Watched]:
    """A browser that has complained of nothing when the test is over, and asked nobody else."""
    watched = Watched(browser, lab, request.param)
    yield watched
    watched.context.close()
    assert (watched.complaints, watched.elsewhere) == ([], [])


@pytest.mark.parametrize("seen", ["op", "look"], indirect=True)
def test_viewer_and_operator_see_every_page_and_no_text_hijacks_it(seen: Watched, lab: Lab) -> None:
    """Labels, annotations and agents' texts contain scripts; none of them runs."""
    run = lab.fire(note="<script>document.title='taken'</script>")
    for path in (*PAGES, *MORE, f"/runs/{run}"):
        answer = seen.page.goto(lab.url + path)
        assert answer is not None
        assert answer.status == 200, path
        expect(seen.page.locator("h1").first).to_be_attached()
        expect(seen.page).to_have_title(re.compile("Trainmedic$"))
        assert "taken" not in seen.page.title()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible(browser: Browser, lab: Lab, scheme: Any) -> None:
    """axe finds no violations, in either theme."""
    run = lab.fire(node="node-2")
    watched = Watched(browser, lab, "op", color_scheme=scheme)
    try:
        of_a_job = (OF_A_JOB[0], OF_A_JOB[-1])  # a few lines of each kind: many would take a minute
        for path in (*PAGES, *of_a_job, "/audit", "/settings", "/report", f"/runs/{run}"):
            watched.page.goto(lab.url + path)
            # By the debugger, which the page's policy does not bind.
            watched.page.evaluate(AXE)
            found = watched.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            assert [(path, each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    finally:
        watched.context.close()


def test_a_new_run_is_announced_at_once_and_moves_no_row(seen: Watched, lab: Lab) -> None:
    """It waits under a bar until a user reveals it."""
    lab.fire(node="node-3")
    seen.page.goto(f"{lab.url}/runs")
    expect(seen.page.locator(".live-word")).to_have_text("live")
    first = seen.page.locator("#rows tr[id]").first
    place = first.bounding_box()
    fired = lab.fire(node="node-4")
    expect(seen.page.locator(".newbar")).to_be_visible(timeout=60_000)
    expect(seen.page.locator("#said")).to_have_text(re.compile("1 new run"))
    assert seen.page.locator(f"#run-{fired}").count() == 0
    after = first.bounding_box()
    assert place is not None
    assert after is not None
    assert after["x"] == place["x"]
    seen.page.keyboard.press(".")
    expect(seen.page.locator(f"#run-{fired}")).to_be_visible()


def test_a_run_is_cancelled_by_keyboard_with_a_note(seen: Watched, lab: Lab) -> None:
    """A key opens the dialog and Enter confirms; the actor is recorded."""
    run = lab.fire(node="node-5")
    seen.page.goto(f"{lab.url}/runs/{run}")
    seen.page.keyboard.press("c")
    expect(seen.page.locator("#ask")).to_be_visible()
    seen.page.keyboard.type("the fan was replaced")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator(".notice")).to_contain_text("Cancelled")
    (order,) = lab.world.history.records[run].orders
    assert (order.kind, order.actor, order.note) == ("cancel", "operator", "the fan was replaced")


def test_a_question_is_answered_by_keyboard(seen: Watched, lab: Lab) -> None:
    """On the first page the user selects the row, approves and enters a note."""
    run = lab.ask(node="node-7")
    seen.page.goto(lab.url)
    expect(seen.page.locator(f"#ask-{run}")).to_be_visible()
    seen.page.keyboard.press("j")
    seen.page.keyboard.press("a")
    seen.page.keyboard.type("looks right")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator(".notice")).to_contain_text("Approved")
    (order,) = lab.world.history.records[run].orders
    assert (order.kind, order.actor, order.note) == ("approve", "operator", "looks right")


def test_the_page_of_questions_is_live_and_answers_by_keyboard(seen: Watched, lab: Lab) -> None:
    """With several questions, an answered one disappears, and the selected one is answered."""
    run, other = lab.ask(node="node-9"), lab.ask(node="node-10")
    seen.page.goto(f"{lab.url}/approvals")
    expect(seen.page.locator(".live-word")).to_have_text("live")
    record = lab.world.history.records.pop(other)
    lab.fire(node="node-11")
    expect(seen.page.locator(f"#ask-{other}")).to_have_count(0)
    lab.world.history.records[other] = record
    while not seen.page.locator(f"#ask-{run}.at").count():
        seen.page.keyboard.press("j")
    seen.page.keyboard.press("x")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator(".notice")).to_contain_text("Rejected")
    assert [order.kind for order in lab.world.history.records[run].orders] == ["reject"]


def test_a_phone_shows_every_page_in_full_and_answers_a_question(browser: Browser, lab: Lab) -> None:
    """Only the texts of playbooks and the API reference scroll sideways."""
    run = lab.ask(node="node-of-a-rack-with-a-long-name-12")
    viewport: Any = {"width": 390, "height": 844}
    watched = Watched(browser, lab, "op", viewport=viewport, has_touch=True)
    try:
        for path in (
            *PAGES,
            *OF_A_JOB,
            "/nodes/node-1",
            "/audit",
            "/settings",
            "/report?whole=1",
            "/playbooks?whole=1",
            f"/runs/{run}",
        ):
            watched.page.goto(lab.url + path)
            wider = watched.page.locator("html, main, .wide").evaluate_all(
                "all => all.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.outerHTML)"
            )
            assert (path, wider) == (path, [])
        watched.page.goto(lab.url)
        watched.page.locator(f"#ask-{run}").get_by_role("button", name="Approve").tap()
        watched.page.locator("#ask").get_by_role("button", name="Confirm").tap()
        expect(watched.page.locator(".notice")).to_contain_text("Approved")
    finally:
        watched.context.close()
    assert (watched.complaints, watched.elsewhere) == ([], [])


def test_several_questions_are_answered_at_once_by_keyboard(seen: Watched, lab: Lab) -> None:
    """They are selected with a key and share one note; the other questions stay unchanged."""
    for record in [*lab.world.history.records.values()]:
        if record.run.status is Status.AWAITING_APPROVAL:
            del lab.world.history.records[record.run.id]
    runs = [lab.ask(node=f"node-{number}") for number in (20, 21, 22)]
    seen.page.goto(f"{lab.url}/approvals")
    expect(seen.page.get_by_role("checkbox")).to_have_count(3)
    seen.page.keyboard.press("j")
    seen.page.keyboard.press("s")
    seen.page.keyboard.press("j")
    seen.page.keyboard.press("s")
    expect(seen.page.locator("#said")).to_have_text("2 chosen")
    seen.page.keyboard.press("a")
    expect(seen.page.get_by_role("heading", name="Approve the 2 questions that are chosen?")).to_be_visible()
    seen.page.keyboard.type("both are safe")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator(".notice")).to_have_text("All chosen questions are approved.")
    orders = [lab.world.history.records[run].orders for run in runs]
    assert sorted([order.note for order in of_run] for of_run in orders) == [[], ["both are safe"], ["both are safe"]]


def test_a_playbook_is_tested_and_started_manually_by_keyboard(seen: Watched, lab: Lab) -> None:
    """The expected actions are shown in place first; the browser then shows the started run."""
    page = seen.page
    page.goto(f"{lab.url}/playbooks/cool")
    page.get_by_label("Target").focus()
    page.keyboard.type("node:node-30")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="It would act on node node-30")).to_be_visible()
    expect(page.locator("#said")).to_have_text("It would act on node node-30")
    expect(page.get_by_label("Target")).to_be_focused()
    expect(page).to_have_url(f"{lab.url}/playbooks/cool")
    page.get_by_role("button", name="Run it", exact=True).focus()
    page.keyboard.press("Enter")
    page.keyboard.type("a new fan")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/runs/"))
    expect(page.locator(".notice")).to_have_text("Started. This is its run.")
    page.goto(f"{lab.url}/playbooks/cool")
    expect(page.get_by_role("table").filter(has_text="First used")).to_contain_text("not yet")
    page.get_by_role("button", name="Run tests").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#tests [role=status]").first).to_contain_text("This server runs no tests.")
    expect(page.locator("#said")).to_have_text("This server runs no tests.")
    expect(page.get_by_role("button", name="Run tests")).to_be_focused()
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []


def test_a_page_recovers_from_an_answer_that_ends_a_stream(browser: Browser, lab: Lab) -> None:
    """A proxy sends 502 while the server restarts; browsers do not retry after that."""
    watched = Watched(browser, lab, "op")
    try:
        watched.page.route("**/console/live*", lambda route: route.fulfill(status=502))
        # The page before may still be given its stream meanwhile.
        with watched.page.expect_response(lambda answer: "/console/live" in answer.url and answer.status == 502):
            watched.page.goto(f"{lab.url}/runs")
        lost = watched.page.locator(".is-lost .live-word")
        expect(lost).to_have_text(re.compile(r"^not live since \d\d:\d\d:\d\d$"))
        assert lost.evaluate("each => getComputedStyle(each).clipPath") == "none"  # shown on a desk, too
        watched.page.unroute("**/console/live*")
        expect(watched.page.locator(".live-word")).to_have_text("live", timeout=15_000)
    finally:
        watched.context.close()


def test_a_page_that_hears_nothing_is_not_live(seen: Watched, lab: Lab) -> None:
    """A hung server closes no connection. The page would show an old state as the present one."""
    seen.page.clock.install()
    seen.page.goto(lab.url)
    expect(seen.page.locator(".live-word")).to_have_text("live")
    seen.page.clock.fast_forward(60_000)
    expect(seen.page.locator(".live-word")).to_have_text(re.compile("^not live since"))
    expect(seen.page.locator(".live-word")).to_have_text("live", timeout=15_000)


def test_a_page_made_in_an_outage_is_reloaded_after_the_outage(browser: Browser, lab: Lab) -> None:
    # Not before, although events can be read: it would load again and again.
    watched = Watched(browser, lab, "op")
    loads: list[str] = []
    try:
        lab.fire(node="node-14")
        lab.world.history.away = True
        watched.page.on(
            "request", lambda request: loads.append(request.url) if request.is_navigation_request() else None
        )
        for _ in range(2):
            with watched.page.expect_response(lambda answer: answer.request.resource_type == "fetch") as found:
                if not loads:
                    watched.page.goto(f"{lab.url}/runs")
            assert (found.value.status, loads) == (503, [f"{lab.url}/runs"])
        lab.world.history.away = False
        expect(watched.page.locator("#filter-text")).to_be_visible(timeout=60_000)
        assert loads == [f"{lab.url}/runs"] * 2
    finally:
        lab.world.history.away = False
        watched.context.close()


def test_an_expired_session_ends_on_open_pages_too(browser: Browser, lab: Lab) -> None:
    """They ask for a token again at the next update."""
    watched = Watched(browser, lab, "look")
    try:
        expect(watched.page.locator(".live-word")).to_have_text("live")
        assert lab.world.auth.sessions is not None
        lab.world.auth.sessions._by_digest.clear()
        lab.fire(node="node-12")
        expect(watched.page).to_have_url(re.compile("/login"), timeout=15_000)
    finally:
        watched.context.close()


def test_a_hidden_tab_releases_its_connection(seen: Watched, lab: Lab) -> None:
    """A browser has six per server. The tab catches up when it is visible again."""
    seen.page.goto(lab.url)
    expect(seen.page.locator(".live-word")).to_have_text("live")
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    told = "document.dispatchEvent(new Event('visibilitychange'))"
    seen.page.evaluate(hide % "true" + told)
    expect(seen.page.locator(".live-word")).to_have_text("not live", timeout=10_000)
    run = lab.ask(node="node-13")
    seen.page.evaluate(hide % "false" + told)
    expect(seen.page.locator(".live-word")).to_have_text("live")
    expect(seen.page.locator(f"#ask-{run}")).to_be_visible()


def test_stopping_repairs_requires_confirmation(seen: Watched, lab: Lab) -> None:
    """This includes Settings, where one click with nothing named would pause everything."""
    seen.page.goto(f"{lab.url}/settings")
    seen.page.fill("form[action='/console/pause'] input[name=node]", "node-9")
    seen.page.fill("form[action='/console/pause'] input[name=note]", "new fans")
    seen.page.click("form[action='/console/pause'] button")
    expect(seen.page.locator("#ask")).to_contain_text("no run starts")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator(".notice")).to_have_text("Paused.")
    (pause,) = lab.world.engine.controls.pauses
    assert (pause.scope.node, pause.note) == ("node-9", "new fans")


def test_keys_navigate_between_pages(seen: Watched, lab: Lab) -> None:
    """The palette finds a playbook by a part of its name."""
    page = seen.page
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page).to_have_url(f"{lab.url}/runs")
    page.keyboard.press("/")
    expect(page.locator("#filter-text")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.keyboard.type("playbook ool")
    expect(page.locator("#palette li").first).to_contain_text("cool")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{lab.url}/playbooks/cool")


def test_pages_show_the_same_without_script(browser: Browser, lab: Lab) -> None:
    """Only the live parts are missing."""
    run = lab.fire(node="node-6")
    context = browser.new_context(java_script_enabled=False)
    try:
        page: Page = context.new_page()
        page.goto(f"{lab.url}/login?next=/runs")
        page.fill("#token", "op")
        page.click("button.primary")
        expect(page.locator(f"#run-{run}")).to_be_visible()
        page.click(f"#run-{run} a.open")
        page.click("text=Cancel")
        expect(page.locator(".notice")).to_contain_text("Cancelled")
    finally:
        context.close()


@pytest.mark.parametrize("width", [768, 1024, 1280])
def test_the_pages_of_a_job_fit_every_width(browser: Browser, lab: Lab, width: int) -> None:
    """Lines wrap, and nothing scrolls sideways."""
    watched = Watched(browser, lab, "look", viewport={"width": width, "height": 900})
    try:
        for path in OF_A_JOB:
            watched.page.goto(lab.url + path)
            wider = watched.page.locator("html, main, .wide").evaluate_all(
                "all => all.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.className)"
            )
            assert (path, wider) == (path, [])
    finally:
        watched.context.close()
    assert (watched.complaints, watched.elsewhere) == ([], [])


def test_a_log_is_searched_filtered_and_paged_by_keyboard(seen: Watched, lab: Lab) -> None:
    """Older lines are added to those shown; each view has an address."""
    page = seen.page
    page.goto(f"{lab.url}/jobs/{JOB}")
    page.get_by_role("link", name="Log", exact=True).click()
    rows = page.locator("#log-rows tr")
    expect(rows).to_have_count(200)
    first = rows.first.inner_text()
    page.get_by_role("link", name="Older").focus()
    page.keyboard.press("Enter")
    expect(rows).to_have_count(400)
    assert rows.first.inner_text() == first
    page.get_by_role("link", name="Older").click()
    expect(rows).to_have_count(566)
    expect(page.get_by_role("link", name="Older")).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("OUT OF MEMORY")
    page.get_by_label("Rank", exact=True).fill("3")
    page.get_by_label("Level").select_option("error")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Search").press("Enter")
    expect(rows).to_have_count(1)
    expect(rows.locator("mark")).to_have_text("out of memory")
    assert all(part in page.url for part in ("text=OUT+OF+MEMORY", "rank=3", "level=error"))
    rows.get_by_role("link", name="cuda-oom").click()
    expect(page.locator("#finding-01f0:target")).to_contain_text("critical")
    page.locator("#finding-01f0").get_by_role("link", name="in the log").click()
    expect(page.locator("#moment")).to_contain_text(OOM)
    expect(page.locator("#moment")).to_be_in_viewport()
    page.get_by_role("link", name="Newest").or_(page.get_by_role("link", name="Failing moment")).first.click()
    expect(page.locator("#moment")).to_contain_text(OOM)


def test_a_log_is_followed_paused_and_released(seen: Watched, lab: Lab) -> None:
    """New lines appear above the others, without script in them; a hidden tab does not follow."""
    page = seen.page
    page.goto(f"{lab.url}/jobs/{JOB}/logs?text=live")
    page.get_by_role("button", name="Follow").click()
    expect(page.locator("#log-state")).to_have_text("following")
    lab.logs.lines.append(line(-1, "live <script>document.title='taken'</script> \u202e", 2))
    expect(page.locator("#log-rows tr").first).to_contain_text("live <script>document.title='taken'</script> \\u202e")
    expect(page.locator("#log-state")).to_have_text("following: 1 new line")
    assert "live=1" in page.url
    lab.logs.lines.append(line(-2, "nobody asked for this", 2))
    lab.logs.lines.append(line(-3, "live again", 2))
    expect(page.locator("#log-state")).to_have_text("following: 2 new lines")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#log-state")).to_have_text("paused")
    assert "live=1" not in page.url
    _until(lambda: lab.logs.followers == 0)
    lab.logs.lines.append(line(-4, "live while paused", 2))
    page.get_by_role("button", name="Follow").click()
    expect(page.locator("#log-rows tr").first).to_contain_text("live while paused")
    assert page.locator("#log-rows tr").count() == 3
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    told = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(hide % "true" + told)
    expect(page.locator("#log-state")).to_have_text("paused while the tab is hidden", timeout=10_000)
    _until(lambda: lab.logs.followers == 0)
    lab.logs.lines.append(line(-5, "live while hidden", 2))
    page.evaluate(hide % "false" + told)
    expect(page.locator("#log-rows tr").first).to_contain_text("live while hidden")
    assert "taken" not in page.title()


def test_the_number_of_pages_following_logs_is_limited(seen: Watched, lab: Lab) -> None:
    """The next page is refused with a message, and is admitted when another one has closed."""
    most = lab.world.limits.followed_logs
    lines = [lab.open_stream(f"/console/log?job={JOB}", "look") for _ in range(most)]
    try:
        _until(lambda: lab.logs.followers == most)
        seen.page.goto(f"{lab.url}/jobs/{JOB}/logs?live=1")
        expect(seen.page.locator("#log-state")).to_contain_text(f"{most} pages follow logs already")
        expect(seen.page.get_by_role("button", name="Follow")).to_be_visible()
    finally:
        for each in lines:
            each.close()
    _until(lambda: lab.logs.followers == 0)
    seen.page.get_by_role("button", name="Follow").click()
    expect(seen.page.locator("#log-state")).to_contain_text("following")


def test_a_log_is_searched_without_script(browser: Browser, lab: Lab) -> None:
    """Search, times and older lines work; only following does not."""
    context = browser.new_context(java_script_enabled=False)
    try:
        page: Page = context.new_page()
        page.goto(f"{lab.url}/login?next=/jobs/{JOB}/logs")
        page.fill("#token", "look")
        page.click("button.primary")
        page.click("text=Older")
        expect(page.locator("#log-rows tr")).to_have_count(200)
        expect(page.get_by_role("button", name="Follow")).to_have_count(0)
        page.fill("#log-text", "without a time")
        page.select_option("[name=last]", "own")
        page.fill("[name=since]", "2026-01-31T11:50:05")
        page.fill("[name=until]", "2026-01-31T11:59:00")
        page.get_by_role("button", name="Search").click()
        expect(page.locator("#log-rows tr")).to_have_count(1)
        expect(page.locator("[name=since]")).to_have_value("2026-01-31T11:50:05")
    finally:
        context.close()


def _until(holds: Callable[[], bool]) -> None:
    """Wait until it holds, ten seconds at most."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come about in a minute"
        time.sleep(0.02)
