"""Sampling between the steps of a run that trains: by the weights themselves, which are not copied."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, ClassVar

from mplug import Axis, Model, Run, UsageError
from mplug.commands import Instead, Selection, modules_around
from mplug_sampling.continuous import Lanes
from mplug_sampling.filling import LaneText, fill_lanes
from mplug_sampling.form import Form, form_of_caches, form_of_slots, selected_undivided
from mplug_sampling.sampler import Sampler, cached_modules, refuse_axis, refuse_stages
from mplug_sampling.sampling import Sampling
from mplug_sampling.together import Gathers, refuse_even


class TrainedSampler(Sampler):
    """The model of a run that trains, which also samples. It replaces no kernel, because the kernels train too.

    Ranks that divide the positions of samples in training have whole texts when they sample (`Form`): their own ones if
    they divide the entries of micro batches, and the same ones if they divide positions inside the model.
    """

    steps_stages: ClassVar[bool] = True
    gathers: Gathers = "rollout"
    form: Form

    def select(self, run: Run, model: Model, selection: Selection) -> None:
        """The part in the hook `offers_selected`. UsageError if the model cannot sample with static caches."""
        refuse_stages(run, model)
        caching = [] if self.uncached else cached_modules(model)
        caches = form_of_caches(caching)
        with caches.applied():
            own = selected_undivided(run, model, selection, {*self.undivided_axes(run).values()})
            self.growing = self.uncached or self._reason_against_static(run, model, own)
            self.form = Form([*caches.values, *form_of_slots(selection, own).values])
        refuse_even(run, own)
        if self.eager_because:
            raise UsageError(
                f"rollouts need caches that do not grow, and {self.eager_because}; use a kernel with static keys "
                f"(--attention sdpa or reference) and a layout that does not divide the positions of a call, such as "
                f"data parallelism"
            )
        selection.unmet += [one for one in own.unmet if one not in selection.unmet]

    def sampling(self) -> AbstractContextManager[None]:
        """In the block, slots and modules are as sampling needs them."""
        return self.form.applied()

    def _may_undivide(self, axis: Axis) -> bool:
        return axis.divides("sequence") and not (axis.entries and axis.splits)  # with parts of weights, no own prompts

    def _refuse_divided(self, run: Run) -> None:
        """Raise UsageError if ranks divide a sample in another way than by its positions, or when they sample too."""
        undivided = self.undivided_axes(run)
        for axis in run.mesh.axes.values():
            if axis.name not in undivided or {*axis.entries} - {"batch", "sequence"}:
                refuse_axis(run, axis)

    def _serve_caches(self, model: Model) -> None:
        """Nothing: modules serve caches only while the model samples (`form`)."""

    def own_units(self) -> Instead:
        """The methods of the units' classes, if training calls others: compiled for its shapes, or recomputed."""
        found, own = dict[str, Callable[..., Any]](), {unit.name for unit in self.model.own_units}
        for unit in self.model.plan.inference:
            if own.isdisjoint((unit.name, *modules_around(unit.name))):
                continue
            part = self.model.module.get_submodule(unit.name)
            if unit.method in vars(part):
                found[unit.name] = MethodType(getattr(type(part), unit.method), part)
        for exchange in self.model.exchanges if self.gathers == "units" else ():
            if exchange.around is not None:
                found = {name: exchange.around(name, call) for name, call in found.items()}
        return found


@dataclass
class Completion:
    """The tokens that follow a prompt, with their log-probabilities when they were sampled.

    The last token is an end token, unless the text is `truncated`.
    """

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    truncated: bool = False


def complete(
    lanes: Lanes,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> list[Completion]:
    """The completions of prompts, of up to `num_tokens` tokens each, by the present weights.

    `keys` are those of the completions' random numbers. Collective: groups of ranks have different prompts, and also
    call this function without any. The model's mode (training or evaluation) is the same afterwards.
    """
    module = lanes.model.module
    was_training = module.training
    module.eval()
    lanes.model.weights_settled()
    lanes.forget_prompt()
    found = [Completion() for _ in prompts]

    def take(number: int, token: int, log_probability: float) -> bool:
        text = found[number]
        text.tokens.append(token)
        text.log_probabilities.append(log_probability)
        text.truncated = token not in ends and len(text.tokens) >= num_tokens
        return token in ends or text.truncated

    try:
        with lanes.sampling():
            fill_lanes(lanes, [LaneText(*one, sampling) for one in zip(prompts, keys, strict=True)], take, num_tokens)
            lanes.ranks.finish(lanes.compute_nothing)
    finally:
        module.train(was_training)
    return found
