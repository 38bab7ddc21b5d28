"""The config's sections that are the host's own. Their defaults stand in `default.yaml` and nowhere else.

A field with the mark `MAY_CHANGE` may be another one when a run resumes. The others decide the course of training.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from mplug.contracts import MAY_CHANGE

LEAST_TIMEOUT = 3.0
"""Seconds in which a process sends three heartbeats."""


class Section(BaseModel):
    """A section of the config: unknown fields are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise ValueError(f"must be a power of two, so that scaling rounds nothing, not {value:g}")
    return value


PowerOfTwo = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_power_of_two)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Bounds that no run meets: a slip of the keyboard must not become hours of waiting or a full memory.
Size = Annotated[int, Field(gt=0, le=10**9)]
"""Samples of a batch, tokens of a sample, steps."""
Count = Annotated[int, Field(ge=0, le=10**15)]
"""Samples over a run."""


class LossScale(Section):
    """How fp16 keeps its gradients within its range; bf16 and fp32 have no use for it."""

    initial: PowerOfTwo = Field(description="what the loss of the first step is multiplied with before backward")
    smallest: PowerOfTwo = Field(description="where gradients overflow at this scale, `trainer.nonfinite` decides")
    growth_interval: Size = Field(description="steps without an overflow after which the scale rises")
    growth_factor: PowerOfTwo = Field(ge=1, description="what the scale is multiplied with then; 1: it never rises")
    backoff_factor: PowerOfTwo = Field(lt=1, description="what it is multiplied with after an overflow")

    @model_validator(mode="after")
    def _begins_above_the_smallest(self) -> Self:
        if self.smallest > self.initial:
            raise ValueError(f"smallest={self.smallest:g} is above initial={self.initial:g}; the scale begins there")
        return self


class Trainer(Section):
    """How long, on what, and in which portions to train."""

    steps: Annotated[Size, MAY_CHANGE] = Field(description="optimizer steps of the whole run")
    seq_length: Size = Field(description="tokens of a sample")
    micro_batch_size: Annotated[Size | None, MAY_CHANGE] = Field(
        description="samples of one forward and backward pass on a rank; null: all of the global batch that it reads"
    )
    global_batch_size: Size = Field(description="samples of one optimizer step, over all ranks")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        description="number format of weights and activations; masters and moments are fp32. "
        "Products of fp32 matrices are fp32's own, as torch has it by default, not TF32's. "
        "fp64, masters and moments included, is for tests: it tells a wrong sum from rounding"
    )
    loss_scale: LossScale = Field(description="dynamic loss scaling, in fp16")
    gradients: Literal["auto", "fp32"] = Field(
        description="number format of gradients; 'auto' is the weights' where nothing is added to a gradient (one "
        "micro batch a step, no data parallelism) and the optimizer takes it, else fp32; in fp16 always fp32"
    )
    compile: Annotated[Literal["auto", "never", "inductor", "aot_eager"], MAY_CHANGE] = Field(
        description="torch.compile's backend for each unit of the model; 'auto' is inductor on a GPU, never on a CPU; "
        "aot_eager is for tests"
    )
    tune_kernels: Annotated[bool, MAY_CHANGE] = Field(
        description="let inductor time launch shapes of the kernels that it builds: a longer start, faster steps"
    )
    deterministic: Annotated[bool, MAY_CHANGE] = Field(
        description="the same run twice gives the same bits: only kernels that promise that, some of them slower"
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = Field(
        description="where to train; 'auto' takes a GPU if there is one"
    )
    seed: NonNegativeInt = Field(description="decides initial weights, data order and dropout, under any layout")
    max_grad_norm: Finite = Field(description="gradients are scaled down to this global norm; 0: never")
    nonfinite: Annotated[Literal["stop", "skip"], MAY_CHANGE] = Field(
        description="what a loss or gradient norm that is not finite does: end the run, or leave the step out; "
        "either way no weight changes"
    )
    log_every: Annotated[Size, MAY_CHANGE] = Field(description="steps between two progress lines")
    eval_every: Annotated[NonNegativeInt, MAY_CHANGE] = Field(
        description="steps between two evaluations; 0: none, not even at the end"
    )
    eval_samples: Annotated[Size, MAY_CHANGE] = Field(description="validation samples of one evaluation")


class WeightDecay(Section):
    """How the optimizer's weight decay changes over a run."""

    name: Literal["constant", "linear", "cosine"] = Field(description="shape of the change over the run")
    end: Finite | None = Field(description="value at the last step; null: the optimizer's own")


class BatchRampup(Section):
    """How the global batch grows to `trainer.global_batch_size`."""

    start: Size | None = Field(description="samples of the first steps' global batch; null: no ramp-up")
    increment: Size = Field(description="samples that each increase adds")
    samples: Count = Field(description="samples over which the increases are spread evenly")


class Schedule(Section):
    """Learning rate, weight decay and batch size as functions of the step."""

    name: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        description="shape of the learning rate after the warm-up"
    )
    warmup_steps: NonNegativeInt = Field(description="steps over which the rate rises linearly from 0 to optimizer.lr")
    decay_steps: Size | None = Field(
        description="length of the decay; null: all that follows the warm-up (wsd: the last fifth of the run)"
    )
    min_lr: Finite = Field(description="the rate never decays below this")
    weight_decay: WeightDecay = Field(description="schedule of the weight decay")
    batch_rampup: BatchRampup = Field(description="schedule of the global batch size")


class Checkpoint(Section):
    """When to save, and how many checkpoints to keep."""

    every: Annotated[NonNegativeInt, MAY_CHANGE] = Field(
        description="steps between two checkpoints; 0: only at the end of the run"
    )
    keep: Annotated[PositiveInt, MAY_CHANGE] = Field(
        description="newest valid checkpoints to keep; older ones are removed after a save"
    )
    asynchronous: Annotated[bool, MAY_CHANGE] = Field(
        description="write while training goes on, from a copy in the host's memory"
    )
    pretrained: Annotated[str | None, MAY_CHANGE] = Field(
        description="a checkpoint, or a run's folder: a new run begins with its weights, and with nothing else of it"
    )


def _three_ticks(value: float) -> float:
    if 0 < value < LEAST_TIMEOUT:
        raise ValueError(
            f"must be 0, or at least {LEAST_TIMEOUT:g} (a process sends a heartbeat a second), not {value:g}"
        )
    return value


class Watchdog(Section):
    """When a process of several is taken to hang: the run then ends with an error that names the rank."""

    timeout: Annotated[FiniteFloat, Field(ge=0, le=10**7), AfterValidator(_three_ticks), MAY_CHANGE] = Field(
        description="seconds without a heartbeat, or without progress in a step, after which the run ends: at least 3, "
        "or 0 for never"
    )
    first: Annotated[FiniteFloat, Field(ge=0, le=10**7), MAY_CHANGE] = Field(
        description="the same for an activity of unknown duration: building, loading, the first step (it compiles), "
        "the first evaluation and the first save"
    )
    multiple: Annotated[FiniteFloat, Field(ge=1, le=10**4), MAY_CHANGE] = Field(
        description="steps, evaluations and saves may take so many times as long as the longest of their kind, if that "
        "is more than `timeout`"
    )

    @property
    def collective(self) -> float:
        """Seconds after which torch ends a collective by itself: long after the watchdog, if it is on, has acted."""
        return max(24 * 3600, 2 * self.timeout, 2 * self.first) if self.timeout else max(1800, self.first)


class Model(Section):
    """What the host reads of the section 'model', whichever family it names; all other fields are the family's."""

    frozen: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="parameters that are not trained: patterns of their names or of modules that they lie in, as "
        "'embedding', 'blocks.0' or 'blocks.*.attn.qkv.weight' ('*' stands for one part of a name)",
    )


PluginName = Annotated[str, Field(min_length=1, description="name of an installed plugin")]
