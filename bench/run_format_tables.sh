#!/usr/bin/env bash
# Reproduces, on one model and one text, in order and sign, the tables of Dettmers' thesis about number formats:
#
#   bench/run_format_tables.sh [--quick] [OUT_DIR]
#
# (a) LLM.int8(), Table 2.1: ways to quantize weights and activations to 8 bits, on the model and on a copy with planted outlier features;
# (b) k-bit inference, chapter 3: KL divergence against total bits, for data types and block sizes; (c) QLoRA, Table 5.2: 4-bit types.
# The model's weights as stored, decoded to 32 bits, stand in for an unquantized model. Writes JSON lines, DATE-formats.md, and PNG plots
# where matplotlib is installed. --quick: fewer tokens and formats, to try the script.
# Environment: MODEL (default: the default model), TEXT (default: bench/fetch_text.sh), MAX_TOKENS, THREADS, PYTHON, TREADLE,
# TREADLE_BENCH.
set -euo pipefail
cd "$(dirname "$0")/.."
quick=
[ "${1:-}" != --quick ] || { quick=1; shift; }
out=${1:-build/format_tables}
model=${MODEL:-$(scripts/fetch_model.sh)}
text=${TEXT:-$(bench/fetch_text.sh)}
python=${PYTHON:-python3}
treadle=${TREADLE:-build/treadle}
treadle_bench=${TREADLE_BENCH:-build/treadle-bench}
tokens=${MAX_TOKENS:-${quick:+512}}
tokens=${tokens:-3072}
for program in "$treadle" "$treadle_bench"; do
  [ -x "$program" ] || { echo "$program is missing: run 'make build bench' first" >&2; exit 1; }
done
mkdir -p "$out"
common=(--model "$model" --text "$text" --max-tokens "$tokens" --window 512 --threads "${THREADS:-0}" --json)
started=$SECONDS

weights() { for name in "$@"; do printf -- '--weights\n%s\n' "$name"; done; }
compare() {  # FILE FORMAT ...
  local file=$1
  shift
  mapfile -t flags < <(weights "$@")
  "$treadle_bench" accuracy "${common[@]}" "${flags[@]}" >"$out/$file.part" 2>>"$out/log"
  mv "$out/$file.part" "$out/$file"
}
: >"$out/log"

echo "(c) 4-bit types"
compare four_bits.jsonl kbit-int4:64 kbit-float4e2:64 kbit-float4e3:64 fp4 nf4 nf4-dq

echo "(b) k-bit data types and block sizes"
# Exponent bits of the float type by width.
exponents=([3]=2 [4]=2 [5]=2 [6]=3 [7]=3 [8]=3)
formats=()
widths="3 4 5 6 7 8"
[ -z "$quick" ] || widths="3 4 5"
for bits in $widths; do
  for type in "int$bits" "float${bits}e${exponents[$bits]}" "dynamic$bits" "quantile$bits"; do
    blocks=64
    [ -n "$quick" ] || [ "$bits" -gt 5 ] || [[ $type == dynamic* ]] || blocks="64 256 1024 tensor"
    for block in $blocks; do formats+=("kbit-$type:$block"); done
  done
done
compare kbit.jsonl "${formats[@]}"

echo "(a) 8 bits: the model as it is, then with planted outlier features"
"$treadle_bench" int8 "${common[@]}" >"$out/int8.jsonl" 2>>"$out/log"
"$treadle_bench" int8 "${common[@]}" --plant-outliers >"$out/int8_planted.jsonl" 2>>"$out/log"

cat >"$out/about.json" <<JSON
{"date": "$(date +%F)", "processor": "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)", "cpus": $(nproc),
 "treadle": "$("$treadle" --version)", "model": "$(basename "$model")", "model_sha256": "$(sha256sum "$model" | cut -d' ' -f1)",
 "text": "$(basename "$text")", "text_sha256": "$(sha256sum "$text" | cut -d' ' -f1)", "seconds": $((SECONDS - started))}
JSON
"$python" bench/format_tables.py "$out"
