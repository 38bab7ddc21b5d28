"""The record of a run: which plugin, version and source supplied each part."""

import hashlib
import json
import platform
import sys
from datetime import datetime
from importlib.metadata import version
from typing import Any

from mplug.errors import printable
from mplug.run.run import Run
from mplug.system.files import write_whole
from mplug.system.version import __version__


def provenance(run: Run) -> dict[str, Any]:
    """The distribution, version and source of every plugin. The run and every checkpoint save it."""
    plugins = [
        {
            "plugin": entry.label,
            "distribution": printable(entry.distribution),
            "version": printable(entry.version),
            "source": printable(entry.source),
        }
        for entry in sorted(run.config.entries, key=lambda entry: (entry.label, entry.distribution))
    ]
    order = [[plugin["plugin"], plugin["distribution"], plugin["version"]] for plugin in plugins]
    digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()
    return {"mplug": __version__, "torch": version("torch"), "plugins": plugins, "plugins_hash": digest}


def write_record(run: Run, facts: dict[str, Any]) -> None:
    """Write record.json on rank 0: provenance, layout, versions, and the facts that the caller adds."""
    assert run.directory is not None
    if run.rank != 0:
        return
    preset, recipe = run.config.settings.get(("model", "preset")), run.config.recipe
    record = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "preset": preset.value if preset else None,
        "recipe": None if recipe is None else {"name": recipe.name, "origin": recipe.origin},
        **provenance(run),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "layout": run.config.parallel.layout,
        "world_size": run.mesh.world_size,
        "device": run.device,
        "precision": {"name": run.config.trainer.precision, **run.precision.as_mapping()},
        **facts,
    }
    write_whole(run.directory / "record.json", json.dumps(record, indent=2) + "\n")
