#!/usr/bin/env bash
# build/treadle as clients see it that are not ours: with packages of the registry, pinned by hash
# and kept in a cache, and in the distribution's browser. Arguments: which of tests/clients; without
# any, the clients of HTTP.
set -euo pipefail
cd "$(dirname "$0")/.."

# packages FILE: what a requirements file names, installed; prints where.
packages() {
  local at
  at=${XDG_CACHE_HOME:-$HOME/.cache}/treadle/$(basename "$1" .txt)-$(sha256sum "$1" | cut -c1-12)
  if [ ! -d "$at" ]; then
    rm -rf "$at.partial"
    PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m pip install --quiet --require-hashes \
      --target "$at.partial" -r "$1" >&2
    mv "$at.partial" "$at"
  fi
  echo "$at"
}

model=$(scripts/fetch_model.sh)
[ $# -gt 0 ] || set -- openai agents json_schema langchain gateway page
for client; do
  requirements=tests/clients/${client}_requirements.txt path=
  [ ! -f "$requirements" ] || path=$(packages "$requirements")
  [ "$client" != page ] || command -v chromedriver >/dev/null || scripts/install_packages.sh chromium chromium-driver
  PYTHONPATH=$path PYTHONDONTWRITEBYTECODE=1 timeout 300 \
    python3 "tests/clients/${client}_client.py" build/treadle "$model"
done
