#!/usr/bin/env bash
# bench.sh: runs every program in benchmarks/, one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."

shopt -s nullglob
programs=(benchmarks/*.py)
[ ${#programs[@]} -gt 0 ] || { echo "bench.sh: benchmarks/ holds no program" >&2; exit 1; }
for program in "${programs[@]}"; do
  scripts/stage.sh "$program" python3 "$program"
done
