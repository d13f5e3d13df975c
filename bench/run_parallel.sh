#!/usr/bin/env bash
# Gains of tensor and pipeline parallelism on this machine, as Markdown. One core per rank, runs alternate, medians are given.
# Usage: run_parallel.sh [MODEL [MODEL_FOR_TWO_RANKS]]; ROUNDS=3, TREADLE=build/treadle. The second model's heads must divide by two;
# without it one with random weights is taken. Two cores at least, and nothing else on them.
set -euo pipefail
cd "$(dirname "$0")/.."
treadle=${TREADLE:-build/treadle}
model=${1:-$(scripts/fetch_model.sh)}
even=(--random-model smollm2-135m,hidden=512,heads=8,kv-heads=2 --weights q4_1,embedding=q4_1)
[ $# -lt 2 ] || even=(--model "$2")
rounds=${ROUNDS:-3}
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
address=127.0.0.1:50077

start() {  # start NAME COMMAND...: a server in the background; its process is $server
  local name=$1
  shift
  "$@" >"$work/$name.log" 2>&1 &
  server=$!
  for _ in $(seq 300); do
    grep -q "^listening on" "$work/$name.log" && return
    kill -0 $server || break
    sleep 0.1
  done
  echo "$name did not start:" >&2
  tail -3 "$work/$name.log" >&2
  exit 1
}
stop() { kill $server && wait $server || true; }
workers() { pgrep -f "treadle worker .*--parent $server( |$)"; }
# MiB that nobody else has: what lies in a mapped file is the page cache's.
private() { for pid in "$@"; do awk '/^RssAnon/ {print $2 / 1024}' "/proc/$pid/status"; done | xargs; }

common=(--model "$model" --listen $address --http-listen none --metrics-listen none --max-batch-size 16 --max-batch-tokens 64
  --max-context 1024)
whole_kv=(--kv-memory 128M)  # for the same tokens as two stages with
half_kv=(--kv-memory 64M)
load() {  # load NAME: everything at once, prompts four times as long as answers
  "$treadle" bench serve --target $address --num-prompts 128 --request-rate inf --input-len 64:192 --output-len 16:48 \
    --seed 3 --json 2>/dev/null >>"$work/$1.throughput"
}
for _ in $(seq "$rounds"); do
  start one taskset -c 0 "$treadle" serve "${common[@]}" "${whole_kv[@]}" --threads 1
  load one
  stop
  start two "$treadle" serve "${common[@]}" "${half_kv[@]}" --pipeline-parallel 2 --threads 2
  load two
  private $(workers) >"$work/half.memory"
  stop
  start late "$treadle" serve "${common[@]}" "${half_kv[@]}" --pipeline-parallel 2 --threads 2 --plan-forwarding late
  load late
  stop
  "$treadle" bench iteration --model "$model" --prompt-tokens 64 --new-tokens 64 --batch-sizes 1 --threads 2 2>/dev/null |
    tail -1 >>"$work/process.batch1"
  taskset -c 0 "$treadle" bench iteration --model "$model" --prompt-tokens 64 --new-tokens 64 --batch-sizes 1 --threads 1 \
    2>/dev/null | tail -1 >>"$work/core.batch1"
  "$treadle" bench iteration --model "$model" --prompt-tokens 64 --new-tokens 64 --batch-sizes 1 --threads 2 \
    --pipeline-parallel 2 2>/dev/null | tail -1 >>"$work/workers.batch1"
  "$treadle" bench iteration --model "$model" --prompt-tokens 64 --new-tokens 64 --batch-sizes 1 --threads 2 \
    --pipeline-parallel 2 --plan-forwarding late 2>/dev/null | tail -1 >>"$work/late.batch1"
  taskset -c 0 "$treadle" bench iteration "${even[@]}" --prompt-tokens 64 --new-tokens 64 --batch-sizes 1 --threads 1 \
    2>/dev/null | tail -1 >>"$work/thread.tensor"
  "$treadle" bench iteration "${even[@]}" --prompt-tokens 64 --new-tokens 64 --batch-sizes 1 --threads 2 \
    --tensor-parallel 2 2>/dev/null | tail -1 >>"$work/ranks.tensor"
done
"$treadle" worker --model "$model" --listen 127.0.0.1:50078 --threads 1 >"$work/worker.log" 2>&1 &
whole=$!
start whole "$treadle" serve "${common[@]}" "${whole_kv[@]}" --workers 127.0.0.1:50078
load whole
private $whole >"$work/whole.memory"
stop
kill $whole
"$treadle" bench trace --model "$model" --pipeline-parallel 2 --threads 2 --requests 16 --new-tokens 300 \
  --out "$work/plans.trace" >/dev/null 2>&1

python3 - "$work" <<'PYTHON'
import json, pathlib, statistics, sys

work = pathlib.Path(sys.argv[1])
median = statistics.median


def served(name, what="total_token_throughput"):
    return [json.loads(line)[what] for line in (work / f"{name}.throughput").open()]


def milliseconds(name):
    return [float(line.split()[5]) for line in (work / name).open()]


def row(what, *cells):
    print("| " + " | ".join([what, *cells]) + " |")


def spread(values, form="{:.0f}"):
    return form.format(median(values)) + " (" + ", ".join(form.format(v) for v in values) + ")"


one, two, late = served("one"), served("two"), served("late")
print("| | | | ratio |\n|---|---|---|---|")
row("tokens/s at saturation, prompts included: one core; two workers on one core each", spread(one), spread(two),
    f"{median(two) / median(one):.2f}")
row("the same two workers: plans passed on early; late", spread(two), spread(late), f"{median(late) / median(two):.2f}")
row("their time between tokens under that load, ms: early; late",
    *(spread(served(n, "mean_itl_ms"), "{:.1f}") for n in ("two", "late")),
    f"{median(served('late', 'mean_itl_ms')) / median(served('two', 'mean_itl_ms')):.2f}")
whole = float((work / "whole.memory").read_text())
half = [float(v) for v in (work / "half.memory").read_text().split()]
row("private memory of a worker, MiB: whole model; its stages", f"{whole:.0f}", ", ".join(f"{v:.0f}" for v in half),
    f"{max(half) / whole:.2f}")
core, process, workers = (milliseconds(f"{n}.batch1") for n in ("core", "process", "workers"))
row("batch 1, ms: one core; two workers", spread(core, "{:.2f}"), spread(workers, "{:.2f}"),
    f"{median(workers) / median(core):.2f}")
row("batch 1, ms: one process on two cores; two workers", spread(process, "{:.2f}"), spread(workers, "{:.2f}"),
    f"{median(workers) / median(process):.2f}")
late = milliseconds("late.batch1")
row("batch 1, two workers, ms: plans passed on early; late", spread(workers, "{:.2f}"), spread(late, "{:.2f}"),
    f"{median(late) / median(workers):.2f}")
thread, ranks = milliseconds("thread.tensor"), milliseconds("ranks.tensor")
row("batch 1, ms: one thread; two ranks", spread(thread, "{:.2f}"), spread(ranks, "{:.2f}"),
    f"{median(thread) / median(ranks):.2f}")
arrivals = {}
for event in json.loads((work / "plans.trace").read_text())["traceEvents"]:
    if event.get("ph") == "b" and event["name"] == "plan" and event["tid"] == 0:
        arrivals.setdefault(event["args"]["iteration"], {})[event["pid"]] = event["ts"]
hops = sorted(a[1] - a[0] for a in arrivals.values() if 0 in a and 1 in a)
row("a plan's hop from stage to stage, us: median; 99th percentile", f"{median(hops):.0f}",
    f"{hops[int(0.99 * len(hops))]:.0f}", f"n = {len(hops)}")
PYTHON
