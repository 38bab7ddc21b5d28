"""Which parameters are hidden matrices."""

from mplug import Parameter

STACKS = ("expert", "every_expert")
"""Named axes along which separate matrices, or separate vectors (biases of experts), are stacked."""


def is_hidden_matrix(parameter: Parameter, tables: tuple[str, ...]) -> bool:
    """Whether a parameter maps hidden activations to hidden activations, unlike a table of separate vectors.

    True for parameters of two or more dimensions, besides `STACKS`, without an axis in `tables`.
    """
    of_one = [dim for dim in parameter.dims if dim not in STACKS]
    return len(of_one) >= 2 and not parameter.axes & set(tables)
