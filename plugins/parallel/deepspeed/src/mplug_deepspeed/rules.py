"""What a file of DeepSpeed may not say: values that the run determines, and features without support."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mplug import RunConfig

AXIS = "deepspeed"
LAYOUT = "it changes where DeepSpeed keeps a parameter, and checkpoints would not find it"
OWN = "mplug does this itself"
MOVED = "the plugin supports memory of the device and of the host, and files"
OFF: tuple[Any, ...] = (False, None, 0)

UNSUPPORTED: tuple[tuple[tuple[str, ...], tuple[Any, ...], str], ...] = (
    (("zero_optimization", "round_robin_gradients"), OFF, LAYOUT),
    (("zero_optimization", "parameter_alignment"), OFF, LAYOUT),
    (("zero_optimization", "zero_hpz_partition_size"), (0, 1), LAYOUT),
    (("zero_optimization", "zenflow"), (None,), LAYOUT),
    (("zero_optimization", "zero_quantized_weights"), OFF, "mplug cannot state its rounding"),
    (("zero_optimization", "zero_quantized_gradients"), OFF, "mplug cannot state its rounding"),
    (("zero_optimization", "zero_quantized_nontrainable_weights"), OFF, "mplug cannot state its rounding"),
    (("zero_optimization", "stage3_module_granularity_threshold"), OFF, "the plugin gathers whole units"),
    (("zero_optimization", "leaf_module"), (None,), "the plugin gathers whole units"),
    (("zero_optimization", "legacy_stage1"), OFF, "DeepSpeed has removed it"),
    (("zero_optimization", "cpu_offload"), OFF, "DeepSpeed deprecates it; use offload_optimizer"),
    (("zero_optimization", "cpu_offload_param"), OFF, "DeepSpeed deprecates it; use offload_param"),
    (("zero_optimization", "offload_optimizer", "device"), ("none", "cpu", "nvme"), MOVED),
    (("zero_optimization", "offload_optimizer", "ratio"), (1, 1.0), "all states are in one memory"),
    (("zero_optimization", "offload_optimizer", "super_offload"), OFF, LAYOUT),
    (("zero_optimization", "offload_param", "device"), ("none", "cpu", "nvme"), MOVED),
    (("bf16", "bf16_master_weights_and_grads"), OFF, "masters are fp32"),
    (("bf16", "bf16_optimizer_states"), OFF, "the run's optimizer chooses the format of its states"),
    (("fp16", "fp16_master_weights_and_grads"), OFF, "masters are fp32"),
    (("fp16", "auto_cast"), OFF, "inputs are tokens"),
    (("torch_autocast", "enabled"), OFF, "weights have the format of trainer.precision"),
    (("amp", "enabled"), OFF, "weights have the format of trainer.precision"),
    (("gradient_allreduce_op",), ("mean",), "the plugin undoes the mean"),
    (("managed_gradient_accumulation",), (True,), "the plugin sets the boundary of accumulation"),
    (("prescale_gradients",), OFF, "the plugin undoes the mean"),
    (("gradient_predivide_factor",), (1, 1.0), "the plugin undoes the mean"),
    (("sparse_gradients",), OFF, LAYOUT),
    (("elasticity", "enabled"), OFF, "a checkpoint of mplug resumes on any number of ranks"),
    (("autotuning", "enabled"), OFF, OWN),
    (("curriculum_learning", "enabled"), OFF, OWN),
    (("data_efficiency", "enabled"), OFF, OWN),
    (("compression_training",), (None,), "it changes the model"),
    (("tensor_parallel", "autotp_size"), (0, 1), "use tp in the layout"),
    (("sequence_parallel_size",), (1,), "use cp in the layout"),
    (("expert_parallel", "enabled"), OFF, LAYOUT),
    (("pipeline",), (None,), "use a layout of mplug"),
    (("compile", "deepcompile"), OFF, "trainer.compile compiles units"),
)
"""(path, the values that are supported, why others are not)."""

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedules -> the names in `schedule.name`."""


class Owned(NamedTuple):
    """A value of DeepSpeed's config that a setting of the run determines; `setting` describes it for the user."""

    path: tuple[str, ...]
    value: Any
    setting: str


def optimizer_words(config: "RunConfig", raw: Mapping[str, Any]) -> Iterator[Owned]:
    """The section 'optimizer' of a file, as the run's own optimizer determines it."""
    given = raw.get("optimizer", {}).get("type")
    if given is None:
        return
    chosen = next(one.label.rpartition("/")[2] for one in config.chosen if one.label.startswith("optimizers/"))
    same = _family(str(given)) == _family(chosen)
    yield Owned(("optimizer", "type"), given if same else chosen, f"optimizer.name={chosen}")
    own = config.optimizer
    values = {"lr": own.lr, "weight_decay": own.weight_decay}
    if same and _family(chosen) == "adam":
        names = ("beta1", "beta2")
        if all(hasattr(own, name) for name in names):
            values["betas"] = [getattr(own, name) for name in names]
        elif hasattr(own, "betas"):
            values["betas"] = list(own.betas)
        if hasattr(own, "eps"):
            values["eps"] = own.eps
    for name, value in values.items():
        yield Owned(("optimizer", "params", name), value, f"optimizer.{name}={value}")


def schedule_words(config: "RunConfig", raw: Mapping[str, Any]) -> Iterator[Owned]:
    """The section 'scheduler' of a file, as the run's own schedule determines it."""
    given = raw.get("scheduler", {}).get("type")
    if given is None:
        return
    schedule, same = config.schedule, SCHEDULES.get(given) == config.schedule.name
    yield Owned(("scheduler", "type"), given if same else None, f"schedule.name={schedule.name}")
    steps = schedule.warmup_steps
    yield Owned(("scheduler", "params", "warmup_num_steps"), steps, f"schedule.warmup_steps={steps}")
    yield Owned(("scheduler", "params", "warmup_max_lr"), config.optimizer.lr, f"optimizer.lr={config.optimizer.lr:g}")
    yield Owned(("scheduler", "params", "warmup_min_lr"), 0, "a warm-up from 0")
    yield Owned(("scheduler", "params", "warmup_type"), "linear", "a linear warm-up")
    total = config.trainer.steps
    yield Owned(("scheduler", "params", "total_num_steps"), total, f"trainer.steps={total}")


def _family(optimizer: str) -> str:
    """The kind of update that an optimizer's name states: 'adam' for every Adam with decoupled decay."""
    word = optimizer.lower()
    return "adam" if "adam" in word and "onebit" not in word and "zeroone" not in word else word
