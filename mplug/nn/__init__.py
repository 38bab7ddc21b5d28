"""Building blocks for model authors: plain torch, nothing distributed.

Each module has *slots*: callable attributes, listed in `SLOTS` by the name that plugins know them by, that hold a
composition in plain torch until the host puts a plugin's supplier there. Strategies read the plan, never the module.
"""

from mplug.nn.attention import Attention, DotProductAttention
from mplug.nn.embedding import Embedding
from mplug.nn.linear import Gemm, Linear
from mplug.nn.loss import Loss
from mplug.nn.mlp import MLP, Activation
from mplug.nn.norm import Norm
from mplug.nn.operator import fake, operator
from mplug.nn.random import Dropout
from mplug.nn.sink import add_product, add_rows, zero_if_stale

__all__ = [
    "MLP",
    "Activation",
    "Attention",
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "Gemm",
    "Linear",
    "Loss",
    "Norm",
    "add_product",
    "add_rows",
    "fake",
    "operator",
    "zero_if_stale",
]
