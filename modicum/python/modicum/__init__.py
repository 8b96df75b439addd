"""Loads checkpoints into sharded training within one host-memory budget."""

from modicum import memory as memory
from modicum import walk as walk
from modicum._modicum import Ledger as Ledger
from modicum._modicum import inspect as inspect
from modicum._modicum import parse_size as parse_size
from modicum._modicum import plan as plan
from modicum._modicum import version
from modicum.commands import convert as convert
from modicum.commands import diff as diff
from modicum.commands import verify as verify
from modicum.errors import BudgetError as BudgetError
from modicum.errors import Error as Error
from modicum.errors import FormatError as FormatError
from modicum.errors import IntegrityError as IntegrityError
from modicum.errors import IoError as IoError
from modicum.errors import PeerError as PeerError
from modicum.errors import PreemptedError as PreemptedError
from modicum.errors import UsageError as UsageError
from modicum.options.renamed import getattr_of

__version__ = version()
__getattr__ = getattr_of("modicum", "imports", "recipes", "torch")
