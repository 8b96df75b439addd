#!/usr/bin/env bash
# stage.sh NAME COMMAND...: runs the command, then prints how long it took and whether it succeeded.
set -u
name=$1
shift
printf '=== %s\n' "$name"
start=$(date +%s)
"$@"
status=$?
seconds=$(($(date +%s) - start))
[ $status -eq 0 ] && verdict=ok || verdict="FAILED ($status)"
printf '=== %s: %d.%02d min, %s\n' "$name" $((seconds / 60)) $((seconds % 60 * 100 / 60)) "$verdict"
exit $status
