#!/usr/bin/env python3
"""What does a node hold while a script of accelerate loads and trains, as it is and with Modicum's
one line around it?

    benchmarks/accelerate.py DIRECTORY [--ranks 4] [--trainer]

Runs examples/accelerate_fsdp2.py by torchrun both ways, the checkpoint in the page cache or not as
it happens. The node's peak is the largest sum over all processes of anonymous and shared memory and
page tables, sampled; the prediction is the load's own, of its own phase. Prints one line for each.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time

from harness.page import ROOT
from harness.watch import Process, held

sys.path.append(str(ROOT / "tests"))
from program import tree_of

GIB = 1 << 30
EVERY_S = 0.02
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Freed gathers go back to the kernel: what stays in glibc hides what is held.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
}


def run(ranks: int, words: list[str]) -> tuple[int, str]:
    """The node's peak in bytes, and what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "examples/accelerate_fsdp2.py", *words]
    peak, known = 0, {}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            for pid in tree_of(process.pid):
                if pid not in known:
                    with contextlib.suppress(FileNotFoundError):
                        known[pid] = Process(pid)
            peak = max(peak, sum(held(one.status()) for one in known.values()))
            time.sleep(EVERY_S)
        log.seek(0)
        printed = log.read()
    for one in known.values():
        one.close()
    if process.returncode != 0:
        sys.exit(printed)
    return peak, printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--trainer", action="store_true", help="Trainer's loop")
    options = parser.parse_args()

    words = [options.directory, *(["--trainer"] if options.trainer else [])]
    peak, plain = run(options.ranks, words)
    print(f"as it is          node peak {peak / GIB:6.2f} GiB")
    peak, printed = run(options.ranks, [*words, "--modicum"])
    (promised,) = re.findall(r"^node 0 +(\S+ \S+)", printed, re.M)
    print(f"with the one line node peak {peak / GIB:6.2f} GiB, of the load {promised} predicted")
    steps = [re.findall(r"step \d+: .*", text) for text in (plain, printed)]
    if steps[0] != steps[1] or not steps[0]:
        sys.exit("losses or gradients' norms differ")
    print(*steps[0], sep="\n")


if __name__ == "__main__":
    main()
