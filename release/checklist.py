"""Check that the committed tree can be released, and print what a person does then.

python release/checklist.py            checks, quick tests, builds
python release/checklist.py --short    without the tests, which take 10 minutes

It refuses to run on a tree with changes that are not committed, because it would then check something else than what
is released. Every step runs, also after one that fails. The exit status is 1 if a step fails.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable

from distributions import ROOT, every, project, version
from environments import cell, minor, results

BY_HAND = """
By hand:
  1. Run the wide sets of the tests (pytest --wide all), and on a machine with GPUs pytest -m gpu (CONTRIBUTING.md).
  2. Check that the project owns the names of all distributions on the index; the first release claims them:
     {names}.
  3. git tag -a v{version} -m "mplug {version}" && git push origin v{version}
  4. Upload dist/*: the host and the libraries first, mplug-all last. An upload cannot be repeated.
  5. In a new environment without dist/: pip install mplug-all=={version}, then README's first session.
  6. Build the image of release/Containerfile, run `mplug train` in it, and publish it as {version}.
  7. Begin the next version: python release/versions.py NEXT, python docs/generate.py, and a section
     '## NEXT (unreleased)' at the top of CHANGELOG.md.
"""


def main() -> None:
    """Run all steps, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="without the tests")
    short = parser.parse_args().short
    if changes := output("git", "status", "--porcelain"):
        sys.exit(f"the tree has changes that are not committed; commit or remove them:\n{changes}")
    steps: dict[str, Callable[[], str]] = {
        "every file states one version": lambda: command("release/versions.py", "--check"),
        "the version has no tag yet": tag_fault,
        "CHANGELOG.md begins with the version": changelog_fault,
        "the generated pages are true": generated_fault,
        "archives build, and their metadata is valid": lambda: command("release/build.py"),
        "docs/installing.md has passed environments of this version": environments_fault,
    }
    if not short:
        steps["the quick tests pass"] = lambda: command("-m", "pytest", "-q", "-n", "2", "--dist", "loadfile")
    faults = sum(reported(name, step) for name, step in steps.items())
    if changes := output("git", "status", "--porcelain"):
        sys.exit(f"a step changed the tree:\n{changes}")
    if faults:
        sys.exit(f"{faults} of {len(steps)} steps failed: mplug {version()} cannot be released")
    names = ", ".join(str(project(folder)["name"]) for folder in every())
    print(BY_HAND.format(version=version(), names=names))
    if short:
        print("The tests did not run (--short); .ci/run runs them in a fresh clone.")


def reported(name: str, step: Callable[[], str]) -> bool:
    """Run a step and print its result: whether it failed."""
    began = time.monotonic()
    fault = step()
    print(f"{'FAILED' if fault else 'ok':<7} {name} ({time.monotonic() - began:.0f} s)", flush=True)
    if fault:
        print("\n".join(f"        {line}" for line in fault.splitlines()), flush=True)
    return bool(fault)


def output(*words: str) -> str:
    """What a command prints."""
    return subprocess.check_output(words, cwd=ROOT, text=True).rstrip()


def command(*words: str) -> str:
    """What a Python command prints if it fails, or an empty text."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or f"exit status {done.returncode}"


def tag_fault() -> str:
    """A released version stays what it is."""
    return f"the tag v{version()} exists; choose another version" if output("git", "tag", "-l", f"v{version()}") else ""


def changelog_fault() -> str:
    """The top section is the version's, and has content; a person replaces '(unreleased)' by the date."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    top, _, rest = text.partition("\n## ")[2].partition("\n")
    if not re.fullmatch(rf"{re.escape(version())} \(\d{{4}}-\d\d-\d\d\)", top):
        return f"its top section is '{top}'; write '## {version()} (YEAR-MONTH-DAY)' with the day of the release"
    return "" if rest.partition("\n## ")[0].strip() else f"its section '{top}' is empty"


def generated_fault() -> str:
    """The pages that scripts write are those in the tree."""
    fault = command("docs/generate.py") or command("docs/import_graph.py") or command("release/environments.py")
    changed = output("git", "diff", "--name-only")
    return fault or (f"commit what the scripts wrote: {', '.join(changed.split())}" if changed else "")


def environments_fault() -> str:
    """Two versions of Python, at least, were tested with this version of mplug, and every test passed."""
    own = [one for one in results() if one["mplug"] == version()]
    failed = [f"Python {one['python']}, torch {one['torch']}: {cell(one)}" for one in own if one["failed"]]
    pythons = {minor(str(one["python"])) for one in own}
    if len(pythons) < 2:
        failed.append("run release/environments.py with at least two versions of Python and of torch")
    return "\n".join(failed)


if __name__ == "__main__":
    main()
