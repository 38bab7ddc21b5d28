"""The sections of the config that the host owns. Their defaults are in `default.yaml` only.

A run that resumes may change the fields with the mark `MAY_CHANGE`. The other fields determine the course of training.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    create_model,
    field_serializer,
    model_serializer,
    model_validator,
)

from mplug.config.family import GroupOptimizer
from mplug.contracts.fields import MAY_CHANGE, distinct

PositiveHours = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PluginName = Annotated[str, Field(min_length=1, description="name of an installed plugin")]


class Section(BaseModel):
    """A section of the config: unknown fields are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise ValueError(f"must be a power of two, because other factors cause rounding, not {value:g}")
    return value


PowerOfTwo = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_power_of_two)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(distinct)]
"""Names or patterns, each once."""

# Bounds above any real run: they stop a typing error before it costs hours of waiting or all of the memory.
Size = Annotated[int, Field(gt=0, le=10**9)]
"""Samples of a batch, tokens of a sample, steps."""
Count = Annotated[int, Field(ge=0, le=10**15)]
"""Samples over a run."""


class LossScale(Section):
    """Dynamic loss scaling, which keeps gradients in range if the precision uses it (fp16)."""

    initial: PowerOfTwo = Field(description="factor on the loss of the first step before backward")
    smallest: PowerOfTwo = Field(description="minimum scale; `trainer.nonfinite` handles an overflow at this scale")
    growth_interval: Size = Field(description="number of steps without an overflow after which the scale rises")
    growth_factor: PowerOfTwo = Field(ge=1, description="factor by which the scale rises; 1: it never rises")
    backoff_factor: PowerOfTwo = Field(lt=1, description="factor on the scale after an overflow")

    @model_validator(mode="after")
    def _starts_at_or_above_smallest(self) -> Self:
        if self.smallest > self.initial:
            raise ValueError(f"smallest={self.smallest:g} is above initial={self.initial:g}; set it to a lower value")
        return self


class Trainer(Section):
    """Length of the run, batch sizes, number formats, device, and evaluation."""

    steps: Annotated[Size, MAY_CHANGE] = Field(description="optimizer steps of the whole run")
    seq_length: Size = Field(description="tokens per sample")
    micro_batch_size: Annotated[Size | None, MAY_CHANGE] = Field(
        description="samples per forward and backward pass on a rank; null: the rank's whole share of the global batch"
    )
    global_batch_size: Size = Field(description="samples per optimizer step, over all ranks")
    precision: PluginName = Field(
        description="the number formats of the run: the name of an installed precision, such as fp32 or bf16 "
        "('mplug plugins list --kind precisions'); its options are in the section `precisions`"
    )
    base_modules: Names | None = Field(
        description="modules whose matrix products ignore the recipe of the precision, as patterns "
        "of names ('*' matches one part of a name); null: those of the precision, by default the embedding, the head, "
        "and the first and last block; []: none"
    )
    loss_scale: LossScale = Field(description="dynamic loss scaling, of precisions that use it (fp16)")
    gradients: Literal["auto", "masters"] = Field(
        description="number format of gradients; 'masters' uses the format of the master weights; 'auto' saves memory "
        "in a run with one micro batch per step and without data parallelism, where each gradient is a single product: "
        "it uses the format that the precision states for such gradients (bf16: that of the weights) if the optimizer "
        "supports it, and otherwise the format of the master weights"
    )
    compile: Annotated[Literal["auto", "never", "inductor", "aot_eager"], MAY_CHANGE] = Field(
        description="torch.compile's backend for each unit of the model; 'auto' uses inductor on a GPU and does not "
        "compile on a CPU; 'never' does not compile; 'aot_eager' is for tests"
    )
    tune_kernels: Annotated[bool, MAY_CHANGE] = Field(
        description="let inductor benchmark launch configurations of its kernels: a slower start, faster steps"
    )
    graphs: Annotated[bool, MAY_CHANGE] = Field(
        description="replay each training step as one CUDA graph, which costs the CPU almost no time; the run is "
        "refused if a part of its step cannot be replayed ('mplug explain' says which)"
    )
    deterministic: Annotated[bool, MAY_CHANGE] = Field(
        description="make the run repeatable bit for bit: use deterministic kernels only, some of which are slower"
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = Field(
        description="device to train on; 'auto' uses a GPU if there is one"
    )
    memory_check: Annotated[Literal["refuse", "warn", "off"], MAY_CHANGE] = Field(
        description="before the run starts, compare an estimate of its memory with that of this machine: 'refuse' ends "
        "a run that surely does not fit, and warns of one that may not; 'warn' only warns; 'off' estimates nothing"
    )
    seed: NonNegativeInt = Field(description="seed of initial weights, data order and dropout, under any layout")
    max_grad_norm: Finite = Field(
        description="maximum global gradient norm; gradients above it are scaled down; 0: never"
    )
    nonfinite: Annotated[Literal["stop", "skip"], MAY_CHANGE] = Field(
        description="reaction to a loss or gradient norm that is not finite: 'stop' ends the run, 'skip' omits the "
        "update of this step; neither changes a weight"
    )
    log_every: Annotated[Size, MAY_CHANGE] = Field(description="steps between two progress lines")
    eval_every: Annotated[NonNegativeInt, MAY_CHANGE] = Field(
        description="steps between two evaluations; 0: no evaluation, not even at the end"
    )
    eval_samples: Annotated[Size, MAY_CHANGE] = Field(description="validation samples per evaluation")
    eval_averages: Annotated[bool, MAY_CHANGE] = Field(
        description="evaluate, generate and export with the averages of the weights, if the optimizer keeps averages "
        "(`optimizer.average`); false: with the weights themselves"
    )


class WeightDecay(Section):
    """Schedule of the optimizer's weight decay over a run."""

    name: Literal["constant", "linear", "cosine"] = Field(description="shape of the change over the run")
    end: Finite | None = Field(description="value at the last step; null: the value of `optimizer.weight_decay`")


class BatchRampup(Section):
    """Growth of the global batch to `trainer.global_batch_size` over the first samples of a run."""

    start: Size | None = Field(description="global batch size of the first steps; null: no ramp-up")
    increment: Size = Field(description="samples that each increase adds to the global batch")
    samples: Count = Field(description="training samples over which the increases are spread evenly")


class Schedule(Section):
    """Learning rate, weight decay and batch size as functions of the step."""

    name: PluginName = Field(
        description="the learning rate after the warm-up: an entry of the open list of schedules, such as cosine "
        "or wsd ('mplug plugins list --kind learning_rates')"
    )
    warmup_steps: NonNegativeInt = Field(description="steps over which the rate rises linearly from 0 to optimizer.lr")
    decay_steps: Size | None = Field(
        description="steps of the decay; null: all steps after the warm-up (wsd, wsd_sqrt, wsd_cosine: the last fifth "
        "of the run)"
    )
    min_lr: Finite = Field(description="minimum learning rate of the decay")
    weight_decay: WeightDecay = Field(description="schedule of the weight decay")
    batch_rampup: BatchRampup = Field(description="schedule of the global batch size")


class Pretrained(Section):
    """The weights that a new run starts with. A path alone stands for the whole section."""

    path: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a checkpoint, a run's folder, or a published folder of an installed format"
    )
    parts: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        {},
        description="instead of path: a published folder for each part of the model, by the name of the part's section "
        "in 'model'; parts without a folder keep initial values. Beside path: that of a second model, such as the "
        "teacher of an objective",
    )
    only: Names | None = Field(
        None, description="patterns of the parameters or modules to load; null: all. The others keep initial values"
    )

    @model_validator(mode="after")
    def _names_folders_once(self) -> Self:
        if self.path is None and not self.parts:
            raise ValueError("needs path, a folder of the whole model, or parts, folders of parts of it")
        return self

    @property
    def excluded(self) -> tuple[str, ...]:
        """The field `except`: a keyword of Python, which a class body cannot declare."""
        found: tuple[str, ...] = getattr(self, "except")
        return found


_EXCEPT: Any = {
    "except": (
        Names,
        Field(
            (),
            description="patterns of the parameters or modules that keep their initial values, and of tensors of a "
            "published checkpoint that may stay unused",
        ),
    )
}
if not TYPE_CHECKING:
    Pretrained = create_model("Pretrained", __base__=Pretrained, __doc__=Pretrained.__doc__, **_EXCEPT)


def _with_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class Checkpoint(Section):
    """When to save, and how many checkpoints to keep."""

    every: Annotated[NonNegativeInt | Literal["auto"], MAY_CHANGE] = Field(
        description="steps between two checkpoints; 0: only at the end of the run; 'auto': the interval that loses the "
        "least time, by the measured cost of a save and hours_between_failures"
    )
    hours_between_failures: Annotated[PositiveHours | None, MAY_CHANGE] = Field(
        description="for every=auto: the mean time between two failures of the run; null: 50,700 hours divided by the "
        "number of ranks, as with the H100s of Llama 3 405B"
    )
    keep: Annotated[PositiveInt, MAY_CHANGE] = Field(
        description="number of valid checkpoints to keep; each save removes older ones"
    )
    asynchronous: Annotated[bool, MAY_CHANGE] = Field(
        description="write while training continues, from a copy in the host's memory"
    )
    pretrained: Annotated[Pretrained | None, BeforeValidator(_with_path), MAY_CHANGE] = Field(
        description="the weights that a new run starts with, and nothing else: a path, or path (or parts), only "
        "and except"
    )

    @field_serializer("pretrained")
    def _short(self, value: Pretrained | None) -> Any:
        """A path alone as a text, as the user may write it."""
        if value is None or (value.only is None and not value.excluded and not value.parts):
            return None if value is None else value.path
        return value.model_dump(mode="json")


Line = Annotated[str, Field(min_length=1)]


class RecipeMachine(Section):
    """The GPUs for which a recipe is made."""

    gpus: int = Field(1, ge=1, description="the least number of GPUs; a run with fewer gets a warning")
    gpu_memory_gb: float = Field(0, ge=0, description="the least memory of each GPU in GB; 0: any")


class Recipe(Section):
    """The description of a recipe, in its file; the config of a run keeps the name and the origin."""

    name: Line | None = Field(None, description="the recipe from which the settings come; mplug writes it")
    origin: Line | None = Field(None, description="its distribution and version; mplug writes it")
    summary: Line | None = Field(None, description="what the recipe is for, in a line")
    needs: Line | None = Field(None, description="the GPUs and the memory that it needs")
    machine: RecipeMachine | None = Field(
        None,
        description="the GPUs of `needs` as numbers: a machine that lacks them gets a warning; null: a CPU will do",
    )
    reaches: Line | None = Field(None, description="measured speed and quality, or 'not measured'")
    give: dict[str, Line] = Field(
        default_factory=dict,
        description="fields that the recipe leaves to the user, each with what to give; a run without one is refused",
    )


class Model(Section):
    """The host's own fields in the section 'model'. The model family owns all other fields."""

    frozen: Names = Field(
        (),
        description="parameters that are not trained, as patterns of the names of parameters or modules: 'embedding', "
        "'blocks.0' or 'blocks.*.attn.qkv.weight' ('*' matches one part of a name)",
    )


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class ParameterGroup(Section):
    """Parameters with an optimizer of their own, or with factors on the learning rate and the weight decay."""

    match: Annotated[Names, Field(min_length=1), BeforeValidator(_as_list)] = Field(
        description="patterns of the names of parameters or modules, as in `model.frozen`; one pattern may be a text"
    )
    lr_scale: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="factor on the learning rate that the schedule gives at each step"
    )
    weight_decay_scale: Finite = Field(
        1.0, description="factor on the weight decay that the schedule gives at each step; 0: no decay"
    )
    optimizer: GroupOptimizer | None = Field(
        None,
        description="section of the optimizer of these parameters: its name, and its own fields with its own defaults; "
        "null: that of the run",
    )

    @model_serializer(mode="wrap")
    def _without_default(self, fields: Any) -> Any:
        """Without the optimizer of the run, a group is saved as it was before groups had optimizers."""
        return {name: value for name, value in fields(self).items() if value is not None}


class Average(Section):
    """An average of the weights over the updates of a run, beside the weights that are trained."""

    decay: float | None = Field(
        0.999,
        ge=0,
        lt=1,
        description="the average becomes decay times itself plus (1 - decay) times the new weights after each update; "
        "null: the mean of all weights since `start`",
    )
    start: Count = Field(0, description="number of updates before the average begins; until then, it is the weights")


class Offload(Section):
    """Optimizer states in the memory of the CPU, of which an update has a chunk after the other on the device."""

    chunk: Size = Field(
        100_000_000,
        description="elements of parameters, over all ranks, whose states are updated together; three chunks are on "
        "the device at the same time, and a chunk has at least one parameter",
    )


class Optimizer(Section):
    """The host's own fields in the section 'optimizer'. The optimizer owns all other fields."""

    groups: tuple[ParameterGroup, ...] = Field(
        (),
        description="parameters with other learning rates, weight decays or optimizers: a list of match, lr_scale, "
        "weight_decay_scale and optimizer; the first group that matches a parameter applies",
    )
    average: Average | None = Field(
        None,
        description="an average of the weights (decay, start), which evaluations and exports use: one more value per "
        "parameter; null: none",
    )
    offload: Annotated[Offload | None, MAY_CHANGE] = Field(
        None,
        description="keep the states of any optimizer in the memory of the CPU (chunk), and copy them while others are "
        "updated: {} is the default chunk; null: on the device",
    )
