"""Building blocks for model authors: plain torch, nothing distributed.

Each module has *slots*: callable attributes, listed in `SLOTS`, that hold a composition in plain torch until the host
puts a plugin's supplier there. Strategies read the plan, never the module.
"""

from mplug.nn.attention import Attention
from mplug.nn.embedding import Embedding
from mplug.nn.linear import Gemm, Linear
from mplug.nn.loss import Loss
from mplug.nn.mlp import MLP
from mplug.nn.norm import Norm
from mplug.nn.random import Dropout

__all__ = ["MLP", "Attention", "Dropout", "Embedding", "Gemm", "Linear", "Loss", "Norm"]
