#!/usr/bin/env python3
"""Structured output against the official JSON-Schema test suite (draft 2020-12): each of its schemas is refused, by
keyword, or every answer that ends by itself, drawn at a temperature at which the model knows nothing, validates.
Usage: json_schema_client.py TREADLE MODEL (with the packages of json_schema_requirements.txt on PYTHONPATH;
SEEDS=100 for more answers to each schema than 4)"""

import collections
import concurrent.futures
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import jsonschema

SEEDS = int(os.environ.get("SEEDS", "4"))
SUITE = ["scripts/fetch_source.sh", "jsonschema", "4.26.0",
         "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326", "hatchling", "json/tests/draft2020-12"]


def schemas():
    """Of all files of the suite: where it stands, and the schema."""
    folder = subprocess.check_output(SUITE, text=True).strip()
    files = sorted(glob.glob(f"{folder}/json/tests/draft2020-12/**/*.json", recursive=True))
    for file in files:
        with open(file, encoding="utf-8") as text:
            for case in json.load(text):
                yield f"{os.path.basename(file)}: {case['description']}", case["schema"]


def ask(url, schema):
    """The texts of the answers that ended by themselves, and how many did not; or why there are none."""
    choices = []
    while len(choices) < SEEDS:
        body = {"prompt": "JSON: ", "max_tokens": 60, "temperature": 1.5, "n": min(SEEDS - len(choices), 50),
                "seed": 1 + len(choices),
                "response_format": {"type": "json_schema", "json_schema": {"name": "suite", "schema": schema}}}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=250) as reply:
                choices += json.load(reply)["choices"]
        except urllib.error.HTTPError as refusal:
            error = json.load(refusal)["error"]
            assert refusal.code == 400 and error["param"] == "response_format", (refusal.code, error, schema)
            return error["message"]
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    return ended, len(choices) - len(ended)


def ecma_pattern(validator, pattern, instance, _):
    """ECMAScript's classes are of ASCII but for white space; Python's are all of it or none."""
    if validator.is_type(instance, "string") and not any(re.search(pattern, instance, f) for f in (0, re.ASCII)):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": ecma_pattern})


def main(treadle, model):
    log = tempfile.TemporaryFile("w+")
    server = subprocess.Popen([treadle, "serve", "--model", model, "--listen", "127.0.0.1:0", "--http-listen",
                               "127.0.0.1:0", "--metrics-listen", "none", "--max-batch-size", "64"],
                              stdout=log, stderr=subprocess.STDOUT)
    try:
        url = None
        for _ in range(600):
            log.seek(0)
            text = log.read()
            found = re.search(r"listening on (http://\S+) ", text)
            if found and "ready" in text:
                url = found.group(1)
                break
            assert server.poll() is None, text
            time.sleep(0.1)
        assert url, text
        refused, valid, cut, invalid = collections.Counter(), 0, 0, []
        cases = list(schemas())
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for (name, schema), answer in zip(cases, pool.map(lambda case: ask(url, case[1]), cases)):
                if isinstance(answer, str):
                    keyword = re.search(r"the keyword (\S+)", answer)
                    refused[keyword.group(1) if keyword else answer] += 1
                    continue
                validator = VALIDATOR(schema)
                cut += answer[1]
                for text in answer[0]:
                    try:
                        validator.validate(json.loads(text))
                        valid += 1
                    except (jsonschema.ValidationError, ValueError) as error:
                        invalid.append((name, schema, text, str(error).split("\n")[0]))
        for each in invalid:
            print("INVALID", *each, file=sys.stderr)
        print(f"json schema: {len(cases)} schemas, {sum(refused.values())} refused "
              f"({', '.join(f'{word} {count}' for word, count in refused.most_common(12))} ...); of the others' answers "
              f"{valid} ended and are valid, {len(invalid)} are not, {cut} were cut off")
        assert not invalid and valid > len(cases) / 4
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    began = time.time()
    main(*sys.argv[1:])
    print(f"json schema client ok in {time.time() - began:.0f} s")
