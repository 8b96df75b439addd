#!/usr/bin/env bash
# progress.sh: reads what Ninja prints on stdin, such as "[30/181] Building CXX object
# CMakeFiles/modicum_plan.dir/Unity/unity_0_cxx.cxx.o", and prints every tenth step as it comes, as
# "[30/181] modicum_plan", or with the file's name if the path names no target.
set -euo pipefail

while IFS= read -r line; do
  [[ $line =~ \[([0-9]+)/([0-9]+)\] ]] || continue
  step=${BASH_REMATCH[1]} count=${BASH_REMATCH[2]}
  ((step % 10 == 0 || step == count)) && ((step > 0)) || continue
  what=${line##*[/ ]}
  if [[ $line =~ CMakeFiles/([^/]+)\.dir/ ]]; then what=${BASH_REMATCH[1]}; fi
  echo "[$step/$count] $what"
done
