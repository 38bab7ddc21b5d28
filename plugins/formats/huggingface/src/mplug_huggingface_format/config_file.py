"""The folder of a published checkpoint of Hugging Face's form, and the content of its config.json. No torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mplug import UsageError

CONFIG = "config.json"
ADAPTERS = "adapter_config.json"
"""The file of PEFT."""
LARGEST_CONFIG = 1 << 26
"""Maximum size of a JSON file of a folder, in bytes."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a folder, whose value is a mapping. Raises UsageError."""
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"it has more than {LARGEST_CONFIG} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error) or "it is nested too deeply"
        raise UsageError(f"cannot read '{path}': {reason}; download the file again") from None
    if not isinstance(value, dict):
        raise UsageError(f"'{path}' is not a mapping of fields; download the file again")
    return value


def architectures_of(fields: Mapping[str, Any]) -> list[str]:
    """The names that identify the family of a config.json, the most specific first."""
    named = fields.get("architectures")
    names: Iterable[Any] = named if isinstance(named, list) else ()
    return [name for name in (*names, fields.get("model_type")) if isinstance(name, str)]
