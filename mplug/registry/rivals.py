"""Several default kernels: which of them compete for slots."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from mplug.config.binding import Chosen


def competing(chosen: Iterable[Chosen], rivals: Sequence[str]) -> list[str]:
    """The labels of the default kernels that compete: all, or those whose options differ from their defaults.

    So the options of a kernel name it, if the config does not name a kernel.
    """
    changed = [one.label for one in chosen if one.label in rivals and _differs(one.config)]
    return changed or list(rivals)


def without(chosen: Iterable[Chosen], labels: Collection[str]) -> list[Chosen]:
    """The chosen plugins without those of these labels."""
    return [one for one in chosen if one.label not in labels]


def _differs(config: Any) -> bool:
    fields = type(config).model_fields if config is not None else {}
    return any(getattr(config, name) != field.get_default(call_default_factory=True) for name, field in fields.items())
