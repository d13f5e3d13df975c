#!/usr/bin/env bash
# Tests and measures a bundle (gpu_bundle.sh) on the machine that it lies on, the most important first.
#
#   gpu_run.sh OUT_DIR [--device cuda|cpu] [--quick] [--only STEP,...] [--dry-run]
#
# Leaves each step's output in OUT_DIR, and report.md. A step that fails or takes too long does not stop the others; the exit code
# says whether one did. A call takes at most BUDGET seconds: a step begins only if its limit fits into what is left of them. Exit code 3:
# steps are left; the same call again goes on with them, and does not repeat those that OUT_DIR has. --only runs what it names, again
# if need be. --dry-run runs nothing and lists the calls, each as an --only. --quick: small shapes, to try the script itself.
# Environment: BUNDLE (this folder, or build/gpu_bundle), BUDGET (530 seconds), STEP_LIMIT (of seconds, for every step), SHAPE, SERVE_SHAPE,
# RATES.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ -x "$here/treadle" ]; then bundle=${BUNDLE:-$here}; else bundle=${BUNDLE:-$here/../build/gpu_bundle}; fi
out= device=cuda quick= only= dry=
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:?--device needs cuda or cpu}; shift ;;
    --quick) quick=yes ;;
    --dry-run) dry=yes ;;
    --only) only=,${2:?--only needs names of steps}, ; shift ;;
    -*) echo "gpu_run.sh: unknown flag $1" >&2; exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || { echo "usage: gpu_run.sh OUT_DIR [--device cuda|cpu] [--quick] [--only STEP,...] [--dry-run]" >&2; exit 2; }
treadle=$bundle/treadle
treadle_bench=$bundle/treadle-bench
for program in "$treadle" "$treadle_bench"; do
  [ -x "$program" ] || { echo "gpu_run.sh: no program $program; bench/gpu_bundle.sh makes it" >&2; exit 2; }
done
mkdir -p "$out"

# The bundle's own libraries, then CUDA's, from the Python packages that bring them or from the toolkit. Only for the bundle's programs:
# python3 and NVIDIA's tools have libraries of their own, which another libstdc++ or libssl would break.
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
own=(env "LD_LIBRARY_PATH=$library_path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")

budget=${BUDGET:-530}
shape=${SHAPE:-llama-3.1-8b} serve_shape=${SERVE_SHAPE:-orca-13b} greedy_shape=smollm2-135m rates=${RATES:-4,8,16,32}
seconds_per_case=0.05 cold=600M batches=1,8,32,64 many=64 prompts=128,2048 new_tokens=64 rows=1,8,32,2048 requests=120 batch=64 lengths=(32:512 1:128)
crossover=4,8,16,24,32,48,64,96,128,192,256
if [ -n "$quick" ]; then
  shape=${SHAPE:-llama-3.2-1b,layers=2,hidden=256,heads=4,kv-heads=2,ffn=512,vocab=1000}
  serve_shape=${SERVE_SHAPE:-orca-13b,layers=2,hidden=128,heads=4,ffn=256,vocab=1000}
  greedy_shape=$shape
  rates=${RATES:-50,100} seconds_per_case=0.001 cold=1M batches=1,2 many=2 prompts=16,40 new_tokens=4 rows=1,8 requests=10 batch=4 lengths=(4:20 1:8) crossover=4,40
fi

touch "$out/steps.tsv"
left= calls=() call_seconds=() ran=
# step NAME SECONDS COMMAND...: its output is OUT/NAME.json, what it says besides OUT/NAME.log.
step() {
  local name=$1 limit=$2 begin=$SECONDS code
  shift 2
  if [ -n "$only" ]; then
    [[ $only == *,$name,* ]] || return 0
  elif [ -z "$dry" ] && grep -q "^$name"$'\t' "$out/steps.tsv"; then
    return 0
  fi
  [ "$limit" -le "${STEP_LIMIT:-$limit}" ] || limit=$STEP_LIMIT
  [ "$limit" -le "$budget" ] || limit=$budget
  if [ -n "$dry" ]; then
    local last=$((${#calls[@]} - 1))
    if [ "$last" -lt 0 ] || [ $((call_seconds[last] + limit)) -gt "$budget" ]; then
      calls+=("$name") call_seconds+=("$limit")
    else
      calls[last]+=,$name
      call_seconds[last]=$((call_seconds[last] + limit))
    fi
    return 0
  fi
  if [ -n "$left" ] || { [ -n "$ran" ] && [ $((SECONDS + limit)) -gt "$budget" ]; }; then
    left+=" $name"  # and what comes after it: the order stays
    return 0
  fi
  ran=yes
  echo "$name (at most $limit s): $*"
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.json" 2>"$out/$name.log"
  code=$?
  # Tests that found no GPU; those of NCCL may want more than there are.
  [ "$code" != 0 ] || [ "$name" = nccl_gpu_test ] || ! grep -q 'PASSED  \] 0 tests' "$out/$name.json" || code='all skipped'
  sed -i "/^$name\t/d" "$out/steps.tsv"
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - begin))" >>"$out/steps.tsv"
  [ "$code" = 0 ] && return 0
  echo "  $name failed: $code"
  { tail -n 5 "$out/$name.log"; tail -n 15 "$out/$name.json"; } 2>/dev/null | sed 's/^/  | /'
}

{ nvidia-smi -L 2>/dev/null || true; grep -m1 'model name' /proc/cpuinfo | sed 's/.*: //'; echo "$(nproc) CPUs"; } >"$out/machine.txt"

iteration() { # NAME SECONDS BATCHES SETTING... -- FLAG...: tokens of the shape, with settings of the environment
  local name=$1 limit=$2 sizes=$3 settings=()
  shift 3
  while [ "$1" != -- ]; do settings+=("$1"); shift; done
  shift
  step "$name" "$limit" "${own[@]}" "${settings[@]}" "$treadle" bench iteration --device "$device" --random-model "$shape" --batch-sizes "$sizes" \
    --new-tokens "$new_tokens" --max-batch-tokens 2048 --repeats 2 --json "$@"
}

# Small op cases of each kind of kernel: a sanitizer takes tens of times as long.
few_ops='*MatchesTheReference/rms_norm_f32:*MatchesTheReference/attention_bf16:*MatchesTheReference/sample_f32'
first_ops='*/rms_norm_f32:*/matmul_bf16:*/attention_bf16'
if [ "$device" = cuda ]; then
  if [ -n "$dry" ] || [ -x "$bundle/cuda_device_test" ]; then
    step cuda_device_test 20 "${own[@]}" "$bundle/cuda_device_test" --gtest_brief=1
  fi
  if [ -n "$dry" ] || [ -x "$bundle/cuda_backend_test" ]; then
    step ops_first 60 "${own[@]}" "$bundle/cuda_backend_test" --gtest_brief=1 --gtest_filter="$first_ops"
    step cuda_backend_test 150 "${own[@]}" "$bundle/cuda_backend_test" --gtest_brief=1
    for tool in memcheck racecheck synccheck; do
      step "$tool" 85 compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 "${own[@]}" "$bundle/cuda_backend_test" \
        --gtest_brief=1 --gtest_filter="$few_ops"
    done
  fi
fi
# Greedy tokens in plain float arithmetic are the same on any device: its margins are far above float's rounding.
greedy=(--model "random:$greedy_shape" --token-ids 11,2,33,4,5 --ignore-eos)
model=$bundle/SmolLM2-135M-Instruct.Q4_1.gguf
[ ! -f "$model" ] || greedy=(--model "$model" --prompt "The capital of France is")
greedy+=(--kv-dtype f32 --temperature 0 --max-new-tokens 32 --json)
step greedy_cpu 60 "${own[@]}" "$treadle" generate --device cpu --compute exact "${greedy[@]}"
if [ "$device" = cuda ]; then
  step greedy_cuda 60 "${own[@]}" "$treadle" generate --device cuda --dtype fp32 "${greedy[@]}"
  step greedy_bf16 60 "${own[@]}" "$treadle" generate --device cuda --dtype bf16 "${greedy[@]}"
fi
# Reuse changes no answer: the script compares them, and fails where they differ.
[ "$device" != cuda ] || step prefix_cache 90 python3 "$here/prefix_cache.py" "random:$greedy_shape" --treadle "${own[*]} $treadle" \
  --rounds 1 --serve-flags "--device cuda --deterministic on"
[ "$device" = cuda ] && crossover=(--crossover-rows "$crossover") || crossover=()
step shapes 10 "${own[@]}" "$treadle" inspect --json "random:$shape"
step kernels_layer 130 "${own[@]}" "$treadle_bench" kernels --device "$device" --random-model "$shape" --rows "$rows" "${crossover[@]}" \
  --seconds-per-case "$seconds_per_case" --cold-memory "$cold" --json
iteration iteration_bf16 60 "$batches" -- --prompt-tokens "$prompts"
if [ "$device" = cuda ]; then
  iteration iteration_bf16-late-launches 40 1 TREADLE_CUDA_EARLY_LAUNCHES=off -- --prompt-tokens "$prompts"
  iteration iteration_bf16-carve-out 40 1 TREADLE_CUDA_CARVE_OUT=100 -- --prompt-tokens "$prompts"
  iteration iteration_bf16-deterministic 40 "$batches" -- --prompt-tokens "$prompts" --deterministic on
fi
iteration iteration_bf16-alone 40 "$many" -- --prompt-tokens "${prompts%%,*}" --one-at-a-time
if [ "$device" = cuda ] && { [ -n "$dry" ] || command -v ncu >/dev/null; }; then
  step ncu 150 ncu --target-processes all --set basic --section SpeedOfLight --launch-count 40 --csv \
    --kernel-name 'regex:AttentionKernel|DenseStreamKernel|FewRowsKernel|WarpgroupsKernel' \
    "${own[@]}" "$bundle/cuda_backend_test" --gtest_brief=1 --gtest_filter="$first_ops"
fi
iteration iteration_int8 60 "$batches" -- --prompt-tokens "$prompts" --weights int8
iteration iteration_nf4 60 "$batches" -- --prompt-tokens "$prompts" --weights nf4
for policy in fcfs request-level; do
  step "serve_$policy" 110 "${own[@]}" "$treadle" bench serve --in-process --device "$device" --random-model "$serve_shape" --policy "$policy" \
    --max-batch-size "$batch" --max-batch-tokens 1024 --num-prompts "$requests" --request-rate "$rates" --input-len "${lengths[0]}" \
    --output-len "${lengths[1]}" --num-warmups 4 --label "$policy" --json
done
if [ -n "$dry$only" ] || python3 -c 'import torch, transformers' 2>/dev/null; then
  step transformers 400 bash -c '"$1" "$2" "$3" inspect --json "random:$4" >"$5/shape.json" && exec python3 "$6" --shape "$5/shape.json" "${@:7}"' \
    - "${own[@]}" "$treadle" "$shape" "$out" "$here/transformers_peer.py" --device "$device" --batch-sizes "${batches%,*}" \
    --prompt-tokens "${prompts%%,*}" --new-tokens "$new_tokens"
fi
step kernels_ops 60 "${own[@]}" "$treadle_bench" kernels --device "$device" --seconds-per-case "$seconds_per_case" --cold-memory "$cold" \
  ${quick:+--filter rms_norm} --json
if [ "$device" = cuda ] && { [ -n "$dry" ] || [ -x "$bundle/nccl_gpu_test" ]; }; then
  step nccl_gpu_test 30 "${own[@]}" "$bundle/nccl_gpu_test" --gtest_brief=1
fi

if [ -n "$dry" ]; then
  for i in "${!calls[@]}"; do echo "call $((i + 1)), at most ${call_seconds[i]} s: --only ${calls[i]}"; done
  exit 0
fi
failed=$(awk -F'\t' '$2 != "0" {printf " %s", $1}' "$out/steps.tsv")
python3 "$here/gpu_report.py" "$out" >"$out/report.md" || failed+=" report"
echo "$out/report.md after $SECONDS s"
[ -z "$failed" ] || echo "failed:$failed" >&2
[ -z "$left" ] || { echo "left:$left" >&2; exit 3; }
[ -z "$failed" ] || exit 1
