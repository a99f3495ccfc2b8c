"""The page in a real browser: no error, no request, figures as large as they should be, nothing wider than a phone."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrofit.report.page import report
from tests.retrofit.report.runs import NASTY, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Browser:
    """A headless Chromium, spoken to in the DevTools protocol through a pair of pipes."""

    def __init__(self, program: str, profile: Path) -> None:
        read_by_it, self._out = os.pipe()
        self._in, written_by_it = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]

        def hand_over() -> None:  # it reads descriptor 3 and writes 4; above both first, so that neither is overwritten
            high = [os.dup2(read_by_it, 103), os.dup2(written_by_it, 104)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            [program, *flags, "--remote-debugging-pipe", "about:blank"],
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_it)
        os.close(written_by_it)
        self._rest, self._count = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session: str | None = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come before it are kept."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def wait(self, event: str) -> None:
        """Until it has come."""
        while all(one.get("method") != event for one in self.events):
            self._receive()

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Load ``page`` as wide as ``width`` pixels and keep what happens in :attr:`events`."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=True)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.wait("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What a line of JavaScript gives."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            some = os.read(self._in, 1 << 16)
            assert some, "the browser has gone"
            self._rest += some
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser, where there is one."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)}")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose memory has a name that is a script."""
    return report(write_run(tmp_path_factory.mktemp("runs") / "run", NASTY))[0]


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_the_page_in_a_browser(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.open(page, width, scheme)
    figures = browser.value(
        "[...document.querySelectorAll('figure svg')].map(e => [e.getBoundingClientRect().width,"
        " e.querySelectorAll('path').length, e.getAttribute('aria-label').length])"
    )
    assert len(figures) == 11
    for wide, paths, alt in figures:
        assert min(width, 430) * 0.8 < wide <= width
        assert paths > 10
        assert alt > 30
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("document.querySelectorAll('script').length") == 0
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(21, 24, 28)")

    events = browser.events
    wrong = [
        one
        for one in events
        if one["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ]
    assert wrong == []
    asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
