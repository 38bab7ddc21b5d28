"""The host without any bundled package: its wheel, what the wheel requires, and the packages of strangers.

`tests/frozen/` has a wheel that was built for the contracts of mplug 0.1; its sources are in `packages/acme-solo`.
"""

import json
import os
import subprocess
import sys
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from mplug.config.binding import KIND_OF_SECTION
from mplug.config.defaults import default_settings
from mplug.registry.entry_points import Registry

HERE = Path(__file__).parent
IN_TURN = HERE / "support" / "commands_in_turn.py"
FROZEN = HERE / "frozen" / "acme_solo-1.0.0-py3-none-any.whl"
BUILT = [HERE / "packages" / "acme-solo", HERE / "third_party" / "nova-jotter", HERE / "third_party" / "nova-orthon"]

SOLO = ("--model", "solo", "--kernels", "mean=triangle")
OWN = (*SOLO, "--data", "counting", "--optimizer", "descent")
SETTINGS = (
    *("trainer.steps=12", "trainer.seq_length=32", "trainer.eval_every=0", "trainer.device=cpu"),
    *("schedule.warmup_steps=2", "checkpoint.every=6"),
)
OPTIONS = tuple(word for setting in SETTINGS for word in ("--set", setting))


def called(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing of this checkout on its path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # where uv_build finds uv-build
    environment = {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)


def succeeded(*command: str | Path, cwd: Path) -> str:
    result = called(*command, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def built(folder: Path, *sources: Path) -> list[Path]:
    """A wheel of each source, built by its own backend."""
    options = ("-q", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    succeeded(sys.executable, "-m", "pip", "wheel", *options, *sources, cwd=folder)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host's wheel."""
    (wheel,) = built(tmp_path_factory.mktemp("host"), HERE.parent)
    return wheel


def link_required(site: Path, wheel: Path) -> None:
    """Link what a wheel requires, and what that requires, into a folder of packages."""
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        own = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    pending, seen = list(own), set[str]()
    while pending:
        requirement = Requirement(text := pending.pop())
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            assert text not in own, f"{text} is not installed"  # a build of torch may lack what another one requires
            continue
        for top in {file.parts[0] for file in found.files or ()} - {"..", "bin", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
        pending += found.requires or ()


class Result(NamedTuple):
    """What a command gave."""

    status: int
    out: str
    err: str


class Alone:
    """An environment with the host and some wheels, and a working directory."""

    def __init__(self, folder: Path, host: Path, *wheels: Path) -> None:
        self.folder = folder
        succeeded(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
        self.python = folder / "env" / "bin" / "python"
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        link_required(site, host)
        options = ("-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", site)
        succeeded(sys.executable, "-m", "pip", "install", *options, host, *wheels, cwd=folder)

    def light(self, *words: str) -> Result:
        """A command in a new interpreter."""
        result = called(self.python, "-m", "mplug", *words, cwd=self.folder)
        return Result(result.returncode, result.stdout, result.stderr)

    def in_turn(self, *commands: tuple[str, ...]) -> list[Result]:
        """Commands one after the other, in forks of one interpreter."""
        out = succeeded(self.python, IN_TURN, json.dumps(commands), cwd=self.folder)
        return [Result(*result) for result in json.loads(out)]

    def losses(self, name: str) -> list[float]:
        """The losses of a run."""
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, host: Path) -> Alone:
    """The host and the frozen wheel."""
    return Alone(tmp_path_factory.mktemp("alone"), host, FROZEN)


def test_help_and_listing(alone: Alone) -> None:
    shown = alone.light("--help")
    assert (shown.status, shown.err) == (0, "")
    assert "Train large transformers" in shown.out
    listed = alone.light("plugins", "list")
    assert listed.status == 0, listed.err
    rows = {tuple(line.split()[:3]) for line in listed.out.splitlines()[1:]}
    own = {("models", "solo"), ("kernels", "triangle"), ("data", "counting"), ("optimizers", "descent")}
    assert rows == {
        *((*plugin, "acme-solo") for plugin in own),
        *(("precisions", name, "mplug") for name in ("bf16", "fp16", "fp32", "fp64")),
    }


def test_the_frozen_wheel_trains_and_resumes_and_is_described(alone: Alone) -> None:
    trained, resumed, sources = alone.in_turn(
        ("train", "--name", "one", *OWN, *OPTIONS),
        ("train", "--resume", "--name", "one", "--set", "trainer.steps=14"),
        ("config", "show", "--sources", *OWN, *OPTIONS),
    )
    for result in (trained, resumed, sources):
        assert result.status == 0, result.out + result.err
    losses = alone.losses("one")
    assert len(losses) == 14
    assert losses[-1] < 0.8 * losses[0]
    assert "from step 12" in resumed.out + resumed.err
    rows = dict(line.split(maxsplit=2)[::2] for line in sources.out.splitlines() if len(line.split(maxsplit=2)) == 3)
    assert rows["optimizer.lr"] == "default of optimizers/descent"
    assert rows["parallel.data"].endswith("; 'dp' is not installed")
    assert rows["kernels.default"].endswith("; 'sdpa' is not installed")
    record = json.loads((alone.folder / "runs" / "one" / "record.json").read_text())
    assert {plugin["distribution"] for plugin in record["plugins"]} == {"acme-solo", "mplug"}


ABSENT = {
    ("checkpoint",): "mplug-checkpoint",
    ("explain",): "mplug-explain",
    ("generate",): "mplug-generate",
    ("plugins", "show"): "mplug-testing",
    ("plugins", "check"): "mplug-testing",
    ("plugins", "new"): "mplug-testing",
}
"""Commands that the host lacks, each with the package that has it."""
REFUSED: dict[tuple[str, ...], str] = {
    ("train",): (
        "mplug: models/gpt, optimizers/adamw and data/text of the default run are not installed; install them "
        "(pip install mplug-gpt mplug-adamw mplug-text), or name others with --model (installed: solo), --optimizer "
        "(installed: descent) and --data (installed: counting)\n"
    ),
    ("config", "schema", *OWN[:2], *OWN[4:6]): (
        "mplug: optimizers/adamw of the default run is not installed; install it (pip install mplug-adamw), or name "
        "another with --optimizer (installed: descent)\n"
    ),
    ("train", "--model", "gpt", *OWN[4:]): (
        "mplug: model.name (--model): no plugin 'gpt' of kind 'models' is installed (installed: solo)\n"
    ),
    ("train", *OWN, "--parallel", "dp2"): (
        "mplug: parallel.layout (--parallel): layout 'dp2': unknown strategy 'dp' (installed: none); install the "
        "package that supplies it\n"
    ),
    **{
        words: f"mplug: the command '{' '.join(words)}' is in the package {package}, which is not installed: "
        f"pip install {package}\n"
        for words, package in ABSENT.items()
    },
}


def test_what_needs_a_missing_package_is_refused_in_one_sentence_that_names_it(alone: Alone) -> None:
    for words, message in REFUSED.items():
        result = alone.light(*words)
        assert (result.status, result.err) == (2, message), words


def test_packages_of_several_strangers_that_are_built_now_train_together(tmp_path: Path, host: Path) -> None:
    (tmp_path / "wheels").mkdir()
    alone = Alone(tmp_path, host, *built(tmp_path / "wheels", *BUILT))
    lines = [json.dumps({"text": f"{a} plus {b} is {a + b}."}) for a in range(30) for b in range(20)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    named = (*SOLO, "--set", "model.vocab_size=256", "--data", "jotter", "--optimizer", "orthon")
    (trained,) = alone.in_turn(("train", "--name", "two", *named, "--set", "data.path=texts.jsonl", *OPTIONS))
    assert trained.status == 0, trained.out + trained.err
    losses = alone.losses("two")
    assert losses[-1] < losses[0]


def test_the_packages_that_the_message_names_have_the_plugins_of_the_default_run() -> None:
    default = default_settings()
    for section, kind in KIND_OF_SECTION.items():
        name = str(default[section, "name"].value)
        assert Registry().find(kind, name).distribution == f"mplug-{name}"
