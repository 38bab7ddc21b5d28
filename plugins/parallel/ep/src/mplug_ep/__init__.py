"""Expert parallelism (arXiv 2006.16668) and expert tensor parallelism, in a view of their own (arXiv 2504.14960).

Experts are divided over `ep` ranks, and each one's width over `etp` ranks. The expert view folds over the ranks of all
other parallelism, so that neither degree multiplies the world.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, Axis, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig, Wrap

VIEW = "expert"
"""The view of the mesh in which experts have their axes; a pipeline's stages are shared with it."""


class ExpertParallel:
    """Whole experts divided over ranks; tokens travel to them and back."""

    class Config(BaseModel):
        """How tokens travel."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        dispatch: Annotated[Literal["all_to_all", "all_gather"], MAY_CHANGE] = Field(
            "all_to_all",
            description="each token to the ranks of its experts, whose numbers the host waits for; "
            "or all tokens to all ranks, in shapes that are known, which waits for nothing",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis of the expert view, outside that of expert tensor parallelism."""
        return [Axis("ep", config.parallel.degrees["ep"], splits=("expert",), distance=10, views=(VIEW,))]

    @hookimpl
    def shard_model(self, run: "Run", model: "Model") -> None:
        """Placements need no more than the plan; a model without experts is refused."""
        from mplug_ep.fit import refuse_what_does_not_fit

        refuse_what_does_not_fit(run, model, "ep")

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> "list[Wrap]":
        """Dispatch and combine over the ranks; of one rank, nothing."""
        from mplug_ep.wraps import wraps_of_ep

        return wraps_of_ep(run, model, self.config.dispatch)


class ExpertTensorParallel:
    """The width of every expert divided over ranks that sit nearest to each other."""

    class Config(BaseModel):
        """Nothing to choose."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One axis of the expert view."""
        return [Axis("etp", config.parallel.degrees["etp"], splits=("expert_mlp",), distance=0, views=(VIEW,))]

    @hookimpl
    def shard_model(self, run: "Run", model: "Model") -> None:
        """Placements need no more than the plan; a model without experts is refused."""
        from mplug_ep.fit import refuse_what_does_not_fit

        refuse_what_does_not_fit(run, model, "etp")

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> "list[Wrap]":
        """Tokens gathered before dispatch, partial results summed after combine; of one rank, nothing."""
        from mplug_ep.wraps import wraps_of_etp

        return wraps_of_etp(run, model)
