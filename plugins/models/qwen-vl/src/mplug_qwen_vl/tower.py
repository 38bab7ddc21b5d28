"""The tower and the decoder that it belongs to. P patches, R merged rows, D width of the tower, E of the decoder."""

from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from mplug_nn import Decoder, Head, Norm, PatchEmbedding, PatchMerger, StreamJoin, TokenEmbedding
from mplug_qwen_vl.vision import VisionConfig


class Tower(nn.Module):
    """The units of the tower; the host runs them in the plan's order.

    `patches` [1, P, C] -> [1, P, D], the blocks [1, P, D] -> [1, P, D], `merger` and each of `deepstack` [1, P, D] ->
    [1, R, E]. The key of a merger in `deepstack` is its place, from 0 on.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: VisionConfig, out_dim: int) -> None:
        super().__init__()
        size, grid = config.hidden_size, config.position_grid
        self.patches = PatchEmbedding(
            config.patch_width, size, config.patch_bias, None if grid is None else grid * grid
        )
        block = config.block_config()
        self.blocks = nn.ModuleDict({str(number): block.build(size) for number in range(config.num_layers)})
        merged = config.merge_size**2

        def norm(width: int) -> Norm:
            return config.norm_config().build(width)

        self.deepstack = nn.ModuleDict(
            {
                str(place): PatchMerger(norm(size * merged), size, merged, out_dim)
                for place, _ in enumerate(config.deepstack_blocks)
            }
        )
        self.merger = PatchMerger(norm(size), size, merged, out_dim)


class SeeingDecoder(Decoder):
    """A decoder whose tokens of images are replaced by rows of the tower, and to whose first blocks more is added."""

    def __init__(
        self, embedding: TokenEmbedding, blocks: Iterable[nn.Module], head: Head, tower: Tower, *, tied: bool
    ) -> None:
        super().__init__(embedding, blocks, head, tied=tied)
        self.tower = tower
        self.join = StreamJoin()
        self.deepstack = nn.ModuleDict({place: StreamJoin(add=True) for place in tower.deepstack})
