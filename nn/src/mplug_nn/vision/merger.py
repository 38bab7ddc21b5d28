"""The end of a tower: neighbouring patches become one row of the decoder's width.

P patches, m of them merged into a row, R = P / m rows, D width of the tower, E width of the decoder.
"""

from typing import ClassVar

from torch import Tensor

from mplug.layout.inits import ZEROS, Entries, Inits
from mplug.layout.plan import Init, Parameter, Segment
from mplug.layout.work import Branches, Step, WeightProduct
from mplug_nn.linear import Linear
from mplug_nn.mlp import Activation, Kind
from mplug_nn.norm import Norm


class PatchMerger(Activation):
    """Norm, concatenation of `merged` consecutive rows, and an MLP to the width of the decoder.

    The norm is one of each row before they are concatenated, or, if it is as wide as the concatenation, one of that.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()  # only rows of one group, which are always on one rank

    def __init__(self, norm: Norm, dim: int, merged: int, out_dim: int, kind: Kind = "gelu") -> None:
        super().__init__(kind)
        if self.gated:
            raise ValueError(f"a merger has one projection before its activation, and '{kind}' needs two")
        self.norm, self.merged, self.width = norm, merged, dim * merged
        self.up = Linear(self.width, self.width, bias=True)
        self.down = Linear(self.width, out_dim, bias=True)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters."""
        mlp = Segment("mlp", self.width)
        axis = "merged_embed" if len(self.norm.weight) == self.width else "embed"
        norm = {"norm.weight": Parameter((axis,), Init("constant", value=self.norm.initial))}
        if self.norm.bias is not None:
            norm["norm.bias"] = Parameter((axis,), ZEROS)
        return {
            **norm,
            "up.weight": Parameter((mlp, "merged_embed"), inits.weight),
            "up.bias": Parameter((mlp,), ZEROS),
            "down.weight": Parameter(("embed", mlp), inits.residual),
            "down.bias": Parameter(("embed",), ZEROS),
        }

    def plan_work(self) -> Step:
        """The products of the rows, of which there is one for every `merged` patches."""
        return ("norm", self._work("up"), self._work("down"))

    def _work(self, name: str) -> Step:
        linear: Linear = getattr(self, name)
        product = WeightProduct(f"{name}.weight", linear.weight.numel() // self.merged)
        return product if linear.adapter is None else Branches((product, f"{name}.adapter"))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, P, D] -> [1, R, E]."""
        if len(self.norm.weight) == self.width:
            x, _ = self.norm(self._joined(x))
        else:
            x = self._joined(self.norm(x)[0])
        y: Tensor = self.down(self.activate(self.up.without_bias(x), self.up.bias))
        return y

    def _joined(self, x: Tensor) -> Tensor:
        joined: Tensor = x.unflatten(1, (-1, self.merged)).flatten(2)
        return joined
