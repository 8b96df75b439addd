"""Loads checkpoints into sharded training within one host-memory budget."""

from modicum import memory as memory
from modicum._modicum import Checkpoint as Checkpoint
from modicum._modicum import Layout as Layout
from modicum._modicum import Ledger as Ledger
from modicum._modicum import Plan as Plan
from modicum._modicum import Recipe as Recipe
from modicum._modicum import inspect as inspect
from modicum._modicum import make_layout as make_layout
from modicum._modicum import make_recipe as make_recipe
from modicum._modicum import open_checkpoint as open_checkpoint
from modicum._modicum import plan as plan
from modicum._modicum import version
from modicum.errors import BudgetError as BudgetError
from modicum.errors import Error as Error
from modicum.errors import FormatError as FormatError
from modicum.errors import IntegrityError as IntegrityError
from modicum.errors import IoError as IoError
from modicum.errors import PeerError as PeerError
from modicum.errors import PreemptedError as PreemptedError
from modicum.errors import UsageError as UsageError
from modicum.walk.calls import Shards as Shards
from modicum.walk.calls import load as load
from modicum.walk.calls import make_plan as make_plan
from modicum.walk.calls import report as report
from modicum.walk.report import Report as Report

__version__ = version()
