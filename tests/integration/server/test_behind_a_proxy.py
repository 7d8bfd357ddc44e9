"""The console and the API below a path of another host: a real nginx in front, Chromium behind it.

One kind of proxy strips the path of the external URL from each request, the other leaves it there.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Response, expect, sync_playwright

from tests.support.api_world import payload
from tests.support.console_lab import Lab, console_lab
from tests.support.programs import Program, eventually, free_port

BASE = "/ops/medic"
PAGES = {
    "Now": "/",
    "Runs": "/runs",
    "Approvals": "/approvals",
    "Alerts": "/alerts",
    "Why": "/explain",
    "Playbooks": "/playbooks",
    "Jobs": "/jobs",
    "Nodes": "/nodes",
    "Report": "/report",
    "Audit": "/audit",
    "Settings": "/settings",
}


@dataclass
class Site:
    """Where people reach the server, and what their browser did."""

    url: str
    lab: Lab
    page: Page
    failed: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Note errors, and requests that leave the path."""
        self.page.on("response", self._answered)
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._said)

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.failed.append(f"{response.status} {response.url}")

    def _asked(self, url: str) -> None:
        if not url.startswith(self.url):
            self.failed.append(url)

    def _said(self, message: ConsoleMessage) -> None:
        # A browser asks for the icon of a JSON document by itself, at the host's root.
        if message.type == "error" and not message.location["url"].endswith("/favicon.ico"):
            self.complaints.append(message.text)

    def sign_in(self) -> None:
        """From the page that a signed-out browser is sent to, and back to what was asked for."""
        self.page.goto(f"{self.url}/runs?status=failed")
        expect(self.page).to_have_url(f"{self.url}/login?next=%2Fruns%3Fstatus%3Dfailed")
        self.page.fill("#token", "op")
        self.page.click("button.primary")
        expect(self.page).to_have_url(f"{self.url}/runs?status=failed")
        self.page.wait_for_load_state()

    def go(self, path: str) -> None:
        answer = self.page.goto(f"{self.url}{path}")
        assert answer is not None
        assert answer.status == 200, path


def configuration(directory: Path, port: int, upstream: str, *, strips: bool, tls: bool) -> str:
    """As an administrator writes it; without TLS, or with a certificate of its own."""
    listen = f"listen 127.0.0.1:{port}{' ssl' if tls else ''};"
    if tls:
        listen += f" ssl_certificate {directory}/crt.pem; ssl_certificate_key {directory}/key.pem;"
    return f"""
daemon off; pid {directory}/nginx.pid; error_log stderr; worker_processes 1;
events {{}}
http {{
  access_log off; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  server {{
    {listen}
    location / {{ return 418; }}
    location {BASE}/ {{
      proxy_pass {upstream}{"/" if strips else ""};
      proxy_set_header Host $http_host;
      proxy_http_version 1.1;
      proxy_buffering off;
    }}
  }}
}}
"""


def certificate(directory: Path) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=127.0.0.1", "-days", "2", "-out", "crt.pem", "-keyout", "key.pem"),
        ],
        cwd=directory,
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield started
        started.close()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", verify=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(params=["strips the path", "leaves the path", "leaves the path, over TLS"])
def site(request: pytest.FixtureRequest, tmp_path: Path, browser: Browser) -> Iterator[Site]:
    """When the test is over, the browser has asked for nothing above the path, and has complained of nothing."""
    strips, tls = "strips" in request.param, "TLS" in request.param
    port = free_port()
    url = f"http{'s' if tls else ''}://127.0.0.1:{port}{BASE}"
    with console_lab(url) as lab:
        if tls:
            certificate(tmp_path)
        config = tmp_path / "nginx.conf"
        config.write_text(configuration(tmp_path, port, lab.url, strips=strips, tls=tls))
        with Program(["nginx", "-e", "stderr", "-c", config], tmp_path / "nginx.log", {"PATH": "/usr/sbin:/usr/bin"}):
            eventually(lambda: answers(url), 60, "nginx", 0.05)
            context = browser.new_context(ignore_https_errors=True)
            made = Site(url, lab, context.new_page())
            made.watch()
            yield made
            context.close()
            assert (made.failed, made.complaints) == ([], [])


def test_every_page_link_form_and_file_is_found_below_the_path(site: Site) -> None:
    """This covers sign-in and sign-out, pages, live parts, the palette, orders, downloads and the API reference."""
    site.sign_in()
    page = site.page
    (cookie,) = [each for each in page.context.cookies() if "session" in each["name"]]
    assert cookie["path"] == BASE
    assert cookie["secure"] is site.url.startswith("https")
    for name, path in PAGES.items():
        page.click(f"nav a:text-is('{name}')")
        expect(page).to_have_url(f"{site.url}{path}")
        expect(page.locator("nav a[aria-current=page]")).to_have_text(name)
    run = site.lab.fire(node="node-3")
    live(site)
    cancelled(site, run)
    found(site, run)
    downloaded(site, run)
    page.click("form[action$='/logout'] button")
    expect(page).to_have_url(f"{site.url}/login")
    assert [each for each in page.context.cookies() if "session" in each["name"]] == []


def live(site: Site) -> None:
    site.go("/runs")
    expect(site.page.locator(".live-word")).to_have_text("live")
    fired = site.lab.fire(node="node-4")
    expect(site.page.locator(".newbar")).to_be_visible(timeout=5000)
    site.page.keyboard.press(".")
    site.page.click(f"#run-{fired} a.open")
    expect(site.page).to_have_url(f"{site.url}/runs/{fired}")


def cancelled(site: Site, run: str) -> None:
    """The script hands the page's own address on as the one to come back to."""
    site.go(f"/runs/{run}")
    site.page.keyboard.press("c")
    expect(site.page.locator("#ask")).to_be_visible()
    site.page.keyboard.type("the fan was replaced")
    site.page.keyboard.press("Enter")
    expect(site.page.locator(".notice")).to_contain_text("Cancelled")
    expect(site.page).to_have_url(f"{site.url}/runs/{run}")
    site.page.reload()
    expect(site.page.locator(".notice")).to_have_count(0)


def found(site: Site, run: str) -> None:
    site.page.keyboard.press("Control+k")
    site.page.keyboard.type(run)
    expect(site.page.locator("#palette li")).to_have_count(1)
    site.page.keyboard.press("Enter")
    expect(site.page).to_have_url(f"{site.url}/runs/{run}")


def downloaded(site: Site, run: str) -> None:
    site.go(f"/r/{run}")
    expect(site.page).to_have_url(f"{site.url}/runs/{run}")
    assert f"{site.url}/history/{run}" in str(site.page.locator("[data-copy*=curl]").first.get_attribute("data-copy"))
    site.page.click("a[data-json]")
    expect(site.page).to_have_url(f"{site.url}/history/{run}.json")
    site.go("/docs")
    assert f"{site.url}/history" in site.page.content()
    site.page.click("header a:text-is('openapi.json')")
    expect(site.page).to_have_url(f"{site.url}/openapi.json")
    assert site.page.evaluate("JSON.parse(document.body.innerText).servers") == [{"url": BASE}]
    site.go("/")


def test_the_api_answers_below_the_path_and_without_it(site: Site) -> None:
    """Alertmanager may use the proxy or bypass it."""
    for url in (site.url, site.lab.url):
        with httpx.Client(base_url=url, verify=False, headers={"authorization": "Bearer hook"}) as client:
            assert client.post(f"{url}/webhook", json=payload()).status_code == 200
            assert client.post(f"{url}/webhook/", json=payload()).status_code == 200
            assert client.get(f"{url}/ready").json()["mode"] == "enforce"
            client.headers["authorization"] = "Bearer look"
            assert client.get(f"{url}/history?limit=1").json()["items"]
            assert client.get(f"{url}/nowhere").status_code == 404
            with client.stream("GET", f"{url}/events", headers={"last-event-id": "0"}) as stream:
                assert next(stream.iter_lines()).startswith("retry:")
