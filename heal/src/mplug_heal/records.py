"""What the record of a run says of the changes of its layout."""

import json
from typing import Any

from mplug.run.run import Run
from mplug.system.files import write_whole


def record_change(run: Run, change: dict[str, Any]) -> None:
    """Add a change of the layout to record.json, on rank 0: the steps under each layout can be read from it."""
    if run.rank != 0:
        return
    assert run.directory is not None
    path = run.directory / "record.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["layout"] = run.config.parallel.layout
    record["depends_on_layout"] = run.depends_on_layout
    record["relayouts"] = [*record.get("relayouts", []), change]
    write_whole(path, json.dumps(record, indent=2) + "\n")
