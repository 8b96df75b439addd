#!/usr/bin/env bash
# tidy.sh: runs clang-tidy over every C++ source except tests and bindings. Every finding of a check
# in .clang-tidy is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build
cmake --preset dev -B build/tidy -DMODICUM_PRECOMPILE=OFF > build/configure-tidy.log 2>&1 ||
  { cat build/configure-tidy.log; exit 1; }
git ls-files -co --exclude-standard 'modicum/*.cc' ':!modicum/python' | grep -v '_test\.cc$' |
  while read -r source; do [ ! -f "$source" ] || echo "$source"; done |
  xargs -P "$(nproc)" -n 4 clang-tidy-14 -p build/tidy --quiet 2> build/tidy.log ||
  { grep -v 'warnings\? generated' build/tidy.log >&2; exit 1; }
