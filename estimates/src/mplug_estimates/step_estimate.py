"""What a step of a run is, how long it takes at least, and whether machine and data suffice: lines for its start."""

import os
from typing import TYPE_CHECKING

import torch

from mplug.run.durations import LONG_RUN, TRIAL, duration
from mplug.training.hardware import peak_tflops
from mplug_estimates.timing import timed

if TYPE_CHECKING:
    from mplug.distributed.world import World
    from mplug.model.model import Model
    from mplug.run.run import Run

PRODUCTS = (256, 512, 1024)
"""Rows and columns of the matrices whose products measure a CPU; small ones do not occupy many cores."""
ENOUGH_SECONDS = 0.005
"""No larger product is measured after one that took so long."""
WORTH_SAYING = 600.0
"""A least duration of a run below these seconds says little: small models spend their time on other work."""
SLOWEST_FLOPS = 1e8
"""FLOP/s that every CPU reaches; its speed is not measured for a run that is short even at this one."""
SHORT_OF = 0.95
"""The part of a stated memory that a GPU must have: a GPU of 80 GB states a little more or less."""


def about_step(run: "Run", model: "Model", world: "World | None", done: int = 0) -> str:
    """The samples and tokens of a step, and the least duration of the steps after `done` if it is long."""
    trainer = run.config.trainer
    size, length, count = trainer.global_batch_size, trainer.seq_length, run.micro_batch_counts()[-1]
    ramp = "up to " if run.config.schedule.batch_rampup.start is not None else ""
    words = f"a step: {ramp}{size:,} sample{'s' * (size != 1)} of {length:,} tokens ({size * length:,} tokens)"
    if count > 1:
        words += f", {count} micro batches{' on each rank' if run.mesh.world_size > 1 else ''}"
    left = trainer.steps - done
    flops = model.flops.of(size * length, size * length**2)
    if run.device == "cpu" and flops * left < WORTH_SAYING * SLOWEST_FLOPS:
        return words
    speed = _tflops(run, world)
    seconds = 0.0 if speed is None else flops / (speed * 1e12)
    if seconds * left < WORTH_SAYING:
        return words
    source = "by this CPU's speed" if run.device == "cpu" else "at the GPUs' peak"
    words += f"; at least {_short(seconds)} {source}, {duration(seconds * left)} for {left:,} steps"
    return f"{words}; {TRIAL}" if run.device == "cpu" and seconds * left >= LONG_RUN else words


def recipe_gaps(run: "Run", world: "World | None") -> list[str]:
    """A warning for each of the GPUs and the memory that the run's recipe states, and that this machine has not."""
    recipe = run.config.recipe
    if recipe is None or recipe.machine is None:
        return []
    name = "the config" if recipe.name is None else f"the recipe '{recipe.name}'"
    least, needs = recipe.machine, f"needs: {recipe.needs}"
    if run.device == "cpu":
        return [f"{name} is made for GPUs, and this run computes on a CPU ({needs}); {TRIAL}"]
    gpus = torch.cuda.device_count() if world is None else run.mesh.world_size
    if gpus < least.gpus:
        return [
            f"{name} is made for {least.gpus} GPUs, and this run has {gpus} ({needs}); use a "
            f"smaller model, or more GPUs and a layout for them (--parallel)"
        ]
    memory = min(torch.cuda.get_device_properties(one).total_memory for one in range(torch.cuda.device_count())) / 1e9
    if memory < SHORT_OF * least.gpu_memory_gb:
        return [
            f"{name} is made for GPUs with {least.gpu_memory_gb:g} GB, and one of this machine has "
            f"{memory:.0f} GB ({needs}); use more GPUs and a layout that shards the model (--parallel), or a smaller "
            f"model"
        ]
    return []


def _tflops(run: "Run", world: "World | None") -> float | None:
    """An upper bound of the speed of all ranks in 10^12 FLOP/s; None if the chip is unknown."""
    ranks = run.mesh.world_size
    if run.device == "cpu":
        here = ranks if world is None else world.local_size or 1
        threads = torch.get_num_threads()
        at_once = max(1.0, min(here, (os.cpu_count() or 1) / threads))
        return _cpu_tflops(getattr(torch, run.precision.activations)) * at_once * ranks / here
    peak = peak_tflops("cuda")
    factor = 1 if run.precision.recipe is None else 2  # products of 8 bits
    return None if peak is None else peak * factor * ranks


def _cpu_tflops(dtype: torch.dtype) -> float:
    """The speed of matrix products in this process, with the threads that it has now."""
    found = 0.0
    for size in PRODUCTS:
        a = torch.ones(size, size, dtype=dtype, device="cpu")
        seconds = min(timed(lambda a=a: torch.mm(a, a), 3, "cpu"))  # type: ignore[misc]
        found = max(found, 2 * size**3 / seconds / 1e12)
        if seconds > ENOUGH_SECONDS:
            break
    return found


def _short(seconds: float) -> str:
    """Seconds as '0.07 s', or as a clock shows them."""
    return f"{seconds:.2g} s" if seconds < 60 else duration(seconds)
