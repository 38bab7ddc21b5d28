"""Install the built distributions in clean environments, use them, and write the table of docs/installing.md.

python release/build.py
python release/environments.py python3.11:2.11.0 /opt/python3.13/bin/python3:2.15.0
python release/environments.py                  write the table from the recorded results

A word is PYTHON:TORCH, an interpreter and a version of torch. Each environment needs about 8 GB of disk with torch's
CUDA libraries. It is made in a temporary folder, and removed after its checks; there is one at a time. The results are
in release/environments.json. The exit status is 1 if a check fails.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from distributions import ROOT, version

RESULTS = ROOT / "release" / "environments.json"
PAGE = ROOT / "docs" / "installing.md"
BEGIN, END = "<!-- environments: begin -->", "<!-- environments: end -->"
ONE_OF_EACH_KIND = (
    *("models/gpt", "parallel/dp", "kernels/sdpa", "optimizers/adamw", "data/text", "tokenizers/bytes"),
    *("memory/recompute", "extensions/losspicture", "adapters/lora", "formats/huggingface"),
)
SMALL = ("--set", "trainer.steps=12", "--set", "trainer.device=cpu")
CHECKS: dict[str, tuple[tuple[str, ...], str]] = {
    "train": (("train", "--name", "first", *SMALL), r"done in .*validation loss \d"),
    "generate": (("generate", "--prompt", "class ", "--tokens", "20", "--seed", "2"), "^class "),
    "two processes": (("train", "--name", "two", *SMALL, "--parallel", "dp2"), r"dp2 on 2 processes(.|\n)*done in "),
    "plugins check": (("plugins", "check", *ONE_OF_EACH_KIND), f"{len(ONE_OF_EACH_KIND)} of {len(ONE_OF_EACH_KIND)} "),
}
"""The commands of `mplug` that must work in an environment, each with a pattern that its output contains."""


def main() -> None:
    """Check the environments that are named, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", metavar="PYTHON:TORCH")
    parser.add_argument("--from", dest="source", type=Path, default=ROOT / "dist", help="default: dist")
    options = parser.parse_args()
    failed = False
    for word in options.environments:
        interpreter, colon, torch = word.rpartition(":")
        if not colon:
            parser.error(f"'{word}' is not PYTHON:TORCH, such as python3.11:2.11.0")
        result = checked(interpreter, torch, options.source.resolve())
        print(json.dumps(result, indent=2), flush=True)
        record(result)
        failed |= result["failed"] is not None
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(failed)


def checked(interpreter: str, torch: str, source: Path) -> dict[str, str | None]:
    """Make one environment, run the checks, and remove it. The first check that fails is the last one."""
    with tempfile.TemporaryDirectory(prefix="mplug-environment-") as name:
        folder = Path(name)
        python = subprocess.check_output([interpreter, "-c", "import platform; print(platform.python_version())"])
        result: dict[str, str | None] = {"python": python.decode().strip(), "torch": torch, "mplug": version()}
        result["failed"] = installed(interpreter, torch, source, folder)
        for check, (words, pattern) in CHECKS.items():
            if result["failed"] is None:
                result["failed"] = fault(check, [str(folder / "env" / "bin" / "mplug"), *words], folder, pattern)
    return result


def installed(interpreter: str, torch: str, source: Path, folder: Path) -> str | None:
    """Install torch and mplug-all into a new environment: why that fails, or None."""
    pip = [str(folder / "env" / "bin" / "pip"), "install", "--quiet", "--no-cache-dir", "--find-links", str(source)]
    return fault("venv", [interpreter, "-m", "venv", str(folder / "env")], folder) or fault(
        "pip install", [*pip, f"torch=={torch}", f"mplug-all=={version()}"], folder
    )


def fault(check: str, command: list[str], folder: Path, pattern: str = "") -> str | None:
    """Run a command in a folder: the check and the last line of the output if it fails, or None."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode == 0 and re.search(pattern, done.stdout, re.MULTILINE):
        return None
    print(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}", file=sys.stderr, flush=True)
    lines = done.stdout.strip().splitlines() or [f"no output, exit status {done.returncode}"]
    return f"{check}: {lines[-1].strip()}"


def results() -> list[dict[str, str | None]]:
    """The recorded results, in the order of the versions."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


def record(result: dict[str, str | None]) -> None:
    """Add a result to the record, in the place of an earlier one of the same versions."""
    same = [(minor(str(result["python"])), minor(str(result["torch"])))]
    kept = [one for one in results() if (minor(str(one["python"])), minor(str(one["torch"]))) not in same]
    ordered = sorted([*kept, result], key=lambda one: (number(str(one["python"])), number(str(one["torch"]))))
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


def number(of: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", of)[:3])


def minor(of: str) -> str:
    """'3.11' of '3.11.7'."""
    return ".".join(of.split(".")[:2])


def with_table(page: str) -> str:
    """The page with the table of the recorded results."""
    found = results()
    columns = sorted({str(one["torch"]) for one in found}, key=number)
    cells = {(minor(str(one["python"])), str(one["torch"])): cell(one) for one in found}
    rows = sorted({minor(str(one["python"])) for one in found}, key=number)
    lines = [
        "| Python | " + " | ".join(f"torch {name}" for name in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(f"| {row} | " + " | ".join(cells.get((row, name), "not tested") for name in columns) + " |" for row in rows),
    ]
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def cell(result: dict[str, str | None]) -> str:
    """What the table says of one environment."""
    return "passed" if result["failed"] is None else "failed: " + result["failed"].replace("|", "\\|")


if __name__ == "__main__":
    main()
