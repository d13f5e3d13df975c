#!/usr/bin/env python3
"""Runs the commands of a page of documentation, so that none goes stale.
Usage: run_page.py SOURCE TREADLE PAGE. Exit code 0: all is well; 77: the default model is not there.

Every fenced block of a page names its language, and every block of `sh` says what becomes of it:

  ```sh test                 runs here, with bash, and every command must succeed
  ```sh untested: REASON     cannot run everywhere; the reason is for whoever reads the source

A line that begins with `treadle serve` or `treadle worker` starts a process that stays; the next commands run once it
listens, and the next block that starts one stops it first. Blocks share variables and a folder: the repository's files
as links, the tested binary as build/treadle and as `treadle`. Ports of 127.0.0.1 are replaced by free ones. Links to
files of the repository must lead somewhere."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK_SECONDS = 300  # of one run of commands, and until a process listens
SERVER = re.compile(r"(build/)?treadle (serve|worker)\b(?!.*--(help|print-config))")
DEFAULT_PORTS = {"TREADLE_LISTEN": "50051", "TREADLE_HTTP_LISTEN": "8080", "TREADLE_METRICS_LISTEN": "9400"}
MODEL = "treadle/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the user's cache: scripts/fetch_model.sh


def read_blocks(text, page):
    """(line number, commands) of every block that is tested; complains about one without a mark."""
    blocks, opened, fence = [], None, re.compile(r" *```(.*)")
    for number, line in enumerate(text.splitlines(), 1):
        found = fence.fullmatch(line)
        if not found:
            if opened:
                opened[2].append(line)
        elif opened:
            if opened[1] == "sh test":
                blocks.append((opened[0], opened[2]))
            opened = None
        else:
            opened = (number, found[1], [])
            shell = re.match(r"(sh|bash|shell|console)\b|$", found[1])
            assert not shell or re.fullmatch(r"sh test|sh untested: [^`]*\w+ \w+[^`]*", found[1]), \
                f"{page}:{number}: the block says '{found[1]}', expected its language, for commands 'sh test' or 'sh untested: REASON'"
    assert not opened, f"{page}:{opened[0]}: the block has no end"
    return blocks


def check_links(source, text, page):
    prose = re.sub(r"(?ms)^ *```.*?^ *```$", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = os.path.normpath(os.path.join(source, os.path.dirname(page), path)) if path else os.path.join(source, page)
        assert os.path.exists(file), f"{page}: the link {target} leads to no file"
        if anchor:
            with open(file) as other:
                titles = re.findall(r"(?m)^#+ (.*)$", other.read())
            known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in known, f"{page}: the link {target} leads to no title"


def split_servers(lines):
    """Runs of commands, and commands that stay, in order: (is a server, text)."""
    parts, continued = [], False
    for line in lines:
        server = parts[-1][0] if continued else bool(SERVER.match(line))
        if continued or (parts and not server and not parts[-1][0]):
            parts[-1] = (parts[-1][0], parts[-1][1] + "\n" + line)
        else:
            parts.append((server, line))
        continued = line.endswith("\\")
    return parts


class Page:
    def __init__(self, folder, environment):
        self.folder, self.environment = folder, environment
        self.ports, self.next_port = {}, 20000 + os.getpid() % 750 * 16
        self.servers = []

    def port(self, wanted):
        """A free one instead: not of those that the system gives away, and of other processes' pages others."""
        while wanted not in self.ports:
            self.next_port += 1
            with socket.socket() as free, contextlib.suppress(OSError):
                free.bind(("127.0.0.1", self.next_port))
                self.ports[wanted] = str(self.next_port)
        return self.ports[wanted]

    def spawn(self, text, **streams):
        """A shell with the variables that earlier ones kept; the first command that fails ends it."""
        text = re.sub(r"127\.0\.0\.1:(\d+)", lambda found: "127.0.0.1:" + self.port(found[1]), text)
        return subprocess.Popen(["bash", "-c", f"set -aeuo pipefail; [ ! -f .variables ] || . ./.variables\n{text}"],
                                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                                start_new_session=True, **streams)

    def wait(self, process):
        try:
            return process.wait(BLOCK_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end within {BLOCK_SECONDS} s") from None

    def start(self, text):
        log = open(os.path.join(self.folder, f".server{len(self.servers)}.log"), "w+")
        process = self.spawn("exec " + text, stdout=log, stderr=log)
        self.servers.append((process, log))
        wanted = "listening" if text.split()[1] == "worker" else "ready"
        deadline = time.monotonic() + BLOCK_SECONDS
        while not re.search(rf"\b{wanted}\b", shown := Path(log.name).read_text()):
            assert process.poll() is None, f"it ended with exit code {process.returncode}:\n{shown}"
            assert time.monotonic() < deadline, f"it was not {wanted} in time:\n{shown}"
            time.sleep(0.05)

    def stop(self):
        for process, log in reversed(self.servers):
            process.send_signal(signal.SIGTERM)
            self.wait(process)
            log.close()
        self.servers = []

    def run(self, lines):
        parts = split_servers(lines)
        if any(server for server, _ in parts):
            self.stop()
        for server, text in parts:
            if server:
                self.start(text)
                continue
            code = self.wait(self.spawn(text + "\nexport -p >.variables"))
            assert code == 0, f"exit code {code}"


def main(source, treadle, page):
    source, treadle = os.path.abspath(source), os.path.abspath(treadle)
    with open(os.path.join(source, page)) as file:
        text = file.read()
    blocks = read_blocks(text, page)
    check_links(source, text, page)
    assert blocks, f"{page} has no command that is tested"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ["HOME"], ".cache")
    model = os.environ.pop("TREADLE_MODEL", "") or os.path.join(cache, MODEL)
    if not os.path.exists(model):
        print(f"SKIPPED: no model file at {model} (make test fetches it)")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        for name in os.listdir(source):
            if name != "build" and not name.startswith("."):
                os.symlink(os.path.join(source, name), os.path.join(folder, name))
        for name in ("build", ".cache/treadle"):
            os.makedirs(os.path.join(folder, name))
        os.symlink(treadle, os.path.join(folder, "build", "treadle"))
        os.symlink(model, os.path.join(folder, ".cache", MODEL))
        with open(os.path.join(folder, ".curlrc"), "w") as file:
            file.write("fail-with-body\nsilent\nshow-error\n")
        environment = {**os.environ, "HOME": folder, "XDG_CACHE_HOME": os.path.join(folder, ".cache"),
                       "PATH": f"{folder}/build:{os.environ['PATH']}"}
        run = Page(folder, environment)
        environment.update({name: "127.0.0.1:" + run.port(port) for name, port in DEFAULT_PORTS.items()})
        try:
            for number, lines in blocks:
                print(f"{page}:{number}\n" + "\n".join(lines), flush=True)
                run.run(lines)
        finally:
            run.stop()
    print(f"\n{page}: {len(blocks)} blocks ran")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except AssertionError as error:
        sys.exit(f"FAILED: {error}")
