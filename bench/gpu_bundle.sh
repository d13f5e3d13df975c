#!/usr/bin/env bash
# Builds Treadle for GPUs and collects what a machine with one needs to test and measure it, in one folder that can be copied there:
#
#   bench/gpu_bundle.sh [ARCHITECTURE ...]        sm_90a (the default), sm_80, sm_100, ...
#
# Into build/gpu_bundle, and packed into build/gpu_bundle.tar.gz: treadle and treadle-bench, the tests that need a GPU,
# gpu_run.sh with its report, and the shared libraries that all of these need, stripped. All of them come along, gRPC too, so
# that the machine needs no packages and runs the very binary that is built here; a second build without gRPC would be one more
# thing to keep working, for 20 MB. What stays behind: the C library, the driver, cuBLASLt and NCCL, which are larger than
# everything else together and come with that machine's CUDA or PyTorch.
# Environment: OUT (build/gpu_bundle), BUILD (build/gpu), JOBS, LIMIT_MIB (of the archive: 60), TARGETS; BUILT=yes: TARGETS have been built in BUILD.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/gpu_bundle}
build=${BUILD:-build/gpu}
limit=${LIMIT_MIB:-60}
architectures=()
for name in "${@:-sm_90a}"; do
  [[ $name =~ ^sm_([0-9]+a?)$ ]] || { echo "architecture is '$name', expected one such as sm_90a" >&2; exit 2; }
  architectures+=("${BASH_REMATCH[1]}-real")
done

[ -n "${BUILT:-}" ] || cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTREADLE_CUDA="${TREADLE_CUDA:-ON}" \
  -DTREADLE_CUDA_ARCHITECTURES="$(IFS=';'; echo "${architectures[*]}")" >/dev/null
targets=(treadle treadle-bench cuda_device_test cuda_backend_test)
! grep -q '^build nccl_gpu_test:' "$build/build.ninja" || targets+=(nccl_gpu_test)
[ -z "${TARGETS:-}" ] || read -r -a targets <<<"$TARGETS"
[ -n "${BUILT:-}" ] || cmake --build "$build" -j "${JOBS:-$(nproc)}" --target "${targets[@]}"

rm -rf "$out"
mkdir -p "$out/lib"
programs=()
for target in "${targets[@]}"; do
  program=$build/$target
  [ -x "$program" ] || program=$(find "$build" -type f -perm -u+x -name "$target" -print -quit)
  [ -n "$program" ] || { echo "$target was built, but is not in $build" >&2; exit 1; }
  cp "$program" "$out/"
  programs+=("$out/$target")
done

# Paths of the libraries that a program needs, the dynamic loader's closure. What belongs to the C library has to be the other
# machine's own, beside its kernel and its loader.
left_behind='^(ld-linux|libc|libm|libdl|librt|libpthread|libresolv|libutil|libcublas|libcublasLt|libnccl|libcuda|libnvidia-.*)(-.*)?\.so'
libraries() { ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u; }
while read -r library; do
  name=$(basename "$library")
  if [[ $name =~ $left_behind ]]; then
    [[ $name =~ ^lib(cublas|nccl) ]] && echo "left behind: $name"
  else
    cp -L "$library" "$out/lib/$name"
  fi
done < <(libraries "${programs[@]}")
strip --strip-unneeded "$out"/lib/*.so* "${programs[@]}" 2>/dev/null || true
cp bench/gpu_run.sh bench/gpu_report.py bench/transformers_peer.py bench/prefix_cache.py "$out/"

# The default model only if there is room; else benchmarks run on random weights in the shape of real models.
used() { du -sm "$out" | cut -f1; }
model=${TREADLE_MODEL:-${XDG_CACHE_HOME:-$HOME/.cache}/treadle/SmolLM2-135M-Instruct.Q4_1.gguf}
if [ -f "$model" ]; then
  if [ $(($(used) + $(du -sm "$model" | cut -f1))) -le "$limit" ]; then
    cp "$model" "$out/"
  else
    echo "left behind: the default model ($(du -sm "$model" | cut -f1) MiB); gpu_run.sh uses --random-model"
  fi
fi

(cd "$out" && du -ah --max-depth=1 . | sort -h)
tar -C "$(dirname "$out")" -czf "$out.tar.gz" "$(basename "$out")"
packed=$(du -sm "$out.tar.gz" | cut -f1)
echo "$out: $(used) MiB for ${architectures[*]}; $out.tar.gz: $packed MiB"
[ "$packed" -le "$limit" ] || { echo "that is more than $limit MiB" >&2; exit 1; }
