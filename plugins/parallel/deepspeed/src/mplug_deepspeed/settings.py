"""The config that DeepSpeed receives: a user's file, completed by the run's settings. Imports no torch."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import log2, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mplug import UsageError, rounding_of_sums
from mplug_deepspeed.rules import AXIS, UNSUPPORTED, Owned, optimizer_words, schedule_words

if TYPE_CHECKING:
    from mplug import Run
    from mplug_deepspeed.config import DeepSpeedConfig

REDUCE_BUCKET = 500_000_000
"""DeepSpeed's default for the elements of a bucket of gradient sums."""
WORDS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "half": "fp16"}
"""DeepSpeed's words for formats of communication -> the words of mplug."""
SECTIONS = ("offload_optimizer", "offload_param")
Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """A file's values, and those of `parallel.deepspeed`."""

    config: "DeepSpeedConfig"
    raw: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, config: "DeepSpeedConfig") -> Self:
        """Read the file that the config names; UsageError if it is no JSON object with the sections of DeepSpeed."""
        if config.config is None:
            return cls(config)
        label = f"parallel.{AXIS}.config: '{config.config}'"
        try:
            raw = json.loads(Path(config.config).expanduser().read_text(), object_pairs_hook=_unique)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{label} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        except ValueError as error:
            raise UsageError(f"{label} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise UsageError(f"{label} is no config of DeepSpeed: it must be a JSON object")
        for name in ("zero_optimization", "fp16", "bf16", "bfloat16", "optimizer", "scheduler", "data_types"):
            if not isinstance(raw.get(name, {}), dict):
                raise UsageError(f"{label}: '{name}' must be a JSON object, not {json.dumps(raw[name])}")
        settings = cls(config, raw)
        if settings._stage() not in (1, 2, 3):
            raise UsageError(
                f"{label}: zero_optimization.stage={json.dumps(settings._stage())} is not supported; use 1, 2 or 3"
            )
        return settings

    @property
    def stage(self) -> int:
        """The stage of ZeRO: that of the run's config, else that of the file, else 1."""
        return int(self._stage())

    def _stage(self) -> Any:
        given = self.value(("zero_optimization", "stage"))
        return self.config.stage or (1 if given in (None, "auto") else given)

    @property
    def offload_optimizer(self) -> bool:
        """Whether masters and optimizer states are in the host's memory."""
        return self._offloads("offload_optimizer", self.config.offload_optimizer)

    @property
    def offload_param(self) -> bool:
        """Whether weights are in the host's memory between their uses."""
        return self._offloads("offload_param", self.config.offload_param)

    def _offloads(self, name: str, own: bool | None) -> bool:
        device = self.value(("zero_optimization", name, "device"))
        return own if own is not None else device not in (None, "none", "auto")

    def device(self, name: str) -> str:
        """Where the memory of the section `name` is: 'none' (on the run's device), 'cpu' or 'nvme'."""
        is_on = self._offloads(name, getattr(self.config, name))
        given = self.value(("zero_optimization", name, "device"))
        return "none" if not is_on else "nvme" if self.config.nvme_path is not None or given == "nvme" else "cpu"

    def folder(self, name: str) -> Path | None:
        """The folder for what the section `name` offloads to files; None if it offloads to none."""
        if self.device(name) != "nvme":
            return None
        given = self.config.nvme_path or self.value(("zero_optimization", name, "nvme_path"))
        return None if given in (None, "auto") else Path(str(given)).expanduser()

    @property
    def overlap_comm(self) -> bool:
        """Whether gradients are summed while backward runs: DeepSpeed's default depends on the stage."""
        given = self.value(("zero_optimization", "overlap_comm"))
        return self.stage == 3 if given in (None, "auto") else bool(given)

    @property
    def sum_format(self) -> str | None:
        """The word of mplug for the format in which the file lets gradients travel; None: that of the weights."""
        given = self.value(("communication_data_type",))
        return None if given in (None, "auto") else WORDS.get(str(given), str(given))

    def rounding(self, precision: str) -> tuple[str, float] | None:
        """(what rounds gradients, the relative error), or None if gradients are kept and summed in fp32.

        DeepSpeed adds the gradients of micro batches and of ranks in the format of the weights, unless the file names
        others. The formats of a third party's precision are unknown here; they count as bf16.
        """
        weights = precision if precision in ("fp32", "fp16") else "bf16"
        given = self.value(("data_types", "grad_accum_dtype"))
        kept = weights if given in (None, "auto") else WORDS.get(str(given), weights)
        summed = self.sum_format if self.sum_format in WORDS.values() else weights
        assert summed is not None
        errors = [error for word in (kept, summed) if (error := rounding_of_sums(word)) is not None]
        if not errors:
            return None
        return f"gradients are added in {kept} over micro batches, and in {summed} over ranks", max(errors)

    def value(self, path: Path_) -> Any:
        """A value of the file; None if the file omits it."""
        found: Any = self.raw
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def accumulates_in(self, weights: str) -> int:
        """Bytes of an element of the gradients that stage 3 keeps between micro batches."""
        given = self.value(("data_types", "grad_accum_dtype"))
        word = weights if given in (None, "auto") else WORDS.get(str(given), "fp32")
        return 4 if word in ("float32", "fp32") else 2

    def reduce_bucket(self, run: "Run") -> int:
        """The elements of a bucket of gradient sums."""
        given = self.value(("zero_optimization", "reduce_bucket_size"))
        if given not in (None, "auto"):
            return int(given)
        hidden = getattr(run.config.model, "hidden_size", None)
        return REDUCE_BUCKET if given is None or hidden is None else hidden * hidden

    def checked(self, run: "Run") -> None:
        """Raise one UsageError that lists every contradiction between the file and the run, and what is unsupported."""
        contradictions = list(self._contradictions(run))
        problems = [*contradictions, *self._unsupported()]
        if self.config.offload_param and self.stage != 3:
            problems.append(
                f"parallel.{AXIS}.offload_param=true needs stage 3, and the stage is {self.stage}: only stage 3 shards "
                f"weights"
            )
        problems += self._problems_of_folders()
        if problems:
            file = f" and '{self.config.config}'" if self.config.config else ""
            head = f"parallel.{AXIS}{file} cannot be used with this run:"
            if contradictions:
                problems.append('set the run\'s settings to the values of the file, or write "auto" in the file')
            raise UsageError("\n  ".join([head, *problems]))

    def _contradictions(self, run: "Run") -> Iterator[str]:
        for owned in self.owned(run):
            given = self.value(owned.path)
            if given not in (None, "auto") and not _equal(given, owned.value):
                yield f"{'.'.join(owned.path)}={json.dumps(given)} in the file, and {owned.setting} in the run"

    def _unsupported(self) -> Iterator[str]:
        for path, allowed, reason in UNSUPPORTED:
            given = self.value(path)
            if given not in (None, "auto", *allowed):
                yield f"{'.'.join(path)}={json.dumps(given)} is not supported ({reason})"
        word = self.sum_format
        if word is not None and word not in WORDS.values():
            yield f"communication_data_type={json.dumps(word)} is no format of gradient sums (fp32, bf16, fp16)"
        if self.stage == 1 and self.value(("data_types", "grad_accum_dtype")) == "fp32" and self._enabled("bf16"):
            yield 'data_types.grad_accum_dtype="fp32" in stage 1 with bf16 uses an optimizer without ZeRO\'s partitions'

    def _problems_of_folders(self) -> Iterator[str]:
        """What is wrong with the folders for offload."""
        if self.config.nvme_path is not None and not (self.offload_optimizer or self.offload_param):
            yield f"parallel.{AXIS}.nvme_path needs something to offload (offload_optimizer, offload_param)"
        for name in SECTIONS:
            if self.device(name) != "nvme":
                continue
            folder = self.folder(name)
            if folder is None:
                yield f'zero_optimization.{name}.device="nvme" needs a folder: nvme_path, in the file or in the run'
            elif self.stage != 3:
                yield f"{name} to files of '{folder}' needs stage 3, and the stage is {self.stage}"
            elif not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
                yield f"{name} to files of '{folder}': this is no folder in which the run may write; make it first"

    def _enabled(self, name: str) -> bool:
        return self.value((name, "enabled")) is True

    def owned(self, run: "Run") -> list[Owned]:
        """The values of DeepSpeed's config that the run's settings determine."""
        trainer, config = run.config.trainer, run.config
        micro, (_, shards) = run.micro_batch_size, run.mesh.batch_shard(run.rank)
        passes = max(1, trainer.global_batch_size // (micro * shards))
        weights, scale = run.precision.weights, trainer.loss_scale
        precision = f"trainer.precision={trainer.precision}"
        found = [
            Owned(
                ("train_batch_size",),
                trainer.global_batch_size,
                f"trainer.global_batch_size={trainer.global_batch_size}",
            ),
            Owned(("train_micro_batch_size_per_gpu",), micro, f"{micro} (trainer.micro_batch_size)"),
            Owned(
                ("gradient_accumulation_steps",), passes, f"{passes} (trainer.global_batch_size / micro batch / ranks)"
            ),
            Owned(("gradient_clipping",), trainer.max_grad_norm, f"trainer.max_grad_norm={trainer.max_grad_norm:g}"),
            Owned(("bf16", "enabled"), weights == "bfloat16", precision),
            Owned(("bfloat16", "enabled"), weights == "bfloat16", precision),
            Owned(("fp16", "enabled"), weights == "float16", precision),
            Owned(("zero_optimization", "stage"), self.stage, f"parallel.{AXIS}.stage={self.stage}"),
        ]
        if weights == "float16":
            found += [
                Owned(("fp16", "loss_scale"), 0, "a dynamic loss scale (trainer.loss_scale)"),
                Owned(
                    ("fp16", "initial_scale_power"),
                    round(log2(scale.initial)),
                    f"trainer.loss_scale.initial={scale.initial:g}",
                ),
                Owned(
                    ("fp16", "loss_scale_window"),
                    scale.growth_interval,
                    f"trainer.loss_scale.growth_interval={scale.growth_interval}",
                ),
                Owned(("fp16", "min_loss_scale"), scale.smallest, f"trainer.loss_scale.smallest={scale.smallest:g}"),
            ]
        for name in SECTIONS:
            own = getattr(self.config, name)
            path, section = self.config.nvme_path, ("zero_optimization", name)
            if own is not None:
                setting = f"parallel.{AXIS}.{name}={str(own).lower()}"
                found.append(Owned((*section, "device"), self.device(name), setting))
            if path is not None and self.device(name) == "nvme":
                setting = f"parallel.{AXIS}.nvme_path={path}"
                found += [Owned((*section, "device"), "nvme", setting), Owned((*section, "nvme_path"), path, setting)]
        return [*found, *optimizer_words(config, self.raw), *schedule_words(config, self.raw)]

    def effective(self, run: "Run", ranks: int) -> dict[str, Any]:
        """The config that DeepSpeed receives on `ranks` data-parallel ranks.

        The optimizer and the schedule are those of the run. DeepSpeed's count of a batch includes every rank that
        sums gradients, also those that divide sequences.
        """
        filled = {
            name: value for name, value in _without_auto(self.raw).items() if name not in ("optimizer", "scheduler")
        }
        zero, fills = filled.setdefault("zero_optimization", {}), self._fills(run)
        for name, value in fills.items():
            if self.value(("zero_optimization", name)) == "auto":
                zero[name] = value
        for owned in self.owned(run):
            if owned.path[0] not in ("optimizer", "scheduler", "bfloat16"):
                _set(filled, owned.path, owned.value)
        filled.pop("bfloat16", None)
        for name in SECTIONS:
            if self.device(name) == "nvme":
                zero[name] |= {"device": "cpu", "pin_memory": False}  # its tensors are maps (`mplug_deepspeed.files`)
                del zero[name]["nvme_path"]
        passes = filled["gradient_accumulation_steps"]
        filled["train_batch_size"] = prod((filled["train_micro_batch_size_per_gpu"], passes, ranks))
        filled["gradient_clipping"] = 0.0  # the update clips in the optimizer's own pass over memory
        filled["zero_allow_untested_optimizer"], filled["zero_force_ds_cpu_optimizer"] = True, False
        filled.setdefault("timers", {"throughput": {"enabled": False}})  # it waits for the device in every step
        if self.device("offload_optimizer") != "nvme":  # where DeepSpeed makes one sub-group after the other
            zero.setdefault("sub_group_size", 10**12)  # the update is one pass over all pieces
        return filled

    def _fills(self, run: "Run") -> dict[str, int]:
        """Values for 'auto' that depend on the width of the model; DeepSpeed's documents recommend them."""
        hidden = getattr(run.config.model, "hidden_size", None)
        if hidden is None:
            return {}
        return {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key '{name}' appears twice")
        found[name] = value
    return found


def _equal(given: Any, value: Any) -> bool:
    if isinstance(given, bool) or isinstance(value, bool):
        return given is value
    if isinstance(given, list | tuple) and isinstance(value, list | tuple):
        return len(given) == len(value) and all(map(_equal, given, value))
    numbers = isinstance(given, int | float) and isinstance(value, int | float)
    return abs(given - value) <= 1e-12 * abs(value) if numbers else bool(given == value)


def _without_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the values 'auto': DeepSpeed's defaults apply unless the run fills them."""
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if value != "auto"
    }


def _set(tree: dict[str, Any], path: Path_, value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
