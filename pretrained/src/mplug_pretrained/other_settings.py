"""A new run that begins with the weights of another run: the settings by which these weights compute something else."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mplug.config.binding import RunConfig
from mplug.contracts.fields import OF_TRAINING
from mplug.errors import UsageError
from mplug_saving.changes import ABSENT, ADAPTING, Change
from mplug_saving.saved_fields import bound, leaves, mark_of

OF_HOST = ("name", "frozen")
"""Fields of the section 'model' that say nothing about what weights compute."""


def other_model_settings(manifest: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The fields of the section 'model' that differ from those of the run of the weights, as lines for the user.

    Some of them decide training only (a dropout), and a user may change others on purpose (the base of rotary
    positions). So the host reports them.
    """
    chosen = next(one for one in config.chosen if one.section == ("model",))
    old, new = manifest["config"].get("model") or {}, config.resolved()["model"]
    was = {**bound(chosen, {name: value for name, value in old.items() if name not in OF_HOST})}
    both = {name: value for name, value in new.items() if name in was and name not in OF_HOST}
    return [
        f"{Change(('model', *key), before, after)}"
        for key, before, after in _different(chosen.config, {name: was[name] for name in both}, both)
    ]


def refuse_other_adapters(path: Path, manifest: Mapping[str, Any], config: RunConfig) -> None:
    """Raise UsageError if adapters that the run loads would compute something else than in the run that trained them.

    Fields of an adapter plugin may differ only if they are marked (`OF_TRAINING`).
    """
    old, new = manifest["config"].get(ADAPTING) or {}, config.resolved()[ADAPTING]
    for chosen in config.chosen:
        if chosen.section[0] != ADAPTING:
            continue
        name = chosen.section[1]
        own, was = chosen.plugin.Config, old.get(name)
        before = None if was is None else bound(chosen, was)
        found = [] if before is None else list(_different(own, before, new[name]))
        unmarked = [Change((ADAPTING, name, *key), a, b) for key, a, b in found if mark_of(own, key) != OF_TRAINING]
        if before is not None and not unmarked:
            continue
        reason = f"with other settings ({unmarked[0]})" if unmarked else f"without {chosen.label}"
        remedy = "set the values of that run" if unmarked else "name the plugins of that run"
        raise UsageError(
            f"checkpoint.pretrained '{path}' has adapters that were trained {reason}, so they would compute something "
            f"else; {remedy}, or leave the adapters out by checkpoint.pretrained.except"
        )


def _different(
    model: Any, was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(field, old, new) of every field with another value."""
    before, after = dict(leaves(model, was)), dict(leaves(model, now))
    for key in dict.fromkeys([*before, *after]):
        values = before.get(key, ABSENT), after.get(key, ABSENT)
        if values[0] != values[1]:
            yield (key, *values)
