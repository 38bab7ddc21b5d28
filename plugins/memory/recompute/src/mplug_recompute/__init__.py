"""Activation recomputation and offload: both reduce the device memory of tensors saved for backward."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from mplug import MAY_CHANGE, UNIT, Site, UsageError, Wrap, distinct, hookimpl, slots_named

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig

RECOMPUTE, OFFLOAD = 1000, 1100
"""Layers: recompute wraps everything inside it; offload wraps recompute and moves the tensors that it saves."""

SLOTS = "memory.recompute.slots"
PRODUCT = "Experts.product"
"""It belongs to the kind `experts`; it keeps only its input, and is no callable that a wrap could call again."""


class Recompute:
    """In backward, recomputes activations that forward did not save, or copies them back from CPU memory."""

    class Config(BaseModel):
        """The activations that are recomputed, and those that are offloaded to CPU memory."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        mode: Annotated[Literal["none", "full", "selective"], MAY_CHANGE] = Field(
            "full",
            description="full: save only the inputs of each chosen unit, and recompute it in backward; selective: "
            "recompute only some slots of the units (arXiv 2205.05198, section 5); none: recompute nothing",
        )
        every: Annotated[PositiveInt, MAY_CHANGE] = Field(
            1, description="choose every n-th unit of a stage, from the first on"
        )
        first: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
            None, description="choose only among the first n units of a stage; null: among all units"
        )
        slots: Annotated[tuple[str, ...], AfterValidator(distinct), MAY_CHANGE] = Field(
            ("attention",), description="slots, or kinds of slots, that 'selective' recomputes: [attention, activation]"
        )
        offload: Annotated[bool, MAY_CHANGE] = Field(
            False, description="move the activations that chosen units save for backward to CPU memory and back"
        )
        offload_every: Annotated[PositiveInt, MAY_CHANGE] = Field(
            1, description="offload only every n-th of the chosen units, so that the memory of the CPU suffices"
        )
        offload_from: Annotated[NonNegativeInt, MAY_CHANGE] = Field(
            1 << 20, description="minimum size of an offloaded tensor in bytes"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse an empty list, the products of experts, and a field that another one makes useless.

        The slots of the model are known later (`offer`).
        """
        if not self.config.slots:
            raise UsageError(f"{SLOTS} is empty; set it to slots, or set memory.recompute.mode=none")
        if PRODUCT in self.config.slots:
            raise _frees_nothing(PRODUCT)
        if self.config.offload_every > 1 and not self.config.offload:
            raise UsageError(
                "memory.recompute.offload_every has no effect without memory.recompute.offload=true; set both or none"
            )

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> list[Wrap]:
        """Wraps of the chosen units, or of slots in them."""
        again = _recomputed(run)
        names = chosen_units(model, self.config.every, self.config.first)
        chosen, moved = frozenset(names), frozenset(names[:: self.config.offload_every])
        wraps: list[Wrap] = []
        if self.config.mode == "full":
            wraps.append(Wrap(UNIT, again, RECOMPUTE, supports=_inside(chosen), note="run again"))
        if self.config.mode == "selective":
            wraps += self._selective(run, model, chosen)
        if self.config.offload:
            from mplug_recompute.offload import Offload

            offload = Offload(model.module, self.config.offload_from)
            wraps.append(Wrap(UNIT, offload.wrapped, OFFLOAD, supports=_inside(moved), note="offload", moves=True))
        return wraps

    @hookimpl
    def captures(self) -> bool | str:
        """Recomputation is part of backward; offload copies to memory of the CPU that it manages step by step."""
        return "copies activations to the CPU (memory.recompute.offload=true)" if self.config.offload else True

    def _selective(self, run: "Run", model: "Model", chosen: frozenset[str]) -> list[Wrap]:
        named = slots_named(self.config.slots, SLOTS, model.declared)
        for slot in named:
            if slot.startswith("Linear."):
                raise _frees_nothing(slot)
        supports, again = _again_inside(chosen), _recomputed(run)
        return [
            Wrap(slot, again, RECOMPUTE, supports=supports, note="run again", dispensable=True)
            for slot in named
            if slot != PRODUCT
        ]


def _frees_nothing(slot: str) -> UsageError:
    """The refusal of a single product."""
    return UsageError(
        f"{SLOTS}: recomputing '{slot}' frees no memory, because it keeps only its input for backward; use a slot "
        f"between the linear layers, or set memory.recompute.mode=full"
    )


def chosen_units(model: "Model", every: int, first: int | None) -> list[str]:
    """The names of the chosen units of this rank's stage.

    They are every `every`-th of the first `first` units (None: of all units). The model's last unit is never chosen:
    its backward directly follows its forward, so recomputing it would save nothing.
    """
    names = [unit.name for unit in model.own_units if unit.name != model.plan.units[-1].name]
    return names[:first][::every]


def _recomputed(run: "Run") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The wrap for the run's steps: those of a CUDA graph draw nothing from torch's generators."""
    from mplug_recompute.again import recomputed

    return partial(recomputed, keeps_generators=False) if run.config.trainer.graphs else recomputed


def _again_inside(units: frozenset[str]) -> Callable[[Site, "Run"], bool | str]:
    """A `supports` function for slots: as `_inside`, unless backward would repeat a call with other masks of dropout.

    A pipeline has other micro batches in flight between a forward pass and its backward pass.
    """
    inside = _inside(units)

    def supports(site: Site, run: "Run") -> bool | str:
        from mplug_recompute.passes import reads_pass

        is_divided = any("units" in axis.activations and axis.size > 1 for axis in run.mesh.axes.values())
        if inside(site, run) and is_divided and reads_pass(site):
            return (
                f"its adapters keep the dropout masks of one micro batch, and a pipeline has several in flight; leave "
                f"'{site.kind}' out of {SLOTS}, set memory.recompute.mode=full, or use no such dropout"
            )
        return inside(site, run)

    return supports


def _inside(units: frozenset[str]) -> Callable[[Site, "Run"], bool]:
    """A `supports` function: whether a site is one of the units or inside one."""

    def supports(site: Site, run: "Run") -> bool:
        return any(site.name == unit or site.name.startswith(f"{unit}.") for unit in units)

    return supports
