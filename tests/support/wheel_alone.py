"""A program for a wheel without any other package: loads a checkpoint into two ranks and prints
Modicum's version and the SHA-256 of the shards' bytes."""

import hashlib
import sys

import modicum
import modicum.commands
import modicum.memory


def main(directory: str) -> None:
    recipe = modicum.walk.make_recipe(modicum.walk.open_checkpoint(directory))
    plan = modicum.walk.make_plan(recipe, modicum.walk.make_layout(recipe, 2))
    digest = hashlib.sha256()
    for rank in range(2):
        shards = modicum.walk.load(plan, rank)
        for name in sorted(shards):
            digest.update(memoryview(shards[name]))
    print(modicum.__version__, digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
