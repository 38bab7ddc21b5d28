"""Attention by flash-attn, version 4, 3 or 2: by default the newest installed one that serves the site."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run


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
                rate=VERSIONS[version].rate_on(run.device),
                captures=VERSIONS[version].captures,
            )
            for version in self._candidates
        ]

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
