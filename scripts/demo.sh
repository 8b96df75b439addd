#!/usr/bin/env bash
# demo.sh MODICUM: makes a checkpoint of qwen3-0.6b's true shapes, shows what each strategy would
# hold, loads it into 4 ranks and shows the promise next to the outcome. Takes 1.2 GB of disk for a
# moment, and as much memory.
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
show plan "$demo/qwen3-0.6b" --ranks 4
show load "$demo/qwen3-0.6b" --ranks 4 --strategy own-shard --check values
