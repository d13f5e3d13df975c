#!/usr/bin/env python3
"""What masks cost: tokens a second of a batch of 32 under a JSON schema and without, one after the other, five times.
Usage: structured_output.py TREADLE MODEL"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

PERSON = {"type": "object", "required": ["name", "age", "tags"],
          "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
                         "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4}}}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 200}  # no answer ends before max_tokens
BATCH, TOKENS, RUNS = 32, 96, 5


def serve(treadle, model):
    log = tempfile.TemporaryFile("w+")
    server = subprocess.Popen([treadle, "serve", "--model", model, "--listen", "127.0.0.1:0", "--http-listen",
                               "127.0.0.1:0", "--metrics-listen", "none", "--max-batch-size", str(BATCH)],
                              stdout=log, stderr=subprocess.STDOUT)
    text = ""
    while "ready" not in text:
        assert server.poll() is None, text
        time.sleep(0.2)
        log.seek(0)
        text = log.read()
    return server, re.search(r"listening on (http://\S+) ", text).group(1)


def tokens_per_second(url, fields):
    body = {"prompt": "A list of people as JSON:\n", "max_tokens": TOKENS, "n": BATCH, "temperature": 1, "seed": 1,
            **fields}
    began = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())) as reply:
        usage = json.load(reply)["usage"]
    assert usage["completion_tokens"] == BATCH * TOKENS, usage
    return usage["completion_tokens"] / (time.monotonic() - began)


def main(treadle, model):
    kinds = {"without": {"ignore_eos": True},
             "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}}}
    server, url = serve(treadle, model)
    try:
        runs = {kind: [] for kind in kinds}
        for run in range(RUNS + 1):
            for kind, fields in kinds.items():
                measured = tokens_per_second(url, fields)
                if run > 0:  # the first one warms up, and compiles the schema
                    runs[kind].append(measured)
        for kind, each in runs.items():
            print(f"{kind:8} median {statistics.median(each):7.1f} tokens/s  ({', '.join(f'{x:.1f}' for x in each)})")
        ratios = [schema / without for schema, without in zip(runs["schema"], runs["without"])]
        print(f"schema / without: median {statistics.median(ratios):.3f}  ({', '.join(f'{x:.3f}' for x in ratios)})")
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
