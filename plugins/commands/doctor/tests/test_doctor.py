"""The report has what an issue needs, and no private name; a probe that crashes is a line; problems set the status."""

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from distributions import installed

from mplug.commands import Registry, default_settings, read_assignments, resolve
from mplug_doctor import apart, machine
from mplug_doctor.apart import in_process, in_subprocess
from mplug_doctor.command import command
from mplug_doctor.findings import Findings, Problem
from mplug_doctor.run_probe import another_kernel, the_run
from mplug_doctor.software import software
from mplug_doctor.stale import find_stale

CPU = ("trainer.device=cpu", "data.name=mock")


def settings_of(*assignments: str) -> Any:
    return resolve(Registry(), default_settings(), read_assignments([*CPU, *assignments])).resolved()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module that `python -m` finds; returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(source: str) -> str:
        (tmp_path / "planted_probe.py").write_text(source)
        return "planted_probe"

    return write


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os; os.abort()", "ended with status -6"),
        ("raise RuntimeError('no driver')", "ended with status 1: RuntimeError: no driver"),
        ("import time; time.sleep(60)", "gave no answer within 1 s"),
        ("print('something else')", "ended with status 0"),
    ],
    ids=["crash", "exception", "hang", "silence"],
)
def test_a_probe_that_fails_in_its_process_is_a_problem(module: Any, source: str, words: str) -> None:
    (problem,) = in_subprocess("the GPUs", module(source), seconds=1).problems
    assert problem.what.startswith("the probe of the GPUs failed: ")
    assert words in problem.what


def test_a_probe_that_raises_here_is_a_problem() -> None:
    def probe() -> Findings:
        raise OSError("no such device")

    (problem,) = in_process("disks", probe).problems
    assert problem.what == "the probe of disks failed: OSError: no such device"


def test_the_report_of_a_probe_passes_through_its_process(module: Any) -> None:
    source = (
        "from mplug_doctor.apart import answer\nfrom mplug_doctor.findings import Findings\n"
        "import sys\nfound = Findings()\nfound.add('A', {'given': sys.stdin.read()})\n"
        "found.problem('x', 'y')\nprint('noise')\nanswer(found)\n"
    )
    found = in_subprocess("it", module(source), "hello")
    assert found.sections == {"A": {"given": "hello"}}
    assert [(one.what, one.remedy) for one in found.problems] == [("x", "y")]


def test_private_names_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jordan")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node17.example.org")
    monkeypatch.setenv("LOGNAME", "jordan")
    found = Findings({"A": {"place": f"/home/jordan/data on node17.example.org, {os.getcwd()}/runs"}})
    found.problem("/data/jordan is full on node17", "free it")
    text = found.without_private_names().text()
    assert "jordan" not in text
    assert "node17" not in text
    assert "~/data on HOST, ./runs" in text
    assert "problem: /data/USER is full on HOST; free it" in text


def test_no_variable_beyond_the_list_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = machine.environment()
    assert "s3cret" not in found.text()
    assert found.sections["Environment"]["NCCL_P2P_DISABLE"] == "1"
    (problem,) = found.problems
    assert "NCCL_P2P_DISABLE=1" in problem.what
    assert not [name for name in machine.PRINTED if "KEY" in name or "TOKEN" in name or "SECRET" in name]


def test_full_disks_and_low_limits_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1 << 20, "total": 1 << 30})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _path: usage)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (256, 4096))
    full, low = machine.disks(), machine.limits()
    assert "only 1.00 MiB are free for runs" in [one.what for one in full.problems]
    assert [one.what for one in low.problems] == ["a process may open only 256 files"]


def test_the_installation_is_listed_and_faulty_distributions_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = software()
    assert "mplug-doctor" in before.text()
    points = "[mplug.extension]\nlook = acme:Look\n[mplug.extensions]\nwatch = acme:Watch\n"
    monkeypatch.syspath_prepend(installed(tmp_path, "acme-watch", points, requires="mplug>=7"))
    misplaced, other_version = (one.what for one in software().problems if one not in before.problems)
    assert "'look' of acme-watch 1.0 is in the group 'mplug.extension'" in misplaced
    assert "requires mplug >=7" in other_version


def test_a_clone_whose_entry_points_have_changed_is_a_problem_with_its_remedy(tmp_path: Path) -> None:
    source = tmp_path / "acme"
    source.mkdir()
    (metadata := tmp_path / "acme-1.0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[mplug.models]\nacme = acme:Acme\n\n[console_scripts]\nacme = acme:main\n"
    )
    editable = {"url": source.as_uri(), "dir_info": {"editable": True}}
    (metadata / "direct_url.json").write_text(json.dumps(editable))

    def found(entry_points: str, fields: str = "") -> list[Problem]:
        (source / "pyproject.toml").write_text(f'[project]\nname = "acme"\n{fields}\n{entry_points}')
        findings = Findings()
        find_stale(findings, [Distribution.at(metadata)])
        return findings.problems

    same = '[project.entry-points."mplug.models"]\nacme = "acme:Acme"\n'
    assert found(same) == found("", 'dynamic = ["entry-points"]') == []
    (problem,) = found(f'{same}[project.entry-points."mplug.kernels"]\nfast = "acme:fast"\n')
    assert problem.what.startswith("the sources of acme (mplug.kernels: fast) have other entry points")
    assert problem.remedy == f"install them again: pip install --no-deps -e '{source}'"
    assert "mplug.models: acme" in found('[project.entry-points."mplug.models"]\nacme = "acme:Other"\n')[0].what
    (source / "pyproject.toml").unlink()
    findings = Findings()
    find_stale(findings, [Distribution.at(metadata)])
    assert findings.problems == []


def test_the_run_names_its_suppliers_and_time_outs() -> None:
    found = the_run(settings_of("extensions.watchdog.timeout=77"))
    assert found.problems == []
    assert found.sections["The run"]["device"] == "cpu"
    assert found.sections["Kernels of the run"]["Attention.core"].startswith("kernels/sdpa")
    assert found.sections["Time-outs"]["extensions.watchdog.timeout"] == "77.0"


def test_another_kernel_says_why_it_would_not_serve() -> None:
    refused = another_kernel(settings_of(), "triton").sections["Other kernels"]["triton"]
    assert "it needs a CUDA GPU" in refused
    assert refused.count("it needs a CUDA GPU") == 1
    assert "--kernels reference" in another_kernel(settings_of(), "reference").sections["Other kernels"]["reference"]


def test_a_run_that_is_refused_or_too_large_is_a_problem() -> None:
    (problem,) = the_run(settings_of("parallel.layout=tp3")).problems
    assert problem.what.startswith("this run is refused: ")
    long = the_run(settings_of("trainer.seq_length=1000000", "trainer.global_batch_size=64"))
    assert "the run needs at least" in long.problems[0].what


@pytest.mark.parametrize("problems", [0, 1])
def test_the_command_prints_json_and_its_status_says_whether_there_are_problems(
    monkeypatch: pytest.MonkeyPatch, problems: int
) -> None:
    found = Findings({"torch": {"torch": "2"}})
    for number in range(problems):
        found.problem(f"problem {number}", "mend it")
    monkeypatch.setattr(apart, "in_subprocess", lambda *_given: found)
    for name in ("processors", "memory", "disks", "limits", "environment", "driver"):
        monkeypatch.setattr(machine, name, Findings)
    result = CliRunner().invoke(command, ["--json", "--no-run"])
    assert result.exit_code == problems, result.output
    data = json.loads(result.output)
    assert data["sections"]["torch"] == {"torch": "2"}
    assert len(data["problems"]) == problems


def test_probes_of_this_process_import_no_torch() -> None:
    code = "import sys, mplug_doctor, mplug_doctor.machine, mplug_doctor.software; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.gpu
def test_gpus_and_their_links_are_reported() -> None:
    found = in_subprocess("torch and the GPUs", "mplug_doctor.torch_probe")
    assert not [one for one in found.problems if "probe" in one.what], found.text()
    assert len([name for name in found.sections["GPUs"] if name.startswith("GPU ")]) == torch.cuda.device_count()
    assert found.sections["torch"]["NCCL"].count(".") == 2
    assert "compute capability" in found.sections["GPUs"]["GPU 0"]
    if torch.cuda.device_count() > 1:
        assert "peers" in found.sections["GPUs"]
    driver = machine.driver()
    assert not driver.problems
    assert "GPU0" in driver.sections["GPU driver"].get("links", "GPU0")
    run = {**settings_of(), "trainer": {**settings_of()["trainer"], "device": "cuda"}}
    assert the_run(run).sections["The run"]["device"] == "cuda"
