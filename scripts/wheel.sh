#!/usr/bin/env bash
# wheel.sh DIRECTORY: builds the Python wheel into DIRECTORY, in place of an older one.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/venv.sh wheel
mkdir -p "$1"
rm -f "$1"/modicum-*.whl
.venv/bin/python -m pip --disable-pip-version-check wheel . --quiet --no-deps \
  --no-build-isolation --wheel-dir "$1"
ls "$1"/modicum-*.whl
