"""Keep the version of all distributions in lockstep.

python release/versions.py             write every file that states the version, from mplug/system/version.py
python release/versions.py 0.2.0       give all distributions this version
python release/versions.py --check     change nothing; the exit status is 1 if a file states something else
"""

import argparse
import re
import sys
from pathlib import Path

from distributions import ALL, BOUNDED, ROOT, VERSION, bounds, bundled, every, optional, project, version

NUMBER = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
BOUND = re.compile(r"(mplug(?:-[a-z0-9-]+)?)>=\d+\.\d+,<\d+(?:\.\d+)?(?=[\"'`\s])")
PIN = re.compile(r"(mplug(?:-[a-z0-9-]+)?)==[0-9a-z.]+(?=\")")
ITEM = '    "{}",\n'


def requirement_list(folders: list[Path], number: str) -> str:
    """The lines of a list that pins the distributions in some folders."""
    return "".join(ITEM.format(f"{project(folder)['name']}=={number}") for folder in folders)


def written(path: Path, number: str) -> str:
    """The text of a file with this version."""
    text = path.read_text(encoding="utf-8")
    if path == VERSION:
        return re.sub(r'(?m)^__version__ = ".*"$', f'__version__ = "{number}"', text)
    text = BOUND.sub(rf"\g<1>{bounds(number)}", text)
    if path.name == "pyproject.toml":
        text = PIN.sub(rf"\g<1>=={number}", text)
        text = re.sub(r'(?m)^version = ".*"$', f'version = "{number}"', text, count=1)
    if path == ALL / "pyproject.toml":
        for name, folders in (("dependencies", bundled()), ("optional", optional())):
            lines = requirement_list(folders, number)
            text = re.sub(rf"(?ms)^{name} = \[\n.*?^\]$", f"{name} = [\n{lines}]", text)
    return text


def files() -> list[Path]:
    """Every file that states the version or its bounds."""
    return [VERSION, *(folder / "pyproject.toml" for folder in every()), *(ROOT / name for name in BOUNDED)]


def main() -> None:
    """Write the files, or say which of them state something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", help="the new version; the one of mplug/system/version.py if omitted")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    number = options.number or version()
    if not NUMBER.fullmatch(number):
        parser.error(f"'{number}' is no version such as 0.2.0 or 0.2.0rc1")
    stale = [path for path in files() if written(path, number) != path.read_text(encoding="utf-8")]
    for path in stale:
        if not options.check:
            path.write_text(written(path, number), encoding="utf-8")
        print(f"{'states another version' if options.check else 'written'}: {path.relative_to(ROOT)}")
    sys.exit(bool(options.check and stale))


if __name__ == "__main__":
    main()
