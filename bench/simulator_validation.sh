#!/usr/bin/env bash
# Holds what `treadle simulate --calibrate` foretells of this machine against what a server does:
#
#   bench/simulator_validation.sh [OUT_DIR]
#
# The cost of iterations is fitted first, without a trace; then a server gets ORCA's trace at five rates. Writes JSON lines and a
# Markdown table. Wants a quiet machine: fit and trace must meet the same one.
# Environment: MODEL (default: the default model), RATES, NUM_PROMPTS, SEED, PORT, PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/simulator_validation}
model=${MODEL:-$(scripts/fetch_model.sh)}
rates=${RATES:-"0.5 1 1.5 2 3"}
num=${NUM_PROMPTS:-60} seed=${SEED:-1} port=${PORT:-50890}
treadle=build/treadle
[ -x "$treadle" ] || { echo "build/treadle is missing: run 'make build' first" >&2; exit 1; }
mkdir -p "$out"
same="--num-prompts $num --seed $seed --input-len 32:512 --output-len 1:128 --json"
"$treadle" simulate --model "$model" --calibrate --max-context 1024 --max-batch-size 32 --max-batch-tokens 512 \
  --request-rate "${rates// /,}" $same >"$out/simulated.jsonl"
"$treadle" serve --model "$model" --listen "127.0.0.1:$port" --http-listen none --metrics-listen none --max-context 1024 \
  --max-batch-size 32 --max-batch-tokens 512 --speculate off --prefix-cache off >"$out/serve.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait' EXIT
: >"$out/served.jsonl"
for rate in $rates; do
  "$treadle" bench serve --target "127.0.0.1:$port" --wait-ready 60 --num-warmups 2 --request-rate "$rate" $same >>"$out/served.jsonl"
done
"${PYTHON:-python3}" - "$out" <<'PYTHON' | tee "$out/validation.md"
import json, sys
read = lambda name: [json.loads(line) for line in open(f"{sys.argv[1]}/{name}.jsonl")]
keys = ["request_throughput", "median_normalized_latency_ms", "p99_normalized_latency_ms", "median_ttft_ms", "p99_ttft_ms"]
print("| offered/s | " + " | ".join(key.replace("_", " ") for key in keys) + " |\n|" + "---|" * (len(keys) + 1))
for served, simulated in zip(read("served"), read("simulated")):
    cells = [f"{simulated[k]:.4g} for {served[k]:.4g} ({100 * (simulated[k] / served[k] - 1):+.0f} %)" for k in keys]
    print(f"| {served['request_rate']} | " + " | ".join(cells) + " |")
PYTHON
