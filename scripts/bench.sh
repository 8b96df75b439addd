#!/usr/bin/env bash
# bench.sh [PROGRAM...]: installs the wheel and the rivals into .venv, then runs these programs of
# benchmarks/ one after the other; by default all but parity.py, which trains models for an hour,
# and device.py, which needs a GPU. The programs that make README.md's figures come first. The run
# is recorded in benchmarks/RESULTS.md. A program may have arguments: "step.py --rounds 3". With
# PRIME_RL, a checkout of PrimeIntellect-ai/prime-rl, step.py measures that optimizer, too.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- loaders.py picture.py systems.py job.py strategies.py \
  "step.py${PRIME_RL:+ --prime-rl $PRIME_RL}" forks.py saving.py small_runs.py scale.py hub.py \
  engines.py watching.py

scripts/venv.sh test wheel bench
scripts/wheel.sh build/python install
run=build/bench-run.tsv
: > "$run"
for program in "$@"; do
  read -ra words <<< "$program"
  file=benchmarks/${words[0]}
  [ -f "$file" ] || { echo "bench.sh: no program $file" >&2; exit 2; }
  begin=$(date +%s)
  scripts/stage.sh "$file" .venv/bin/python "$file" "${words[@]:1}"
  printf '%s\t%s\t%s\n' "${words[0]%.py}" "$begin" "$(date +%s)" >> "$run"
done
.venv/bin/python benchmarks/harness/record.py "$run"
