"""A stepper of another framework: it declines sinks, receives ordinary gradients, supplies pieces and the step."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from mplug import Bucket, Engine, Piece, Sharding, UsageError, WeightExchange, hookimpl
from mplug.model.build import build_model
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug_estimates import measure_bytes
from mplug_sharding.engine import refuse_other_sums
from mplug_testing.harness import tiny_config

SETTINGS = {"trainer.precision": "fp64", "model.num_layers": 2, "model.tie_embeddings": True, "trainer.eval_every": 0}


class Flat:
    """An engine in plain torch: one flat master, the gradients that autograd leaves in `.grad`, averaged."""

    mistake: Callable[[list[Piece]], list[Piece] | None] = staticmethod(list)

    @hookimpl
    def shard_states(self, run: Run, model: Any) -> Sharding:
        sizes = {name: parameter.numel() for name, parameter in model.parameters().items()}
        *starts, end = accumulate(sizes.values(), initial=0)
        bucket = Bucket(tuple(sizes), tuple(starts), tuple(sizes.values()), end, (), num_owners=1)
        num_bytes = {"masters": 8 * end, "gradients, elsewhere": 3, "parts of the engine": 12}
        return Sharding((bucket,), engine=Engine(num_bytes))

    @hookimpl
    def wrap_model(self, run: Run, model: Any) -> None:
        bucket, self.model = model.sharding.buckets[0], model
        self.masters, self.gradients = torch.zeros(2, bucket.length, dtype=torch.float64).unbind()
        pieces = []
        for name, start, size in zip(bucket.names, bucket.starts, bucket.sizes, strict=True):
            placement = model.sharding.placed(model.placements[name])
            views = (flat[start : start + size] for flat in (self.masters, self.gradients))
            pieces.append(Piece(name, next(views), next(views), None, placement.parameter, placement))
        if (supplied := self.mistake(pieces)) is not None:
            model.supply(supplied)
        model.exchanges.append(WeightExchange(begin=self.write, wait=None))

    @torch.no_grad()
    def write(self) -> None:
        torch._foreach_copy_([one.view(-1) for one in self.model.parameters().values()], self.split(self.masters))

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(flat.split(self.model.sharding.buckets[0].sizes))

    @hookimpl
    def build_stepper(self, run: Run, model: Any, default: Any) -> Any:
        default.gradient_scale = 0.5
        self.default = default
        return self

    def forward_backward(self, micro_batches: Any, step: int) -> None:
        self.default.begin_step(step)
        losses = []
        for batch in micro_batches:
            loss, num_targets = self.model.loss(self.default.entries(batch, step))
            (0.5 * loss).backward()
            losses.append((loss.detach(), num_targets))
        self.default.count(losses)

    def update(self, lr: float, weight_decay: float) -> Any:
        for parameter, gradient in zip(self.model.parameters().values(), self.split(self.gradients), strict=True):
            gradient.copy_(parameter.grad.view(-1))
            parameter.grad = None
        self.default.reduction.finish()
        self.default.set_rates(lr, weight_decay)
        return self.default.apply(self.default.norm(), self.write)

    def evaluate(self, micro_batches: Any) -> Any:
        return self.default.evaluate(micro_batches)


def run_with(plugin: object | None) -> Run:
    return prepare(tiny_config(SETTINGS), {} if plugin is None else {"host/engine": plugin})


def figures(plugin: object | None) -> list[tuple[float, float]]:
    """(loss, norm) of four steps."""
    run = run_with(plugin)
    parts, found = build(run), []
    for step in range(1, 5):
        run.step = step
        parts.stepper.forward_backward(parts.train_loader.take(8), step)
        result = parts.stepper.update(1e-2, 0.1)
        found.append((float(result.loss), float(result.grad_norm)))
    if plugin is not None:
        assert len(parts.model.sinks) == 0
        assert not any(hasattr(parameter, "main_grad") for parameter in parts.model.parameters().values())
    return found


def test_an_engine_that_declines_sinks_gives_the_steps_of_the_default_stepper() -> None:
    for own, expected in zip(figures(Flat()), figures(None), strict=True):
        assert own == pytest.approx(expected, rel=1e-10)


def test_the_bytes_of_an_engine_are_those_that_it_states_and_the_optimizers() -> None:
    run = run_with(Flat())
    model = build_model(run)
    elements = sum(placement.numel for placement in model.placements.values())
    measured = measure_bytes(run, model)
    assert measured["masters"] == 8 * elements
    assert measured["parts of the engine"] == 12
    assert {kind for kind in measured if kind.startswith("gradients")} == {"gradients, elsewhere"}
    assert measured["optimizer state"] == pytest.approx(16 * elements, rel=0.01)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda _: None, "has not called model.supply"),
        (lambda pieces: pieces[1:], "must have the shape"),
        (lambda pieces: [*pieces, pieces[0]], "two pieces of one parameter"),
        (lambda pieces: [replace(pieces[0], master=pieces[0].master[1:]), *pieces[1:]], "must have the shape"),
        (lambda pieces: [replace(pieces[0], placement=pieces[1].placement), *pieces[1:]], "is not that of the shardi"),
        (lambda pieces: [replace(pieces[0], weight=pieces[0].master), *pieces[1:]], "and no weight"),
    ],
)
def test_wrong_pieces_of_an_engine_are_refused(mistake: Any, words: str) -> None:
    engine = Flat()
    engine.mistake = mistake
    with pytest.raises((ValueError, RuntimeError), match=words):
        build(run_with(engine))


def test_a_pipeline_and_a_strategy_that_listens_to_sinks_are_refused_beside_an_engine() -> None:
    run = prepare(tiny_config({**SETTINGS, "parallel.layout": "pp2"}), {"host/engine": Flat()})
    with pytest.raises(UsageError, match=r"parallel/pp runs the step of its stages .* host/engine replaces the step"):
        build_model(run)
    run = run_with(Flat())
    with pytest.raises(UsageError, match="parallel/near sums gradients by listening to their sinks, and host/engine"):
        refuse_other_sums(run, build_model(run), ["host/engine", "parallel/near"])


def test_an_average_beside_an_engine_is_refused() -> None:
    run = prepare(tiny_config({**SETTINGS, "optimizer.average": {}}), {"host/engine": Flat()})
    with pytest.raises(UsageError, match=r"optimizer\.average: the engine of host/engine keeps the master weights"):
        build_model(run)
