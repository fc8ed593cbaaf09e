"""The dashboard of a small real run, opened in headless Chromium: are the charts there, by name?

Chromium is driven by chromedriver's HTTP interface, so nothing besides Debian's `chromium` and `chromium-driver` is
needed. DASHBOARD_SCREENSHOTS=DIR keeps the pictures.
"""

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} not found: apt-get install chromium chromium-driver"
    ),
]

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1500,2200",
]

# Straight to this machine, whatever proxy the environment names.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# The page hides its text in shadow roots; this gathers all of it.
ALL_TEXT = """
const found = [];
const walk = node => {
  for (const child of node.childNodes) {
    if (child.nodeType === Node.TEXT_NODE && !["STYLE", "SCRIPT"].includes(node.nodeName)) {
      found.push(child.textContent.trim());
    }
    if (child.shadowRoot) walk(child.shadowRoot);
    walk(child);
  }
};
walk(document.body);
return found.filter(text => text).join("\\n");
"""

TRAIN = [
    "--replay.capacity",
    "1000",
    "--learner.learning_starts_steps",
    "400",
    "--budget.max_steps",
    "2400",
    "--memory.window_steps",
    "200",
    "--evaluation.period_steps",
    "800",
    "--evaluation.episodes",
    "2",
    "--evaluation.max_frames",
    "400",
    "--checkpoint.period_seconds",
    "60",
]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(command, url):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(240):
            with contextlib.suppress(OSError), OPENER.open(url, timeout=5):
                break
            assert process.poll() is None, f"{command[0]} ended"
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(30)


class Browser:
    """A session of chromedriver (W3C WebDriver)."""

    def __init__(self, base, profile):
        self.base = base
        chrome = {"args": [*OPTIONS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        session = self.call("", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": chrome}}})
        self.base = f"{base}/{session['sessionId']}"

    def call(self, path, body=None, method="POST"):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with OPENER.open(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def wait_for(self, url, words):
        """Opens a page and returns its text once it shows all words, or after a minute."""
        self.call("/url", {"url": "about:blank"})
        self.call("/url", {"url": url})
        text = ""
        for _ in range(120):
            text = self.call("/execute/sync", {"script": ALL_TEXT, "args": []})
            if all(word in text for word in words):
                break
            time.sleep(0.5)
        return text

    def screenshot(self, name):
        folder = os.environ.get("DASHBOARD_SCREENSHOTS")
        if folder:
            (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(self.call("/screenshot", method="GET")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "dqn", "train", "--config", "configs/smoke.yaml", "--run", str(folder / "small")]
    result = subprocess.run([*command, *TRAIN], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def dashboard(runs):
    port = free_port()
    url = f"http://localhost:{port}/"
    options = ["--logdir", str(runs), "--host", "localhost", "--port", str(port), "--load_fast=false"]
    with server([sys.executable, "-m", "tensorboard.main", *options], url):
        yield url


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    base = f"http://127.0.0.1:{free_port()}"
    with server(["chromedriver", f"--port={base.rpartition(':')[2]}"], f"{base}/status"):
        session = Browser(f"{base}/session", tmp_path_factory.mktemp("profile"))
        yield session
        session.call("", method="DELETE")


def test_the_custom_layout_shows_every_group_and_chart(browser, dashboard):
    from dqn.dashboard import LAYOUT

    charts = [chart for group in LAYOUT.values() for chart in group]
    words = [*LAYOUT, *(chart.rpartition(": ")[0] or chart for chart in charts)]
    curves = [f"{tag} (small)" for chart in charts for tag in chart.rpartition(": ")[2].split()]
    text = browser.wait_for(f"{dashboard}#custom_scalars", words + curves)
    browser.screenshot("custom_scalars")
    assert [word for word in words + curves if word not in text] == []


def test_the_scalars_stand_under_their_tags(browser, dashboard):
    words = ["episode\n/return", "episode\n/length_steps", "eval\n/return_mean"]  # a card's title is two spans
    text = browser.wait_for(f"{dashboard}#timeseries", words)
    browser.screenshot("timeseries")
    assert [word for word in words if word not in text] == []


def test_the_config_and_its_difference_stand_as_text(browser, dashboard):
    words = ["config/text_summary", "difference_from_nature/text_summary", "learner.learning_starts_steps", "commit"]
    text = browser.wait_for(f"{dashboard}#text", words)
    browser.screenshot("text")
    assert [word for word in words if word not in text] == []
