"""mplug doctor."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from mplug import UsageError
from mplug.commands import Registry, config_options, resolved

AT_ONCE = 2
"""Number of processes that probe at once: each imports torch."""


@click.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: sections and problems.")
@click.option("--private", is_flag=True, help="Keep the names of the user, the machine and the folders.")
@click.option("--no-run", is_flag=True, help="Leave out the run: its kernels, time-outs and memory.")
def command(as_json: bool, private: bool, no_run: bool, **options: Any) -> None:
    """Check this machine, the installation and a run, and print a report that can be pasted into an issue.

    The report has versions, GPUs and their links, processors, memory, free disk, limits, the environment variables that
    concern training (a fixed list, no other is read), the time-outs and kernels of the run that the options describe
    (the default run without options), and why other installed kernels would not serve it. Each problem is a line with
    its remedy. The exit status is 1 if there is a problem.
    """
    from mplug_doctor.apart import in_process, in_subprocess
    from mplug_doctor.findings import Findings
    from mplug_doctor.machine import disks, driver, environment, limits, memory, processors
    from mplug_doctor.software import software

    findings = Findings()
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        waiting = [pool.submit(in_subprocess, "torch and the GPUs", "mplug_doctor.torch_probe")]
        if not no_run:
            for name, given in _about_run(options, findings):
                waiting.append(pool.submit(in_subprocess, name, "mplug_doctor.run_probe", given))
        for name, probe in {
            "the installation": software,
            "the processors": processors,
            "memory": memory,
            "disks": disks,
            "limits": limits,
            "the environment": environment,
            "the driver of GPUs": driver,
        }.items():
            findings.merge(in_process(name, probe))
        for one in waiting:
            findings.merge(one.result())
    if not private:
        findings = findings.without_private_names()
    click.echo(json.dumps(findings.as_data(), indent=2) if as_json else findings.text())
    if findings.problems:
        raise SystemExit(1)


def _about_run(options: dict[str, Any], findings: Any) -> list[tuple[str, str]]:
    """(name, input) of the probes of the run: its own parts, and every other kernel plugin."""
    try:
        config = resolved(options)
    except UsageError as error:
        findings.problem(f"this run is refused: {error}", "change the options of the run as the message says")
        return []
    settings = config.resolved()
    own = {name.partition("/")[2] for name in config.kernels.plugins}
    others = [name for name in Registry().names("kernels") if name.rpartition("/")[2] not in own]
    inputs = {"the run": "", **{f"kernels/{name}": name for name in others}}
    return [(name, json.dumps({"settings": settings, "kernel": kernel})) for name, kernel in inputs.items()]
