"""The slots of the building blocks, by name."""

from torch import nn

from mplug.model.slots.declaration import Slot
from mplug_nn.attention import Attention
from mplug_nn.cross import CrossAttention
from mplug_nn.dropout import Dropout
from mplug_nn.embedding import Embedding
from mplug_nn.experts import Experts
from mplug_nn.largest_logits import LargestLogits
from mplug_nn.linear import Linear
from mplug_nn.loss import Loss
from mplug_nn.mixers.convolution import Convolution
from mplug_nn.mixers.mamba import Mamba2
from mplug_nn.mixers.scan import Scan
from mplug_nn.mlp import MLP
from mplug_nn.moe import MixtureOfExperts
from mplug_nn.norm import Norm
from mplug_nn.objective import Objective
from mplug_nn.router import Router
from mplug_nn.vision.join import StreamJoin
from mplug_nn.vision.patches import PatchEmbedding

BLOCKS: tuple[type[nn.Module], ...] = (
    *(Attention, Linear, Norm, MLP, Embedding, Dropout, Loss, Router, Experts, MixtureOfExperts),
    *(PatchEmbedding, StreamJoin, Scan, Convolution, Mamba2, CrossAttention, LargestLogits, Objective),
)
"""The blocks that declare slots. Other blocks share the slots of these."""
SLOTS: dict[str, Slot] = {slot.name: slot for block in BLOCKS for slot in block.SLOTS}  # type: ignore[attr-defined]
"""The name of each slot -> what its block declares."""
