"""Expert parallelism (arXiv 2006.16668) and expert tensor parallelism, in their own mesh view (arXiv 2504.14960).

`ep` splits the experts over ranks, and `etp` splits the width of each expert. The sparse view folds over the ranks of
the dense view, so neither degree multiplies the world size.
"""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from mplug import MAY_CHANGE, Axis, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from mplug import Model, Run, RunConfig, Wrap
    from mplug_ep.bounds import Bounds

VIEW = "sparse"
"""The mesh view of the experts' axes; it shares the pipeline axis with the dense view."""


BOUNDED = ("bounded", "symmetric")
"""The values of `parallel.ep.dispatch` with memory of a fixed size."""


class ExpertParallel:
    """Splits the experts over ranks; tokens are sent to the ranks of their experts, and the results back."""

    class Config(BaseModel):
        """How tokens reach their experts."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        dispatch: Annotated[
            Literal["all_to_all", "bounded", "symmetric", "once_per_rank", "deepep", "all_gather"], MAY_CHANGE
        ] = Field(
            "all_to_all",
            description="all_to_all: send a token once for each of its experts; the CPU waits for the number of "
            "tokens; bounded: in buffers of a fixed size, and steps for which these are too small are computed again "
            "by all_to_all; symmetric: the same by kernels that write rows into other GPUs of the machine; "
            "once_per_rank: send a token once to each rank that has any of its experts, which returns the sum of their "
            "results; deepep: the same by the library DeepEP; all_gather: send all tokens to all ranks; shapes are "
            "fixed, and the CPU does not wait",
        )
        room: Annotated[PositiveFloat, MAY_CHANGE] = Field(
            1.5,
            description="bounded: rows that a rank may send to each rank, as a multiple of the even share; symmetric: "
            "rows that it may receive from all ranks",
        )
        overlap: Annotated[bool, MAY_CHANGE] = Field(
            False,
            description="all_to_all, bounded, symmetric: compute the shared experts, and other parts of the micro "
            "batch, while tokens travel",
        )
        parts: Annotated[PositiveInt, MAY_CHANGE] = Field(
            1,
            description="all_to_all, bounded, symmetric: the parts in which experts compute the tokens of a micro "
            "batch; with overlap, the tokens of one part travel while another part is computed",
        )

        @model_validator(mode="after")
        def _can_overlap(self) -> Self:
            if self.dispatch in ("all_to_all", *BOUNDED):
                return self
            for field in ("overlap", "parts"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise ValueError(
                        f"{field} is for dispatch=all_to_all, bounded and symmetric, and dispatch is {self.dispatch}; "
                        f"choose one"
                    )
            return self

        @model_validator(mode="after")
        def _has_buffers_for_room(self) -> Self:
            if self.room != type(self).model_fields["room"].default and self.dispatch not in BOUNDED:
                raise ValueError(
                    f"room={self.room:g} is for dispatch=bounded and symmetric, and dispatch is {self.dispatch}; set "
                    f"dispatch=bounded, or remove room"
                )
            return self

    def __init__(self, config: Config) -> None:
        self.config = config
        self.bounds: Bounds | None = None

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis of the sparse view; its ranks are farther apart than those of expert tensor parallelism."""
        return [Axis("ep", config.parallel.degrees["ep"], splits=("expert",), distance=10, views=(VIEW,))]

    @hookimpl
    def shard_model(self, run: "Run", model: "Model") -> None:
        """Refuse what does not fit (`fit.py`); the plan's rules suffice for the placements."""
        from mplug_ep.fit import refuse_parts_without_tokens, refuse_what_does_not_fit

        refuse_what_does_not_fit(run, model, "ep")
        refuse_parts_without_tokens(run, self.config.parts)

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> "list[Wrap]":
        """Wraps of dispatch and combine; nothing if ep=1."""
        from mplug_ep.bounds import Bounds
        from mplug_ep.wraps import wraps_of_ep

        self.bounds = Bounds(model, self.config.room) if self.config.dispatch in BOUNDED else None
        return wraps_of_ep(run, model, self.config.dispatch, self.bounds, self.config.overlap, self.config.parts)

    @hookimpl
    def captures(self) -> bool | str:
        """True for memory of a fixed size: no shape depends on a value, and the step check is between two graphs."""
        overlaps, parts = self.config.overlap, self.config.parts
        if self.config.dispatch in BOUNDED and not overlaps and parts == 1:
            return True
        if overlaps or parts > 1 or self.config.dispatch == "all_gather":
            where = "overlap=true" if overlaps else f"parts={parts}" if parts > 1 else "dispatch=all_gather"
            return f"has not been tested in a CUDA graph with parallel.ep.{where}; use dispatch=symmetric or bounded"
        return (
            f"makes the CPU wait for a number of rows (parallel.ep.dispatch={self.config.dispatch}); use "
            f"parallel.ep.dispatch=symmetric or bounded"
        )

    @hookimpl
    def build_step_check(self, run: "Run") -> "Callable[[], bool] | None":
        """The check of bounded buffers: whether a row of the step was lost on any rank."""
        if self.bounds is None or run.mesh.axes["ep"].size == 1:
            return None
        return self.bounds.check(run)


class ExpertTensorParallel:
    """Splits the width of every expert over neighbouring ranks."""

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis of the sparse view."""
        return [Axis("etp", config.parallel.degrees["etp"], splits=("expert_mlp",), distance=0, views=(VIEW,))]

    @hookimpl
    def shard_model(self, run: "Run", model: "Model") -> None:
        """Refuse what does not fit (`fit.py`); the plan's rules suffice for the placements."""
        from mplug_ep.fit import refuse_what_does_not_fit

        refuse_what_does_not_fit(run, model, "etp")

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> "list[Wrap]":
        """Wraps that gather tokens before dispatch and sum partial results after combine; nothing if etp=1."""
        from mplug_ep.wraps import wraps_of_etp

        return wraps_of_etp(run, model)
