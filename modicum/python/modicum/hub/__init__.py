"""Headers of checkpoints on the Hugging Face Hub, for `modicum plan ORG/NAME` and `inspect`.

Reads config.json, the index, and by range requests the header of each data file, into a temporary
directory of sparse files, which the program plans. No value is read, and the directory is removed
at the end of the command. Standard library only.
"""
