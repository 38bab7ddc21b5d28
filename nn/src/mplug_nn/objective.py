"""Objectives: what a step computes from the end of a language model, instead of the mean cross-entropy of its targets.

B samples of a micro batch, S positions of this process, D embed, V vocabulary, N sequences of a sample.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from mplug.contracts.micro_batch import IGNORED, LOSS_WEIGHTS, REFERENCE
from mplug.errors import UsageError, listed
from mplug.layout.inits import TOKENS, Entries, Inits
from mplug.layout.names import within
from mplug.layout.plan import Buffer, Shift, Unit
from mplug.model.plans.work import flops_of_work, work_of
from mplug.model.slots.declaration import Slot
from mplug_nn.divergence import DIVERGENCE, divergence
from mplug_nn.first_bias import FirstBias
from mplug_nn.head import Head
from mplug_nn.loss import CAPPED, LOG_PROBABILITIES, log_probabilities
from mplug_nn.multi_token_prediction import TokensAhead
from mplug_nn.router import ALL_EXPERTS, Router
from mplug_nn.statistics import count
from mplug_nn.top_divergence import TOP_DIVERGENCE, top_divergence
from mplug_nn.top_probabilities import TOP_PROBABILITIES, top_probabilities
from mplug_pretrained.external import ScoreHead

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug.run.run import Run

LOG_PROBABILITIES_OUTPUT = "log_probabilities"
"""The activation [B, S] that an objective returns beside its loss if the run needs it (`Objective.recalls`)."""


def summed(values: Tensor) -> tuple[Tensor, float]:
    """The default of the slot `Objective.summed`.

    values [...], sums over this process's positions -> (the sums over whole sequences, a share: 1.0 on one of the
    processes that know the same sums, and 0.0 on the others). The host supplies it if ranks divide sequences.
    """
    return values, 1.0


def sums_of(values: Tensor, sequences: Tensor, number: int) -> Tensor:
    """values [B, S, F], the sequence of each position [B, S] -> the sums over positions of each sequence [B, N, F]."""
    members = sequences[..., None] == torch.arange(number, device=sequences.device)  # [B, S, N]
    return torch.where(members[..., None], values[:, :, None], 0).sum(dim=1)


def gathered(values: Tensor) -> Tensor:
    """The default of the slot `Objective.gathered`.

    values [B, S / R, ...] of the positions of this process's hidden vectors -> those of all its positions [B, S, ...].
    Sequence parallelism divides hidden vectors over R ranks, and supplies it: then every rank computes the same loss.
    """
    return values


OF_LOGITS = (LOG_PROBABILITIES, DIVERGENCE, TOP_DIVERGENCE, TOP_PROBABILITIES)
"""The slots that compute logits."""
SUMMED = Slot("Objective.summed", "objective", summed, sums_parts=True)
GATHERED = Slot("Objective.gathered", "objective", gathered)


class Objective(nn.Module):
    """The base class of objectives. A subclass implements `forward`, and `set_objective` puts it into a model.

    `forward(hidden [B, S, D], project, labels [B, S], weights, **entries)` returns (the sum of the losses, the number
    that the host divides the sums of all ranks and micro batches by), and the activation 'log_probabilities' [B, S]
    (detached) if `returns` is set. `project` maps hidden vectors to logits. Of a vocabulary that ranks divide, it
    returns a part: use `log_probabilities(hidden, project, labels)`.

    `entries` maps the entries of micro batches that `forward` takes by name to their axes. `recalls` asks the host for
    the log-probabilities of the labels under the weights with which the run began, as the entry REFERENCE; it sets
    `returns`, as does `return_log_probabilities`. `figures`
    are the names of values that metrics report: `report` adds to their sums, which the host divides as it divides the
    loss. If that number is not that of the targets, `number_in` returns it for a whole micro batch before a strategy
    divides it: losses inside of the model's blocks, which are means over tokens, need it before the step. `shifted` are
    entries that the host makes from those of the loader (`Plan.shifted`); `entries` has their axes too.

    An objective with a head of its own (scores, classes) does not need the projection to the vocabulary: it sets
    `projects` to False, and the projection is then frozen unless it is tied to the embedding. If labels are no tokens,
    it sets `of_tokens` to False. It computes the head on `hidden`, and passes the result to `gathered`.

    `labels` are the names of the scores of such a head, whose weight is `score.weight`: published classifiers of
    decoders have it in place of the projection.

    `outputs` maps the names of further results, which follow those, to their axes. They are not for the host: who runs
    the model forward finds them in what the last unit returns (`ForwardStepper.outputs`).

    `weighted` says that `weights` [B, S] multiply the losses of targets. A loss that is not of targets (of pairs, say)
    sets it to False, and data that have weights are refused.

    A subclass that computes sums over sequences calls `over_sequences`, and `counted_once` at its end. So every rank
    that has a part of a sequence has the gradient of the whole loss, and one of them counts it.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (*OF_LOGITS, SUMMED, GATHERED)
    mixes: ClassVar[frozenset[str]] = frozenset()  # sums over sequences lie in a slot
    projects: ClassVar[bool] = True
    of_tokens: ClassVar[bool] = True
    weighted: ClassVar[bool] = True
    labels: tuple[str, ...] = ()

    def __init__(
        self,
        entries: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        figures: Sequence[str] = (),
        recalls: bool = False,
        shifted: Mapping[str, Shift] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.entries, self.figures, self.recalls, self.shifted = entries, tuple(figures), recalls, shifted
        self.returns = recalls
        self.outputs: Mapping[str, tuple[str, ...]] = {}
        self.soft_cap: float | None = None
        self.measures = False
        self.log_probabilities: Callable[..., Tensor] = log_probabilities
        self.divergence: Callable[..., Tensor] = divergence
        self.top_divergence: Callable[..., Tensor] = top_divergence
        self.top_probabilities: Callable[..., tuple[Tensor, Tensor]] = top_probabilities
        self.summed: Callable[[Tensor], tuple[Tensor, float]] = summed
        self.gathered: Callable[[Tensor], Tensor] = gathered
        for name in self.figures:
            self.register_buffer(_attribute(name), torch.zeros((), dtype=torch.float64), persistent=False)

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the figures."""
        return {_attribute(name): Buffer((), over=TOKENS, per_target=True, reported=name) for name in self.figures}

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier of a slot must offer here."""
        of_logits = any(slot == one.name for one in OF_LOGITS)
        return frozenset({CAPPED}) if of_logits and self.soft_cap is not None else frozenset()

    @staticmethod
    def number_in(batch: Mapping[str, Tensor]) -> Tensor:
        """The number [] by which the sums of losses of a whole micro batch are divided."""
        return (batch["labels"] != IGNORED).sum()

    def over_sequences(self, values: Tensor, sequences: Tensor, number: int) -> tuple[Tensor, float]:
        """values [B, S, F], the sequence of each position [B, S] -> (sums over whole sequences [B, N, F], share)."""
        return self.summed(sums_of(values, sequences, number))

    def report(self, hidden: Tensor, labels: Tensor, share: float = 1.0, **figures: Tensor) -> None:
        """Add sums [] to the figures of a step, by their names with '_' for '/'; none in an evaluation during training.

        `hidden` and `labels` are those of `forward`. Sequence parallelism gathers the sequence before the loss, so
        several ranks know the same sums, and each counts its part of them.
        """
        share *= hidden.shape[1] / labels.shape[1]
        for name, value in figures.items() if self.training or self.measures else ():
            count(getattr(self, name), (share * value.detach()).to(torch.float64))

    @staticmethod
    def counted_once(loss: Tensor, number: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """The loss and its number of terms; on ranks with share 0 both are zero, and the gradient is that of the loss.

        A rank of context parallelism knows the loss of whole sequences, and has the gradients of its own positions.
        """
        return (loss, number) if share else (loss - loss.detach(), torch.zeros_like(number))


def _attribute(name: str) -> str:
    return name.replace("/", "_")


def set_objective(run: "Run", model: "Model", objective: Objective, label: str) -> None:
    """Let a model that trains compute an objective instead of the cross-entropy. Call it in `adapt_model`.

    Does nothing in a run that does not train. All else is as in `replace_end`.
    """
    if run.trains:
        replace_end(run, model, objective, label)


def replace_end(run: "Run", model: "Model", objective: Objective, label: str) -> None:
    """Let a model compute an objective instead of the cross-entropy, also in a run that does not train.

    There, the objective adds to its figures in evaluations (`mplug_validation.Figures` reads them). Call it in
    `adapt_model`. `label` is that of the plugin ('objectives/dpo'), for errors. Raises UsageError if the micro batches
    lack an entry of the objective or have weights that it does not use, if the model has another end than `Head`, or if
    it predicts tokens further ahead and the objective counts something else than tokens.
    """
    unit, head = end_of(model, label)
    counts = None if type(objective).number_in is Objective.number_in else objective.number_in
    counts_tokens = counts is None and objective.of_tokens
    if not counts_tokens and any(isinstance(part, TokensAhead) for part in model.module.modules()):
        raise UsageError(f"{label} has no loss for tokens further ahead; set model.num_mtp_layers=0")
    entries = dict(objective.entries)
    made = {*objective.shifted, *((REFERENCE,) if objective.recalls else ())}
    missing = [name for name in entries if name not in run.entries and name not in made]
    if missing:
        (loader,) = run.hooks.implementers("build_loader")
        raise UsageError(
            f"{label} needs micro batches with {listed(map(repr, missing))}, which {loader} does not supply; use data "
            f"that does ('mplug plugins list --kind data')"
        )
    if LOSS_WEIGHTS in run.entries and not objective.weighted:
        (loader,) = run.hooks.implementers("build_loader")
        raise UsageError(
            f"{loader} has weights of the losses of targets ('{LOSS_WEIGHTS}'), which {label} would ignore: its loss "
            f"is not a sum over targets; use data without weights"
        )
    objective.soft_cap, objective.measures = head.soft_cap, not run.trains
    if not objective.projects:
        _without_projection(model, unit, head)
    setattr(head, "loss", None)  # noqa: B010 (mypy knows the attribute as a module)
    model.attach({f"{unit.name}.loss": objective})
    if objective.labels:
        _describe_scores(run, model, unit, head, objective.labels)
    if objective.recalls:
        model.attach(
            {f"{name}.first_bias": FirstBias(len(bias), ALL_EXPERTS) for name, bias in _changing_biases(model)}
        )
    optional = tuple(dict.fromkeys((*unit.optional, *entries)))
    changed = replace(unit, optional=optional)
    model.plan = replace(
        model.plan,
        units=tuple(changed if one is unit else one for one in model.plan.units),
        context={**model.plan.context, **entries},
        shifted={**model.plan.shifted, **objective.shifted},
        recalled={REFERENCE: LOG_PROBABILITIES_OUTPUT} if objective.recalls else {},
        count=counts,
    )
    if objective.returns:
        _add_output(model, LOG_PROBABILITIES_OUTPUT, TOKENS)
    for name, axes in objective.outputs.items():
        _add_output(model, name, axes)


def return_log_probabilities(model: "Model", label: str) -> None:
    """Let the objective of a model return the log-probabilities of labels, as the output LOG_PROBABILITIES_OUTPUT.

    Call it in `adapt_model`, outside of the objective's layer. `label` is that of the plugin that needs them, for
    the UsageError if the end of the model is no such objective.
    """
    unit, _ = end_of(model, label)
    objective = getattr(model.module.get_submodule(unit.name), "loss", None)
    if not isinstance(objective, Objective):
        raise UsageError(
            f"{label} needs the log-probabilities that an objective computes, and the run has none; set --objective"
        )
    if not objective.returns:
        objective.returns = True
        _add_output(model, LOG_PROBABILITIES_OUTPUT, TOKENS)


def _add_output(model: "Model", name: str, axes: tuple[str, ...]) -> None:
    """Add an activation with these axes to the outputs of the model's last unit."""
    unit = _last_unit(model)
    changed = replace(unit, outputs=(*unit.outputs, name))
    model.plan = replace(
        model.plan,
        units=tuple(changed if one is unit else one for one in model.plan.units),
        activations={**model.plan.activations, name: axes},
    )


def _without_projection(model: "Model", unit: Unit, head: Head) -> None:
    """Freeze the projection of a head that no longer projects, and take its FLOPs from the plan."""
    before = flops_of_work(work_of(head, unit.name))
    head.projects = False
    unused = before.without(flops_of_work(work_of(head, unit.name)))
    model.plan = replace(model.plan, flops=model.plan.flops.without(unused))
    parameters = model.parameters()
    model.freeze(name for name, _ in head.project.named_parameters(f"{unit.name}.project") if name in parameters)


def _describe_scores(run: "Run", model: "Model", unit: Unit, head: Head, labels: tuple[str, ...]) -> None:
    """Give the weight of scores its public name, and the widths of the projection that it replaces.

    Beside a narrower base model, both multiply hidden vectors that are divided by the ratio of the widths. UsageError
    for a pattern of `model.frozen` that freezes other parameters and the scores too.
    """
    own, projection = f"{unit.name}.loss.score.weight", f"{unit.name}.project.weight"
    for pattern in run.config.frozen:
        if within(pattern).fullmatch(own) and any(
            within(pattern).fullmatch(name) for name in model.parameters() if name != own
        ):
            raise UsageError(
                f"model.frozen: '{pattern}' also freezes the scores '{own}', which the objective trains; name "
                f"'{unit.name}.norm' to freeze the rest of the head (the projection is frozen anyway), or "
                f"'{unit.name}.loss' to freeze the scores alone"
            )
    parameters = model.parameters()
    replaced = next(name for name, one in parameters.items() if one is head.project.weight)
    scores = replace(model.plan.parameters[own], widths=model.plan.match(parameters)[replaced].widths)
    model.plan = replace(model.plan, parameters={**model.plan.parameters, own: scores})
    if model.plan.external is not None:
        names = model.plan.external
        tensors, heads = {**names.tensors, own: "score.weight"}, ScoreHead(own, projection, labels)
        model.plan = replace(model.plan, external=replace(names, tensors=tensors, scores=heads))


def _changing_biases(model: "Model") -> Iterator[tuple[str, Tensor]]:
    """The routers with a bias that changes after each step, and the biases."""
    for name, module in model.module.named_modules():
        if isinstance(module, Router) and module.bias is not None and module.bias_rate:
            yield name, module.bias


def width_at_end(model: "Model", label: str) -> int:
    """The length D of the hidden vectors that an objective of the model takes. UsageError as of `set_objective`."""
    _, head = end_of(model, label)
    return int(head.project.weight.shape[1])


def end_of(model: "Model", label: str) -> tuple[Unit, Head]:
    """The unit that computes the loss, and its module."""
    unit = _last_unit(model)
    head = model.module.get_submodule(unit.name)
    if not isinstance(head, Head):
        raise UsageError(
            f"{label} needs a model that ends in log-probabilities of tokens (mplug_nn.Head), and the unit "
            f"'{unit.name}' of this model is a {type(head).__name__}; use another model or another head"
        )
    return unit, head


def _last_unit(model: "Model") -> Unit:
    """The unit that computes the loss."""
    return next(unit for unit in model.plan.units if "loss" in unit.outputs)
