"""MLPs and losses in tiles: parts of the sequence, each computed again in backward (arXiv 2506.13996, section 3.1).

An MLP and a loss compute each position by itself. So their largest tensors, four times as wide as the residual stream
and as wide as the vocabulary, need to exist for a tile at a time only. B batch, S sequence, D embed.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import MAY_CHANGE, Site, UsageError, Wrap, hookimpl
from mplug_recompute.passes import reads_pass

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import Model, Run, RunConfig

TILES = 1050
"""Layer: outside of recomputed slots, inside of recomputed units."""
TOKENS = "sequence"
"""The axis of tokens. The rows of a stream have another number in every micro batch, and stay whole."""


class Tiles:
    """Computes MLPs and losses tile by tile, so that their inner tensors exist for one tile at a time."""

    class Config(BaseModel):
        """The sizes of tiles."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        mlp: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
            16384, description="positions of a sample that an MLP computes at a time; null: all of them"
        )
        loss: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
            16384, description="positions of a sample whose logits exist at a time; null: all of them"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a section that does nothing."""
        if self.config.mlp is None and self.config.loss is None:
            raise UsageError("memory.tiles has no tiles: mlp and loss are null; set one of them, or remove the section")

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> list[Wrap]:
        """The wraps of MLPs and losses of the model."""
        from mplug_recompute.again import recomputed

        again = partial(recomputed, keeps_generators=not run.config.trainer.graphs)
        around: dict[str, tuple[int | None, Callable[..., Any]]] = {
            "MLP.core": (self.config.mlp, tiled_mlp),
            "Loss.cross_entropy": (self.config.loss, tiled_loss),
            "Loss.log_probabilities": (self.config.loss, tiled_log_probabilities),
        }
        return [
            Wrap(
                slot,
                partial(tiled, size, again),
                TILES,
                supports=partial(_has_tokens, size),
                note=f"tiles of {size}",
                tile=size,
            )
            for slot, (size, tiled) in around.items()
            if size is not None and slot in model.declared
        ]

    @hookimpl
    def captures(self) -> bool:
        """Tiles have fixed sizes, and their backward recomputes them."""
        return True


def _has_tokens(size: int, site: Site, run: "Run") -> bool | str:
    if site.sequence == TOKENS and size < run.config.trainer.seq_length and reads_pass(site):
        return "its adapters draw dropout masks for whole samples; set memory.tiles.mlp=null, or use no such dropout"
    return site.sequence == TOKENS


def tiled_mlp(
    size: int, again: Callable[[Callable[..., Any]], Callable[..., Any]], inner: Callable[..., "Tensor"]
) -> Callable[..., "Tensor"]:
    """Wrap a supplier of `MLP.core` so that it computes at most `size` positions of each sample at a time."""
    from torch import cat

    step = again(inner)

    def call(x: "Tensor", *arguments: Any, **named: Any) -> "Tensor":
        """x [B, S, D] -> [B, S, D]."""
        if x.shape[1] <= size:
            return inner(x, *arguments, **named)
        return cat([step(tile, *arguments, **named) for tile in x.split(size, dim=1)], dim=1)

    return call


def tiled_loss(
    size: int,
    again: Callable[[Callable[..., Any]], Callable[..., Any]],
    inner: Callable[..., "tuple[Tensor, Tensor]"],
) -> Callable[..., "tuple[Tensor, Tensor]"]:
    """Wrap a supplier of `Loss.cross_entropy` so that it computes at most `size` positions of each sample at a time.

    Sequence parallelism gives a rank S / R consecutive positions of the hidden states and all S labels, and the
    projection gathers the parts of the R ranks in their order. A tile then has `size` positions after the gathering.
    """
    step = again(inner)

    def call(hidden: "Tensor", project: Any, *of_tokens: "Tensor", **named: Any) -> "tuple[Tensor, Tensor]":
        """hidden [B, S / R, D]; labels and perhaps weights [B, S] -> (sum of the losses, number of targets)."""
        ranks = of_tokens[0].shape[1] // hidden.shape[1]
        own = max(size // ranks, 1)
        if hidden.shape[1] <= own:
            return inner(hidden, project, *of_tokens, **named)
        parts = [_tiles(one, ranks, own) for one in of_tokens]
        found = [step(*tile, **named) for tile in _calls(hidden.split(own, dim=1), project, parts)]
        return sum(loss for loss, _ in found), sum(count for _, count in found)  # type: ignore[return-value]

    return call


def tiled_log_probabilities(
    size: int, again: Callable[[Callable[..., Any]], Callable[..., Any]], inner: Callable[..., "Tensor"]
) -> Callable[..., "Tensor"]:
    """Wrap a supplier of `Loss.log_probabilities`, which objectives call, as `tiled_loss` wraps that of the loss."""
    from torch import cat

    step = again(inner)

    def call(hidden: "Tensor", project: Any, labels: "Tensor") -> "Tensor":
        """hidden [B, S / R, D], labels [B, S] -> [B, S]."""
        ranks = labels.shape[1] // hidden.shape[1]
        own = max(size // ranks, 1)
        if hidden.shape[1] <= own:
            return inner(hidden, project, labels)
        tiles = _calls(hidden.split(own, dim=1), project, [_tiles(labels, ranks, own)])
        return cat([step(*tile).unflatten(1, (ranks, -1)) for tile in tiles], dim=2).flatten(1)

    return call


def _tiles(of_tokens: "Tensor", ranks: int, size: int) -> "list[Tensor]":
    """[B, R n] -> for each tile of n, the positions that the ranks have of it, [B, R size]."""
    parts = of_tokens.unflatten(1, (ranks, -1)).split(size, dim=2)
    return [part.flatten(1) for part in parts]


def _calls(hidden: "tuple[Tensor, ...]", project: Any, parts: "list[list[Tensor]]") -> "list[tuple[Any, ...]]":
    return [(tile, project, *(part[number] for part in parts)) for number, tile in enumerate(hidden)]
