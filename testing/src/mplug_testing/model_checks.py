"""A tiny model with initial values, and the requirements for its computations. B samples, S length, V vocabulary."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mplug.contracts.micro_batch import MicroBatch
from mplug.errors import listed
from mplug.layout.plan import TOKENS_AXIS, Unit
from mplug.layout.work import Flops
from mplug.model.model import Model
from mplug.model.plans.work import flops_of_work
from mplug.model.slots.fill import sites
from mplug.model.units import run_units
from mplug.run.run import Run
from mplug.tensors.random import sample_keys
from mplug.training.assembly import build
from mplug.training.batch_parts import with_shifted
from mplug_nn import AttentionSpec
from mplug_nn.loss import IGNORED
from mplug_testing.blueprint import other_functions
from mplug_testing.harness import EXACT, TinySettings, tiny_run, with_ragged_labels
from mplug_testing.mixer_flops import note_mixers
from mplug_testing.suite import Fault, require

SAMPLES = 4
"""B: number of samples of a micro batch."""

Gradients = Mapping[str, Tensor]


def _attention_on_cpu(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    """The FLOPs of torch's fused attention on CPUs over all pairs of a query and a key.

    torch's counter does not know this operator.
    """
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


UNCOUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu}


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

    @torch.no_grad()
    def require_flops(self, core_flops: Callable[..., Flops]) -> None:
        """The plan's FLOPs are three times those of a forward pass, as torch counts matrix products.

        The check replaces the slot of attention by a core that multiplies nothing. It counts H K multiply-adds with
        keys and as many with values for each pair that the site's mask leaves: S² / 2 of them if it is causal, S² if it
        is not, and those inside of a window (`AttentionSpec.flops`). Each costs 6 FLOPs with backward.
        The cores of scans and short convolutions are replaced likewise (`note_mixers`).
        For a core other than softmax attention, `core_flops` states the FLOPs. If a model does not use the slot, the
        check estimates attention from the growth of the count with the length, and the plan must not state less. In
        both cases, the modules must not state more (`plan_work`) than the plan.
        """
        calls: list[tuple[str, tuple[Any, ...]]] = []
        streams = [f"{unit.name}." for unit in self.model.plan.units if unit.sequence != TOKENS_AXIS]
        for site in sites(self.model.module):
            if site.slot == "Attention.core":
                is_counted = not site.name.startswith(tuple(streams))
                site.module.core = _noting(calls if is_counted else [], other_functions(site))
        of_mixers = note_mixers(list(sites(self.model.module)))
        batch = self.batches[0]
        counted = self._products(batch)
        if not calls and not of_mixers:
            self._require_no_fewer_flops(counted)
            self._require_work_of_plan()
            return
        stated, weights = self.model.plan.flops, 3 * counted // batch["tokens"].numel()
        cores = [_flops_of(call, other, core_flops) for other, call in calls]
        per_token = sum(core.per_token for core in cores) + sum(of_mixers)
        pairs = Flops.sum(core.of_pairs for core in cores)
        more = f", and its cores {per_token:,}" if per_token else ""
        require(
            stated.per_token == weights + per_token,
            f"the plan states {stated.per_token:,} FLOPs per token, and the products with weights need "
            f"{weights:,}{more}",
        )
        functions = {other for other, _ in calls} - {""}
        cores_need = f"cores of {listed(sorted(functions))} need" if functions else "attention, by its masks, needs"
        require(
            stated.per_squared_length == pairs.per_squared_length,
            f"the plan states {stated.per_squared_length:,} FLOPs per squared length, and {cores_need} "
            f"{pairs.per_squared_length:,}",
        )
        require(
            dict(stated.windows) == dict(pairs.windows),
            f"the plan states these FLOPs per pair: {_of_windows(stated)}; and {cores_need} {_of_windows(pairs)}",
        )
        self._require_work_of_plan()

    def _require_work_of_plan(self) -> None:
        """The FLOPs that modules state are a part of the plan's: a frozen model skips some of them."""
        of_tokens = {unit.name for unit in self.model.plan.units if unit.sequence == TOKENS_AXIS}
        own = [one for one in self.model.work if one.unit in of_tokens]
        stated, found = self.model.plan.flops, flops_of_work(own)
        require(
            found.per_token <= stated.per_token,
            f"the modules state {found.per_token:,} FLOPs per token (plan_work), and the plan {stated.per_token:,}, so "
            f"a run with frozen parameters would skip more than there is",
        )

    def _products(self, batch: MicroBatch) -> int:
        """The FLOPs of the products and convolutions of tokens that torch can count in a forward pass."""
        values, total = dict(batch), 0
        for unit in self.model.plan.units:
            counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
            with counter:
                values = run_units(self.model.module, [unit], values)
            total += int(counter.get_total_flops()) if unit.sequence == TOKENS_AXIS else 0
        return total

    def _require_no_fewer_flops(self, counted: int) -> None:
        """A lower bound from forward passes of two lengths.

        The part that grows with the length counts per token, as exactly as torch counts; a causal mask may leave a
        query one key more than half of all. The part that grows with the squared length counts half, because attention
        may have computed what a causal mask discards. torch does not see what a kernel of the model itself multiplies.
        """
        stated, length = self.model.plan.flops, self.batches[0]["tokens"].shape[1]
        part = length // 2
        whole, less = (
            Fraction(3 * count, SAMPLES) for count in (counted, self._products(self.shortened(self.batches[0], part)))
        )
        squared = max(Fraction(), (whole / length - less / part) / (length - part))
        per_token = whole / length - squared * length if squared else (whole - less) / (length - part)
        how = f"in forward passes of {part} and {length} tokens per sample, torch counts"
        hint = "if the model computes in chunks, set trainer.seq_length to at least two chunks"
        require(
            stated.per_token >= per_token - squared,
            f"the plan states {stated.per_token:,} FLOPs per token; {how} {float(per_token):,.0f} with backward; "
            f"{hint}",
        )
        require(
            stated.per_squared_length >= squared / 2,
            f"the plan states {stated.per_squared_length:,} FLOPs per squared length; {how} {float(squared):,.0f} with "
            f"backward, and a causal mask leaves half of them; {hint}",
        )

    def shortened(self, batch: MicroBatch, length: int) -> MicroBatch:
        """The first `length` tokens of each sample of a micro batch."""
        context = self.model.plan.context
        _, sequence = context["tokens"]
        cut = {name: axes.index(sequence) for name, axes in context.items() if sequence in axes}
        return {name: x.narrow(cut[name], 0, length) if name in cut else x for name, x in batch.items()}


def _noting(calls: list[tuple[str, tuple[Any, ...]]], other: str) -> Callable[..., Tensor]:
    """A core that multiplies nothing, and records its function and its arguments."""

    def nothing(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> Tensor:
        calls.append((other, (q, k, v, *rest[:1])))
        return q.new_zeros(*q.shape[:3], v.shape[3])

    return nothing


def _flops_of(call: tuple[Any, ...], other: str, core_flops: Callable[..., Flops]) -> Flops:
    """The FLOPs of one call of a core: of softmax attention, or of the function `other`."""
    if not other:
        q, k, v = call[:3]
        if getattr(call[3], "cross", False):
            return Flops(6 * q.shape[2] * (q.shape[3] + v.shape[3]) * k.shape[1], 0)
        pair = 6 * q.shape[2] * (q.shape[3] + v.shape[3])
        return call[3].flops(pair) if isinstance(call[3], AttentionSpec) else Flops(0, pair // 2)
    try:
        return core_flops(*call)
    except NotImplementedError as error:
        raise Fault(f"its sites need '{other}', whose FLOPs are unknown: {error}") from None


def _of_windows(flops: Flops) -> str:
    """The FLOPs of each window, for messages."""
    found = [f"{pair:,} in {'causal' if one.causal else 'full'} windows of {one.size}" for one, pair in flops.windows]
    return listed(found) if found else "none"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)
