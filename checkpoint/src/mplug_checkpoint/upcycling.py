"""The weights of a mixture of experts that begins as a dense model (arXiv 2212.05055; granular: arXiv 2410.07524).

E experts; a token chooses k of them. The dense MLP has the width F, and an expert F / G; D embed.

Expert e is part e mod G of the MLP, and G consecutive experts, a *group*, are one whole MLP. The router's rows are
drawn as for a new run, one for each group. So all experts of a group have equal logits, and a token chooses k / G whole
groups. The k gates of a token sum to s (`Choice.scale`) if they are normalised. Those of a group are equal, so the
chosen experts add up to s / G times the MLP. The down projections are multiplied by G / s, and then the mixture
computes what the MLP computes, for any choice.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from mplug.errors import UsageError, some_names
from mplug.layout.placement import Placement
from mplug.model.build import build_model
from mplug.model.memory import initialize
from mplug.model.model import Model
from mplug.run.run import Run
from mplug.tensors.random import key_of, normal
from mplug_checkpoint.export import CheckpointBoxes
from mplug_nn import MLP, MixtureOfExperts
from mplug_pretrained.foreign import WEIGHT, ForeignCheckpoint, ForeignTensor, Shape
from mplug_pretrained.foreign_match import needed_of
from mplug_pretrained.public_load import open_published
from mplug_pretrained.published import FolderWeights
from mplug_pretrained.transfer import fill_ours
from mplug_pretrained.wanted import wanted_of
from mplug_saving.opened import open_together

REMEDY = "give the mixture the settings of the dense model, and experts in the place of MLPs"


class DenseWeights:
    """The parameters of a dense model, from a checkpoint of its run or from a published folder; read one at a time."""

    def __init__(self, run: Run, path: Path, is_published: bool) -> None:
        self.model, self.path, self._stack = build_model(run), path, ExitStack()
        self._files: FolderWeights | CheckpointBoxes
        if is_published:
            self._files = open_published(path)[1].weights(self.model)
            wanted = wanted_of(None, self.model.plan, sorted(needed_of(self.model)), self._files.present)
            self._files.refuse_other_model(f"'{path}'", wanted)
        else:
            self._files = CheckpointBoxes(open_together(run, path), run.config.trainer.eval_averages)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._files)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """A whole parameter."""
        shape = self.model.placements[name].shape
        start = (0,) * len(shape)
        if isinstance(self._files, CheckpointBoxes):
            return self._files.read(name, start, shape)
        values = torch.empty(shape, dtype=self._files.widest)
        fill_ours(self._files.links[name], start, values, self._files.read)
        return values


@dataclass(frozen=True)
class Part:
    """The experts of one block: the MLP that they are parts of, and what decides the formula."""

    mlp: str
    mixture: MixtureOfExperts
    dense: MLP

    @property
    def split(self) -> int:
        """G, the parts of an MLP."""
        return int(self.dense.down.weight.shape[1] // self.mixture.experts.down.shape[2])

    @property
    def factor(self) -> float:
        """What the down projections are multiplied by: G / s."""
        return self.split / self.mixture.router.gating.scale

    def refuse(self, name: str) -> None:
        """UsageError for experts that no parts of the MLP are."""
        experts, gating = self.mixture.experts, self.mixture.router.gating
        whole, own = self.dense.down.weight.shape[1], experts.down.shape[2]
        if experts.kind != self.dense.kind:
            raise UsageError(
                f"'{name}' has the activation '{experts.kind}', and '{self.mlp}' of the dense model has "
                f"'{self.dense.kind}'; {REMEDY}"
            )
        if whole % own:
            raise UsageError(
                f"an expert of '{name}' is {own} wide, which does not divide the {whole} of the dense model's MLP; set "
                f"model.moe_ffn_hidden_size to {whole} or a divisor"
            )
        for field, number in (("num_experts", gating.num_experts), ("num_experts_per_token", gating.top_k)):
            if number % self.split:
                raise UsageError(
                    f"model.{field}={number} is no multiple of the {self.split} experts of '{name}' that make one MLP "
                    f"of the dense model ({whole} / {own} wide); use a multiple of {self.split}"
                )
        if (gating.num_experts // gating.num_groups) % self.split:
            raise UsageError(
                f"model.moe_router_num_groups={gating.num_groups} divides the {self.split} experts of '{name}' that "
                f"make one MLP of the dense model ({whole} / {own} wide), so a token would choose a part of them; use "
                f"groups of a multiple of {self.split} experts"
            )


class Upcycled(ForeignCheckpoint):
    """The parameters of a mixture, computed from those of a dense model. Each is one tensor with the same name.

    `noise` is the standard deviation of normal noise on the experts' weights, as a multiple of that of the dense
    weight. It depends on the seed alone.
    """

    def __init__(self, model: Model, dense: DenseWeights, noise: float, seed: int) -> None:
        self.model, self.dense, self.noise, self.seed = model, dense, noise, seed
        self.path = dense.path
        self.needed: Mapping[str, Placement] = needed_of(model)
        self.tensors = {name: ForeignTensor(placement.shape) for name, placement in self.needed.items()}
        self._last: tuple[str, Tensor] = "", torch.empty(0)
        self._refuse_other_models()

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The mixtures of the model that have the place of an MLP, by their names."""
        dense = dict(self.dense.model.module.named_modules())
        found = {}
        for name, module in self.model.module.named_modules():
            mlp = f"{name.rpartition('.')[0]}.mlp"
            if isinstance(module, MixtureOfExperts) and name not in dense and isinstance(dense.get(mlp), MLP):
                found[name] = Part(mlp, module, dense[mlp])
        return found

    def differences(self) -> Iterator[str]:
        """Why the logits are not those of the dense model; nothing if they are."""
        choices = [part.mixture.router.gating for part in self.parts.values()]
        if any(not one.normalize and one.score != "softmax_of_chosen" for one in choices):
            yield "the gates of a token do not sum to model.moe_router_scale (model.moe_router_normalize is false)"
        if any(part.mixture.capacity_factor is not None for part in self.parts.values()):
            yield "choices beyond model.capacity_factor are dropped"
        if self.noise:
            yield "the experts have noise"

    def read(self, tensor: str, start: Shape, shape: Shape, state: str = WEIGHT, part: int = 0) -> Tensor:
        """A box of a parameter of the mixture. The last parameter stays in memory."""
        assert (state, part) == (WEIGHT, 0)
        if self._last[0] != tensor:
            self._last = tensor, self._whole(tensor)
        box: Tensor = self._last[1][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
        return box

    def _whole(self, name: str) -> Tensor:
        mixture, _, own = name.rpartition(".moe.")
        part = self.parts.get(f"{mixture}.moe")
        if part is None:
            return self.dense.read(name) if name in self.dense.model.placements else self._initial(name)
        if own == "experts.up":  # [F, D]; gated: [2F, D]
            segments = 2 if part.dense.gated else 1
            return self._experts(name, self.dense.read(f"{part.mlp}.up.weight"), (segments, part.split), 0)
        if own == "experts.down":  # [D, F]
            return self._experts(name, self.dense.read(f"{part.mlp}.down.weight") * part.factor, (1, part.split), 1)
        rows = self._initial(name)
        if own == "router.weight":
            rows = rows[:: part.split].repeat_interleave(part.split, dim=0)
        return rows

    def _experts(self, name: str, dense: Tensor, cuts: tuple[int, int], dim: int) -> Tensor:
        """The experts [E, ...] from a projection of the MLP: each segment of its dimension `dim` is cut into G parts.

        `cuts` is (segments, G).
        """
        parts = dense.unflatten(dim, (*cuts, -1)).movedim(dim + 1, 0).flatten(1 + dim, 2 + dim)  # [G, ...]
        experts: Tensor = parts.repeat(self.needed[name].shape[0] // cuts[1], 1, 1)
        if self.noise:
            counter = torch.arange(experts.numel()).view(experts.shape)
            drawn = normal(key_of(self.seed, "upcycling", name), counter).to(experts.dtype)
            experts += drawn * (self.noise * dense.std())
        return experts

    def _initial(self, name: str) -> Tensor:
        placement = self.needed[name]
        values = torch.zeros(placement.shape, dtype=torch.float64)
        initialize({name: values}, {name: placement}, 0, self.seed)
        return values

    def _refuse_other_models(self) -> None:
        """UsageError unless both models compute the same outside of the experts, by their parameters and modules."""
        if not self.parts:
            raise UsageError(
                "the model has no experts in the place of an MLP of the dense model; choose a family with experts "
                "(--model mixtral), or say which blocks have some (model.feed_forward_types)"
            )
        for name, part in self.parts.items():
            part.refuse(name)
        made = {
            f"{name}.{own}"
            for name in self.parts
            for own in ("experts.up", "experts.down", "router.weight", "router.logit_bias", "router.bias")
        } | {f"{name}.router.last_load" for name in self.parts}
        of_dense = needed_of(self.dense.model)
        used = {f"{part.mlp}.{own}.weight" for part in self.parts.values() for own in ("up", "down")}
        lacking = [name for name in self.needed if name not in made and name not in of_dense]
        unused = [name for name in of_dense if name not in used and name not in self.needed]
        wrong = [name for name in self.needed if name in of_dense and self.needed[name].shape != of_dense[name].shape]
        problems = [f"the dense model has no counterpart of {some_names(lacking)}"] if lacking else []
        problems += [f"the mixture has no place for {some_names(unused)}"] if unused else []
        problems += [f"the shapes of {some_names(wrong)} differ"] if wrong else []
        problems += list(self._other_modules())[:1] if not problems else []
        if problems:
            raise UsageError(f"'{self.path}' does not become this mixture: {'; '.join(problems)}; {REMEDY}")

    def _other_modules(self) -> Iterator[str]:
        """Modules of the same name that compute something else, by their type and by their plain attributes."""
        dense, blocks = dict(self.dense.model.module.named_modules()), {name.rpartition(".")[0] for name in self.parts}
        for name, module in self.model.module.named_modules():
            twin = dense.get(name)
            if twin is None or not name:
                continue
            if type(twin) is not type(module) and name not in blocks:
                kinds = type(module).__name__, type(twin).__name__
                yield f"'{name}' is of the class {kinds[0]} in the mixture, {kinds[1]} in the dense model"
            theirs = _plain(twin)
            for attribute, value in _plain(module).items():
                if attribute in theirs and theirs[attribute] != value:
                    yield f"'{name}' has {attribute}={value} in the mixture, {theirs[attribute]} in the dense model"


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers, words or data classes of these."""
    return {name: value for name, value in vars(module).items() if name[:1] != "_" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, field.name)) for field in fields(value))
    return value is None or isinstance(value, bool | int | float | str)
