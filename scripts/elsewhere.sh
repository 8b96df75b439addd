#!/usr/bin/env bash
# elsewhere.sh: runs the style checks, the C++ tests and the Python tests as a stranger might: in a
# shallow clone of the commit HEAD, in a path with spaces, with a HOME that can't be written to,
# another TMPDIR, umask, locale and time zone, and a file that git does not know. Tests that compile
# DeepSpeed's extensions are skipped there: torch can't link them in such a path.
set -euo pipefail
cd "$(dirname "$0")/.."

place="$PWD/build/elsewhere/a path with spaces"
rm -rf build/elsewhere
mkdir -p "$place/temporary files"
git clone --quiet --depth 1 "file://$PWD" "$place/modicum"
cd "$place/modicum"
touch 'notes of a stranger.md'

export HOME=/dev/null/home TMPDIR="$place/temporary files" LANG=de_DE TZ=Asia/Tokyo
umask 077
make --no-print-directory -k check-style test-dev test-python
