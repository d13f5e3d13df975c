#!/usr/bin/env python3
"""A server of ours as the field's measuring programs see it: guidellm, which loads it, and lm-eval, which asks it
questions, by completions with the log probabilities of given answers, and by chats. Both from their command lines.
Usage: evaluations_client.py TREADLE MODEL (with guidellm or lm-eval installed; PATH has their commands)"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from openai_client import main

QUESTIONS = [{"question": "The capital of France is", "choices": [" Paris", " a banana"], "answer": 0},
             {"question": "Two and two is", "choices": [" purple", " four"], "answer": 1},
             {"question": "At night the sky is", "choices": [" dark", " edible"], "answer": 0},
             {"question": "Water freezes to", "choices": [" trousers", " ice"], "answer": 1}]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: questions.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ANSWER = """output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def run(folder, key, *command):
    """What it prints; nothing is fetched."""
    environment = os.environ | {"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                                "HF_HOME": f"{folder}/hub"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, (command, (done.stdout + done.stderr)[-3000:])
    return done.stdout


def check_guidellm(client, model, folder):
    """Two at once; then its sweep: one after the other, all at once, and at a rate between those."""
    base = str(client.base_url).removesuffix("/v1/")
    version = run(folder, client.api_key, "guidellm", "--version").split()[-1]
    told = []
    for profile, runs in (("kind=concurrent,streams=2", 1), ("kind=sweep,sweep_size=3", 3)):
        run(folder, client.api_key, "guidellm", "run", "--disable-console", "--backend",
            f"kind=openai_http,target={base},model={model},api_key={client.api_key}", "--profile", profile,
            "--constraint", "kind=max_requests,count=4", "--data", "kind=json_file,path=prompts.jsonl", "--output",
            f"kind=json,path=report{runs}.json")
        benchmarks = json.loads(Path(folder, f"report{runs}.json").read_text())["benchmarks"]
        totals = [benchmark["metrics"]["request_totals"] for benchmark in benchmarks]
        assert len(totals) == runs, totals
        assert all(each["successful"] >= 4 and not each["errored"] for each in totals), totals
        told.append(f"{profile} {sum(each['successful'] for each in totals)} requests")
    return f"guidellm {version}: " + ", ".join(told)


def check_lm_eval(client, model, folder):
    version = run(folder, client.api_key, sys.executable, "-c",
                  "import importlib.metadata as m; print(m.version('lm_eval'))").strip()
    told = []
    for api, path, task in (("local-completions", "completions", "choice"),
                            ("local-completions", "completions", "answer"),
                            ("local-chat-completions", "chat/completions", "answer")):
        arguments = f"model={model},base_url={client.base_url}{path},num_concurrent=2,max_retries=1"
        if api == "local-completions":
            arguments += f",tokenizer_backend=remote,tokenized_requests=False,auth_token={client.api_key}"
        chat = ["--apply_chat_template"] if "chat" in api else []
        run(folder, client.api_key, "lm_eval", "run", "--model", api, "--model_args", arguments, *chat,
            "--include_path", ".", "--tasks", task, "--batch_size", "1", "--output_path", api + task, "--log_samples")
        (report,) = Path(folder).glob(f"{api}{task}*/**/results_*.json")
        results = json.loads(report.read_text())["results"][task]
        value = next(value for name, value in results.items() if re.match("acc,|exact_match,", name))
        assert task == "answer" or value == 1, results  # a small model knows better than to eat bananas
        told.append(f"{api} {task} {value}")
    return f"lm-eval {version}: " + ", ".join(told)


def check(client, model):
    peers = {"guidellm": check_guidellm, "lm_eval": check_lm_eval}
    missing = [name for name in peers if shutil.which(name) is None]
    with TemporaryDirectory() as folder:
        Path(folder, "questions.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in QUESTIONS))
        Path(folder, "prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": entry["question"]}) + "\n" for entry in QUESTIONS))
        for name, text in (("choice", CHOICE), ("answer", ANSWER)):
            Path(folder, f"{name}.yaml").write_text(TASK.format(name=name) + text)
        for name, check_peer in peers.items():
            print(f"MISSING {name}: no such command in PATH" if name in missing else check_peer(client, model, folder))
    assert not missing, f"missing: {missing}"


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:], tools=check)
    print(f"Evaluations: ok in {time.monotonic() - began:.1f} s")
