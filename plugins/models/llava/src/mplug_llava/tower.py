"""The tower, the projector and the join.

P rows of a micro batch, p of this rank, D width of the tower, E of the decoder. B samples, S positions, s of this rank.
R rows of the projector, r of this rank.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug import Entries, Init, Inits, Parameter, Segment, Step
from mplug_llava.names import unused_tensors
from mplug_llava.vision import VisionConfig
from mplug_nn import Linear, PatchEmbedding, StreamJoin
from mplug_nn.mlp import Activation


class RowEmbedding(PatchEmbedding):
    """The patches of pictures, each with the learned vector of its place, and a class row before those of a picture.

    The pixels of a class row are zeros, so the product of a class row is its bias: there is no bias with a class row.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: VisionConfig) -> None:
        size = config.hidden_size
        super().__init__(config.patch_width, size, config.patch_bias, config.num_rows)
        self.first = nn.Parameter(torch.empty(size)) if config.class_row else None
        self.norm = config.norm_config().build(size) if config.norm_before else None

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        own = {} if self.first is None else {"first": Parameter(("embed",), inits.weight, decay=False)}
        return {**super().plan_entries(inits), **own}

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches [1, P, C] in any floating dtype, places [1, P] in their pictures -> [1, p, D]."""
        assert self.position is not None
        own = self.rows(places)
        x = self.project(self.rows(patches).to(self.project.weight.dtype)) + F.embedding(own, self.position)
        if self.first is not None:
            x = x + (own == 0)[..., None] * self.first
        y: Tensor = x if self.norm is None else self.norm(x)[0]
        return y


class Unused(nn.Module):
    """Frozen tensors that a published tower has and that nothing computes with, so that an export has them too.

    The names of the parameters are those of the published tensors.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        for name, shape in shapes.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(torch.empty(shape)))

    def plan_entries(self, inits: Inits) -> Entries:
        """Each dimension is one that no layout divides."""
        found = {}
        for name, shape in self.shapes.items():
            is_scale = "norm" in name and name.endswith("weight")
            init = inits.weight if len(shape) > 1 else Init("constant", value=1.0 if is_scale else 0.0)
            found[name] = Parameter(("unused",) * len(shape), init, trainable=False)
        return found

    def plan_work(self) -> Step:
        """None."""
        return ()


class Projector(Activation):
    """Two products with an activation between them: rows of the tower's width -> rows of the decoder's."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: VisionConfig, out_dim: int, kind: str, bias: bool) -> None:
        super().__init__(kind)
        if self.gated:
            raise ValueError(f"a projector has one product before its activation, and '{kind}' needs two")
        self.up = Linear(config.hidden_size, out_dim, bias)
        self.down = Linear(out_dim, out_dim, bias)
        self.unused = Unused(unused_tensors(config))

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        mlp = Segment("mlp", self.up.weight.shape[0])
        zeros = Init("constant")
        entries = {
            "up.weight": Parameter((mlp, "embed"), inits.weight),
            "down.weight": Parameter(("embed", mlp), inits.weight),
        }
        if self.up.bias is not None:
            entries |= {"up.bias": Parameter((mlp,), zeros), "down.bias": Parameter(("embed",), zeros)}
        return entries

    def plan_work(self) -> Step:
        """The two products."""
        return ("up", "down")

    def forward(self, x: Tensor) -> Tensor:
        """x [1, p, D] -> [1, p, E]."""
        y: Tensor = self.down(self.activate(self.up.without_bias(x), self.up.bias))
        return y


class GridJoin(StreamJoin):
    """Weighted sums of rows of the tower in place of the hidden states of some positions, and a trained end of lines.

    A position whose weights are all 0 is the end of a line.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.newline = nn.Parameter(torch.empty(dim))

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameter."""
        return {"newline": Parameter(("embed",), inits.weight, decay=False)}

    def plan_work(self) -> Step:
        """No product."""
        return ()

    def forward(  # type: ignore[override]
        self, hidden: Tensor, rows: Tensor, places: Tensor, shares: Tensor, returns: Mapping[str, Any] | None = None
    ) -> Tensor:
        """hidden [B, s, E], rows [1, r, E], places and shares [B, S, CORNERS] -> [B, s, E].

        A place is the number of a row, or -1. `returns` is the optional entry `mplug.RETURNS`.
        """
        own, weights, table = self.positions(places), self.positions(shares), self.gather(rows)[0]
        if returns is not None:
            table = self.bring_back(table, returns)
        dtype = torch.promote_types(table.dtype, torch.float32)
        mixed = hidden.new_zeros((), dtype=dtype)
        for place, weight in zip(own.unbind(-1), weights.to(dtype).unbind(-1), strict=True):
            mixed = mixed + F.embedding(place.clamp(min=0), table).to(dtype) * weight[..., None]  # [B, s, E]
        is_seen, is_end = (own[..., :1] >= 0), (weights == 0).all(dim=-1, keepdim=True)
        return torch.where(is_seen, torch.where(is_end, self.newline, mixed.to(hidden.dtype)), hidden)


class Tower(nn.Module):
    """The units of the tower; the host runs them in the plan's order.

    `patches` [1, P, C] -> [1, p, D], the blocks [1, p, D] -> [1, p, D], `projector` [1, p, D] -> [1, p, E].
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: VisionConfig, projector: Projector) -> None:
        super().__init__()
        size, block = config.hidden_size, config.block_config()
        self.patches = RowEmbedding(config)
        self.blocks = nn.ModuleDict({str(number): block.build(size) for number in range(config.used_layers)})
        self.projector = projector


class SeeingModel(nn.Module):
    """A tower, and a decoder in whose text rows of the tower stand."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, tower: Tower, join: StreamJoin, decoder: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.join = join
        self.decoder = decoder
