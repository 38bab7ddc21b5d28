"""What release/ does: one version everywhere, archives with all files, an installation from them, and the checklist."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import distributions as installed_distributions
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from mplug.registry.entry_points import KINDS, Registry

ROOT = Path(__file__).parent.parent
RELEASE = ROOT / "release"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Import one of the scripts."""
    monkeypatch.syspath_prepend(RELEASE)
    names = {path.stem for path in RELEASE.glob("*.py")}
    for name in names & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)
    yield import_module
    for name in names & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)


def called(*words: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    words = tuple(map(str, words))
    environment = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **environment}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)


# The version.


def test_every_file_states_the_version_of_the_one_place() -> None:
    done = called(sys.executable, RELEASE / "versions.py", "--check")
    assert (done.returncode, done.stdout) == (0, ""), f"run release/versions.py: {done.stdout}"


def test_a_new_version_reaches_every_distribution_and_every_requirement(script) -> None:
    distributions, versions = script("distributions"), script("versions")
    for folder in distributions.every():
        project = tomllib.loads(versions.written(folder / "pyproject.toml", "3.7.1"))["project"]
        assert project["version"] == "3.7.1", folder
        extras = project.get("optional-dependencies", {}).values()
        for text in chain(project["dependencies"], *extras):
            requirement = Requirement(text)
            if requirement.name.startswith("mplug"):
                assert requirement.specifier.contains("3.7.1"), (folder, text)
                assert not requirement.specifier.contains("0.1.0"), (folder, text)
    for name in distributions.BOUNDED:
        assert "mplug>=3.7,<4" in versions.written(ROOT / name, "3.7.1"), name
    assert distributions.bounds("0.2.0rc1") == ">=0.2,<0.3"


def test_mplug_all_requires_every_bundled_distribution_of_exactly_its_version(script) -> None:
    distributions = script("distributions")
    own = distributions.project(distributions.ALL)
    required = {*own["dependencies"], *own["optional-dependencies"]["optional"]}
    folders = [path.parent for path in (*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml"))]
    names = {distributions.project(folder)["name"] for folder in (ROOT, *folders)}
    assert required == {f"{name}=={distributions.version()}" for name in names}


# The archives.


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = called(sys.executable, RELEASE / "build.py", "--into", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.wide("session")
def test_every_distribution_has_a_wheel_and_a_source_distribution(dist: Path, script) -> None:
    names = {script("distributions").project(folder)["name"] for folder in script("distributions").every()}
    for suffix in ("-py3-none-any.whl", ".tar.gz"):
        built = {path.name.partition("-")[0].replace("_", "-") for path in dist.glob(f"*{suffix}")}
        assert built == names


def test_a_file_that_an_archive_lacks_or_that_git_does_not_track_is_found(script) -> None:
    build, folder = script("build"), ROOT / "plugins" / "adapters" / "lora"
    content = {name: path.read_bytes() for name, path in build.tracked(folder).items()}
    assert build.package_faults(folder, content) == []
    recipe = "mplug_lora/recipes/lora.yaml"
    changed = {**content, "mplug_lora/__init__.py": b"", "mplug_lora/notes.txt": b""}
    del changed[recipe]
    assert build.package_faults(folder, changed) == [
        f"lacks {recipe}",
        "has mplug_lora/notes.txt, which git does not track",
        "has another mplug_lora/__init__.py than this tree",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("Version: 0.1.0", "Version: 0.1.0-final-1"), "'0.1.0-final-1' is invalid for 'version'"),
        (("Requires-Dist: mplug>=0.1,<0.2", "Requires-Dist: mplug>=0.1 <0.2"), "is invalid for 'requires-dist'"),
        (("License-Expression: Apache-2.0", "License-Expression: Apache 2"), "is invalid for 'license-expression'"),
        (("Version: 0.1.0", "Version: 0.1.1"), "has the version 0.1.1, not 0.1.0"),
        (("Summary: LoRA", "Keywords: LoRA"), "states no summary"),
    ],
)
def test_metadata_that_an_index_would_refuse_is_found(
    dist: Path, script, changed: tuple[str, str], message: str
) -> None:
    build, folder = script("build"), ROOT / "plugins" / "adapters" / "lora"
    (wheel,) = dist.glob("mplug_lora-*.whl")
    with ZipFile(wheel) as archive:
        text = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    assert changed[0] in text
    assert message in "\n".join(build.metadata_faults(folder, text.replace(*changed).encode()))


@pytest.mark.wide("session")
def test_mplug_all_installs_from_the_archives_alone_with_all_plugins_and_recipes(dist: Path, tmp_path: Path) -> None:
    """The environment has what others publish, and nothing of mplug."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=tmp_path, check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for folder in {Path(str(one.locate_file(""))) for one in installed_distributions()} - {ROOT}:
        for path in folder.iterdir():
            if not path.name.startswith("mplug") and path.suffix != ".pth" and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    python = tmp_path / "env" / "bin" / "python"
    options = ("--no-index", "--find-links", dist, "--no-compile", "--quiet")
    done = called(sys.executable, "-m", "pip", "--python", python, "install", *options, "mplug-all", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    script = f"""if True:
        import json
        from mplug.commands import Registry
        print(json.dumps({{kind: Registry().names(kind) for kind in {[*KINDS, "recipes"]!r}}}))"""
    done = called(python, "-c", script, cwd=tmp_path)
    installed = {kind: set(names) for kind, names in json.loads(done.stdout).items()}
    optional = {f"mplug-{name}" for name in ("deepspeed", "lm-eval", "mlflow", "wandb")}
    for entry in Registry().entries():
        if entry.distribution not in optional:
            assert entry.name in installed[entry.kind], entry
    assert {"gpt", "llama"} <= installed["models"]
    done = called(python, "-m", "mplug", "recipes", "show", "lora", cwd=tmp_path)
    assert f"# {site}/mplug_lora/recipes/lora.yaml" in done.stdout, done.stderr


# The checklist and the table.


def test_the_checklist_refuses_a_tree_with_changes(tmp_path: Path) -> None:
    shutil.copytree(RELEASE, tmp_path / "release", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    done = called(sys.executable, "-B", tmp_path / "release" / "checklist.py", "--short", cwd=tmp_path)
    message = "the tree has changes that are not committed; commit or remove them:\n?? release/\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


def test_the_checklist_wants_the_day_of_the_release_at_the_top_of_the_changelog(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checklist = script("checklist")
    monkeypatch.setattr(checklist, "ROOT", tmp_path)
    number = checklist.version()
    cases = {
        f"# Changelog\n\n## {number} (unreleased)\n\nNew.\n": f"its top section is '{number} (unreleased)'",
        f"# Changelog\n\n## 9.9.9 (2030-01-02)\n\nNew.\n\n## {number} (2030-01-01)\n": "its top section is '9.9.9",
        f"# Changelog\n\n## {number} (2030-01-02)\n\n## 0.0.1 (2029-01-01)\n\nOld.\n": "is empty",
    }
    for text, message in cases.items():
        (tmp_path / "CHANGELOG.md").write_text(text)
        assert message in checklist.changelog_fault()
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {number} (2030-01-02)\n\nNew.\n")
    assert checklist.changelog_fault() == ""


def test_the_table_of_environments_is_what_was_measured(script) -> None:
    environments = script("environments")
    page = environments.PAGE.read_text()
    assert environments.with_table(page) == page, "run release/environments.py"
    assert {result["failed"] for result in environments.results()} == {None}
