"""Import checkpoints that DeepSpeed's own engine has written: `mplug checkpoint import --from deepspeed`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mplug import RunError, UsageError
from mplug_deepspeed_format.rank_files import UNIVERSAL, find_files, refuse_absent_parts, tag_folder
from mplug_deepspeed_format.saved import Shape
from mplug_deepspeed_format.universal import read_universal
from mplug_deepspeed_format.zero_files import WEIGHT, Content, read_part
from mplug_pretrained import ForeignCheckpoint, ForeignTensor

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import RunConfig

FIELDS = {"beta1": ("betas", 0), "beta2": ("betas", 1), "eps": ("eps", None), "weight_decay": ("weight_decay", None)}
"""Settings of an optimizer of mplug, and where the parameter groups of a checkpoint have them."""


class DeepSpeedCheckpoint(ForeignCheckpoint):
    """ZeRO stages 1, 2 and 3, the bf16 and fp16 optimizers, and universal checkpoints. The weights are fp32 masters."""

    def __init__(self, folder: Path) -> None:
        self.path = tag_folder(folder)
        try:
            self._parts = _contents(self.path)
            self.tensors = {name: self._described(name) for name in self._parts[0].tensors}
            facts = self._parts[0].facts
            self.step = max(int(facts.get("global_steps", 0)) - int(facts.get("skipped_steps", 0)), 0)
        except OSError as error:
            raise RunError(f"cannot read '{self.path}': {error.strerror or error}") from error
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:160]
            raise UsageError(
                f"'{self.path}' is no checkpoint of DeepSpeed that mplug can read: {reason}; copy it again, or save it "
                f"with DeepSpeed 0.8 or later"
            ) from error

    def read(self, tensor: str, start: Shape, shape: Shape, state: str = WEIGHT, part: int = 0) -> "Tensor":
        """A box of the fp32 values, or of a moment."""
        return self._parts[part].tensors[tensor].read(state, start, shape)

    def compare(self, config: "RunConfig") -> Sequence[str]:
        """Settings of the optimizer that differ from those of the checkpoint, and weights that are no masters."""
        return [*_rounded(self._parts[0]), *_other_settings(config, self._parts[0])]

    def _described(self, name: str) -> ForeignTensor:
        """One tensor of all tensor-parallel ranks. UsageError if their parts differ."""
        saved = [content.tensors.get(name) for content in self._parts]
        first = saved[0]
        assert first is not None
        for part, one in enumerate(saved):
            if one is None or (one.shape, one.pieces.keys(), one.numbers) != (
                first.shape,
                first.pieces.keys(),
                first.numbers,
            ):
                raise UsageError(
                    f"'{name}' in '{self.path}' differs between the tensor-parallel ranks 0 and {part} in shape or "
                    f"states, so its parts cannot be joined; convert the checkpoint to a universal one"
                )
        states = {key: None for key in first.pieces if key != WEIGHT}
        return ForeignTensor(first.shape, {**states, **first.numbers}, parts=len(saved))


def _contents(path: Path) -> list[Content]:
    """What each tensor-parallel rank has saved."""
    if (path / UNIVERSAL).is_dir():
        return [read_universal(path)]
    files = find_files(path)
    first = read_part(files, min(files.model))
    count = max(int(first.facts.get("mp_world_size") or 1), len(files.model))
    refuse_absent_parts(path, files.model, count)
    aliases = first.facts.get("shared_params") or {}
    found = [first, *(read_part(files, part, aliases) for part in range(1, count))]
    names = set(first.tensors)
    for part, content in enumerate(found):
        if other := sorted(names ^ set(content.tensors)):
            raise UsageError(
                f"'{path}' has '{other[0]}' on one of the tensor-parallel ranks 0 and {part} only, so its parts cannot "
                f"be joined; convert the checkpoint to a universal one"
            )
    return found


def _rounded(content: Content) -> Iterator[str]:
    """A sentence if weights are stored in less than fp32: then the file has no masters, or no names for them."""
    dtypes = {piece.dtype for one in content.tensors.values() for piece in one.pieces[WEIGHT]}
    if low := sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.itemsize < 4):
        trained = content.facts.get("param_shapes") is None and content.facts.get("optimizer") is not None
        reason = "the checkpoint was saved without ZeRO, which names no fp32 weights" if trained else "they are frozen"
        yield f"some weights are in {', '.join(low)} ({reason})"


def _other_settings(config: "RunConfig", content: Content) -> Iterator[str]:
    """The settings of the run's optimizer that differ from those with which DeepSpeed has trained."""
    for field, (key, index) in FIELDS.items():
        found = [group[key] if index is None else group[key][index] for group in content.groups if key in group]
        own = getattr(config.optimizer, field, None)
        if found and own is not None and own != max(found):
            yield f"optimizer.{field} is {own:g} in the run and was {max(found):g} in the checkpoint"
