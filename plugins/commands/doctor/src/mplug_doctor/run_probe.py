"""The parts that a run would use, and why not others, in a process of its own: `python -m mplug_doctor.run_probe`.

It reads JSON: the settings of the run's config, and the names of kernel plugins to try instead of the run's own.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from mplug import UsageError
from mplug.commands import (
    COLLECTIVE_SECONDS,
    Registry,
    build_model,
    from_mapping,
    prepare,
    resolve,
    supervisor_of,
    unmet_reasons,
)
from mplug_doctor.apart import answer
from mplug_doctor.findings import Findings
from mplug_estimates import check_memory

SHOWN = 200
"""Characters of a reason that are shown."""


def run_of(settings: Mapping[str, Any]) -> Any:
    """The prepared run of a whole config."""
    return prepare(resolve(Registry(), from_mapping(settings, "the run's config"), {}))


def the_run(settings: Mapping[str, Any]) -> Findings:
    """The device, the slots' suppliers, the time-outs, and the estimate of memory of a run."""
    findings = Findings()
    try:
        run = run_of(settings)
        model = build_model(run)
    except UsageError as error:
        findings.problem(f"this run is refused: {error}", "change the options of the run as the message says")
        return findings
    config = run.config
    layout = config.parallel.layout or "one process"
    (owner,) = run.hooks.implementers("build_model")
    facts = {"model": owner, "layout": layout, "device": run.device, "precision": config.trainer.precision}
    findings.add("The run", {**facts, "compiler": run.compiler or "none"})
    suppliers = defaultdict[str, dict[str, None]](dict)
    for filled in model.slots:
        wraps = "".join(f" + {wrap.label}" for wrap in filled.wraps)
        suppliers[filled.site.slot][f"{filled.supplier_label(run)}{wraps}"] = None
    findings.add("Kernels of the run", {slot: ", ".join(names) for slot, names in suppliers.items()})
    supervisor = supervisor_of(run)
    seconds = supervisor.collective_seconds if supervisor else COLLECTIVE_SECONDS
    label = ", ".join(run.hooks.implementers("supervise")) or "none: torch ends a collective that hangs"
    findings.add("Time-outs", {"supervisor": label, "a collective": f"{seconds:g} s (gloo and NCCL)"})
    for name, section in config.resolved().get("extensions", {}).items():
        if f"extensions/{name}" in label:
            findings.add("Time-outs", {f"extensions.{name}.{field}": str(value) for field, value in section.items()})
    for warning in _memory(run, model):
        findings.problem(warning, "'mplug explain' shows the bytes of a rank")
    return findings


def _memory(run: Any, model: Any) -> list[str]:
    try:
        return check_memory(run, model, None)
    except UsageError as error:
        return [str(error)]


def another_kernel(settings: Mapping[str, Any], name: str) -> Findings:
    """Whether the run could use another kernel plugin everywhere, or why not."""
    findings = Findings()
    changed = {**settings, "kernels": {**settings["kernels"], "default": name}}
    try:
        reasons = unmet_reasons(run_of(changed))
    except UsageError as error:
        reasons = [str(error)]
    findings.add("Other kernels", {name: _shortened(reasons) or f"nothing in this run refuses it: --kernels {name}"})
    return findings


def _shortened(reasons: list[str]) -> str:
    """The different reasons, each with the first place that it concerns."""
    first = dict[str, str]()
    for reason in reasons:
        text = reason.partition("\n")[0]
        first.setdefault(text.rpartition(": ")[2], text[:SHOWN])
    return "; ".join(first.values())


if __name__ == "__main__":
    given = json.load(sys.stdin)
    answer(another_kernel(given["settings"], given["kernel"]) if given["kernel"] else the_run(given["settings"]))
