"""A tiny model with initial values, and the requirements for its computations. B samples, S length, V vocabulary."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug.contracts.micro_batch import MicroBatch
from mplug.errors import listed
from mplug.layout.plan import Unit
from mplug.model.model import Model
from mplug.model.units import run_units
from mplug.run.run import Run
from mplug.tensors.random import sample_keys
from mplug.training.assembly import build
from mplug.training.batch_parts import with_shifted
from mplug_nn.loss import IGNORED
from mplug_testing.harness import EXACT, TinySettings, tiny_run, with_ragged_labels
from mplug_testing.suite import Fault, require

SAMPLES = 4
"""B: number of samples of a micro batch."""

Gradients = Mapping[str, Tensor]


@dataclass
class Trial:
    """A model in one process and two micro batches. Its slots are in plain torch unless the settings name kernels."""

    run: Run
    model: Model
    batches: tuple[MicroBatch, MicroBatch]

    @classmethod
    def of(cls, settings: TinySettings) -> "Trial":
        """The model and the data of a tiny run; an error in the plan is a Fault."""
        sizes = {"trainer.micro_batch_size": SAMPLES, "trainer.global_batch_size": 2 * SAMPLES}
        run = tiny_run({"kernels.default": None, **settings, **sizes})
        try:
            parts = build(run)
        except ValueError as error:
            raise Fault(str(error)) from error
        seed = run.config.trainer.seed
        first, second = (
            {
                **with_shifted(with_ragged_labels(batch), parts.model.plan),
                "keys": sample_keys(seed, 1, batch["sample_ids"]),
            }
            for batch in parts.train_loader.loader.take(2 * SAMPLES)
        )
        return cls(run, parts.model, (first, second))

    def flow(self, units: Iterable[Unit], batch: MicroBatch) -> dict[str, Tensor]:
        """All values that flow through units: the micro batch's entries and the activations."""
        available = set(batch)
        for unit in units:
            missing = sorted(set(unit.inputs) - available)
            require(not missing, f"unit '{unit.name}' takes {listed(missing)}, which the tiny run's data does not have")
            available |= set(unit.outputs)
        try:
            return run_units(self.model.module, units, batch)
        except Exception as error:  # the plugin's code may raise anything
            raise Fault(f"its forward pass fails: {type(error).__name__}: {error}") from error

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of targets)."""
        values = self.flow(self.model.plan.units, batch)
        return values["loss"], values["num_targets"]

    @torch.no_grad()
    def logits(self, batch: MicroBatch) -> Tensor:
        """[B, S, V]; SkipTest if the plan has no inference units."""
        if not self.model.plan.inference:
            raise SkipTest("the plan has no units of inference, so 'mplug generate' cannot sample from the model")
        return self.flow(self.model.plan.inference, batch)["logits"]

    def shake(self) -> None:
        """Perturb all parameters, so that those with initial zeros or ones matter too."""
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.model.parameters().values():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))

    def part(self, batch: MicroBatch, samples: slice) -> MicroBatch:
        """Some samples of a micro batch."""
        context = self.model.plan.context
        divided = {name for name in batch if "batch" in context.get(name, ()) and batch[name].shape[0] > 1}
        return {name: value[samples] if name in divided else value for name, value in batch.items()}

    # Requirements.

    def require_named_axes(self) -> None:
        """Every entry and activation has one axis per dimension, and equal axes have equal lengths."""
        plan, batch = self.model.plan, self.batches[0]
        values = {**self.flow(plan.inference, batch), **self.flow(plan.units, batch)}
        lengths: dict[str, tuple[int, str]] = {}
        for name, axes in {**plan.context, **plan.activations}.items():
            if name not in values:
                continue
            shape = tuple(values[name].shape)
            require(len(axes) == len(shape), f"the plan names {len(axes)} axes of '{name}', which has shape {shape}")
            for axis, length in zip(axes, shape, strict=True):
                if name in plan.context and length == 1:  # positions [1 or B, S]
                    continue
                first_length, other = lengths.setdefault(axis, (length, name))
                require(
                    length == first_length,
                    f"the axis '{axis}' has length {length} in '{name}' of shape {shape}, and length {first_length} in "
                    f"'{other}'; correct the plan's axes",
                )

    def require_same_beginning(self, same: "Trial") -> None:
        """Two runs of one seed have the same initial weights."""
        for name, parameter in self.model.parameters().items():
            other = same.model.parameters().get(name)
            require(
                other is not None and torch.equal(parameter, other),
                f"two runs with the same seed begin with different values of '{name}'",
            )

    def require_other_beginning(self, other: "Trial") -> None:
        """A run of another seed has other initial weights."""
        inits = {name: placement.parameter.init for name, placement in other.model.placements.items()}
        drawn = {name for name, init in inits.items() if init.std > 0 or init.high > init.low}
        require(drawn, "no parameter has random initial values (Init), so all seeds give the same model")
        own, its = self.model.parameters(), other.model.parameters()
        for name in sorted(drawn & own.keys()):
            require(
                not torch.equal(own[name], its[name]),
                f"runs with different seeds begin with the same values of '{name}'",
            )

    def require_same_loss_whatever_torch_draws(self) -> None:
        """A training loss is a function of the weights and the micro batch, including its random keys."""
        losses = self._losses_of_two_generator_states()
        require(
            losses[0] == losses[1],
            f"the loss of one micro batch depends on torch's generator ({losses[0]}, {losses[1]}); draw random numbers "
            f"from the samples' keys (mplug_nn.Dropout)",
        )

    def _losses_of_two_generator_states(self) -> list[float]:
        losses = []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for seed in (1, 2):
                torch.manual_seed(seed)
                losses.append(float(self.loss(self.batches[0])[0]))
        return losses

    @torch.no_grad()
    def require_sum_with_count(self) -> None:
        """Losses and counts of samples add up, and ignored labels do not contribute."""
        self.model.module.eval()
        batch = self.batches[0]
        (whole, count), targets = self.loss(batch), int((batch["labels"] != IGNORED).sum())
        require(
            int(count) == targets,
            f"the loss counts {int(count)} targets in a micro batch of {targets}; count every label except {IGNORED}",
        )
        halves = [self.loss(self.part(batch, samples))[0] for samples in (slice(0, 2), slice(2, None))]
        require(
            _close(sum(map(float, halves)), float(whole)),
            f"the loss of {SAMPLES} samples is {float(whole)}, and their halves have {float(halves[0])} and "
            f"{float(halves[1])}; the loss must be a sum over targets, not a mean, and no sample may change the loss "
            f"of another",
        )
        first, rest = slice(0, 1), slice(1, None)
        labels = batch["labels"].clone()
        labels[first] = IGNORED
        left, alone = float(self.loss({**batch, "labels": labels})[0]), float(self.loss(self.part(batch, rest))[0])
        require(_close(left, alone), f"ignored labels change the loss: {left} with them, {alone} without them")
        none = float(self.loss({**batch, "labels": torch.full_like(labels, IGNORED)})[0])
        require(none == 0, f"the loss of a micro batch without targets is {none}; it must be 0")

    def gradients(self, batches: Iterable[MicroBatch]) -> Gradients:
        """The gradients that a step over micro batches sums in the sinks."""
        self.model.module.train()
        sinks, batches = self.model.sinks, list(batches)
        sinks.begin_step()
        for number, batch in enumerate(batches, start=1):
            if number == len(batches):
                sinks.expect_last()
            loss, _ = self.loss(batch)
            require(loss.requires_grad, "the loss depends on no parameter")
            loss.backward()
        sinks.finish()
        return {name: sink.buffer.clone() for name, sink in sinks.items()}

    def require_reference(self, reference: Callable[[Gradients, MicroBatch, Any], Tensor]) -> None:
        """The logits and the gradients of the loss are those of a reference in plain torch, in fp64."""
        self.shake()
        self.model.module.eval()
        batch, own = self.batches[0], {**self.model.states(), **self.model.parameters()}
        weights = {
            name: x.detach().clone().requires_grad_(x.requires_grad and x.is_floating_point())
            for name, x in own.items()
        }
        expected = reference(weights, batch, self.run.config.model)
        found = self.logits(batch)
        require(
            expected.shape == found.shape,
            f"the reference of the suite returns logits of shape {tuple(expected.shape)}, and the model "
            f"{tuple(found.shape)}",
        )
        exact = expected.detach()
        error = float((found - exact).abs().max() / exact.abs().max())
        require(
            error <= EXACT,
            f"its logits differ from those of the suite's reference (relative difference {error:.1e} in fp64); does a "
            f"block read another tensor than the reference does?",
        )
        if expected.requires_grad:
            self._require_reference_gradients(weights, expected, batch)

    def _require_reference_gradients(self, weights: Gradients, logits: Tensor, batch: MicroBatch) -> None:
        labels = batch["labels"].flatten()
        F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum").backward()
        sinks = self.model.sinks
        sinks.begin_step()
        sinks.expect_last()
        self.loss(batch)[0].backward()
        sinks.finish()
        for name, sink in sinks.items():
            expected = weights[name].grad
            if expected is not None:
                error = float((sink.buffer - expected).norm() / expected.norm().clamp(min=1e-30))
                require(
                    error <= 100 * EXACT,
                    f"the gradient of '{name}' differs from that of the suite's reference (relative difference "
                    f"{error:.1e} in fp64)",
                )

    def require_gradients(self) -> None:
        """Every trained parameter gets a gradient that is finite and not zero."""
        self.shake()
        for name, gradient in self.gradients(self.batches[:1]).items():
            require(bool(gradient.isfinite().all()), f"the gradient of parameter '{name}' is not finite")
            require(
                bool(gradient.any()),
                f"parameter '{name}' gets no gradient; use it in the loss without detaching it, or freeze it",
            )

    def require_gradients_of(self, expected: Gradients, frozen: list[str]) -> None:
        """If units are frozen, each remaining gradient equals that of the model that trains all, after `shake`."""
        if self.run.config.frozen != tuple(frozen):
            raise SkipTest("the model family's Config defines the field 'frozen' itself")
        self.shake()
        found = self.gradients(self.batches[:1])
        total = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in expected.values()))
        for name, gradient in found.items():
            error = float((gradient - expected[name]).norm())
            require(
                error <= 1e-5 * max(float(expected[name].norm()), 1e-3 * total),
                f"if {listed(frozen)} are frozen, the gradient of '{name}' differs by {error:.3g}; gradients must flow "
                f"through frozen parameters to trained ones",
            )

    def require_accumulation(self) -> None:
        """A step over two micro batches has the sum of their gradients; the model keeps no state between them."""
        first, second = self.batches
        alone, other, both = self.gradients([first]), self.gradients([second]), self.gradients([first, second])
        whole = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in both.values()))
        for name, gradient in both.items():
            error = float((gradient - alone[name] - other[name]).norm())
            require(
                error <= 1e-5 * max(float(gradient.norm()), 1e-3 * whole),
                f"the gradient of '{name}' over two micro batches differs from the sum of both gradients by "
                f"{error:.3g}; does the model keep state of one micro batch for the next?",
            )

    def require_quiet_evaluation(self) -> None:
        """In evaluation, the loss depends neither on torch's generator nor on the samples' keys."""
        self.model.module.eval()
        losses = self._losses_of_two_generator_states()
        require(
            losses[0] == losses[1],
            f"in evaluation the loss of one micro batch depends on torch's generator ({losses[0]}, {losses[1]}); draw "
            f"in training only",
        )
        batch = self.batches[0]
        with torch.no_grad():
            keyed = [float(self.loss({**batch, "keys": keys})[0]) for keys in (batch["keys"], batch["keys"] + 1)]
        require(
            keyed[0] == keyed[1],
            f"in evaluation the loss depends on the samples' random keys ({keyed[0]}, {keyed[1]}); draw in training "
            f"only",
        )

    def require_logits_of_the_loss(self) -> None:
        """The logits [B, S, V] have the loss as their cross-entropy."""
        self.shake()
        self.model.module.eval()
        batch = self.batches[0]
        logits, shape = self.logits(batch), tuple(batch["labels"].shape)
        require(
            logits.dim() == 3 and logits.shape[:2] == shape,
            f"the logits have shape {tuple(logits.shape)}; they must be {[*shape, 'V']}",
        )
        labels = batch["labels"].flatten()
        expected = F.cross_entropy(logits.float().flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
        with torch.no_grad():
            loss = float(self.loss(batch)[0])
        require(
            _close(loss, float(expected)),
            f"the cross-entropy of the logits is {float(expected)}, and the loss is {loss}; the units of inference "
            f"must compute the same function as those of training",
        )

    def require_causal_logits(self) -> None:
        """Logits depend on the tokens up to their own position only."""
        self.shake()
        self.model.module.eval()
        batch = self.batches[0]
        tokens, at = batch["tokens"].clone(), batch["tokens"].shape[1] // 2
        tokens[:, at:] = (tokens[:, at:] + 1) % (tokens.max() + 1)
        before, after = self.logits(batch), self.logits({**batch, "tokens": tokens})
        changed = (before - after).abs().amax(dim=(0, 2)) > 1e-5 * float(before.abs().max())  # [S]
        for position, moved in enumerate(changed.tolist()):
            require(
                position >= at or not moved,
                f"the tokens from position {at} on change the logits of position {position}, so the model is not "
                f"causal",
            )
            require(position < at or moved, f"the token at position {position} does not change the logits there")

    @torch.no_grad()
    def require_logits_of_later_tokens(self) -> None:
        """Logits depend on the token at their own position, and the last token changes those of the position before."""
        self.shake()
        self.model.module.eval()
        batch = self.batches[0]
        tokens = batch["tokens"].clone()
        tokens[:, -1] = (tokens[:, -1] + 1) % (tokens.max() + 1)
        before, after = self.logits(batch), self.logits({**batch, "tokens": tokens})
        changed = (before - after).abs().amax(dim=(0, 2)) > 1e-5 * float(before.abs().max())  # [S]
        require(bool(changed[-1]), "the last token does not change the logits there")
        require(
            bool(changed[-2]),
            "the last token does not change the logits before it, so the model is causal; remove 'causal = False' from "
            "the suite",
        )

    def shortened(self, batch: MicroBatch, length: int) -> MicroBatch:
        """The first `length` tokens of each sample of a micro batch."""
        context = self.model.plan.context
        _, sequence = context["tokens"]
        cut = {name: axes.index(sequence) for name, axes in context.items() if sequence in axes}
        return {name: x.narrow(cut[name], 0, length) if name in cut else x for name, x in batch.items()}


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)
