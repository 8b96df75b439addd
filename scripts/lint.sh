#!/usr/bin/env bash
# lint.sh: runs ruff over every Python file, and mypy over the package and a program that mentions
# each public name (check_types.py), with the settings of pyproject.toml. If ruff, mypy or torch,
# whose types mypy reads, can't be installed, it warns and checks nothing; with CI=true that is an
# error.
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
.venv/bin/python scripts/check_types.py || failed=1
exit $failed
