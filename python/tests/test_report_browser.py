"""The page of `python -m folio report` in headless Chromium, as readers meet it: on a phone, a tablet and a desktop, in
light and in dark. Checks that nothing is fetched, logged or cut off, that plots are drawn inside their axes, that text
can be read. FOLIO_SCREENSHOTS names a folder for a screenshot of each.

Needs only Chromium, which is spoken to over a pipe; where there is none, the tests are skipped.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

import pytest
from plots_support import REPOSITORY, TRACES, replay

from folio import plots
from folio.plots import look as colours

SIZES = {"phone": (390, 844), "tablet": (768, 1024), "desktop": (1280, 900)}
SCHEMES = ("light", "dark")
LIMIT_S = 60  # for one answer of the browser: only for what hangs

# Runs in the page. Gives a list of complaints.
PROBE = r"""
(() => {
  const wrong = [], root = document.documentElement;
  const say = text => { if (wrong.length < 20) wrong.push(text); };
  if (root.scrollWidth > root.clientWidth)
    say(`the page is ${root.scrollWidth} px wide in a window of ${root.clientWidth}`);
  const seen = e => e.getClientRects().length > 0;
  const plots = [...document.querySelectorAll('svg.plot')].filter(seen);
  if (plots.length !== PLOTS) say(`${plots.length} plots are shown, expected PLOTS`);
  for (const svg of plots) {
    const view = svg.viewBox.baseVal, [x, y, width, height] = svg.dataset.area.split(' ').map(Number);
    const outside = b => Math.min(b.x, b.y, view.width - b.x - b.width, view.height - b.y - b.height) < -0.5;
    const named = svg.getAttribute('aria-labelledby').split(' ').map(i => document.getElementById(i));
    if (named.length !== 2 || named.some(e => !e || !e.textContent)) say(`${svg.id}: no title or description`);
    if (width < 150 || height < 80 || outside({x, y, width, height})) say(`${svg.id}: its axes are too small`);
    let drawn = 0;
    for (const e of svg.querySelectorAll('path[clip-path], [clip-path] > use')) {
      const b = e.getBBox(), x0 = Math.max(b.x, x), x1 = Math.min(b.x + b.width, x + width);
      const y0 = Math.max(b.y, y), y1 = Math.min(b.y + b.height, y + height);
      if (!isFinite(b.x + b.y + b.width + b.height)) say(`${svg.id}: geometry without numbers`);
      if (!/stroke: (GRID|SOFT)/.test(e.getAttribute('style')) && x1 - x0 > 2 && y1 >= y0) drawn++;
      if (e.tagName === 'use' && outside(b)) say(`${svg.id}: a point outside`);
    }
    if (drawn < DRAWN(svg.id)) say(`${svg.id}: ${drawn} shapes are drawn, expected ${DRAWN(svg.id)}`);
    const texts = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBBox()]);
    if (texts.length < 6) say(`${svg.id}: few labels`);
    texts.forEach(([text, a], i) => {
      if (/nan|inf/i.test(text)) say(`${svg.id}: '${text}'`);
      if (outside(a)) say(`${svg.id}: '${text}' is cut off`);
      for (const [other, b] of texts.slice(i + 1))
        if (Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > 1 &&
            Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 3)
          say(`${svg.id}: '${text}' and '${other}' overlap`);
    });
    const shown = svg.getBoundingClientRect().width / view.width * 13;
    if (shown < 11) say(`${svg.id}: its text is ${shown.toFixed(1)} px high`);
  }
  const light = c => {
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = c.match(/[\d.]+/g).slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  if (ground > 0.5 !== LIGHT) say('the ground does not follow the reader\'s light or dark');
  let read = 0;
  for (const e of document.querySelectorAll('h1,h2,p,dt,dd b,dd span,summary,th,td,footer,text')) {
    if (!seen(e)) continue;
    const style = getComputedStyle(e), ink = light(e.tagName === 'text' ? style.fill : style.color);
    const contrast = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    read++;
    if (contrast < 4.5) say(`'${e.textContent.trim().slice(0, 30)}' has a contrast of ${contrast.toFixed(2)}`);
  }
  if (read < 60) say(`only ${read} texts`);
  document.querySelectorAll('details').forEach(e => { e.open = true; });
  const tables = [...document.querySelectorAll('table')];
  if (tables.length !== PLOTS + 1 || tables.some(t => t.rows.length < 5 || !seen(t))) say('a table is missing');
  if (root.scrollWidth > root.clientWidth) say('with its tables open the page is too wide');
  document.querySelectorAll('details').forEach(e => { e.open = false; });
  return wrong;
})()
"""
PLOTS = 5
# Lines and areas of a plot besides its rules.
DRAWN = "(id => ({kv: 2, batch: 2, sequences: 2, hits: 2, latency: 5})[id.split('-')[0]])"


class Browser:
    """Chromium behind --remote-debugging-pipe: messages of JSON, each ended by a zero byte."""

    def __init__(self, program, directory):
        to_read, self.write_end = self.high_pipe()
        self.read_end, to_write = self.high_pipe()[0:2]

        def in_child():
            os.dup2(to_read, 3)
            os.dup2(to_write, 4)

        self.log = open(os.path.join(directory, "chromium.log"), "wb")
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
             "--user-data-dir=" + os.path.join(directory, "profile"), "--remote-debugging-pipe"],
            pass_fds=(3, 4), preexec_fn=in_child, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(domain + ".enable")

    @staticmethod
    def high_pipe():
        ends = []
        for end in os.pipe():
            ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20))
            os.close(end)
        return ends

    def next_message(self):
        while b"\0" not in self.rest:
            if not select.select([self.read_end], [], [], LIMIT_S)[0]:
                raise RuntimeError("the browser does not answer")
            part = os.read(self.read_end, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self.rest += part
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def ask(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next_message()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method):
        while not any(e.get("method") == method for e in self.events):
            self.events.append(self.next_message())

    def evaluate(self, expression):
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", "a script failed"))
        return result["result"].get("value")

    def close(self):
        try:
            self.session = None
            self.ask("Browser.close")
            self.process.wait(LIMIT_S)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.log.close()


def complaints_of(events, url):
    """What the page logged, threw or asked for besides itself."""
    for event in events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent" and params["request"]["url"] != url:
            yield "it asks for " + params["request"]["url"]
        elif method == "Runtime.exceptionThrown":
            yield "it throws: " + params["exceptionDetails"]["text"]
        elif method == "Log.entryAdded":
            yield "it logs: " + params["entry"]["text"]
        elif method == "Runtime.consoleAPICalled":
            yield "it prints to the console"


def hover(browser):
    """The figures under the pointer are shown, and inside the window."""
    place = browser.evaluate(
        "(() => { const all = [...document.querySelectorAll('svg[data-time=batch]')];"
        "const s = all.find(e => e.getClientRects().length); s.scrollIntoView({block: 'center'}); const b = s.getBoundingClientRect();"
        "return [b.left + 0.9 * b.width, b.top + 0.6 * b.height]; })()")
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    told = browser.evaluate(
        "(() => { const t = document.querySelector('.tip'); if (!t) return null; const b = t.getBoundingClientRect();"
        "return [t.textContent, b.left, b.right, document.querySelectorAll('.cursor').length]; })()")
    if not told:
        return ["no figures under the pointer"]
    width = browser.evaluate("document.documentElement.clientWidth")
    wrong = []
    if "prefill tokens a step" not in told[0]:
        wrong.append(f"under the pointer is '{told[0]}'")
    if told[1] < 0 or told[2] > width:
        wrong.append("the figures under the pointer are cut off")
    if told[3] < 4:
        wrong.append("the plots do not share their pointer")
    return wrong


def show(browser, file, size, scheme):
    """One file in one window."""
    width, height = SIZES[size]
    browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                mobile=size != "desktop")
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.events.clear()
    browser.ask("Page.navigate", url=file.as_uri())
    browser.wait_for("Page.loadEventFired")


def look(browser, page, name, size, scheme, directory):
    """One page in one window; returns complaints."""
    show(browser, page, size, scheme)
    probe = PROBE.replace("PLOTS", str(PLOTS)).replace("DRAWN", DRAWN).replace("GRID", colours.LIGHT["grid"])
    probe = probe.replace("SOFT", colours.LIGHT["soft"]).replace("LIGHT", "true" if scheme == "light" else "false")
    wrong = browser.evaluate(probe)
    tall = browser.evaluate("document.documentElement.scrollHeight")
    picture = browser.ask("Page.captureScreenshot", captureBeyondViewport=True,
                          clip={"x": 0, "y": 0, "width": SIZES[size][0], "height": tall, "scale": 1})
    with open(os.path.join(directory, f"{name}-{size}-{scheme}.png"), "wb") as file:
        file.write(base64.b64decode(picture["data"]))
    return wrong + hover(browser) + list(complaints_of(browser.events, page.as_uri()))


RUNS = {"tight": ["--blocks", "500", "--admit", "chunk"],  # blocks run out
        "queue": ["--speed", "10", "--max-seqs", "4"],
        "slow": ["TRACE", "--hash-block", "16", "--blocks", "2000", "--speed", "0.01"],  # an hour's clock
        "markup": ["TRACE", "--hash-block", "16", "--blocks", "2000"]}  # a name that wants to be markup


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium here: the page of a replay is not looked at")
    browser = Browser(chromium, tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.mark.parametrize("name", RUNS)
def test_page(name, browser, tmp_path):
    trace = tmp_path / ("<img src=x onerror=alert(1)>&\"'.jsonl" if name == "markup" else "talks.jsonl")
    shutil.copyfile(TRACES / "talks.jsonl", trace)
    page = tmp_path / "page.html"
    plots.report(replay(tmp_path, *(str(trace) if o == "TRACE" else o for o in RUNS[name])), str(page))
    shots = os.environ.get("FOLIO_SCREENSHOTS", tmp_path)
    wrong = [f"{size}, {scheme}: {text}" for size in SIZES for scheme in SCHEMES
             for text in look(browser, page, name, size, scheme, shots)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_roofline(scheme, browser, tmp_path):
    """A picture by itself follows light and dark."""
    file = tmp_path / "roofline.svg"
    plots.plot(plots.load(str(REPOSITORY / "docs" / "figures" / "cpu.json")), str(file))
    show(browser, file, "desktop", scheme)
    ground = browser.evaluate("getComputedStyle(document.querySelector('[id$=patch_1] path')).fill")
    ink = browser.evaluate("getComputedStyle(document.querySelector('text')).fill")
    assert (ground, ink) == {"light": ("rgb(255, 255, 255)", "rgb(89, 98, 108)"),
                             "dark": ("rgb(20, 24, 29)", "rgb(163, 173, 184)")}[scheme]
    assert browser.evaluate("[...document.querySelectorAll('text')].every(e => { const b = e.getBBox();"
                            "return b.x >= 0 && b.y >= 0 && b.x + b.width <= 860 && b.y + b.height <= 560; })")
    assert not list(complaints_of(browser.events, file.as_uri()))
