"""Write the package of a new plugin: a small, complete example that its author then changes."""

import json
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template

from mplug.errors import UsageError
from mplug.registry.entry_points import Registry

TEMPLATES = Path(__file__).with_name("templates")
REQUIREMENT = "mplug>=0.1,<0.2"
"""The requirement on mplug of a plugin that is written for this version."""
LIBRARIES = {"mplug_nn": "mplug-nn>=0.1,<0.2", "mplug_pretrained": "mplug-pretrained>=0.1,<0.2"}
"""The requirements on other libraries, by the modules that templates import."""

ABOUT = "about.json"
"""The file beside the templates of a kind that describes its package."""


@dataclass(frozen=True)
class About:
    """What the templates of a kind make, as its file `ABOUT` states it; the texts have placeholders."""

    summary: str
    use: str
    """The command that uses the plugin."""
    target: str
    """The object of the package that the entry point names."""
    entry_points: str
    """Further entry points of the package."""


def about(kind: str) -> About:
    """The description of the package of a kind."""
    return About(**json.loads((TEMPLATES / kind / ABOUT).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Package:
    """A new package: its kind, the name of its distribution, and the plugin's name, which users type."""

    kind: str
    distribution: str
    name: str

    @property
    def use(self) -> str:
        """The command that uses the plugin."""
        return Template(about(self.kind).use).substitute(name=self.name)

    @property
    def _imported_names(self) -> set[str]:
        """The names that the templates import. The plugin's class must have another name."""
        lines = [line for path in (TEMPLATES / self.kind).glob("*.txt") for line in path.read_text().splitlines()]
        return {word for line in lines if "import " in line for word in re.findall(r"\w+", line)}

    @property
    def _requirements(self) -> list[str]:
        modules = [path for path in (TEMPLATES / self.kind).glob("*.py.txt") if path.name != "test.py.txt"]
        sources = "".join(path.read_text() for path in modules)
        return [REQUIREMENT, *(one for module, one in LIBRARIES.items() if f"from {module} import" in sources)]

    @property
    def words(self) -> dict[str, str]:
        """The values of the templates' placeholders."""
        package = re.sub("[-.]", "_", self.distribution)
        camel = "".join(part.capitalize() for part in re.split("[-_]", self.name))
        if keyword.iskeyword(camel) or camel in self._imported_names:
            camel += "Plugin"
        function = self.name.replace("-", "_")
        if keyword.iskeyword(function) or function in {*self._imported_names, "supports"}:
            function += "_core"
        own, names = about(self.kind), {"name": self.name, "Class": camel, "function": function}
        return {
            **names,
            "distribution": self.distribution,
            "package": package,
            "kind": self.kind,
            "target": Template(own.target).substitute(names),
            "summary": own.summary,
            "requirements": ", ".join(f'"{one}"' for one in self._requirements),
            "use": self.use,
            "more": Template(own.entry_points).substitute(names),
        }


def describe(kind: str, distribution: str) -> Package:
    """The package of a distribution: 'acme-ringo' has the plugin 'ringo'. UsageError if the name cannot be used."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", distribution):
        raise UsageError(
            f"'{distribution}' is not a valid distribution name; use lower-case letters, digits and '-': 'acme-ringo'"
        )
    name = distribution.partition("-")[2] or distribution
    if not name[0].isalpha():
        raise UsageError(f"the plugin's name, '{name}', must begin with a letter, as in 'acme-ringo'")
    package = distribution.replace("-", "_")
    if find_spec(package) is not None and distribution not in {entry.distribution for entry in Registry().entries()}:
        raise UsageError(f"a module '{package}' is already installed; use another name, such as 'acme-{distribution}'")
    if fault := Registry().name_fault(kind, name):
        raise UsageError(fault)
    if kind == "parallel" and not name.isalpha():
        raise UsageError(
            f"the strategy's name '{name}' must contain only letters, because layouts append the degree to it ('tp2')"
        )
    for entry in Registry().entries(kind):
        if entry.name == name and entry.distribution != distribution:
            raise UsageError(f"{entry.label} is already installed ({entry.origin}); use another name")
    return Package(kind, distribution, name)


def write(package: Package, folder: Path) -> list[Path]:
    """Write the package to a new folder; returns its files. UsageError if the folder exists."""
    if folder.exists():
        raise UsageError(f"'{folder}' already exists; use another name, or another folder with --folder")
    words = package.words
    source = TEMPLATES / package.kind
    files = {
        folder / "pyproject.toml": TEMPLATES / "pyproject.toml.txt",
        folder / "README.md": TEMPLATES / "README.md.txt",
        folder / "tests" / f"test_{package.name.replace('-', '_')}.py": source / "test.py.txt",
    }
    for template in sorted(source.glob("*.py.txt")):
        name = template.name.removesuffix(".txt")
        if name != "test.py":
            files[folder / "src" / words["package"] / ("__init__.py" if name == "plugin.py" else name)] = template
    for data in sorted(set(source.glob("*.txt")) - set(source.glob("*.py.txt"))):
        files[folder / "tests" / data.name] = data
    for path, template in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(template, words), encoding="utf-8")
    return list(files)


def _filled(template: Path, words: Mapping[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(words)
