#!/usr/bin/env python3
"""The page at / in a real browser, headless Chromium by WebDriver: a chat that streams, one that is
stopped, its request as curl, Markdown and reasoning, also of a hostile model, a key that is asked for,
a server that goes away and comes back, and the timeline with eight and with 64 requests; at 1400 and
at 380 pixels, light and dark.
Usage: page_client.py TREADLE MODEL [FOLDER [SECONDS]] (screenshots go into FOLDER, if it is given;
SECONDS: how long 64 requests are watched, default 15)"""

import base64
import contextlib
import http.server
import json
import pathlib
import re
import socket
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
        """What the browser complains of, but for what these checks do to the page themselves."""
        return [entry for entry in self.call("/se/log", type="browser") if entry["level"] in ("SEVERE", "WARNING")
                and not re.search("requires 'TrustedHTML'|Multiple readback", entry["message"])]


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
def serving(treadle, model, folder, *flags, http="127.0.0.1:0"):
    server = Server([treadle, "serve", "--model", model, "--listen", "127.0.0.1:0", "--http-listen", http,
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


SHOW = """
    const done = arguments[arguments.length - 1];
    import("/page/markdown.js").then(({ Markdown }) => {
      const at = document.createElement("div"), began = performance.now();
      new Markdown(at).show(arguments[0]);
      done([at.textContent, [...at.querySelectorAll("*")].map((element) => [
        element.tagName.toLowerCase(), ...[...element.attributes].map(({ name, value }) => `${name}=${value}`)]
        .join(" ")), performance.now() - began]);
    }, (error) => done(`${error}`));"""


def shown(tab, markdown):
    """The text of what the page makes of an answer, its elements with their attributes, and milliseconds."""
    return tab.call("/execute/async", script=SHOW, args=[markdown])


LINK = "target=_blank rel=noopener noreferrer nofollow"
# Markdown, the text and the elements that CommonMark (and GitHub's tables) make of it, but for the
# levels of headings and the bar above code.
MARKDOWN = [
    ("a\nb *c* **d** `e*f*` ***g*** ~~h~~ snake_case_name 2 * 3 * 4 \\*i\\*",
     "a\nb c d e*f* g h snake_case_name 2 * 3 * 4 *i*", "p em strong code strong em del"),
    ("# A **b**\n\n---\n> c\n> d", "A bc\nd", "h3 strong hr blockquote p"),
    ("3. a\n4. b\n   - c\n   - d\n5. e", "abcde", "ol start=3|li|p|li|p|ul|li|p|li|p|li|p"),
    ("```py\nif a < b:\n    **c**\n\n# d\n```\ne", "pyCopyif a < b:\n    **c**\n\n# de",
     "figure|figcaption|span|button type=button|pre|code|p"),
    ("~~~\n```\n~~~~\nb", "textCopy```b", "figure|figcaption|span|button type=button|pre|code|p"),
    ("| a | *b* |\n|---|:-:|\n| 1 | 2 |", "ab12", "div class=table|table|tr|th|th|em|tr|td|td"),
    ("[a](https://b.org/c_(d)) ![e](https://f.org) <https://g.org> https://h.org/i.",
     "a e https://g.org https://h.org/i.",
     "p|" + "|".join(f"a href={url} {LINK}" for url in (
         "https://b.org/c_(d)", "https://f.org", "https://g.org", "https://h.org/i"))),
    ("an *open **one `and [more](", "an *open **one `and [more](", "p"),
]
# Text is shown as it was written, and as nothing else; and in how few steps.
HOSTILE = ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<iframe srcdoc='<script>alert(1)</script>'>",
           "[a](javascript:alert(1))", "[a](data:text/html,<script>alert(1)</script>)", "![a](//evil.example/x)",
           "<javascript:alert(1)>", "[a](JaVaScRiPt:alert(1))", "<svg/onload=alert(1)>", "[a]( javascript:alert(1))"]
LONG = ["[" * 100_000, "*a " * 50_000, "**" * 50_000, "`" * 100_000, "a*" * 50_000, "~" * 100_000 + "`", "> " * 50_000,
        "- " * 50_000 + "\u2028", "|-" * 50_000 + "x", "-" * 100_000 + "x|", "[a](https://" * 20_000, "_a" * 50_000,
        "<" * 100_000, "https://" * 20_000, "![a](https://b" + "(" * 100_000, "# " + " " * 100_000 + "\u2028",
        "".join("`" * i + "a" for i in range(1, 400)), "1. " * 30_000, "\\" * 100_001, "a|b\n" * 20_000]


def check_markdown(tab):
    for markdown, text, elements in MARKDOWN:
        found = shown(tab, markdown)
        expected = elements.split("|" if "|" in elements else " ")
        assert found[:2] == [text, expected], (markdown, found)
    for markdown in HOSTILE:
        assert shown(tab, markdown)[:2] == [markdown, ["p"]], (markdown, shown(tab, markdown))
    allowed = {"p", "a", "em", "strong", "del", "code", "br", "ul", "ol", "li", "blockquote", "hr", "h3", "h4", "h5", "h6",
               "figure", "figcaption", "span", "button", "pre", "div", "table", "tr", "th", "td"}
    slowest = 0
    for markdown in LONG:
        _, elements, milliseconds = shown(tab, markdown)
        assert {element.split()[0] for element in elements} <= allowed, markdown[:40]
        slowest = max(slowest, milliseconds)
    # A browser that knows Trusted Types makes no elements of texts, whoever asks.
    assert tab.run("""try { document.createElement("p").innerHTML = "<b>"; return "made"; }
                      catch (error) { return error.name; }""") == "TypeError"
    print(f"Markdown: {len(MARKDOWN)} kinds, {len(HOSTILE)} attacks shown as text, {len(LONG)} long ones in "
          f"{slowest:.0f} ms at most")


def check_reasoning(tab):
    """A model that reasons, and writes what would be code in a page that trusts it."""
    tab.click("#clear")
    deltas = [{"role": "assistant"}, {"reasoning_content": "<b>Let me"}, {"reasoning_content": " think</b>"},
              {"content": "# Yes\n"}, {"content": "<img src=x onerror=\"window.broken = 1\">"}]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    answer = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    tab.run("""const real = fetch, answer = arguments[0];
        window.fetch = (path, ...more) => {
          if (path !== "v1/chat/completions") return real(path, ...more);
          window.fetch = real;
          return Promise.resolve(new Response(answer, { headers: { "X-Request-Number": "99999" } }));
        };""", answer)
    tab.type("#prompt", "Really?\ue007")
    tab.wait_text(".message:last-child .numbers", "request 99999 .*complete")
    assert tab.text(".thought summary") == "Reasoning" and tab.text(".thought div") == "<b>Let me think</b>"
    assert not tab.run("return document.querySelector('.thought').open"), "not folded"
    assert tab.run("return [...document.querySelectorAll('.assistant .text *')].map((one) => one.tagName)") == ["H3", "P"]
    assert not tab.run("return window.broken ?? document.querySelector('#messages img')")
    tab.click("#clear")
    print("reasoning: folded, and apart from the answer")


def check_chat(tab, server):
    assert tab.run("return document.activeElement.id") == "prompt"
    tab.wait_text("#idle", "Nothing has run")
    tab.click("#hint button")  # an example
    tab.wait_text(".user .text", "loom")
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
    assert shown(tab, text)[0] == tab.text(".message:last-child .text"), (command, output)
    tab.click("#curl button[value='']")
    print(f"chat: streams ({numbers[0]}), stops, and curl gets the same answer")


OWN, FAINT = "#a3128f", "#55606e"  # of page.css, in the light


def pixels(tab, colour, columns=10_000, rows=10_000):
    """How many pixels of the timeline's first columns and rows have about this colour."""
    return tab.run("""
        const canvas = document.querySelector("#canvas");
        const wanted = [1, 3, 5].map((at) => parseInt(arguments[0].slice(at, at + 2), 16));
        const { data } = canvas.getContext("2d").getImageData(0, 0, Math.min(canvas.width, arguments[1]),
                                                              Math.min(canvas.height, arguments[2]));
        let found = 0;
        for (let at = 0; at < data.length; at += 4) {
          found += wanted.reduce((far, value, i) => far + Math.abs(value - data[at + i]), 0) < 120;
        }
        return found;""", colour, columns, rows)


def check_timeline(tab, server):
    tab.wait_text("#state", "^live$")
    assert pixels(tab, OWN) > 0, "no row is marked as the page's own"
    assert pixels(tab, FAINT, columns=44, rows=25) > 0, "the rows' numbers are gone, now that their requests have ended"
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
        assert tab.text("#state").startswith("paused"), tab.text("#state")
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


def check_absence(tab, treadle, model, scratch):
    """The server goes away, and another one comes at its address."""
    where = socket.create_server(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % where.getsockname()[1]
    where.close()
    for name in ("first", "second"):
        with serving(treadle, model, scratch, "--served-model-name", name, http=address) as server:
            if name == "first":
                tab.open(server.base)
            tab.wait_text("#model", f"^{name}$")
            tab.wait_text("#state", "^live$")
            tab.wait_text("#running", "^0 of ")
        tab.wait_text("#state", r"^the server does not answer; next try in [\d.]+ s$")
        assert tab.text("#running") == tab.text("#waiting") == "–", tab.text("#running")
    tab.type("#prompt", "Hi\ue007")
    tab.wait_text(".error", "^the server does not answer$")
    tab.troubles()  # those are meant
    print("absence: told, and over once the server is back, with its new model")


def check_keys(tab, server):
    tab.open(server.base)
    wait("the question for a key", lambda: tab.run("return document.querySelector('#key').open"))
    assert tab.text("#running") == "–", tab.text("#running")
    tab.click("#key button[value='']")
    tab.wait_text("#state", "^no API key")
    tab.type("#prompt", "Hi\ue007")
    wait("the question for a key", lambda: tab.run("return document.querySelector('#key').open"))
    tab.type("#key-value", "page-0123456789abcdef\ue007")
    tab.wait_text("#state", "^live$")
    tab.wait_text("#model", "^keyed$")
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
            check_markdown(tab)
            check_reasoning(tab)
            check_timeline(tab, server)
            check_looks(tab, server, folder)
            assert not (troubles := tab.troubles()), troubles
            check_stranger(tab, server, page, allowed=False)
            tab.open(server.base)
            check_load(tab, server, folder, int(seconds))
        check_absence(tab, treadle, model, scratch)
        pathlib.Path(f"{scratch}/keys").write_text("page-0123456789abcdef page\n")
        with serving(treadle, model, scratch, "--api-keys-file", f"{scratch}/keys", "--http-allow-origin",
                     page, "--served-model-name", "keyed") as server:
            check_keys(tab, server)
            check_stranger(tab, server, page, allowed=True)
            print("strangers: the page of another server may not ask, and may if it is allowed to")
        return tab.version


if __name__ == "__main__":
    began = time.monotonic()
    print(f"the page: Chromium {main(*sys.argv[1:])}, ok in {time.monotonic() - began:.1f} s")
