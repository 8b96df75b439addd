#!/usr/bin/env bash
# tidy.sh [all]: runs clang-tidy over the C++ sources, except tests and bindings, that have changed
# since the commit in .ci/tidy-base (see changed_sources.py), or over all. Every finding of a check
# in .clang-tidy is an error; so is a missing include, since this build precompiles no headers.
# `all` without a finding, in a tree without changes, writes HEAD to .ci/tidy-base.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build
base=$([ "${1:-}" = all ] || cat .ci/tidy-base)
python3 scripts/changed_sources.py "$base" > build/tidy.sources
echo "$(wc -l < build/tidy.sources) sources${base:+ that differ from ${base:0:10}}"
[ -s build/tidy.sources ] || exit 0
cmake --preset dev -B build/tidy -DMODICUM_PRECOMPILE=OFF > build/configure-tidy.log 2>&1 ||
  { cat build/configure-tidy.log; exit 1; }
xargs -P "$(nproc)" -n 4 clang-tidy-14 -p build/tidy --quiet \
  < build/tidy.sources 2> build/tidy.log ||
  { grep -v 'warnings\? generated' build/tidy.log >&2; exit 1; }
if [ "${1:-}" = all ] && [ -z "$(git status --porcelain -- modicum .clang-tidy)" ]; then
  git rev-parse HEAD > .ci/tidy-base
fi
