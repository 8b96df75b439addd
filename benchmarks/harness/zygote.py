"""A process that imports slow modules once, and forks ranks on request.

python -m harness.zygote MODULE ARGUMENT: calls `MODULE.preload(ARGUMENT)`. Then each line of stdin
is a job in JSON: it forks the job's `world` processes, which call `MODULE.rank(RANK, JOB)`, and
prints their exit codes after all have ended. Ranks are killed if the zygote dies, and the zygote if
its parent dies.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_rank(module: Any, rank: int, job: dict[str, Any]) -> None:
    """The body of a forked rank; does not return."""
    end_with_parent()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.environ.update(job["environment"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    code = 1
    try:
        module.rank(rank, job)
        code = 0
    except BaseException:
        traceback.print_exc()
    # os._exit below skips destructors and collectives of the interpreter's exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_ranks(module: Any, job: dict[str, Any]) -> list[int]:
    pids = []
    for rank in range(job["world"]):
        pid = os.fork()
        if pid == 0:
            run_rank(module, rank, job)
        pids.append(pid)
    return pids


def main() -> None:
    end_with_parent()
    module = importlib.import_module(sys.argv[1])
    module.preload(sys.argv[2])
    gc.collect()
    gc.freeze()  # a rank's collector must not write to inherited, shared pages
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        pids = fork_ranks(module, json.loads(line))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"codes": codes}), flush=True)


if __name__ == "__main__":
    main()
