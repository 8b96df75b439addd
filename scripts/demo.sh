#!/usr/bin/env bash
# demo.sh MODICUM: makes a checkpoint with the true shapes of qwen3-0.6b, shows the memory that each
# strategy would take, loads it into 4 ranks, and shows predicted and measured memory. Needs 1.2 GB
# of disk, removed at the end, and 1.2 GB of memory.
set -euo pipefail
modicum=$(realpath "$1")
cd "$(dirname "$0")/.."

demo=build/demo
rm -rf "$demo"
mkdir -p "$demo"
trap 'rm -rf "$demo"' EXIT

show() {
  printf '\n$ modicum %s\n' "$*"
  "$modicum" "$@"
}

show synth "$demo/qwen3-0.6b" --arch qwen3-0.6b
show plan "$demo/qwen3-0.6b" --ranks 4 --compare
show load "$demo/qwen3-0.6b" --ranks 4 --strategy own-shard --check values
