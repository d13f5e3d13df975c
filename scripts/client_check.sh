#!/usr/bin/env bash
# build/treadle as clients see it that are not ours: with packages of the registry, pinned, by hash but for the largest,
# and kept in a cache, and in the distribution's browser. Arguments: which of tests/clients; without any, the clients of
# HTTP. `hour` plays what an application does in its first hour, up to guidellm, lm-eval (6 GB of packages) and aiperf.
set -euo pipefail
cd "$(dirname "$0")/.."

# packages FILE: what a requirements file names, installed; prints where.
packages() {
  local at hashes=--require-hashes
  at=${XDG_CACHE_HOME:-$HOME/.cache}/treadle/$(basename "$1" .txt)-$(sha256sum "$1" | cut -c1-12)
  grep -q -- --hash "$1" || hashes=
  if [ ! -d "$at" ]; then
    rm -rf "$at.partial"
    PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m pip install --quiet $hashes \
      --target "$at.partial" -r "$1" >&2 && mv "$at.partial" "$at" || return 1
  fi
  echo "$at"
}

model=$(scripts/fetch_model.sh)
[ $# -gt 0 ] || set -- openai agents instructor json_schema langchain gateway page
[ "$*" != hour ] || set -- openai agents langchain instructor evaluations aiperf
missing=()
for client; do
  requirements=tests/clients/${client}_requirements.txt path=
  if [ -f "$requirements" ] && ! path=$(packages "$requirements"); then
    echo "MISSING $client: its packages cannot be installed"
    missing+=("$client")
    continue
  fi
  [ "$client" != page ] || command -v chromedriver >/dev/null || scripts/install_packages.sh chromium chromium-driver
  PATH=${path:+$path/bin:}$PATH PYTHONPATH=$path PYTHONDONTWRITEBYTECODE=1 timeout 600 \
    python3 "tests/clients/${client}_client.py" build/treadle "$model"
done
[ ${#missing[@]} -eq 0 ]
