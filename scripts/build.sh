#!/usr/bin/env bash
# build.sh: builds the program build/release/modicum. Prints every tenth step; build/release.log has
# all output.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build
build() {
  cmake --preset release && cmake --build --preset release --target modicum
}

if ! build 2>&1 | tee build/release.log | scripts/progress.sh; then
  tail -n 40 build/release.log >&2
  exit 1
fi
