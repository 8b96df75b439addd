#!/usr/bin/env bash
# wheel.sh DIRECTORY [install]: builds the Python wheel into DIRECTORY, in place of an older one,
# and installs it into .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/venv.sh wheel
mkdir -p "$1"
rm -f "$1"/modicum-*.whl
.venv/bin/python -m pip --disable-pip-version-check wheel . --quiet --no-deps \
  --no-build-isolation --config-settings=cmake.define.MODICUM_PRECOMPILE=ON --wheel-dir "$1"
ls "$1"/modicum-*.whl
if [ "${2:-}" = install ]; then
  .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-index --no-deps \
    --force-reinstall "$1"/modicum-*.whl
fi
