"""The optimizers of torch.optim, torch 2.13."""

OPTIMIZERS = frozenset(
    (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon",
        "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
    )
)  # fmt: skip
"""Their names, for programs without torch."""
