# A target that needs Debian packages first installs them. Without root it prints the command for
# that, and fails.
.NOTPARALLEL:
.DEFAULT_GOAL := help
# Sources, pages and the tests' files are UTF-8 in any locale.
export PYTHONUTF8 := 1
.PHONY: help demo build test check tidy tidy-all bench soak conformance conformance-wheels format \
  wheel wheels release mutants generated-mutants clean

STAGES := asan plain skips python lint
CXX_SOURCES = $(wildcard $(shell git ls-files -co --exclude-standard '*.h' '*.cc'))

help:
	@echo 'make demo     loads a synthesised model into 4 ranks; prints predicted and measured memory'
	@echo 'make build    the release build: build/release/modicum'
	@echo 'make test     the tests, without those of soak; make test-STAGE runs one of:'
	@echo '              $(STAGES); make test-tsan those of threads with'
	@echo '              ThreadSanitizer (.ci/run does), make test-dev the C++ tests in build/dev'
	@echo 'make check    checks format, the table of rooms, sizes and pages, and runs clang-tidy'
	@echo 'make bench    the programs in benchmarks/'
	@echo 'make soak     hours: what make test leaves out; PART=NAME runs one part'
	@echo '              (scripts/soak.py --list names them)'
	@echo 'make conformance  tests newest packages and engines; writes benchmarks/CONFORMANCE.md'
	@echo 'make conformance-wheels  the same with the wheels of a release, from Python 3.10 to 3.13'
	@echo 'make mutants  applies each named mutation and expects its test to fail'
	@echo 'make wheel    the Python wheel, in dist/'
	@echo 'make wheels   the wheels and the sdist of a release, in dist/wheels/'
	@echo 'make release VERSION=X.Y.Z  the tag of a release, if the commit is ready for it'
	@echo 'make format   formats the C++ sources'
	@echo 'make clean    removes build/ and dist/'

build:
	@scripts/packages.sh build
	@scripts/stage.sh 'build' scripts/build.sh

demo: build
	@scripts/stage.sh 'demo' scripts/demo.sh build/release/modicum

test: begin-venv $(STAGES:%=test-%)

# Installs Python packages in the background, while C++ is compiled. A later call of scripts/venv.sh
# waits until it has finished.
begin-venv:
	@scripts/packages.sh build python
	@mkdir -p build; scripts/venv.sh test wheel lint docs > build/venv.log 2>&1 &

test-dev test-asan test-plain test-tsan test-asan-all test-tsan-all: test-%:
	@scripts/packages.sh build
	@scripts/stage.sh 'test, $*' scripts/test.sh $*

test-clang test-fuzz: test-%:
	@scripts/packages.sh build check python
	@scripts/stage.sh 'test, $*' scripts/test.sh $*

test-skips:
	@scripts/stage.sh 'test, skips' scripts/test.sh skips

test-lint:
	@scripts/packages.sh python
	@scripts/stage.sh 'test, lint' scripts/lint.sh

test-python:
	@scripts/packages.sh build python
	@scripts/stage.sh 'test, python' scripts/test.sh python

test-elsewhere:
	@scripts/packages.sh build check python
	@scripts/stage.sh 'test, elsewhere' scripts/elsewhere.sh

check: check-style tidy

check-style:
	@scripts/packages.sh check
	@scripts/stage.sh 'check, format' clang-format-14 --dry-run -Werror $(CXX_SOURCES)
	@scripts/stage.sh 'check, rules' python3 scripts/check.py
	@scripts/stage.sh 'check, rules of Python' python3 scripts/check_python.py
	@scripts/stage.sh 'check, words' python3 scripts/check_words.py
	@scripts/stage.sh 'check, tests of the rules' python3 scripts/check_test.py
	@scripts/stage.sh 'check, tests of the rules of Python' python3 scripts/check_python_test.py
	@scripts/stage.sh 'check, tests of the rules of words' python3 scripts/check_words_test.py
	@scripts/stage.sh 'check, tests of the rules of names' python3 scripts/check_names_test.py
	@scripts/stage.sh 'check, tests of the rules of types' python3 scripts/check_types_test.py
	@scripts/stage.sh 'check, tests of the claims' python3 scripts/claims_test.py
	@scripts/stage.sh 'check, tests of the rules of skips' python3 scripts/check_skips_test.py
	@scripts/stage.sh 'check, tests of changed_sources' python3 scripts/changed_sources_test.py
	@scripts/stage.sh 'check, tests of soak' python3 scripts/soak_test.py
	@scripts/stage.sh 'check, tests of release' python3 scripts/release_test.py
	@scripts/stage.sh 'check, tests of mutants' python3 scripts/mutants_test.py
	@scripts/stage.sh 'check, tests of same_as' python3 scripts/same_as_test.py

tidy:
	@scripts/packages.sh build check
	@scripts/stage.sh 'check, clang-tidy' scripts/tidy.sh

tidy-all:
	@scripts/packages.sh build check
	@scripts/stage.sh 'check, clang-tidy of all' scripts/tidy.sh all

bench: build
	@scripts/packages.sh python
	@scripts/bench.sh

# `make soak` runs all parts, and PART='kills devices' these. AGAIN=1 also runs parts that
# benchmarks/SOAK.md says have passed at this commit.
soak:
	@scripts/packages.sh build check python wheels
	@python3 scripts/soak.py $(PART) $(if $(AGAIN),--again)

conformance:
	@scripts/packages.sh build python
	@scripts/venv.sh test wheel
	@scripts/wheel.sh build/python install
	@scripts/stage.sh 'conformance' python3 scripts/conformance.py

conformance-wheels:
	@scripts/packages.sh python wheels
	@scripts/venv.sh test
	@scripts/wheels.sh "$$(uname -m)"
	@scripts/stage.sh 'conformance of wheels' python3 scripts/conformance.py --wheels

mutants:
	@scripts/packages.sh build python
	@scripts/venv.sh test wheel
	@scripts/wheel.sh build/python
	@scripts/stage.sh 'mutants' python3 scripts/mutants.py

generated-mutants:
	@scripts/packages.sh build python
	@scripts/venv.sh test wheel
	@scripts/wheel.sh build/python
	@scripts/stage.sh 'generated mutants' python3 scripts/mutants_generated.py

wheel:
	@scripts/packages.sh build python
	@scripts/wheel.sh dist

# VERSION=X.Y.Z: the signed tag, if the commit is ready for it.
release:
	@python3 scripts/release.py '$(VERSION)'

wheels:
	@scripts/packages.sh python wheels
	@scripts/stage.sh 'wheels' scripts/wheels.sh

format:
	@scripts/packages.sh check
	@clang-format-14 -i $(CXX_SOURCES)

clean:
	rm -rf build dist
