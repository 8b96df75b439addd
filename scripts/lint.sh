#!/usr/bin/env bash
# lint.sh: ruff over every Python file, mypy over the package; their settings are in pyproject.toml.
# Both come from a Python index, and mypy reads the types of torch: without an index this warns and
# checks nothing. With CI=true that is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! scripts/venv.sh test wheel lint || ! .venv/bin/python -c 'import torch'; then
  echo "lint.sh: WARNING: SKIPPED: ruff, mypy or torch can't be installed" >&2
  [ "${CI:-}" != true ]
  exit
fi
failed=0
.venv/bin/ruff check . || failed=1
.venv/bin/ruff format --check . || failed=1
.venv/bin/mypy --python-executable .venv/bin/python || failed=1
exit $failed
