#!/usr/bin/env bash
# Treadle beside other servers of this machine: the same model, trace and client, in turns; one table and one plot.
#
#   bench/compare_peers.sh [OUT_DIR]
#
# Peers: llama.cpp's server (LLAMA_SERVER), OpenVINO GenAI (OPENVINO_PYTHON: a Python with openvino-genai), transformers
# (TRANSFORMERS_PYTHON: one with torch and transformers), vLLM's for CPUs (VLLM, with VLLM_MODEL: a folder). One that is
# not there is said, and the others are compared. Further environment: MODEL (a GGUF file; default: the default model),
# RATES, ROUNDS (each with another seed), NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN, THREADS, SLOTS, SERVE_ARGS, LLAMA_ARGS,
# BENCH_ARGS, PYTHON (for the plot: one with matplotlib). All servers stand from the beginning, the idle ones asleep, so
# that they alternate: on a machine whose speed changes with the hour, one after the other would compare hours.
# transformers needs gguf and accelerate, too.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/compare_peers}
model=${MODEL:-$(scripts/fetch_model.sh)}
threads=${THREADS:-$(nproc)} slots=${SLOTS:-16} rounds=${ROUNDS:-3} num=${NUM_PROMPTS:-60}
rates=${RATES:-"0.5 1 2 4"} input=${INPUT_LEN:-32:512} output=${OUTPUT_LEN:-1:128}
llama=${LLAMA_SERVER:-$(command -v llama-server || true)}
treadle=build/treadle
[ -x "$treadle" ] || { echo "build/treadle is missing: run 'make build' first" >&2; exit 1; }
mkdir -p "$out"
: >"$out/results.jsonl"
: >"$out/peers.txt"
names=() protocols=() targets=() pids=()
stop() { [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true; wait; }
trap stop EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# peer NAME PROTOCOL PORT VERSION COMMAND...: starts it, and waits until it answers; says it if it does not.
peer() {
  local name=$1 protocol=$2 port=$3 version=$4
  shift 4
  echo "$name: $version; $*" | tee -a "$out/peers.txt"
  "$@" >"$out/$name.log" 2>&1 &
  local pid=$!
  if "$treadle" bench serve --protocol "$protocol" --target "127.0.0.1:$port" --wait-ready "${WAIT_READY:-180}" \
    --num-prompts 2 --request-rate inf --input-len 32 --output-len 8 --json >"$out/$name.first" 2>&1 &&
    grep -q '"failed":0' "$out/$name.first"; then
    names+=("$name") protocols+=("$protocol") targets+=("127.0.0.1:$port") pids+=("$pid")
  else
    kill "$pid" 2>/dev/null || true
    missing "$name" "it does not serve: $(tail -n 1 "$out/$name.first" | cut -c1-300)"
  fi
}
missing() { echo "MISSING $1: $2" | tee -a "$out/peers.txt"; }

grep -m1 'model name' /proc/cpuinfo | sed 's/.*: //; s/$/, '"$(nproc) processors, $threads threads each/" | tee -a "$out/peers.txt"
port=$(free_port)
# shellcheck disable=SC2086
peer treadle grpc "$port" "$("$treadle" --version)" "$treadle" serve --model "$model" --listen "127.0.0.1:$port" \
  --http-listen none --metrics-listen none --log-requests off --threads "$threads" ${SERVE_ARGS:-}
if [ -x "$llama" ]; then
  port=$(free_port)
  # shellcheck disable=SC2086
  peer llama.cpp openai "$port" "$("$llama" --version 2>&1 | grep -m1 version)" "$llama" -m "$model" --host 127.0.0.1 \
    --port "$port" -t "$threads" -np "$slots" -c $((slots * 2048)) ${LLAMA_ARGS:-}
else
  missing llama.cpp "no llama-server in PATH; LLAMA_SERVER names one"
fi
for library in openvino transformers; do
  variable=${library^^}_PYTHON module=$library
  [ "$library" = transformers ] || module=openvino_genai
  python=${!variable:-python3}
  if version=$("$python" -c "import $module; print($module.__version__)" 2>/dev/null); then
    port=$(free_port)
    peer "$library" openai "$port" "$version" "$python" bench/peer_server.py "$library" "$model" --port "$port" --threads "$threads"
  else
    missing "$library" "$python has no $module; $variable names a Python that has"
  fi
done
if [ -n "${VLLM:-}" ] && [ -n "${VLLM_MODEL:-}" ]; then
  port=$(free_port)
  peer vllm openai "$port" "$("$VLLM" --version 2>/dev/null | tail -n 1)" "$VLLM" serve "$VLLM_MODEL" --host 127.0.0.1 --port "$port"
else
  missing vllm "VLLM and VLLM_MODEL name a program built for CPUs and a folder; the registry's is for GPUs"
fi

for ((round = 1; round <= rounds; ++round)); do
  for rate in $rates; do
    for i in "${!names[@]}"; do
      # shellcheck disable=SC2086
      "$treadle" bench serve --protocol "${protocols[$i]}" --target "${targets[$i]}" --vocab-size 49152 --num-prompts "$num" \
        --request-rate "$rate" --input-len "$input" --output-len "$output" --seed "$round" --label "${names[$i]}" --json \
        ${BENCH_ARGS:-} >>"$out/results.jsonl" 2>>"$out/bench.log" || echo "${names[$i]} at $rate/s failed: $(tail -n 1 "$out/bench.log")"
    done
  done
done
python3 - "$out" <<'PYTHON' | tee "$out/table.md"
import collections, json, statistics, sys
out = sys.argv[1]
runs = collections.defaultdict(list)
for line in open(f"{out}/results.jsonl"):
    run = json.loads(line)
    runs[run["request_rate"], run["label"]].append(run)
columns = {"served/s": "request_throughput", "tokens/s": "output_throughput", "median TTFT ms": "median_ttft_ms",
           "p99 TTFT ms": "p99_ttft_ms", "median ITL ms": "median_itl_ms", "p99 ITL ms": "p99_itl_ms",
           "normalized ms/token": "median_normalized_latency_ms"}
print("Medians of the rounds.\n\n| offered/s | server | failed | " + " | ".join(columns) + " | client late |")
print("|---|---|---|" + "---|" * len(columns) + "---|")
for (rate, label), found in sorted(runs.items(), key=lambda item: (float(item[0][0]), item[0][1])):
    cells = [f"{statistics.median(run[key] for run in found):.1f}" for key in columns.values()]
    late = sum(run["client_was_late"] for run in found)
    print(f"| {rate} | {label} | {sum(run['failed'] for run in found)} | " + " | ".join(cells) + f" | {late} of {len(found)} |")
print()
print("".join(f"- {line}" for line in open(f"{out}/peers.txt")))
PYTHON
if "${PYTHON:-python3}" -c 'import matplotlib' 2>/dev/null; then
  "${PYTHON:-python3}" bench/plot.py figure10 "$out/peers.png" "$out/results.jsonl"
else
  echo "matplotlib is not installed: no plot"
fi
echo "Wrote $out"
