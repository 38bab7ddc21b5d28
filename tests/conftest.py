"""What the tests share: the command line in a process of its own, and a run small enough for a second."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command_line import Cli, surroundings
from machines import Machines, unavailable
from safetensors.torch import load_file
from torch import Tensor
from warm import STRICT, run_module

from mplug_saving.folder import read_manifest, verify

collect_ignore = ["third_party"]  # its packages are not installed; their suites run where they are planted

TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.vocab_size=256"),
    *("trainer.seq_length=32", "trainer.micro_batch_size=2", "trainer.global_batch_size=4", "trainer.steps=4"),
    *("trainer.device=cpu", "trainer.eval_every=0", "trainer.log_every=1"),
)
"""A whole run in a second, once torch is imported."""


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    return [word for setting in TINY for word in ("--set", setting)]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{a} times {b} is {a * b}.\n" for a in range(40) for b in range(26)))
    return path


@pytest.fixture
def two_machines() -> Iterator[Machines]:
    """Two machines (network namespaces); the test is skipped, with the reason, where the kernel permits none."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with Machines(2) as machines:
        yield machines


@pytest.fixture
def new_interpreter_cli(tmp_path: Path) -> Cli:
    """Run `mplug` as `cli` does, in a process that has imported nothing."""

    def run(*arguments: str, path: Path | None = None, cwd: Path = tmp_path, timeout: float = 600):
        command, environment = [sys.executable, "-m", "mplug", *arguments], surroundings(path)
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def install() -> Callable[..., Path]:
    """Install packages into a folder of their own, from their sources and nothing else: `install(target, *sources)`."""

    def run(target: Path, *sources: Path) -> Path:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        options = ["--no-deps", "--no-build-isolation", "--target", str(target)]
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # where uv_build finds uv-build
        subprocess.run([*command, *options, *map(str, sources)], check=True, env={**os.environ, "PATH": path})
        return target

    return run


@pytest.fixture(scope="session")
def logical() -> Callable[[Path], dict[str, Tensor]]:
    """The tensors of a checkpoint whose files match their checksums, and whose boxes cover each element once."""

    def read(path: Path) -> dict[str, Tensor]:
        manifest = read_manifest(path)
        verify(path, manifest, manifest["files"])
        files = {name: load_file(path / name) for name in manifest["files"]}
        found = {}
        for name, saved in manifest["tensors"].items():
            found[name], written = (
                torch.zeros(saved["shape"], dtype=getattr(torch, saved["dtype"])),
                torch.zeros(saved["shape"], dtype=torch.int64),
            )
            for file, start, shape in saved["chunks"]:
                box = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
                found[name][box] = files[file][f"{name}@{','.join(map(str, start))}"]
                written[box] += 1
            assert bool((written == 1).all()), f"{name} is covered once"
        assert {name.split("/")[-1] for name in found} > {"weight"}, "weights and optimizer state"
        return found

    return read


@pytest.fixture(scope="session")
def assert_bitwise(logical: Callable[[Path], dict[str, Tensor]]) -> Callable[[Path, Path], None]:
    """Two checkpoints hold the same tensors to the bit."""

    def check(one: Path, other: Path) -> None:
        found, wanted = logical(one), logical(other)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []

    return check


THIRD_PARTY, PACKAGES = (Path(__file__).parent / name for name in ("third_party", "packages"))


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a package of `third_party/` or `packages/` importable and its plugins nameable, one piece of it changed.

    `plant("nova-ringo")` is the package as it is; `plant("nova-ringo", old, new)` has `old`, which must stand in its
    source exactly once, replaced: a planted fault. More pairs may follow.
    """

    def install(distribution: str, *changes: str) -> None:
        package = distribution.replace("-", "_")
        source = next(folder for folder in (THIRD_PARTY / distribution, PACKAGES / distribution) if folder.is_dir())
        copied = tmp_path / f"planted-{len(list(tmp_path.glob('planted-*')))}"
        shutil.copytree(source / "src", copied)
        for old, new in filter(any, zip(changes[::2], changes[1::2], strict=True)):
            files = [path for path in copied.rglob("*.py") if old in path.read_text()]
            assert sum(path.read_text().count(old) for path in files) == 1, f"{old!r} must stand there exactly once"
            files[0].write_text(files[0].read_text().replace(old, new))
        described = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        information = copied / f"{package}-{described['version']}.dist-info"
        information.mkdir()
        needs = "".join(f"Requires-Dist: {need}\n" for need in described["dependencies"])
        information.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {described['version']}\n"
            f"Summary: {described['description']}\n{needs}"
        )
        groups = described["entry-points"].items()
        information.joinpath("entry_points.txt").write_text(
            "\n".join(f"[{group}]\n" + "".join(f"{n} = {t}\n" for n, t in points.items()) for group, points in groups)
        )
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(copied))

    return install


@pytest.fixture
def own_tests(plant: Callable[..., None], tmp_path: Path) -> Callable[..., str]:
    """Run the tests of a package of `third_party/` where nothing but the package is added; returns what pytest says."""

    def run(distribution: str, *options: str) -> str:
        plant(distribution)
        tests = shutil.copytree(THIRD_PARTY / distribution / "tests", tmp_path / f"{distribution}-tests")
        words = ["-q", *STRICT, "-p", "no:cacheprovider", *options, str(tests)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        finished = run_module("pytest", *words, cwd=tests, environment=environment)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    return run
