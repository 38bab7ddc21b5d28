"""Wheels in environments of their own: the host without any bundled package, and packages of strangers beside all.

`tests/frozen/` has a wheel that was built for the contracts of mplug 0.1; its sources are in `packages/acme-solo`.
`tests/third_party/` is built as it stands.
"""

import json
import os
import subprocess
import sys
import sysconfig
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from warm import run_module

from mplug.config.binding import KIND_OF_SECTION
from mplug.config.defaults import default_settings
from mplug.registry.entry_points import Registry

HERE = Path(__file__).parent
IN_TURN = HERE / "support" / "commands_in_turn.py"
FROZEN = HERE / "frozen" / "acme_solo-1.0.0-py3-none-any.whl"
STRANGERS = sorted(path.parent for path in HERE.glob("third_party/*/pyproject.toml"))

SOLO = ("--model", "solo", "--kernels", "mean=triangle")
OWN = (*SOLO, "--data", "counting", "--optimizer", "descent")
SETTINGS = (
    *("trainer.steps=12", "trainer.seq_length=32", "trainer.eval_every=0", "trainer.device=cpu"),
    *("schedule.warmup_steps=2", "checkpoint.every=6"),
)
OPTIONS = tuple(word for setting in SETTINGS for word in ("--set", setting))


def succeeded(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints with nothing of this checkout on its path."""
    result = called(*command, cwd=cwd, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def called(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # where uv_build finds uv-build
    environment = {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)


def built(folder: Path, *sources: Path) -> list[Path]:
    options = ("-q", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    succeeded(sys.executable, "-m", "pip", "wheel", *options, *sources, cwd=folder)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def environment_in(folder: Path, *wheels: Path) -> tuple[Path, Path]:
    """A new environment with some wheels: (its interpreter, its folder of packages)."""
    succeeded(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    options = ("-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", site)
    succeeded(sys.executable, "-m", "pip", "install", *options, *wheels, cwd=folder)
    return folder / "env" / "bin" / "python", site


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def distributions_of(run: Path) -> set[str]:
    """The distributions of the plugins that a run names in its record."""
    return {plugin["distribution"] for plugin in json.loads((run / "record.json").read_text())["plugins"]}


def write_texts(path: Path) -> None:
    lines = [json.dumps({"text": f"{a} times {b} is {a * b}."}) for a in range(40) for b in range(26)]
    path.write_text("\n".join(lines) + "\n")


# The host alone.


class Alone:
    """An environment with the host and some wheels, and a working directory."""

    def __init__(self, folder: Path, host: Path, *wheels: Path) -> None:
        self.folder, (self.python, site) = folder, environment_in(folder, host, *wheels)
        link_required(site, host)

    def outcomes(self, *commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
        """(exit status, output, errors) of commands, one after the other, in forks of one interpreter."""
        results = json.loads(succeeded(self.python, IN_TURN, json.dumps(commands), cwd=self.folder))
        return [(status, out, err) for status, out, err in results]

    def in_turn(self, *commands: tuple[str, ...]) -> list[str]:
        """What commands print; all succeed."""
        results = self.outcomes(*commands)
        assert [status for status, *_ in results] == [0] * len(commands), results
        return [out + err for _, out, err in results]

    def add(self, name: str, *wheels: Path) -> None:
        """Install wheels, and what they require, in a folder that only commands with the first word '+NAME' read."""
        options = ("-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", self.folder / name)
        succeeded(sys.executable, "-m", "pip", "install", *options, *wheels, cwd=self.folder)
        for wheel in wheels:
            link_required(self.folder / name, wheel)
        for twice in (self.folder / name).glob("mplug-*.dist-info"):
            twice.unlink()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, host: Path) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"), host, FROZEN)


@pytest.mark.wide("session")
def test_help_and_listing(alone: Alone) -> None:
    assert "Train large transformers" in succeeded(alone.python, "-m", "mplug", "--help", cwd=alone.folder)
    listed = succeeded(alone.python, "-m", "mplug", "plugins", "list", cwd=alone.folder)
    own = {("models", "solo"), ("kernels", "triangle"), ("data", "counting"), ("optimizers", "descent")}
    assert {tuple(line.split()[:3]) for line in listed.splitlines()[1:]} == {
        *((*plugin, "acme-solo") for plugin in own),
        *(("precisions", name, "mplug") for name in ("bf16", "fp16", "fp32", "fp64")),
    }


WORKS = [
    ("train", "--name", "unsaved", *OWN, *OPTIONS),
    ("+saving", "train", "--name", "one", *OWN, *OPTIONS),
    ("+saving", "train", "--resume", "--name", "one", "--set", "trainer.steps=14"),
    ("+settings", "config", "show", "--sources", *OWN, *OPTIONS),
    ("+heal", "train", "--name", "lacking", *OWN, *OPTIONS),
]
"""A run of the host alone; with mplug-saving, a run and its continuation; the sources of settings; a run with
mplug-heal whose required mplug-saving was uninstalled."""


@pytest.fixture(scope="module")
def outcomes(alone: Alone) -> list[tuple[int, str, str]]:
    """What the commands of `WORKS`, then those of `REFUSED`, give: one interpreter imports torch for all."""
    for name, more in {"saving": (), "heal": ("invariance",), "settings": ()}.items():
        alone.add(name, *built(alone.folder, *(HERE.parent / one for one in (name, *more))))
    return alone.outcomes(*WORKS, *REFUSED)


@pytest.mark.wide("session")
def test_the_frozen_wheel_trains_and_resumes(alone: Alone, outcomes: list[tuple[int, str, str]]) -> None:
    works = outcomes[: len(WORKS)]
    assert [status for status, *_ in works] == [0] * len(WORKS), works
    unsaved, _, resumed, sources, _ = (out + err for _, out, err in works)
    assert "  nothing is saved, because mplug-saving is not installed\n" in unsaved
    assert "  no progress is shown, because mplug-progress is not installed\n" in unsaved
    assert not (alone.folder / "runs" / "unsaved" / "checkpoints").exists()
    losses = losses_of(alone.folder / "runs" / "one")
    assert len(losses) == 14
    assert losses[:12] == losses_of(alone.folder / "runs" / "unsaved") == losses_of(alone.folder / "runs" / "lacking")
    assert losses[-1] < 0.8 * losses[0]
    assert "from step 12" in resumed
    rows = dict(line.split(maxsplit=2)[::2] for line in sources.splitlines() if len(line.split(maxsplit=2)) == 3)
    assert rows["optimizer.lr"] == "default of optimizers/descent"
    assert rows["parallel.data"].endswith("; 'dp' is not installed")
    assert rows["kernels.default"].endswith("; 'flash', 'triton' and 'sdpa' are not installed")
    assert distributions_of(alone.folder / "runs" / "one") == {"acme-solo", "mplug"}


ABSENT = {
    ("checkpoint",): "mplug-checkpoint",
    ("config",): "mplug-settings",
    ("evaluate",): "mplug-evaluate",
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
    ("+settings", "config", "schema", *OWN[:2], *OWN[4:6]): (
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
        (
            "train",
            *OWN,
            *words,
        ): f"mplug: no installed package serves {what}; install {package}, or remove these settings\n"
        for words, what, package in (
            (
                ("--pretrained", "weights"),
                "weights that a run begins with (checkpoint.pretrained) or adapters",
                "mplug-pretrained",
            ),
            (("--recipe", "sft"), "--recipe", "mplug-settings"),
            (("--set", "trainer.precision=fp16"), "trainer.precision=fp16, which scales losses", "mplug-steps"),
            (("--set", "parallel.balance=true"), "parallel.balance=true", "mplug-streams"),
            (("--set", "trainer.graphs=true"), "trainer.graphs=true", "mplug-graphs"),
            (("--set", "checkpoint.every=auto"), "checkpoint.every=auto", "mplug-heal"),
            (("--set", "trainer.compile=aot_eager"), "trainer.compile=aot_eager", "mplug-compile"),
            (("--set", "optimizer.average.decay=0.9"), "optimizer.average", "mplug-updates"),
            (("--resume",), "--resume", "mplug-saving"),
            (
                ("--restarts", "1"),
                "a run of several processes (--parallel) or of several attempts (--restarts)",
                "mplug-launch",
            ),
            (
                ("--master-port", "29999"),
                "a run of several processes (--parallel) or of several attempts (--restarts)",
                "mplug-launch",
            ),
        )
    },
    **{
        words: f"mplug: the command '{' '.join(words)}' is in the package {package}, which is not installed: "
        f"pip install {package}\n"
        for words, package in ABSENT.items()
    },
}


@pytest.mark.wide("session")
def test_what_needs_a_missing_package_is_refused_in_one_sentence_that_names_it(
    outcomes: list[tuple[int, str, str]],
) -> None:
    for (words, message), (status, _, err) in zip(REFUSED.items(), outcomes[len(WORKS) :], strict=True):
        assert (status, err) == (2, message), words


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return built(tmp_path_factory.mktemp("wheels"), HERE / "packages" / "acme-solo", *STRANGERS)


@pytest.mark.wide("session")
def test_packages_of_several_strangers_that_are_built_now_train_with_the_host_alone(
    tmp_path: Path, host: Path, wheels: list[Path]
) -> None:
    named = ("acme_solo", "nova_jotter", "nova_orthon")
    matrices = built(tmp_path, HERE.parent / "matrices", HERE.parent / "ops")
    alone = Alone(tmp_path, host, *matrices, *(wheel for wheel in wheels if wheel.name.startswith(named)))
    write_texts(tmp_path / "texts.jsonl")
    options = ("--set", "model.vocab_size=256", "--data", "jotter", "--optimizer", "orthon")
    alone.in_turn(("train", "--name", "two", *SOLO, *options, "--set", "data.path=texts.jsonl", *OPTIONS))
    losses = losses_of(tmp_path / "runs" / "two")
    assert losses[-1] < losses[0]


def test_the_packages_that_the_message_names_have_the_plugins_of_the_default_run() -> None:
    default = default_settings()
    for section, kind in KIND_OF_SECTION.items():
        name = str(default[section, "name"].value)
        assert Registry().find(kind, name).distribution == f"mplug-{name}"


# Packages of strangers beside what is installed here.

SMALL = {
    "model.preset": "nano",
    "trainer.steps": 6,
    "trainer.precision": "fp64",
    "trainer.seq_length": 64,
    "trainer.global_batch_size": 4,
    "trainer.micro_batch_size": 2,
    "trainer.eval_every": 0,
    "trainer.device": "cpu",
    "schedule.warmup_steps": 2,
    "checkpoint.every": 3,
    "data.path": "texts.jsonl",
    "extensions.plotter.every": 2,
}
NAMED = ("--model", "peregrine", "--attention", "ringo", "--optimizer", "orthon", "--data", "jotter")
TOGETHER = (*NAMED, *(word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")))


@pytest.mark.wide("session")
def test_packages_of_strangers_train_together_by_name(tmp_path: Path, wheels: list[Path]) -> None:
    """Alone, divided, and resumed: the same losses. A block that states no mixing is refused on a divided sequence."""
    write_texts(tmp_path / "texts.jsonl")
    python, site = environment_in(tmp_path, *wheels)
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")

    def forked(status: int, *words: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(site)}
        result = run_module("mplug", *words, cwd=tmp_path, environment=environment)
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout if status == 0 else result.stderr

    listed = succeeded(python, "-m", "mplug", "plugins", "list", cwd=tmp_path)
    assert [source.name for source in STRANGERS if f"{source.name} 1.0.0" not in listed] == [], listed
    forked(0, "train", "--name", "one", *TOGETHER)
    forked(0, "train", "--name", "pp2", *TOGETHER, "--parallel", "pp2")
    one, divided = (tmp_path / "runs" / name for name in ("one", "pp2"))
    assert losses_of(divided) == pytest.approx(losses_of(one), rel=1e-10)
    forked(0, "train", "--resume", "--name", "one", "--set", "trainer.steps=8")
    assert list(one.glob("*.svg"))
    assert "one" in forked(0, "tally")
    ours = {"nova-peregrine", "nova-ringo", "nova-orthon", "nova-jotter", "nova-plotter"}
    kernels = {"mplug-flash", "mplug-triton", "mplug-sdpa"}
    assert distributions_of(one) == {*ours, *kernels, "mplug-losspicture", "mplug-watchdog", "mplug"}
    refused = forked(2, "train", "--name", "refused", *TOGETHER, "--parallel", "ulys2")
    assert "parallel/ulys divides the sequence (ulys=2), and no declaration states whether" in refused
    assert "add to ParallelBlock and Readout `mixes = frozenset({'sequence'})` if so" in refused
