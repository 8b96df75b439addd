"""torch.distributed.checkpoint (DCP) with Hugging Face files: a reader of checkpoints, a writer of
steps (saved checkpoint directories), and a reader of steps that the writer has written."""

from modicum.torch.dcp.readers import HuggingFaceReader as HuggingFaceReader
from modicum.torch.dcp.readers import Reader as Reader
from modicum.torch.dcp.writer import Writer as Writer
