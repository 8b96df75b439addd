#!/usr/bin/env bash
# packages.sh GROUP...: makes sure that the Debian packages of each GROUP (build, check, python,
# wheels) are installed. Root installs missing ones; for other users it prints the command to run
# and exits 1.
set -euo pipefail

packages_of() {
  case "$1" in
    build) echo "g++ cmake ninja-build pkg-config libsimdjson-dev libfmt-dev libcli11-dev" \
                "libxxhash-dev libhwy-dev libre2-dev libgtest-dev nettle-dev libjs-dygraphs" ;;
    check) echo "clang-14 libclang-rt-14-dev clang-format-14 clang-tidy-14 universal-ctags" \
                "python3" ;;
    python) echo "python3 python3-venv python3-dev strace e2fsprogs xfsprogs mount iproute2" \
                 "chromium fonts-dejavu-core" ;;
    wheels) echo "cmake ninja-build make m4 curl debootstrap qemu-user libc6-arm64-cross" ;;
    *) echo "packages.sh: no group '$1' (build, check, python, wheels)" >&2; return 2 ;;
  esac
}

is_installed() {
  [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# apt-get update first: an old package list would name versions that the server no longer has.
install() {
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@"
}

missing=()
for group in "$@"; do
  list=$(packages_of "$group")
  command -v dpkg-query >/dev/null || { echo "no Debian here; needed: $list" >&2; continue; }
  for package in $list; do
    is_installed "$package" || missing+=("$package")
  done
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ]; then
  install "${missing[@]}"
else
  echo "packages are missing; run:" >&2
  echo "  sudo apt-get update && sudo apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
