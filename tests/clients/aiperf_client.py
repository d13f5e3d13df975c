#!/usr/bin/env python3
"""A server of ours under load by NVIDIA's aiperf, from its command line: streamed completions and chats, counted by the
server's usage. Usage: aiperf_client.py TREADLE MODEL (with aiperf and openai installed; PATH has its command)"""

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from openai_client import main

# It wants a tokenizer even where the server counts: one that knows no word.
TOKENIZER = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
             "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}
REQUESTS = 6


def check(client, model):
    base = str(client.base_url).removesuffix("/v1/")
    told = []
    with TemporaryDirectory() as folder:
        for name, content in (("tokenizer", TOKENIZER), ("config", {"model_type": "llama"}),
                              ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"})):
            Path(folder, f"{name}.json").write_text(json.dumps(content))
        Path(folder, "prompts.jsonl").write_text('{"text": "The capital of France is"}\n{"text": "Two and two is"}\n')
        for endpoint in ("completions", "chat"):
            command = ["aiperf", "profile", "--model", model, "--url", base, "--endpoint-type", endpoint, "--streaming",
                       "--api-key", client.api_key, "--use-server-token-count", "--tokenizer", folder, "--input-file",
                       f"{folder}/prompts.jsonl", "--custom-dataset-type", "single_turn", "--request-count", str(REQUESTS),
                       "--concurrency", "2", "--extra-inputs", "max_tokens:16", "--output-artifact-dir",
                       f"{folder}/{endpoint}", "--ui", "none"]
            done = subprocess.run(command, cwd=folder, env=os.environ | {"HOME": folder}, capture_output=True, text=True,
                                  timeout=250)
            assert done.returncode == 0, (command, (done.stdout + done.stderr)[-3000:])
            report = json.loads(Path(folder, endpoint, "profile_export_aiperf.json").read_text())
            assert report["completed_request_count"]["avg"] == REQUESTS and not report["error_summary"], report
            tokens = report["total_usage_completion_tokens"]["avg"]
            assert 0 < tokens <= 16 * REQUESTS and report["time_to_first_token"]["avg"] > 0, report
            told.append(f"{endpoint} {tokens:.0f} tokens")
    print(f"aiperf {importlib.metadata.version('aiperf')}: {REQUESTS} requests each, two at once: " + ", ".join(told))


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:], tools=check)
    print(f"aiperf: ok in {time.monotonic() - began:.1f} s")
