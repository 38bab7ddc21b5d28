"""The calls of units in training, recorded: which unit runs on which samples, and torch's generator state."""

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.run.run import Run
    from mplug.training.assembly import Parts

Call = tuple[int, tuple[int, ...], str]
"""(step, samples of the micro batch, unit) of a call in training."""


def watch_units(run: "Run", parts: "Parts", begins: Callable[[Call], None]) -> None:
    """Have `begins` called before each call of a unit in training; what backward runs again is no such call."""
    model, samples = parts.model, list[tuple[int, ...]]()
    through_all = model.run

    def through(batch: Mapping[str, "Tensor"], chunk: int | None = None) -> dict[str, "Tensor"]:
        samples[:] = [tuple(batch["sample_ids"].tolist())]
        return through_all(batch, chunk)

    model.run = through  # type: ignore[method-assign]
    for unit in model.own_units:
        module = model.module.get_submodule(unit.name)

        def call(*arguments: Any, inner: Callable[..., Any], name: str, **named: Any) -> Any:
            if model.module.training:
                begins((run.step, samples[0], name))
            return inner(*arguments, **named)

        setattr(module, unit.method, partial(call, inner=getattr(module, unit.method), name=unit.name))


def generator_state() -> str:
    """Where the CPU's generator stands; on a GPU the host seeds its generator alike."""
    import torch

    return blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).hexdigest()
