#!/usr/bin/env bash
# Runs a compilation by nvcc with -Xptxas=-v, and leaves what ptxas says of each kernel in OBJECT.ptxas instead of on the terminal:
# registers, barriers, spills (tests/kernels/cuda/runtime/kernel_needs_test.cc reads it).
#   ptxas_report.sh COMPILER ARGUMENT... -o OBJECT ARGUMENT...
set -uo pipefail
object= previous=
for argument in "$@"; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
said=$(mktemp)
trap 'rm -f "$said"' EXIT
"$@" 2>"$said"
code=$?
about_kernels='^ptxas info|bytes stack frame'
[ -z "$object" ] || grep -E "$about_kernels" "$said" >"$object.ptxas"
grep -vE "$about_kernels" "$said" >&2
exit "$code"
