"""Attention by flash-attn, version 4, 3 or 2: by default the newest installed one that serves the site."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run


class Flash:
    """Attention with grouped heads, in half precision on NVIDIA GPUs."""

    class Config(BaseModel):
        """The version of flash-attn."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        version: Annotated[Literal["auto", 4, 3, 2], MAY_CHANGE] = Field(
            "auto", description="auto: the newest installed flash-attn that supports the run; 4, 3, 2: this version"
        )
        packed_heads: Annotated[bool, MAY_CHANGE] = Field(
            False,
            description="version 4, without rotary positions and QK-norm: write the gradients of queries, keys and "
            "values into one tensor; no GPU has run this yet",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self, run: "Run") -> list[Offer]:
        """Offers of the attention core, one for each version that may be selected."""
        from mplug_flash.attention import core
        from mplug_flash.versions import SERVED, VERSIONS

        deterministic = run.config.trainer.deterministic
        return [
            Offer(
                {"Attention.core": core(version, deterministic, packed_heads=self.config.packed_heads)},
                partial(self._supports, version),
                varies,
                note=partial(_note, version),
                serves=SERVED,
                rate=VERSIONS[version].rate,
            )
            for version in self._candidates
        ]

    @hookimpl
    def captures(self, run: "Run", model: "Model") -> bool | str:
        """True for flash-attn 4, which a GPU has replayed to the bit (tests/test_gpu_graphs.py)."""
        from mplug_flash.attention import core

        slot = "Attention.core"
        filled = [one.offer for one in model.slots if one.offer is not None and one.site.slot == slot]
        used = {one.suppliers[slot] for one in filled}
        deterministic = run.config.trainer.deterministic
        untested = {core(number, deterministic): f"flash-attn {number}" for number in (3, 2)}
        untested[core(4, deterministic, packed_heads=True)] = "packed heads"
        for supplier in used & untested.keys():
            return f"has not been tested in a CUDA graph with {untested[supplier]}"
        return True

    @property
    def _candidates(self) -> tuple[int, ...]:
        return (4, 3, 2) if self.config.version == "auto" else (self.config.version,)

    def _supports(self, version: int, site: Site, run: "Run") -> bool | str:
        from mplug_flash.versions import choose

        chosen, reason = choose(self._candidates, site, run)
        if chosen is None:  # only the first offer states the reason
            return reason if version == self._candidates[0] else False
        return chosen == version


def varies(site: Site, run: "Run") -> str:
    """Why results depend on the layout: fused dropout draws its numbers in an order of its own."""
    return "its dropout mask is drawn inside the fused kernel" if site.module.dropout > 0 else ""


def _note(version: int, site: Site, run: "Run") -> str:
    return f"flash-attn-{version}"
