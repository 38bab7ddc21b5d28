"""Editable distributions whose installed entry points are not those of their source, as after an update of a clone."""

import json
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote

from mplug.commands import listed
from mplug_doctor.findings import Findings

Points = set[tuple[str, str, str]]
"""Entry points for mplug: group, name and target."""


def find_stale(findings: Findings, installed: Iterable[Distribution] | None = None) -> None:
    """Add one problem that names all such distributions, each with the entry points that differ."""
    found, sources = [], []
    for one in distributions() if installed is None else installed:
        source = _source(one)
        stated = None if source is None else _stated(source / "pyproject.toml")
        if source is None or stated is None:
            continue
        own = {(point.group, point.name, point.value) for point in one.entry_points if point.group.startswith("mplug.")}
        if different := sorted({f"{group}: {name}" for group, name, _ in own ^ stated}):
            found.append(f"{one.name} ({listed(different)})")
            sources.append(f"-e '{source}'")
    if found:
        findings.problem(
            f"the sources of {listed(found)} have other entry points than they had when they were installed",
            f"install them again: pip install --no-deps {' '.join(sources)}",
        )


def _source(one: Distribution) -> Path | None:
    """The folder of an editable distribution."""
    text = one.read_text("direct_url.json")
    origin = {} if text is None else json.loads(text)
    is_editable = origin.get("dir_info", {}).get("editable") and origin["url"].startswith("file://")
    return Path(unquote(origin["url"].removeprefix("file://"))) if is_editable else None


def _stated(file: Path) -> Points | None:
    """The entry points for mplug that a pyproject.toml states; None if it has no project, or its build makes them."""
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    if "entry-points" in project.get("dynamic", ()) or "name" not in project:
        return None
    groups = project.get("entry-points", {})
    return {
        (group, name, target)
        for group, points in groups.items()
        if group.startswith("mplug.")
        for name, target in points.items()
    }
