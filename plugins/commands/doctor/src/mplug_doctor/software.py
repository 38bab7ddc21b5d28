"""Probe of the installation that needs no torch: Python, versions, distributions of mplug and their problems."""

import platform
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distributions, version

from mplug import UsageError
from mplug.commands import Registry, refuse_other_versions
from mplug_doctor.findings import Findings
from mplug_doctor.stale import find_stale

LIBRARIES = ("torch", "triton", "numpy", "pydantic", "pluggy", "click", "safetensors", "transformers", "deepspeed")
PREFIXES = ("nvidia-nccl", "nvidia-cudnn", "transformer-engine", "flash-attn", "mplug")
"""Beginnings of the names of distributions that the report lists."""


def software() -> Findings:
    """Versions, and what is wrong with the distributions."""
    findings = Findings()
    kind = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    findings.add("Python", {"version": f"{platform.python_version()} ({platform.python_implementation()}), {kind}"})
    found = {name: text for name in LIBRARIES if (text := _version(name))}
    others = {one.name: one.version for one in distributions() if one.name.lower().startswith(PREFIXES)}
    own = {name: text for name, text in others.items() if name.lower().startswith("mplug")}
    findings.add("Libraries", {**found, **{name: text for name, text in sorted(others.items()) if name not in own}})
    by_version = defaultdict[str, list[str]](list)
    for name, text in sorted(own.items()):
        by_version[text].append(name)
    findings.add("mplug", {text: ", ".join(names) for text, names in by_version.items()})
    if "torch" not in found:
        findings.problem("torch is not installed", "install it: https://pytorch.org/get-started/locally")
    if len(by_version) > 1:
        # Plugins of third parties have versions of their own; those that do not admit this host are named below.
        findings.add("mplug", {"note": "the distributions have different versions"})
    _plugins(findings, Registry())
    find_stale(findings)
    return findings


def _plugins(findings: Findings, registry: Registry) -> None:
    """Problems that the metadata of plugins show; no plugin is imported."""
    for misplaced in registry.misplaced():
        findings.problem(str(misplaced), "correct or uninstall that distribution")
    for copy in registry.shadowed():
        findings.problem(
            f"another copy of {copy.distribution} hides {copy.distribution} {copy.version} in {copy.source}",
            f"uninstall one: pip uninstall {copy.distribution}",
        )
    claims = defaultdict[tuple[str, str], list[str]](list)
    for entry in registry.entries():
        claims[entry.kind, entry.name].append(entry.origin)
        try:
            refuse_other_versions(entry)
        except UsageError as error:
            findings.problem(str(error), "'mplug plugins check' shows the details")
    for (kind, name), origins in claims.items():
        if len(origins) > 1:
            findings.problem(f"'{name}' ({kind}) is claimed by {_joined(origins)}", "uninstall one of them")
    findings.add("mplug", {"plugins": f"{len(claims)}; 'mplug plugins check' imports and tests each of them"})


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _joined(words: Iterable[str]) -> str:
    return " and ".join(words)
