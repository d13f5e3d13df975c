#!/usr/bin/env bash
# Clang's thread-safety analysis of every source that uses our locks (GCC ignores the annotations).
# Needs clang and a configured build folder (compile_commands.json); only checks, compiles nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
clang=$(command -v clang++ || command -v clang++-14 || true)
[ -n "$clang" ] || { echo "clang++ is not installed" >&2; exit 1; }
rooms=(kernels engine training scheduler server bench)
files() { git grep -lE "$1" -- "${rooms[@]/%//*.$2}" ':!kernels/cuda/emulation/*'; }
# Sources that use locks themselves, and those of classes whose header does. (The emulation has std::source_location, which
# clang++-14 does not know.)
mapfile -t sources < <({
  files 'sync\.h|token_stream\.h|request_pool\.h|ledger\.h' cc
  files 'sync\.h' h | sed 's/\.h$/.cc/' | xargs ls 2> /dev/null
} | sort -u)
cuda=()
if nvcc=$(command -v nvcc); then
  cuda=(-isystem "$(dirname "$nvcc")/../include")
else
  mapfile -t sources < <(printf '%s\n' "${sources[@]}" | grep -v '/nccl_')
fi
failed=0
for source in "${sources[@]}"; do
  "$clang" -std=c++20 -fsyntax-only -Wthread-safety -Werror=thread-safety -Wno-everything -Wthread-safety \
    -DTREADLE_VERSION='""' -I. -I"$build" -I"$build/generated" "${cuda[@]}" "$source" || failed=1
done
[ "$failed" -eq 0 ] && echo "thread safety: ${#sources[@]} sources are clean"
exit "$failed"
