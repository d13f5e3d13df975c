#!/usr/bin/env bash
# Prints the Debian packages whose libraries a binary links, one a line: what an image or a machine
# needs to run it. Usage: runtime_packages.sh BINARY
set -euo pipefail
binary=${1:?usage: runtime_packages.sh BINARY}
ldd "$binary" | awk '$2 == "=>" {print $3}' | xargs --no-run-if-empty realpath |
  # Packages own files under /usr/lib; an unmerged dpkg database may still say /lib.
  while read -r library; do
    dpkg-query --search "$library" 2>/dev/null || dpkg-query --search "${library#/usr}"
  done | cut -d: -f1 | sort -u
