"""The steps of a load without torch, in order:

    checkpoint = walk.open_checkpoint("path/of/a/checkpoint")
    recipe = walk.make_recipe(checkpoint)
    layout = walk.make_layout(recipe, ranks=4)
    plan = walk.make_plan(recipe, layout, budget="8GiB")
    loaded = walk.load(plan, rank=0, ledger=modicum.Ledger("8GiB"))
    loaded["model.norm.weight"]  # DLPack and the buffer protocol

In C++ the steps are the same: docs/reference/cpp.md.
"""

from modicum._modicum import Checkpoint as Checkpoint
from modicum._modicum import Layout as Layout
from modicum._modicum import Plan as Plan
from modicum._modicum import Recipe as Recipe
from modicum._modicum import make_recipe as make_recipe
from modicum.walk.calls import Shards as Shards
from modicum.walk.calls import load as load
from modicum.walk.calls import make_layout as make_layout
from modicum.walk.calls import make_plan as make_plan
from modicum.walk.calls import open_checkpoint as open_checkpoint
from modicum.walk.calls import report as report
from modicum.walk.load_report import LoadReport as LoadReport
