#!/usr/bin/env bash
# test.sh STAGE [ARGUMENT...]: builds what one stage of the tests needs and runs it.
#   asan    every test program with the address and undefined behaviour sanitizers, except in
#           AdamW's kernels
#   plain   without sanitizers: the test programs that skip or shorten tests under sanitizers
#   tsan    the test programs of the rooms that start threads, with the thread sanitizer
#   skips   fails if asan and plain, which have run, both skipped a test
#   python  the tests under tests/ with the wheel, which is installed into .venv
#   dev     every test program without sanitizers
#   asan-all, tsan-all  every test program with these sanitizers; asan-all also AdamW's kernels
#   clang   compiles everything, the Python module included, with Clang 14
#   fuzz    fuzzes every parser for FUZZ_S seconds (default 60), with Clang's libFuzzer
#   python-soak  the tests under tests/ that are marked soak; ARGUMENTs are for pytest
set -euo pipefail
cd "$(dirname "$0")/.."

# Their tests skip themselves under sanitizers (kIsSanitized); those of kernels try fewer values
# there, and no AVX-512 (CMakeLists.txt).
plain_rooms="base probe memory kernels optim"
threaded_rooms="base memory plan optim ranks watch stream"
# Left out with the thread sanitizer: these tests take minutes there, and test values, not threads.
of_values='^(LoadFp8\.(Every|Experts)|LoadExact\.OddSizes)'
jobs=$(nproc)

configure_and_build() {  # PRESET [TARGET...]
  local preset=$1
  shift
  cmake --preset "$preset" ${kernels:+"$kernels"} > "build/configure-$preset.log" 2>&1 ||
    { cat "build/configure-$preset.log"; return 1; }
  cmake --build --preset "$preset" -j "$jobs" ${1:+--target "$@"}
}

# Runs tests of a build. The report of the stage is build/ctest-STAGE.xml.
run_ctest() {  # STAGE PRESET [CTEST ARGUMENT...]
  local report="$PWD/build/ctest-$1.xml" preset=$2
  shift 2
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --timeout 300 \
    --output-junit "$report" -j "$jobs" "$@" |
    grep --line-buffered -v -E '^ *Start +[0-9]+:|Passed +[0-9.]+ sec$'
}

# GCC 12's thread sanitizer can't map its shadow memory if addresses are randomised by too many
# bits. The build runs test programs to list their tests, so it needs this, too.
without_randomisation() {
  if setarch "$(uname -m)" -R true 2>/dev/null; then
    setarch "$(uname -m)" -R "$0" "$@"
  else
    "$0" "$@"
  fi
}

run_pytest() {  # ARGUMENT...
  .venv/bin/python -m pytest "$@"
}

test_files() {
  find tests -name 'test_*.py' -not -path 'tests/gpu/*' | sort
}

# Every test file. Those that take minutes come first, so that none of them is left for the end.
longest_first() {
  local long="torch/fronts/test_optimizers package/test_first_hour torch/optim/test_deepspeed
    torch/fronts/test_engine_strategies torch/fronts/test_accelerate_memory
    torch/load/test_training torch/optim/test_adamw_ranks torch/fronts/test_engines
    torch/load/test_strategies recipes/test_value_oracle package/test_wheel"
  # shellcheck disable=SC2086
  { printf 'tests/%s.py\n' $long; test_files; } | awk '!seen[$0]++'
}

programs_of() {  # ROOM...
  local room
  for room in "$@"; do
    compgen -G "modicum/$room/*_test.cc" >/dev/null && echo "modicum_${room}_test"
  done
  return 0
}

test_rooms() {  # STAGE PRESET ROOMS [CTEST ARGUMENT...]: builds and runs these rooms' programs
  local stage=$1 preset=$2 rooms=$3
  shift 3
  # shellcheck disable=SC2046,SC2086
  configure_and_build "$preset" $(programs_of $rooms)
  run_ctest "$stage" "$preset" -L "^(${rooms// /|})\$" "$@"
}

mkdir -p build
case "${1:-}" in dev | plain | asan | asan-all | tsan | tsan-all) rm -f "build/ctest-$1.xml" ;; esac
case "${1:-}" in
  dev)
    configure_and_build dev
    run_ctest dev dev ;;
  plain) test_rooms plain dev "$plain_rooms" ;;
  asan)
    kernels=-DMODICUM_SANITIZE_KERNELS=OFF
    test_rooms asan asan "$(basename -a modicum/*/ | paste -sd ' ')" ;;
  asan-all)
    kernels=-DMODICUM_SANITIZE_KERNELS=ON
    configure_and_build asan
    run_ctest asan-all asan ;;
  tsan | tsan-all) without_randomisation "with-$1" ;;
  with-tsan) test_rooms tsan tsan "$threaded_rooms" -E "$of_values" ;;
  with-tsan-all)
    configure_and_build tsan
    run_ctest tsan-all tsan ;;
  skips) python3 scripts/check_skips.py build/ctest-{asan,plain}.xml ;;
  clang)
    # Only the warnings are needed, so nothing is optimised.
    scripts/venv.sh wheel
    cmake --preset dev -B build/clang -DCMAKE_CXX_COMPILER=clang++-14 \
      -DCMAKE_CXX_FLAGS=-O0 -DCMAKE_BUILD_TYPE= -DMODICUM_PRECOMPILE=OFF \
      -DMODICUM_PYTHON=ON -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
      > build/configure-clang.log 2>&1 ||
      { cat build/configure-clang.log; exit 1; }
    cmake --build build/clang -j "$jobs" ;;
  fuzz)
    kernels=-DMODICUM_SANITIZE_KERNELS=OFF
    parsers=$(basename -a tests/fixtures/fuzz/*/)
    # shellcheck disable=SC2046
    configure_and_build fuzz $(printf '%s_fuzz ' $parsers)
    for parser in $parsers; do
      mkdir -p "build/fuzz/found/$parser"
      "build/fuzz/${parser}_fuzz" -max_total_time="${FUZZ_S:-60}" -max_len=4096 -rss_limit_mb=1024 \
        -verbosity=0 -print_final_stats=1 -dict=tests/fixtures/fuzz/tokens.dict \
        -artifact_prefix="build/fuzz/$parser-" "build/fuzz/found/$parser" \
        "tests/fixtures/fuzz/$parser" 2>&1 | grep --line-buffered -v '# Uses:'
    done ;;
  python)
    scripts/venv.sh test wheel
    scripts/wheel.sh build/python install
    failed=0
    # Three workers for two CPUs, since tests wait half of the time for processes and disks (four
    # are no faster). One worker runs all tests of a file (loadfile), since they share fixtures.
    # shellcheck disable=SC2046
    run_pytest $(longest_first) -m "not alone and not soak" \
      --numprocesses $(((3 * jobs + 1) / 2)) \
      --dist loadfile --no-loadscope-reorder --durations 15 || failed=1
    test_files | xargs grep -l 'mark\.alone' | xargs -n 1 -P "$jobs" "$0" python-alone || failed=1
    exit $failed ;;
  python-alone)  # FILE: its tests that are marked alone, with the wheel that is installed
    log="build/alone-$(basename "$2" .py).log"
    status=0
    run_pytest "$2" -m "alone and not soak" > "$log" 2>&1 || status=$?
    cat "$log"  # at once, since another file's tests run at the same time
    [ $status -eq 5 ] && status=0  # all of the file's tests are soak tests
    exit $status ;;
  python-soak)
    scripts/venv.sh test wheel
    scripts/venv.sh docs || echo "test.sh: WARNING: SKIPPED: no mkdocs; no test opens the site" >&2
    scripts/wheel.sh build/python install
    shift
    run_pytest -m soak "${@:-tests}" ;;
  *)
    sed -n '2,13s/^# //p' "$0" >&2
    exit 2 ;;
esac
