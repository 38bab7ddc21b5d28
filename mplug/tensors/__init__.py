"""Functions on tensors that the host and building blocks share, in plain torch and without anything distributed."""
