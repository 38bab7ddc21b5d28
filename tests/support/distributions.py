"""Distributions of third parties that a test writes itself."""

from pathlib import Path


def installed(site: Path, name: str, points: str, code: str | None = None, requires: str = "mplug>=0.1") -> Path:
    """Install a distribution with these entry points, and its module where there is code, into a folder of packages."""
    module = name.replace("-", "_")
    information = site / f"{module}-1.0.dist-info"
    information.mkdir(parents=True)
    facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: A test\nRequires-Dist: {requires}\n"
    (information / "METADATA").write_text(facts)
    (information / "entry_points.txt").write_text(points)
    if code is not None:
        (site / f"{module}.py").write_text(code)
    return site
