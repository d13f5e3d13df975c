#!/usr/bin/env bash
# Reproduces ORCA's Figures 9 and 10 on one model with one command:
#
#   bench/run_orca_figures.sh [OUT_DIR]
#
# Figure 9: `treadle bench iteration`, 32 and 128 prompt tokens. Figure 10: one server per (policy, max_batch_size), all driven with
# the same Poisson traces at rising rates, in turns. Writes JSON, a Markdown table, and PNG plots where matplotlib is installed.
# Environment: MODEL (default: the default model), RATES, BATCH_SIZES, NUM_PROMPTS, SERVE_ARGS, PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/orca_figures}
model=${MODEL:-$(scripts/fetch_model.sh)}
rates=${RATES:-"0.5 1 1.5 2 2.5 3 3.5"}
batch_sizes=${BATCH_SIZES:-"8 32"}
num=${NUM_PROMPTS:-60}
python=${PYTHON:-python3}
port=${PORT:-50871}
treadle=build/treadle
[ -x "$treadle" ] || { echo "build/treadle is missing: run 'make build' first" >&2; exit 1; }
mkdir -p "$out"
servers=()
stop_servers() { [ ${#servers[@]} = 0 ] || kill "${servers[@]}" 2>/dev/null || true; wait; }
trap stop_servers EXIT

echo "Figure 9: the engine alone"
for prompt in 32 128; do
  "$treadle" bench iteration --model "$model" --prompt-tokens "$prompt" --new-tokens 32 --batch-sizes 1,2,4,8,16,32 --json \
    >"$out/figure9_$prompt.json"
done

echo "Figure 10: served, iteration-level (fcfs) against request-level"
# All servers stand from the beginning, the idle ones asleep, so that the configurations alternate: on a machine whose speed changes
# with the hour, one after the other would compare hours.
configurations=()
for policy in fcfs request-level; do
  for size in $batch_sizes; do
    address=127.0.0.1:$((port + ${#configurations[@]}))
    "$treadle" serve --model "$model" --listen "$address" --http-listen none --metrics-listen none --policy "$policy" --max-batch-size "$size" \
      ${SERVE_ARGS:-} >"$out/serve_${policy}_$size.log" 2>&1 &
    servers+=($!)
    configurations+=("$address $policy, max_batch_size $size")
  done
done
: >"$out/figure10.jsonl"
for rate in $rates; do
  for configuration in "${configurations[@]}"; do
    "$treadle" bench serve --target "${configuration%% *}" --wait-ready 60 --num-prompts "$num" --request-rate "$rate" \
      --input-len 32:512 --output-len 1:128 --ignore-eos --num-warmups 2 --label "${configuration#* }" --json 2>>"$out/bench_serve.log" \
      | tee -a "$out/figure10.jsonl" \
      | "$python" -c 'import json,sys
r=json.loads(sys.stdin.read()); print("  %-36s offered %5.2f/s  served %5.2f/s  normalized %8.1f ms" % (
  r["label"], float(r["request_rate"]), r["request_throughput"], r["median_normalized_latency_ms"]))'
  done
done
stop_servers

"$python" - "$out" <<'PYTHON' >"$out/figures.md"
import json, sys
out = sys.argv[1]
print("| batch | prompt | prefill tokens/s | decode tokens/s | decode iteration ms |\n|---|---|---|---|---|")
for prompt in (32, 128):
    for r in json.load(open(f"{out}/figure9_{prompt}.json"))["rows"]:
        print(f"| {r['batch_size']} | {prompt} | {r['prefill_tokens_per_second']:.0f} | {r['decode_tokens_per_second']:.0f} "
              f"| {r['decode_iteration_seconds'] * 1e3:.2f} |")
print("\n| configuration | offered/s | served/s | median normalized latency ms | median TTFT ms | p99 ITL ms |\n|---|---|---|---|---|---|")
for line in open(f"{out}/figure10.jsonl"):
    r = json.loads(line)
    print(f"| {r['label']} | {r['request_rate']} | {r['request_throughput']:.2f} | {r['median_normalized_latency_ms']:.1f} "
          f"| {r['median_ttft_ms']:.0f} | {r['p99_itl_ms']:.1f} |")
PYTHON
if "$python" -c 'import matplotlib' 2>/dev/null; then
  "$python" bench/plot.py figure9 "$out/figure9.png" "$out"/figure9_*.json
  "$python" bench/plot.py figure10 "$out/figure10.png" "$out/figure10.jsonl"
else
  echo "matplotlib is not installed: no plots"
fi
echo "Wrote $out"
