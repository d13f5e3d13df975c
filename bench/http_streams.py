#!/usr/bin/env python3
"""Streams over HTTP from one thread with plain sockets: tokens a second, the gaps between a stream's tokens, and the
server's memory, with connections beside them that say nothing, or begin a request and stop.
Usage: http_streams.py http://HOST:PORT [--streams 64] [--tokens 64] [--idle 0] [--pid OF_THE_SERVER]"""

import argparse
import json
import re
import resource
import selectors
import socket
import time
from urllib.parse import urlsplit


def connect(url, text=b""):
    stream = socket.create_connection((url.hostname, url.port), timeout=30)
    stream.sendall(text)
    return stream


def request(url, number, tokens):
    prompt = [100 + number % 50 + i for i in range(8)]
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                       "return_token_ids": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def resident(pid):
    """In KB; 0 without a process."""
    if pid is None:
        return 0
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("url", type=urlsplit)
    for name, default in (("streams", 64), ("tokens", 64), ("idle", 0), ("pid", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    idle = [connect(asked.url, b"POST /v1/compl" if number % 2 else b"") for number in range(asked.idle)]
    rest = peak = resident(asked.pid)
    selector = selectors.DefaultSelector()
    began = time.monotonic()
    for number in range(asked.streams):
        stream = connect(asked.url, request(asked.url, number, asked.tokens))
        stream.setblocking(False)
        selector.register(stream, selectors.EVENT_READ, {"last": None, "tail": b""})
    gaps, told, looked = [], 0, began
    while selector.get_map():
        events = selector.select(timeout=60)
        assert events, "no stream had anything for a minute"
        now = time.monotonic()
        if now - looked > 0.2:
            looked, peak = now, max(peak, resident(asked.pid))
        for key, _ in events:
            data = key.fileobj.recv(1 << 16)
            stream = key.data
            if b"data: {" in data:
                if stream["last"] is not None:
                    gaps.append(now - stream["last"])
                stream["last"] = now
            tail = stream["tail"] = (stream["tail"] + data)[-400:]
            assert data, f"a stream ended before its answer: {tail!r}"
            if b"data: [DONE]" in tail:
                told += int(re.findall(rb'"completion_tokens":(\d+)', tail)[-1])
                selector.unregister(key.fileobj)
                key.fileobj.close()
    took = time.monotonic() - began
    assert told == asked.streams * asked.tokens, f"{told} tokens, expected {asked.streams * asked.tokens}"
    print(f"{told / took:,.0f} tokens/s ({asked.streams} streams of {asked.tokens} tokens, {asked.idle} idle connections); "
          f"gaps p50 {1e3 * percentile(gaps, 0.5):.1f} ms, p99 {1e3 * percentile(gaps, 0.99):.1f} ms"
          + (f"; memory {rest / 1024:.0f} MB, at most {peak / 1024:.0f} MB: {(peak - rest) / asked.streams:.0f} KB a stream"
             if asked.pid else ""))
    for stream in idle:
        stream.close()


if __name__ == "__main__":
    main()
