#!/usr/bin/env bash
# bench.sh: runs every program in benchmarks/, one after the other, against the wheel, which .venv
# gets alongside the rivals.
set -euo pipefail
cd "$(dirname "$0")/.."

shopt -s nullglob
programs=(benchmarks/*.py)
[ ${#programs[@]} -gt 0 ] || { echo "bench.sh: benchmarks/ holds no program" >&2; exit 1; }

scripts/venv.sh test wheel bench
scripts/wheel.sh build/python install
for program in "${programs[@]}"; do
  scripts/stage.sh "$program" .venv/bin/python "$program"
done
