# Sourced: python_of VERSION prints the path of a CPython of this version, with its headers.
# shellcheck shell=bash
python_of() {
  local python
  for python in $(type -ap "python$1") "$HOME/.pyenv/versions/$1".*/bin/python \
    "/opt/python/cp${1/./}-cp${1/./}/bin/python"; do
    if "$python" -c 'import ensurepip' 2> /dev/null; then
      echo "$python"
      return
    fi
  done
  echo "no Python $1 on PATH, in ~/.pyenv/versions or in /opt/python" >&2
  return 1
}
