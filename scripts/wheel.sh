#!/usr/bin/env bash
# wheel.sh DIRECTORY [install]: builds the Python wheel of this machine, with Debian's libraries, in
# DIRECTORY and removes an older one. With `install` it also installs the wheel into .venv. Prints
# every tenth step of the build; build/wheel.log has all output. (wheels.sh builds a release.)
set -euo pipefail
cd "$(dirname "$0")/.."

build() { # DIRECTORY
  .venv/bin/python -m pip --disable-pip-version-check wheel . --verbose --no-deps \
    --no-build-isolation --config-settings=cmake.define.MODICUM_PRECOMPILE=ON \
    --config-settings=cmake.define.MODICUM_FETCH=OFF --wheel-dir "$1" 2>&1
}

scripts/venv.sh wheel
mkdir -p "$1" build
rm -f "$1"/modicum-*.whl
if ! build "$1" | tee build/wheel.log | scripts/progress.sh; then
  tail -n 40 build/wheel.log >&2
  exit 1
fi
ls "$1"/modicum-*.whl
if [ "${2:-}" = install ]; then
  .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-index --no-deps \
    --force-reinstall "$1"/modicum-*.whl
fi
