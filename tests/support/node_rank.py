"""A program for torchrun that runs acts (functions in `torch_rank.ACTS`) and writes each rank's
answers to a file.

node_rank.py ACTS FOLDER: ACTS is a JSON list of [name, arguments], in which the argument `cut` is a
list. FOLDER/RANK.json gets the answers in this order.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch_rank
from sharding import Cut

from modicum.torch.ranks.group import Ranks


def main() -> None:
    acts, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with Ranks.of_world().together() as ranks:
        per_node = ranks.ranks_per_node
    answers = [answer(act, given) | {"per_node": per_node} for act, given in acts]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(answers, default=str))
    os._exit(0)


def answer(act: str, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments["cut"] = Cut(arguments["cut"][0], tuple(arguments["cut"][1]))
    begin = time.monotonic()
    try:
        made = torch_rank.ACTS[act](**arguments)
    except Exception as error:
        made = {"error": type(error).__name__, "message": str(error)} | vars(error)
    return made | {"took_s": time.monotonic() - begin}


if __name__ == "__main__":
    main()
