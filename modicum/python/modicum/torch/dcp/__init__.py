"""torch.distributed.checkpoint (DCP): a reader of Hugging Face files and of saved checkpoints, and
a writer of checkpoints."""

from modicum.options.renamed import getattr_of
from modicum.torch.dcp.reader import ModicumReader as ModicumReader
from modicum.torch.dcp.writer import ModicumWriter as ModicumWriter

__getattr__ = getattr_of("modicum.torch.dcp")
