#!/usr/bin/env bash
# venv.sh GROUP...: makes .venv and installs scripts/requirements-GROUP.txt of each group into it.
# Then it installs scripts/requirements-GROUP-on-torch.txt, if there is one: packages whose build
# needs the torch of the group. If torch can't be installed, the other packages are installed
# without it, and the tests that need torch are skipped with a message. With CI=true that is an
# error.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
export DS_BUILD_OPS=0 # only deepspeed's Python code is needed, no kernels

# A second venv.sh waits for the first and then finds its packages installed.
mkdir -p build
exec 9> build/venv.lock
flock 9

[ -x .venv/bin/python ] || python3 -m venv .venv

pip_install() { .venv/bin/python -m pip install --quiet "$@"; }

fail_in_ci() { # REQUIREMENTS
  [ "${CI:-}" = true ] || return 0
  echo "venv.sh: $1 can't be installed" >&2
  exit 1
}

install_without_torch() { # REQUIREMENTS
  fail_in_ci "$1"
  echo "venv.sh: WARNING: $1 can't be installed as it is; going on without torch." >&2
  grep -v '^torch==' "$1" > build/requirements-without-torch.txt
  pip_install -r build/requirements-without-torch.txt
}

install_on_torch() { # REQUIREMENTS
  .venv/bin/python -c 'import torch' 2> build/no-torch.log &&
    pip_install --no-build-isolation -r "$1" && return
  fail_in_ci "$1"
  echo "venv.sh: WARNING: $1 can't be installed; going on without it." >&2
  return 1
}

install() { # REQUIREMENTS COMMAND...
  local requirements=$1 stamp=.venv/installed-${1#scripts/requirements-}
  shift
  cmp -s "$requirements" "$stamp" && return
  if "$@" "$requirements"; then cp "$requirements" "$stamp"; else return 1; fi
}

for group in "$@"; do
  requirements="scripts/requirements-$group.txt"
  on_torch="scripts/requirements-$group-on-torch.txt"
  install "$requirements" pip_install -r || install_without_torch "$requirements"
  [ ! -f "$on_torch" ] || install "$on_torch" install_on_torch || true
done
