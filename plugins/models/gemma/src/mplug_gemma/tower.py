"""The tower and the decoder that it belongs to. P patches, R pooled rows, D width of the tower, E of the decoder."""

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

from mplug import Entries, Inits, Parameter, Step, WeightProduct
from mplug_gemma.vision import VisionConfig
from mplug_nn import Decoder, Head, Linear, Norm, PatchEmbedding, StreamJoin, TokenEmbedding


class PooledProjection(nn.Module):
    """The end of the tower: its last norm, means of squares of patches, a norm of them, and a product to the decoder.

    The patches of a square are consecutive.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()  # only rows of one group, which are always on one rank

    def __init__(self, post_norm: Norm, pooled: int, norm: Norm, dim: int, out_dim: int) -> None:
        super().__init__()
        self.post_norm, self.pooled, self.norm = post_norm, pooled, norm
        self.project = Linear(dim, out_dim, bias=False)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the product's weight; the norms describe themselves."""
        return {"project.weight": Parameter(("embed", "tower_embed"), inits.weight)}

    def plan_work(self) -> Step:
        """The product of the rows, of which there is one for every `pooled` patches."""
        return ("post_norm", "norm", WeightProduct("project.weight", self.project.weight.numel() // self.pooled))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, P, D] -> [1, R, E]."""
        pooled = self.post_norm(x)[0].unflatten(1, (-1, self.pooled)).mean(dim=2)  # [1, R, D]
        y: Tensor = self.project(self.norm(pooled)[0])
        return y


class Tower(nn.Module):
    """The units of the tower; the host runs them in the plan's order.

    `patches` [1, P, C] -> [1, P, D], the blocks [1, P, D] -> [1, P, D], `projector` [1, P, D] -> [1, R, E].
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: VisionConfig, out_dim: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.patches = PatchEmbedding(config.patch_width, size, bias=True, num_positions=config.num_patches)
        block = config.block_config()
        self.blocks = nn.ModuleDict({str(number): block.build(size) for number in range(config.num_layers)})
        norm = Norm(size, "offset_rmsnorm", config.norm_eps)
        self.projector = PooledProjection(config.norm_config().build(size), config.pool_side**2, norm, size, out_dim)


class SeeingDecoder(Decoder):
    """A decoder whose tokens of images are replaced by rows of the tower."""

    def __init__(
        self, embedding: TokenEmbedding, blocks: Iterable[nn.Module], head: Head, tower: Tower, *, tied: bool
    ) -> None:
        super().__init__(embedding, blocks, head, tied=tied)
        self.tower = tower
        self.join = StreamJoin()
