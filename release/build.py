"""Build the wheel and the source distribution of every distribution of this repository.

python release/build.py                 into dist/, which is emptied first
python release/build.py --into DIR

Needs uv_build (requirements-dev.txt). The archives must contain every file that git tracks in the packages, and no
other file; their metadata must be valid. Both are checked.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import uv_build
from distributions import ROOT, every, project, version
from packaging.metadata import Metadata


def main() -> None:
    """Build all distributions, and check each archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="the folder; default: dist")
    into = parser.parse_args().into.resolve()
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # where uv-build is
    faults = []
    for folder in every():
        with contextlib.chdir(folder):
            wheel, source = (into / build(str(into)) for build in (uv_build.build_wheel, uv_build.build_sdist))
        faults += [f"{wheel.name}: {fault}" for fault in wheel_faults(folder, wheel)]
        faults += [f"{source.name}: {fault}" for fault in source_faults(folder, source)]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(every())} distributions of version {version()}, each as a wheel and a source distribution: {into}")


def tracked(folder: Path) -> dict[str, Path]:
    """The files of a distribution's package that git tracks, by their names in a wheel."""
    package = project(folder)["name"].replace("-", "_")
    below = folder if folder == ROOT else folder / "src"
    names = subprocess.check_output(["git", "ls-files", "-z", f"{below / package}"], cwd=ROOT, text=True)
    paths = [ROOT / name for name in names.split("\0") if name]
    return {path.relative_to(below).as_posix(): path for path in paths if path.exists()}


def wheel_faults(folder: Path, wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    with ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    metadata = next(text for name, text in content.items() if name.endswith(".dist-info/METADATA"))
    package = {name: text for name, text in content.items() if ".dist-info/" not in name}
    return [*metadata_faults(folder, metadata), *package_faults(folder, package)]


def source_faults(folder: Path, source: Path) -> list[str]:
    """What is wrong with a source distribution."""
    with tarfile.open(source) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        content = {member.name.partition("/")[2]: archive.extractfile(member).read() for member in members}
    if missing := {"PKG-INFO", "pyproject.toml", "README.md"} - content.keys():
        return [f"has no {name}" for name in sorted(missing)]
    top = "" if folder == ROOT else "src/"
    package = f"{top}{project(folder)['name'].replace('-', '_')}/"
    inside = {name.removeprefix(top): text for name, text in content.items() if name.startswith(package)}
    return [*metadata_faults(folder, content["PKG-INFO"]), *package_faults(folder, inside)]


def package_faults(folder: Path, content: dict[str, bytes]) -> list[str]:
    """The differences between the files of a package in an archive and those that git tracks."""
    own = tracked(folder)
    missing = [f"lacks {name}" for name in sorted(own.keys() - content.keys())]
    foreign = [f"has {name}, which git does not track" for name in sorted(content.keys() - own.keys())]
    changed = [name for name in own.keys() & content.keys() if own[name].read_bytes() != content[name]]
    return [*missing, *foreign, *(f"has another {name} than this tree" for name in sorted(changed))]


def metadata_faults(folder: Path, text: bytes) -> list[str]:
    """What an index would refuse, or what does not agree with the project's version."""
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        return [str(error) for error in group.exceptions]
    faults = [] if str(metadata.version) == version() else [f"has the version {metadata.version}, not {version()}"]
    described = message_from_bytes(text).get_payload()
    if not str(described).strip() or metadata.description_content_type != "text/markdown":
        faults.append("has no description in Markdown")
    absent = [name for name in ("summary", "license_expression", "requires_python") if not getattr(metadata, name)]
    return [*faults, *(f"states no {name}" for name in absent)]


if __name__ == "__main__":
    main()
