#!/usr/bin/env bash
# wheels.sh [ARCHITECTURE...]: builds the wheels and the sdist of a release in dist/wheels, and
# removes older ones. By default wheels for x86_64 and aarch64 (docs/internals/wheels.md). Builds
# nothing if dist/wheels has those of this commit and the tree is clean, but for pages that soak.py
# and conformance.py write and that no wheel has. Prints every tenth step of the build;
# build/wheels/ARCHITECTURE/log has all output.
set -euo pipefail
cd "$(dirname "$0")/.."

glibc=2.28
pythons="3.12 3.11 3.10" # the first one's wheel is for later Pythons, too
architectures="${*:-x86_64 aarch64}"
out=dist/wheels
bin="$PWD/.venv/bin"
site="$PWD/build/wheels/site"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# The same bytes in each build of a commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
# With a base directory ccache makes paths relative, which -ffile-prefix-map then does not map.
export CCACHE_BASEDIR=

. scripts/pythons.sh

# The build's packages, which all Pythons share: for another copy scikit-build-core would compile
# everything again. Those of the oldest Python are for later ones, too.
install_site() {
  cmp -s scripts/requirements-wheel.txt "$site/installed" && return
  rm -rf "$site"
  "$(python_of "${pythons##* }")" -m pip install --quiet --target "$site" \
    -r scripts/requirements-wheel.txt
  cp scripts/requirements-wheel.txt "$site/installed"
}

# Programs without arguments, as CMake wants them.
make_compilers() { # ARCHITECTURE
  local folder=build/wheels/$1/bin zig tool target
  zig=$("$bin/python" -c 'import ziglang; print(ziglang.__path__[0])')/zig
  mkdir -p "$folder"
  for tool in cc c++ ar ranlib; do
    case $tool in c*) target="-target $1-linux-gnu.$glibc" ;; *) target= ;; esac
    printf '#!/bin/sh\nexec "%s" %s %s "$@"\n' "$zig" "$tool" "$target" > "$folder/new"
    # ccache compares times.
    cmp -s "$folder/new" "$folder/$tool" || install "$folder/new" "$folder/$tool"
  done
}

# All Pythons share a build folder, since only the module depends on them. scikit-build-core finds
# no ABI for a platform named manylinux, so the wheel is for linux until its tag is changed.
build() { # ARCHITECTURE PYTHON
  local folder=$PWD/build/wheels/$1 define settings=() zig
  zig=$("$bin/python" -c 'import ziglang; print(ziglang.__path__[0])')
  for define in "CMAKE_C_COMPILER=$folder/bin/cc" "CMAKE_CXX_COMPILER=$folder/bin/c++" \
    "CMAKE_AR=$folder/bin/ar" "CMAKE_RANLIB=$folder/bin/ranlib" CMAKE_EXE_LINKER_FLAGS=-s \
    "CMAKE_CXX_FLAGS=-g0 -fno-sanitize=all -ffile-prefix-map=$PWD=." \
    CMAKE_SYSTEM_NAME=Linux "CMAKE_SYSTEM_PROCESSOR=$1" MODICUM_PRECOMPILE=ON \
    "MODICUM_LIBCXX=$zig/lib/libcxx"; do
    settings+=("cmake.define.$define")
  done
  _PYTHON_HOST_PLATFORM="linux-$1" \
    SETUPTOOLS_EXT_SUFFIX=".cpython-${2/./}-$1-linux-gnu.so" PYTHONPATH=$site \
    "$(python_of "$2")" -c 'import sys, scikit_build_core.build as backend
settings = dict(one.split("=", 1) for one in sys.argv[2:])
backend.build_wheel(sys.argv[1], settings)' \
    "$out" "build-dir=$folder/build" "${settings[@]}" 2>&1 &&
    "$bin/wheel" tags --remove --platform-tag "manylinux_${glibc/./_}_$1" \
      "$out"/modicum-*-linux_"$1".whl
}

# The tag is true: no newer symbol of glibc, no library that another Linux may lack.
check() { # ARCHITECTURE
  local wheel
  for wheel in "$out"/modicum-*_"$1".whl; do
    "$bin/auditwheel" show "$wheel" | tee "build/wheels/$1/audit"
    grep -q "\"manylinux_${glibc/./_}_$1\"" "build/wheels/$1/audit" # not the wheel's name
    case $wheel in *-abi3-*) "$bin/abi3audit" --strict --report "$wheel" ;; esac
  done
}

# Prints the commit if the tree is clean.
commit_of_tree() {
  [ -n "$(git status --porcelain -- . ':!benchmarks/*.md')" ] || git rev-parse HEAD
}
commit=$(commit_of_tree)

has_been_built() { # ARCHITECTURE...
  local of built architecture
  read -r of built 2> /dev/null < "$out/commit" && [ "$of" = "$commit" ] || return
  for architecture in "$@"; do
    case " $built " in *" $architecture "*) ;; *) return 1 ;; esac
  done
}

# shellcheck disable=SC2086
if has_been_built $architectures; then
  echo "$out has the wheels of $commit"
  exit
fi
# scikit-build-core would copy them into the wheels.
if git ls-files --others modicum/python | grep -v __pycache__; then
  echo "wheels.sh: expected no files that git does not have, got these" >&2
  exit 1
fi
scripts/venv.sh wheels
mkdir -p "$out"
rm -f "$out"/modicum-* "$out/commit"
install_site
for architecture in $architectures; do
  make_compilers "$architecture"
  for python in $pythons; do
    if ! build "$architecture" "$python" | tee "build/wheels/$architecture/log" |
      scripts/progress.sh; then
      tail -n 40 "build/wheels/$architecture/log" >&2
      exit 1
    fi
  done
  check "$architecture"
done
PYTHONPATH=$site "$(python_of "${pythons##* }")" -c \
  "import scikit_build_core.build as backend; backend.build_sdist('$out')"
ls -l "$out"
[ "$(commit_of_tree)" != "$commit" ] || echo "$commit $architectures" > "$out/commit"
