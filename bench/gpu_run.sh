#!/usr/bin/env bash
# Tests and measures a bundle (gpu_bundle.sh) on the machine that it lies on: correctness first, then every benchmark, within ten minutes.
#
#   gpu_run.sh OUT_DIR [--device cuda|cpu] [--quick] [--only STEP,...]
#
# Leaves each step's output in OUT_DIR, and report.md. A step that fails or takes too long does not stop the others; the exit code
# says whether one did. --quick: small shapes, to try the script itself. Two steps take too long to be among the others: --only memcheck,
# the op tests under compute-sanitizer; --only iteration_bf16,transformers, Hugging Face transformers beside Treadle.
# Environment: BUNDLE (this folder, or build/gpu_bundle), BUDGET (580 seconds), SHAPE, SERVE_SHAPE, RATES.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ -x "$here/treadle" ]; then bundle=${BUNDLE:-$here}; else bundle=${BUNDLE:-$here/../build/gpu_bundle}; fi
out= device=cuda quick= only=
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:?--device needs cuda or cpu}; shift ;;
    --quick) quick=yes ;;
    --only) only=,${2:?--only needs names of steps}, ; shift ;;
    -*) echo "gpu_run.sh: unknown flag $1" >&2; exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || { echo "usage: gpu_run.sh OUT_DIR [--device cuda|cpu] [--quick] [--only STEP,...]" >&2; exit 2; }
treadle=$bundle/treadle
[ -x "$treadle" ] || { echo "gpu_run.sh: no program $treadle; bench/gpu_bundle.sh makes it" >&2; exit 2; }
mkdir -p "$out"

# The bundle's own libraries, then CUDA's, from the Python packages that bring them or from the toolkit.
library_path=$bundle/lib
while read -r folder; do library_path+=:$folder; done < <(python3 - <<'PYTHON'
import glob, importlib.util
spec = importlib.util.find_spec("nvidia")
for root in (spec.submodule_search_locations or []) if spec else []:
    for folder in sorted(glob.glob(root + "/*/lib")):
        print(folder)
for folder in ("/usr/local/cuda/lib64",):
    if glob.glob(folder):
        print(folder)
PYTHON
)
export LD_LIBRARY_PATH=$library_path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

budget=${BUDGET:-580}
shape=${SHAPE:-llama-3.1-8b} serve_shape=${SERVE_SHAPE:-orca-13b} greedy_shape=smollm2-135m rates=${RATES:-4,8,16,32}
seconds_per_case=0.05 cold=600M batches=1,8,32,64 many=64 prompts=128,2048 new_tokens=64 rows=1,8,32,2048 requests=120 batch=64 lengths=(32:512 1:128)
crossover=4,8,16,24,32,48,64,96,128,192,256
if [ -n "$quick" ]; then
  shape=${SHAPE:-llama-3.2-1b,layers=2,hidden=256,heads=4,kv-heads=2,ffn=512,vocab=1000}
  serve_shape=${SERVE_SHAPE:-orca-13b,layers=2,hidden=128,heads=4,ffn=256,vocab=1000}
  greedy_shape=$shape
  rates=${RATES:-50,100} seconds_per_case=0.001 cold=1M batches=1,2 many=2 prompts=16,40 new_tokens=4 rows=1,8 requests=10 batch=4 lengths=(4:20 1:8) crossover=4,40
fi

: >"$out/steps.tsv"
failed=
# step NAME SECONDS COMMAND...: its output is OUT/NAME.json, what it says besides OUT/NAME.log.
step() {
  local name=$1 limit=$2 begin=$SECONDS code
  shift 2
  if [ -n "$only" ]; then
    [[ $only == *,$name,* ]] || return 0
  elif [[ $name == memcheck || $name == transformers ]]; then
    return 0
  fi
  [ $((budget - SECONDS)) -ge "$limit" ] || limit=$((budget - SECONDS))
  if [ "$limit" -lt 5 ]; then
    code=skipped
  else
    echo "$name (at most $limit s): $*"
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.json" 2>"$out/$name.log"
    code=$?
    # Tests that found no GPU; those of NCCL may want more than there are.
    [ "$code" != 0 ] || [ "$name" = nccl_gpu_test ] || ! grep -q 'PASSED  \] 0 tests' "$out/$name.json" || code='all skipped'
  fi
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - begin))" >>"$out/steps.tsv"
  [ "$code" = 0 ] && return 0
  failed+=" $name"
  echo "  $name failed: $code"
  { tail -n 5 "$out/$name.log"; [ "$code" = skipped ] || tail -n 15 "$out/$name.json"; } 2>/dev/null | sed 's/^/  | /'
}

{ nvidia-smi -L 2>/dev/null || true; grep -m1 'model name' /proc/cpuinfo | sed 's/.*: //'; echo "$(nproc) CPUs"; } >"$out/machine.txt"

if [ "$device" = cuda ]; then
  for test in cuda_device_test:20 cuda_backend_test:150 nccl_gpu_test:30; do
    [ ! -x "$bundle/${test%:*}" ] || step "${test%:*}" "${test#*:}" "$bundle/${test%:*}" --gtest_brief=1
  done
  step memcheck 550 compute-sanitizer --error-exitcode 9 "$bundle/cuda_backend_test" --gtest_brief=1
fi
# Greedy tokens in plain float arithmetic are the same on any device: its margins are far above float's rounding.
greedy=(--model "random:$greedy_shape" --token-ids 11,2,33,4,5 --ignore-eos)
model=$bundle/SmolLM2-135M-Instruct.Q4_1.gguf
[ ! -f "$model" ] || greedy=(--model "$model" --prompt "The capital of France is")
greedy+=(--kv-dtype f32 --temperature 0 --max-new-tokens 32 --json)
step greedy_cpu 60 "$treadle" generate --device cpu --compute exact "${greedy[@]}"
[ "$device" = cpu ] || step "greedy_$device" 60 "$treadle" generate --device "$device" --dtype fp32 "${greedy[@]}"
[ "$device" = cuda ] && crossover=(--crossover-rows "$crossover") || crossover=()
step kernels_layer 130 "$treadle" bench kernels --device "$device" --random-model "$shape" --rows "$rows" "${crossover[@]}" \
  --seconds-per-case "$seconds_per_case" --cold-memory "$cold" --json
for weights in bf16 int8 nf4; do
  convert=()
  [ "$weights" = bf16 ] || convert=(--weights "$weights")
  step "iteration_$weights" 60 "$treadle" bench iteration --device "$device" --random-model "$shape" "${convert[@]}" --batch-sizes "$batches" \
    --prompt-tokens "$prompts" --new-tokens "$new_tokens" --max-batch-tokens 2048 --repeats 2 --json
done
for policy in fcfs request-level; do
  step "serve_$policy" 110 "$treadle" bench serve --in-process --device "$device" --random-model "$serve_shape" --policy "$policy" \
    --max-batch-size "$batch" --max-batch-tokens 1024 --num-prompts "$requests" --request-rate "$rates" --input-len "${lengths[0]}" \
    --output-len "${lengths[1]}" --num-warmups 4 --label "$policy" --json
done
step iteration_bf16-alone 40 "$treadle" bench iteration --device "$device" --random-model "$shape" --one-at-a-time --batch-sizes "$many" \
  --prompt-tokens "${prompts%%,*}" --new-tokens "$new_tokens" --max-batch-tokens 2048 --repeats 2 --json
if [ "$device" = cuda ]; then
  step iteration_bf16-deterministic 40 "$treadle" bench iteration --device cuda --random-model "$shape" --deterministic on \
    --batch-sizes "$batches" --prompt-tokens "$prompts" --new-tokens "$new_tokens" --max-batch-tokens 2048 --repeats 2 --json
fi
step kernels_ops 60 "$treadle" bench kernels --device "$device" --seconds-per-case "$seconds_per_case" --cold-memory "$cold" ${quick:+--filter rms_norm} --json
step transformers 400 bash -c '"$1" inspect --json "random:$2" >"$3/shape.json" && shift 2 && exec python3 "$2" --shape "$1/shape.json" "${@:3}"' - \
  "$treadle" "$shape" "$out" "$here/transformers_peer.py" --device "$device" --batch-sizes "${batches%,*}" --prompt-tokens "${prompts%%,*}" \
  --new-tokens "$new_tokens"
step shapes 10 "$treadle" inspect --json "random:$shape"

python3 "$here/gpu_report.py" "$out" >"$out/report.md" || failed+=" report"
echo "$out/report.md after $SECONDS s"
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
