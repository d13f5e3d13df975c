#!/usr/bin/env bash
# Runs fuzz targets one after the other: scripts/fuzz.sh SECONDS [TARGET...], all by default. Ends
# with the first finding, which lies in build/fuzz/findings: an input that treadle_fuzz reads again
# (TREADLE_FUZZ_TARGET=NAME build/fuzz/tests/fuzz/treadle_fuzz FILE). What was learned stays in
# build/fuzz/corpus. TREADLE_FUZZ_SEED=1: not at random.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
folder=build/fuzz fuzz=build/fuzz/tests/fuzz/treadle_fuzz
[ $# -gt 0 ] || mapfile -t targets < <("$fuzz" --list)
mkdir -p $folder/findings
for target in "${@:-${targets[@]}}"; do
  echo "fuzz: $target for $seconds s"
  # 2 GiB: an input of at most 50 KB may not need what a small machine has not got. 25 s: hundreds
  # of times what the slowest honest input takes under the sanitizers.
  TREADLE_FUZZ_TARGET=$target ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 \
    "$fuzz" -seed="${TREADLE_FUZZ_SEED:-0}" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=25 \
    -print_final_stats=1 -verbosity=1 -artifact_prefix="$folder/findings/$target-" \
    "$folder/corpus/$target" > "$folder/findings/$target.log" 2>&1 ||
    { tail -60 "$folder/findings/$target.log"; exit 1; }
  grep -E "DONE|stat::(number_of_executed|average)" "$folder/findings/$target.log"
done
