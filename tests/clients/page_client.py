#!/usr/bin/env python3
"""The page at / in a real browser, headless Chromium by WebDriver: a chat that streams, one that is
stopped, its request as curl, a key that is asked for, and the timeline with eight and with 64
requests; at 1400 and at 380 pixels, light and dark.
Usage: page_client.py TREADLE MODEL [FOLDER [SECONDS]] (screenshots go into FOLDER, if it is given;
SECONDS: how long 64 requests are watched, default 15)"""

import base64
import contextlib
import http.server
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

PATIENCE = 60  # seconds, for anything that must come
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how WebDriver names one


def post(url, body, headers=None):
    text = json.dumps(body).encode()
    request = urllib.request.Request(url, text, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def wait(what, ask, seconds=PATIENCE):
    """The first true answer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if answer := ask():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"did not come: {what}")


class Browser:
    """One tab."""

    def __init__(self, driver):
        self.at = driver + "/session"
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                            "--enable-precise-memory-info"]}
        session = self.call("", capabilities={"alwaysMatch": {"goog:chromeOptions": options,
                                                              "goog:loggingPrefs": {"browser": "ALL"}}})
        self.at += "/" + session["sessionId"]
        self.version = session["capabilities"]["browserVersion"]

    def call(self, path, **body):
        try:
            return post(self.at + path, body)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()[:500]}") from None

    def open(self, url):
        self.call("/url", url=url)

    def run(self, script, *arguments):
        return self.call("/execute/sync", script=script, args=arguments)

    def devtools(self, command, **parameters):
        return self.call("/goog/cdp/execute", cmd=command, params=parameters)

    def element(self, css):
        return self.call("/element", using="css selector", value=css)[ELEMENT]

    def click(self, css):
        self.call(f"/element/{self.element(css)}/click")

    def type(self, css, text):
        self.call(f"/element/{self.element(css)}/value", text=text)

    def text(self, css):
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", css)

    def wait_text(self, css, pattern, seconds=PATIENCE):
        return wait(f"{pattern} in {css}", lambda: re.search(pattern, self.text(css)), seconds)

    def look(self, width, height, scheme):
        self.width = width
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                      mobile=False)
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def save_screenshot(self, path):
        size = self.devtools("Page.getLayoutMetrics")["cssContentSize"] | {"width": self.width}
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True,
                             clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1})
        pathlib.Path(path).write_bytes(base64.b64decode(shot["data"]))

    def heap(self):
        """Bytes that JavaScript holds."""
        self.devtools("HeapProfiler.collectGarbage")
        return self.devtools("Runtime.getHeapUsage")["usedSize"]

    def troubles(self):
        return [entry for entry in self.call("/se/log", type="browser") if entry["level"] in ("SEVERE", "WARNING")]


@contextlib.contextmanager
def browser():
    with tempfile.TemporaryFile("w+") as log:
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            for line in driver.stdout:
                if found := re.search(r"successfully on port (\d+)", line):
                    break
            tab = Browser(f"http://127.0.0.1:{found[1]}")
            yield tab
            urllib.request.urlopen(urllib.request.Request(tab.at, method="DELETE"), timeout=60).close()
        finally:
            driver.terminate()
            driver.wait()


class Server:
    def __init__(self, command, folder):
        self.log = open(f"{folder}/log{time.monotonic_ns()}", "w+")
        self.process = subprocess.Popen(command, stderr=self.log)
        self.stopping = False
        self.base = self.logged(r"listening on (http://\S+) \(page and OpenAI API\)")[1] + "/"
        self.logged("ready: ")

    def stop(self):
        """Once: a second signal would not wait for what is drained."""
        if not self.stopping:
            self.process.terminate()
        self.stopping = True

    def logged(self, pattern):
        return wait(f"{pattern} in the log", lambda: re.search(pattern, open(self.log.name).read()), 120)

    @contextlib.contextmanager
    def load(self, requests, tokens):
        """Keeps so many under way, one after another in each of so many threads."""
        over = threading.Event()

        def ask():
            while not over.is_set():
                with contextlib.suppress(OSError):  # the server may be stopped before they end
                    post(self.base + "v1/completions",
                         {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True})

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(requests)]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        try:
            yield
        finally:
            over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def serving(treadle, model, folder, *flags):
    server = Server([treadle, "serve", "--model", model, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
                     "--metrics-listen", "none", "--kv-memory", "1500M", *flags], folder)
    try:
        yield server
        server.stop()
        assert server.process.wait(timeout=60) in (0, 3), server.process.returncode  # 3: the load was cut off
    except BaseException:
        sys.stderr.write(open(server.log.name).read())
        raise
    finally:
        server.process.kill()


def check_chat(tab, server):
    tab.type("#prompt", "Name three colours.")
    tab.click("#send")
    seen = set()
    while len(seen) < 3:  # it grows before our eyes
        seen.add(len(tab.text(".assistant .text")))
        assert not tab.text(".error"), tab.text(".error")
    numbers = tab.wait_text(".assistant .numbers", r"(\d+) \+ (\d+) tokens · first after \d+ ms · ([\d.]+) tokens/s")
    assert tab.text(".assistant .text").strip() and int(numbers[2]) > 3, numbers
    tab.run("document.querySelector('#parameters').open = true")
    tab.type("[data-field=max_tokens]", "1500")
    tab.type("[data-field=seed]", "5")
    tab.type("#system", "It's \"you\".")
    tab.type("#prompt", "Tell a very long story.\ue007")  # Enter
    wait("a second answer", lambda: tab.run(
        "return document.querySelectorAll('.assistant .text')[1]?.textContent.length > 20"))
    tab.click("#stop")
    server.logged("status=CANCELLED")
    tab.wait_text(".message:last-child .numbers", "stopped")
    tab.type("[data-field=max_tokens]", "\ue003" * 4 + "9")  # Backspaces
    tab.type("#prompt", "And?\ue007")
    tab.wait_text(".message:last-child .numbers", "complete|max tokens")
    tab.click(".message:last-child .numbers button")
    command = tab.text("#curl-text")
    output = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE).stdout
    events = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
    assert text == tab.text(".message:last-child .text"), (command, output)
    tab.click("#curl button[value='']")
    print(f"chat: streams ({numbers[0]}), stops, and curl gets the same answer")


def check_timeline(tab, server):
    tab.wait_text("#state", "live")
    before = tab.run("return document.querySelector('#canvas').toDataURL()")
    with server.load(8, 150):
        tab.wait_text("#running", "^8 of ")
        assert tab.run("return document.querySelector('#canvas').toDataURL()") != before
        time.sleep(2)  # for some iterations of all eight
        # A column, from top to bottom, cell by cell with the keyboard.
        tab.type("#canvas", "\ue012\ue012")  # ArrowLeft
        rows = set()
        for _ in range(12):
            if found := re.search(r"Request (\d+): (decode, 1 token|prompt)", tab.text("#probe")):
                rows.add(found[1])
            tab.type("#canvas", "\ue015")  # ArrowDown
        assert len(rows) == 8, (rows, tab.text("#probe"))
    tab.wait_text("#running", "^0 of ")
    for _ in range(12):
        tab.type("#canvas", "\ue013")  # ArrowUp: to one whose end is known now
    assert re.search(r"Request \d+: .*In all 4 \+ 150 tokens, .* s queued, .*\(length\)", tab.text("#probe")), \
        tab.text("#probe")
    tab.click("#pause")
    tab.wait_text("#cache", "^0 %")
    tab.click("#demo-short")
    tab.wait_text("#running", "^[3-8] of ")
    tab.click("#demo-long")
    tab.wait_text("#prompt-rate", "[1-9]")
    tab.run("document.querySelector('#demo-stop').click()")
    tab.wait_text("#running", "^0 of ")
    assert tab.text("#demo-state") == "", tab.text("#demo-state")
    print("timeline: eight requests, each with a row; its own examples run and stop")


def check_looks(tab, server, folder):
    for width, height in ((1400, 900), (380, 800)):
        for scheme in ("light", "dark"):
            tab.look(width, height, scheme)
            with server.load(6, 60):
                tab.run("document.querySelector('#demo-long').click()")
                time.sleep(2.5)
                widest = tab.run("return document.documentElement.scrollWidth")
                assert widest <= width, f"{widest} pixels wide at {width}"
                if folder:
                    tab.save_screenshot(f"{folder}/page-{width}-{scheme}.png")
    tab.look(1400, 900, "light")
    nodes = tab.devtools("Accessibility.getFullAXTree")["nodes"]
    named = ("button", "textbox", "spinbutton", "meter", "log", "application", "region", "dialog", "list")
    for node in nodes:
        role = node.get("role", {}).get("value")
        if not node["ignored"] and role in named:
            assert node.get("name", {}).get("value"), f"a {role} without a name: {node}"
    print("looks: fits 1400 and 380 pixels, light and dark; whatever can be used has a name")


def check_load(tab, server, folder, seconds):
    heap = tab.heap()
    deltas = []
    with server.load(64, 400):
        tab.wait_text("#running", "^6[0-4] of ")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            deltas += tab.call("/execute/async", args=[], script="""
                const done = arguments[0], deltas = [];
                let last = performance.now();
                requestAnimationFrame(function next(now) {
                  deltas.push(now - last);
                  last = now;
                  deltas.length < 120 ? requestAnimationFrame(next) : done(deltas.slice(1));
                });""")
        at = ", ".join(f"{tab.text(css)} {what}" for css, what in (
            ("#running", "running"), ("#decode-rate", "tokens/s"), ("#iteration-rate", "iterations/s")))
        if folder:
            tab.save_screenshot(f"{folder}/page-64.png")
        grown = tab.heap() - heap
        server.stop()
    deltas.sort()
    print(f"64 requests ({at}), {seconds} s: {1000 * len(deltas) / sum(deltas):.1f} frames/s, a frame takes "
          f"{deltas[len(deltas) // 2]:.1f} ms at the median, {deltas[len(deltas) * 99 // 100]:.1f} at p99, "
          f"{deltas[-1]:.1f} at most; JavaScript holds {heap / 1e6:.1f} MB before, {grown / 1e6:+.2f} MB")
    assert grown < 2e6, grown


def check_keys(tab, server):
    tab.open(server.base)
    wait("the question for a key", lambda: tab.run("return document.querySelector('#key').open"))
    tab.type("#key-value", "page-0123456789abcdef\ue007")
    tab.wait_text("#state", "live")
    tab.wait_text("#model", ".")
    tab.type("#prompt", "Hi\ue007")
    tab.wait_text(".assistant .numbers", "tokens/s|complete")
    print("keys: asked for, kept, used")


class EmptyPage(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def stranger():
    """The origin of a server that is not ours."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def check_stranger(tab, server, page, allowed):
    """Whether another page may ask, with a header for which a browser asks first."""
    tab.open(page)
    status = tab.call("/execute/async", args=[server.base + "v1/models"], script="""
        const headers = { Authorization: "Bearer page-0123456789abcdef" };
        fetch(arguments[0], { headers }).then((answer) => answer.status, (error) => error.name).then(arguments[1]);""")
    assert status == (200 if allowed else "TypeError"), status


def main(treadle, model, folder=None, seconds="15"):
    with tempfile.TemporaryDirectory() as scratch, browser() as tab, stranger() as page:
        tab.look(1400, 900, "light")
        with serving(treadle, model, scratch, "--max-batch-size", "64", "--threads", "1",
                     "--drain-timeout", "1s") as server:
            tab.open(server.base)
            tab.wait_text("#model", ".")
            check_chat(tab, server)
            check_timeline(tab, server)
            check_looks(tab, server, folder)
            assert not (troubles := tab.troubles()), troubles
            check_stranger(tab, server, page, allowed=False)
            tab.open(server.base)
            check_load(tab, server, folder, int(seconds))
        pathlib.Path(f"{scratch}/keys").write_text("page-0123456789abcdef page\n")
        with serving(treadle, model, scratch, "--api-keys-file", f"{scratch}/keys", "--http-allow-origin",
                     page) as server:
            check_keys(tab, server)
            check_stranger(tab, server, page, allowed=True)
            print("strangers: the page of another server may not ask, and may if it is allowed to")
        return tab.version


if __name__ == "__main__":
    began = time.monotonic()
    print(f"the page: Chromium {main(*sys.argv[1:])}, ok in {time.monotonic() - began:.1f} s")
