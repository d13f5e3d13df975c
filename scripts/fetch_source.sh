#!/usr/bin/env bash
# Prints the folder of a Python source package's files, and fetches it into the user's cache first if it is not
# there. Nothing of the package is run.
# Usage: fetch_source.sh PACKAGE VERSION SHA256 BUILD_SYSTEM FILE...   (FILE: what is kept of it)
set -euo pipefail
package=$1 version=$2 hash=$3 build_system=$4
shift 4
cache=${XDG_CACHE_HOME:-$HOME/.cache}/treadle
folder=$cache/$package-$version-${hash:0:12}

if [ ! -d "$folder" ]; then
  echo "Fetching the source package of $package $version into $folder" >&2
  mkdir -p "$cache"
  partial=$(mktemp -d "$cache/fetch.XXXXXX")
  trap 'rm -rf "$partial"' EXIT
  # pip asks a source package's build system for its metadata, which would be fetched and run for that alone.
  # This one answers in its place.
  mkdir -p "$partial/python/$build_system" "$partial/sources"
  cat >"$partial/python/$build_system/build.py" <<PYTHON
import os
def prepare_metadata_for_build_wheel(folder, settings=None):
    name = "$package-$version.dist-info"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\nName: $package\nVersion: $version\n")
    return name
PYTHON
  echo "$package==$version --hash=sha256:$hash" >"$partial/requirements.txt"
  PYTHONPATH=$partial/python timeout 120 python3 -m pip download --quiet --disable-pip-version-check --no-deps \
    --no-binary :all: --no-build-isolation --require-hashes -d "$partial" -r "$partial/requirements.txt" >&2 || {
    echo "Could not fetch it with 'pip download --no-deps --no-binary :all: $package==$version'." >&2
    exit 1
  }
  tar -xzf "$partial/$package-$version.tar.gz" -C "$partial/sources" --strip-components 1 "${@/#/$package-$version/}"
  # Somebody else may have brought it meanwhile.
  mv -T "$partial/sources" "$folder" 2>/dev/null || [ -d "$folder" ]
fi
echo "$folder"
