#!/usr/bin/env bash
# lint.sh: runs ruff over every Python file, and mypy over the package and a program that mentions
# each public name (check_types.py), with the settings of pyproject.toml; builds the site of the
# pages (mkdocs.yml), in which a link that leads nowhere is an error. If ruff, mypy or torch, whose
# types mypy reads, can't be installed, it warns and checks nothing; without mkdocs it warns and
# builds no site. With CI=true both are errors.
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
if scripts/venv.sh docs; then
  NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict || failed=1
else
  echo "lint.sh: WARNING: SKIPPED: no mkdocs; the site of the pages is not built" >&2
  [ "${CI:-}" != true ] || failed=1
fi
exit $failed
