#!/usr/bin/env bash
# venv.sh GROUP...: makes .venv and installs scripts/requirements-GROUP.txt of each group into it.
# torch is large and not to be had everywhere: without it the other packages are installed and the
# tests that need it skip, saying so. With CI=true it is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

[ -x .venv/bin/python ] || python3 -m venv .venv

pip_install() { .venv/bin/python -m pip install --quiet "$@"; }

install_without_torch() {
  if [ "${CI:-}" = true ]; then
    echo "venv.sh: $1 can't be installed" >&2
    return 1
  fi
  echo "venv.sh: WARNING: $1 can't be installed as it is; going on without torch." >&2
  grep -v '^torch==' "$1" > build/requirements-without-torch.txt
  pip_install -r build/requirements-without-torch.txt
}

mkdir -p build
for group in "$@"; do
  requirements="scripts/requirements-$group.txt"
  stamp=".venv/installed-$group.txt"
  cmp -s "$requirements" "$stamp" && continue
  if pip_install -r "$requirements"; then
    cp "$requirements" "$stamp"
  else
    install_without_torch "$requirements"
  fi
done
