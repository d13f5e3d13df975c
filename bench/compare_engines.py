#!/usr/bin/env python3
"""Compares engines without their servers: prompts and decoding of Treadle, llama.cpp and OpenVINO GenAI, in turns.

usage: bench/compare_engines.py MODEL.gguf [--batches 1,8,32] [--prompt N] [--new N] [--rounds N] [--threads N]
                                [--compute auto,int8,auto/int8,...] [--llama llama-batched-bench] [--openvino-python PYTHON]

Prints a table of tokens/s (medians of the rounds), the same as times the fastest peer of each column, the processor,
versions and command lines. A peer that is missing is named. Prompts are counted at the largest batch. A peer's decoding
is counted while all of the batch decodes: after the last first token, before the first end. What follows a slash is the
type of Treadle's K/V cache, f16 by default, as llama.cpp's; OpenVINO's has 8 bits.
"""
import argparse, json, os, pathlib, re, shutil, statistics, subprocess, sys

OPENVINO = """
import json, sys, time, numpy, openvino, openvino_genai as genai
model, batch, prompt, new, threads = sys.argv[1], *map(int, sys.argv[2:])
settings = genai.SchedulerConfig()
settings.cache_size, settings.max_num_batched_tokens, settings.enable_prefix_caching = 4, 512, False
pipe = genai.ContinuousBatchingPipeline(model, settings, "CPU", {"INFERENCE_NUM_THREADS": threads})
def run(length, many):
    how = genai.GenerationConfig()
    how.max_new_tokens, how.ignore_eos, how.do_sample = many, True, False
    ids = numpy.random.default_rng(1).integers(1000, 20000, (batch, length))
    handles = [pipe.add_request(i, openvino.Tensor(ids[i:i + 1]), how) for i in range(batch)]
    counts, began, first, last = [0] * batch, time.perf_counter(), None, None
    while pipe.has_non_finished_requests():
        pipe.step()
        now = time.perf_counter()
        for i, handle in enumerate(handles):
            while handle.can_read():
                counts[i] += sum(len(out.generated_ids) for out in handle.read().values())
        if first is None and min(counts) > 0:
            first = now, sum(counts)
        if first is not None and max(counts) < many:
            last = now, sum(counts)
    return batch * length / (first[0] - began), (last[1] - first[1]) / (last[0] - first[0])
run(16, 4)
print(json.dumps(run(prompt, new + batch)))
"""


def run(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done.stdout


class Treadle:
    def __init__(self, options, modes):
        compute, _, kv = modes.partition("/")
        self.name, self.is_peer = f"Treadle, {compute}" + (f", K/V {kv}" if kv else ""), False
        self.command = [options.treadle, "bench", "iteration", options.model, "--compute", compute, "--threads",
                        options.threads, "--prompt-tokens", options.prompt, "--new-tokens", options.new,
                        "--max-batch-tokens", 512, "--repeats", 1, "--json", "--batch-sizes", ",".join(options.batches)]
        if kv:
            self.command += ["--kv-dtype", kv]

    def measure(self):
        return {str(row["batch_size"]): (row["prefill_tokens_per_second"], row["decode_tokens_per_second"])
                for row in json.loads(run(self.command))["rows"]}


class LlamaCpp:
    def __init__(self, options):
        self.name, self.is_peer = "llama.cpp", True
        room = max(map(int, options.batches)) * (options.prompt + options.new + 64)
        self.command = [options.llama, "-m", options.model, "-c", room, "-b", 2048, "-ub", 512, "-t", options.threads, "-npp",
                        options.prompt, "-ntg", options.new, "-npl", ",".join(options.batches), "--output-format", "jsonl"]

    def measure(self):
        rows = [json.loads(line) for line in run(self.command).splitlines() if line.startswith("{")]
        return {str(row["pl"]): (row["speed_pp"], row["speed_tg"]) for row in rows}


class OpenVino:
    def __init__(self, options):
        self.name, self.is_peer = "OpenVINO GenAI", True
        self.batches = options.batches
        self.command = [options.openvino_python, "-c", OPENVINO, options.model, "BATCH", options.prompt, options.new,
                        options.threads]

    def measure(self):
        return {batch: json.loads(run([batch if word == "BATCH" else word for word in self.command]).splitlines()[-1])
                for batch in self.batches}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batches", default="1,8,32", type=lambda text: text.split(","))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compute", default="auto,mixed,int8,bf16")
    parser.add_argument("--llama", default="llama-batched-bench")
    parser.add_argument("--openvino-python", default=sys.executable)
    parser.add_argument("--treadle", default=pathlib.Path(__file__).resolve().parents[1] / "build/treadle")
    options = parser.parse_args()
    sides = [Treadle(options, compute) for compute in options.compute.split(",")]
    if shutil.which(options.llama):
        sides.append(LlamaCpp(options))
    else:
        print(f"MISSING llama.cpp: no program {options.llama}")
    python = [options.openvino_python, "-c", "import openvino_genai; print(openvino_genai.__version__)"]
    if not shutil.which(options.openvino_python):
        print(f"MISSING OpenVINO GenAI: no program {options.openvino_python}")
    elif (version := subprocess.run(python, capture_output=True, text=True)).returncode == 0:
        sides.append(OpenVino(options))
        sides[-1].name += f" {version.stdout.strip()}"
    else:
        print(f"MISSING OpenVINO GenAI: {options.openvino_python} does not have it")

    found = {side.name: [] for side in sides}
    for number in range(options.rounds):
        for side in sides:
            rows = side.measure()
            found[side.name].append([rows[options.batches[-1]][0]] + [rows[batch][1] for batch in options.batches])
            print(number + 1, side.name, [round(value) for value in found[side.name][-1]], file=sys.stderr)
    median = {name: [statistics.median(column) for column in zip(*rounds)] for name, rounds in found.items()}
    peers = [median[side.name] for side in sides if side.is_peer]
    fastest = [max(column) for column in zip(*peers)]
    head = "| tokens/s | prompt | " + " | ".join(f"decode, batch {batch}" for batch in options.batches) + " |"
    rule = "|---" * (len(options.batches) + 2) + "|"
    print(re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())[1] + f", {options.threads} threads;",
          f"{pathlib.Path(options.model).name}, prompts of {options.prompt}, {options.new} new tokens;",
          f"medians of {options.rounds} rounds in turns\n")
    print(head, rule, sep="\n")
    for name, row in median.items():
        print(f"| {name} | " + " | ".join(f"{value:,.0f}" for value in row) + " |")
    if fastest:
        print("", head.replace("tokens/s", "times the fastest peer"), rule, sep="\n")
        for side in sides:
            ratios = [mine / best for mine, best in zip(median[side.name], fastest)]
            print(f"| {side.name} | " + " | ".join(f"{value:.2f}" for value in ratios) + " |")
    print()
    for side in sides:
        words = ["..." if word == OPENVINO else str(word) for word in side.command]
        print(f"- {side.name}: `{' '.join(words)}`")


main()
