"""The suite for extensions: observers, which report on a run and never change it.

    from mplug_testing import ExtensionSuite

    class TestPlotter(ExtensionSuite):
        plugin = "plotter"
        settings = {"extensions.plotter.every": 2}
        files = ("loss.svg",)

Its tests train a tiny model for a few steps in a temporary folder, through the training loop, and watch every hook.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.errors import counted
from mplug.registry.hooks import implemented
from mplug_testing.harness import installed_plugins, tiny_config
from mplug_testing.leftovers import nothing_left
from mplug_testing.suite import Fault, PluginSuite, require

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug_testing.runs import Witness
    from mplug_testing.watch import Watch

_FINISHED: "dict[tuple[type[ExtensionSuite], Any], tuple[Witness, Watch]]" = {}
STEPS = 4
"""Number of steps of the runs in these tests."""


class ExtensionSuite(PluginSuite):
    """The requirements for an observer: a run with it is bitwise equal to the run without it."""

    kind = "extensions"
    files: ClassVar[tuple[str, ...]] = ()
    """Globs of the files that it writes in the run's directory. An absolute glob allows files elsewhere."""
    keeps_history: ClassVar[bool] = True
    """Its files cover the whole run, also after a resume. If False, they cover only the run since its last start."""

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """Its own section below `extensions`."""
        return {f"extensions.{cls.plugin}": {}}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """`extensions.NAME`."""
        return ("extensions", cls.plugin)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Runs that finish, runs that fail during the build, and runs that fail at their third step."""
        if "fails_at" in metafunc.fixturenames:
            metafunc.parametrize("fails_at", (None, 0, 3), ids=("finished", "never started", "failed"))

    # Runs.

    @classmethod
    def without(cls) -> dict[str, Any]:
        """The settings of the same run without the plugin."""
        own = f"extensions.{cls.plugin}"
        return {name: value for name, value in cls.tiny().items() if name != own and not name.startswith(f"{own}.")}

    @classmethod
    def finished(cls) -> "tuple[Witness, Watch]":
        """A whole run with the plugin, and the record of its hooks; tests that look for different faults share it."""
        key = cls, cls.entry().source
        if key not in _FINISHED:
            _FINISHED.clear()
            with TemporaryDirectory(prefix="mplug-run-") as folder:
                _FINISHED[key] = cls.watched(Path(folder) / "finished")
        return _FINISHED[key]

    @classmethod
    def watched(
        cls, directory: Path, steps: int = STEPS, resume_from: Path | None = None, fails_at: int | None = None
    ) -> "tuple[Witness, Watch]":
        """A run with the plugin, and the record of its hooks; a run that is to fail saves no checkpoint."""
        from mplug_testing.runs import trained
        from mplug_testing.watch import Watch

        watch = Watch(cls.entry().label)
        config = watch.over(short(cls.tiny(), steps, 2 if fails_at is None else 0))
        try:
            return trained(config, directory, resume_from=resume_from, fails_at=fails_at), watch
        except Exception as error:
            refuse(*watch.changed, *watch.raised, f"a run with it raises {type(error).__name__}: {error}")
            raise

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The files that there are after each hook, without numbers in their names; what both of two equal runs say.

        The runs write their checkpoints at once: the moment at which an asynchronous one is done is chance.
        """
        from mplug_testing.runs import trained
        from mplug_testing.watch import Watch

        seen: list[list[tuple[str, int | None, list[str]]]] = []
        with TemporaryDirectory(prefix="mplug-run-") as folder:
            roots = [Path(folder) / name for name in ("first", "second")]
            for root in roots:
                (root / "elsewhere").mkdir(parents=True)
                seen.append([])
                watch = Watch(cls.entry().label, after=partial(cls._look, root, seen[-1]))
                with chdir(root / "elsewhere"):
                    trained(watch.over(short({**settings, "checkpoint.asynchronous": False})), root / "run")
            yield "files", seen[0]
            pairs = zip(*([root / path for path in cls._written(root)] for root in roots), strict=False)
            yield "contents", [sorted(set(cls.contents(one)) & set(cls.contents(other))) for one, other in pairs]

    @classmethod
    def _look(cls, root: Path, seen: list[Any], hook: str, step: int | None) -> None:
        seen.append((hook, step, sorted({re.sub(r"\d+", "#", path.as_posix()) for path in cls._written(root)})))

    @classmethod
    def _written(cls, root: Path) -> list[Path]:
        """The files below a root that `files` names, or that lie outside of the run's folder; relative to the root."""
        return sorted(
            path
            for path in files_of(root)
            if path.parts[0] == "elsewhere"
            or any(fnmatch(path.relative_to("run").as_posix(), one) for one in cls.files)
        )

    @classmethod
    def contents(cls, path: Path) -> Sequence[str]:
        """What a file says, in words that equal runs share; override this for files that are no text."""
        return words_without_chance(path)

    # Its hooks.

    def test_it_implements_a_hook(self) -> None:
        """Otherwise naming the plugin has no effect."""
        hooks = implemented(installed_plugins().load(self.entry()))
        require(set(hooks) - {"configure"}, f"'{self.plugin}' implements no hook of a run, so naming it does nothing")

    def test_its_hooks_are_called_in_the_order_of_a_run(self) -> None:
        """The start, every step, the end; a failing run calls `run_failed` once."""
        hooks = implemented(installed_plugins().load(self.entry()))
        witness, watch = self.finished()
        with TemporaryDirectory(prefix="mplug-run-") as folder:
            _, failed = self.watched(Path(folder) / "failed", fails_at=3)
        expected = {"run_started": 1, "step_started": STEPS, "step_finished": STEPS, "run_finished": 1, "run_failed": 0}
        refuse(miscounted(watch.calls, hooks, {**expected, "checkpoint_saved": len(witness.saved)}, "a run"))
        refuse(misordered(watch.calls, hooks))
        refuse(miscounted(failed.calls, hooks, {"run_started": 1, "run_finished": 0, "run_failed": 1}, "a failing run"))

    def test_no_hook_of_it_raises(self, fails_at: int | None) -> None:
        """The run would continue without the observer, which would then report nothing."""
        if fails_at is None:
            refuse(*self.finished()[1].raised)
            return
        with TemporaryDirectory(prefix="mplug-run-") as folder:
            _, watch = self.watched(Path(folder), fails_at=fails_at)
        refuse(*watch.raised)

    def test_it_leaves_the_record_as_it_is(self) -> None:
        """All observers get the same record."""
        refuse(*self.finished()[1].changed)

    def test_it_draws_no_random_numbers(self) -> None:
        """It must not use the global generators. A generator of its own is allowed."""
        refuse(*self.finished()[1].drawn)

    # The run.

    def test_a_run_with_it_is_the_run_without_it(self) -> None:
        """Losses, gradient norms and weights are bitwise equal."""
        from mplug_testing.runs import trained

        with TemporaryDirectory(prefix="mplug-run-") as folder:
            plain = trained(short(self.without()), Path(folder) / "without")
        refuse(difference_of(self.finished()[0], plain))

    def test_it_survives_a_resume(self) -> None:
        """In the same directory, from the middle of the run: its files exist already, and some steps repeat."""
        from mplug_testing.runs import trained

        with TemporaryDirectory(prefix="mplug-run-") as folder:
            plain = trained(short(self.without(), STEPS + 2), Path(folder) / "without")
            first, _ = self.watched(Path(folder) / "with")
            resumed, watch = self.watched(Path(folder) / "with", STEPS + 2, resume_from=first.saved[0])
        refuse(*(f"{sentence} in a run that resumes" for sentence in watch.raised))
        plain.figures = {step: figures for step, figures in plain.figures.items() if step > 2}
        refuse(difference_of(resumed, plain))

    def test_its_files_tell_of_the_whole_run_after_a_resume(self) -> None:
        """Words that two uninterrupted runs both write must also be in the files of a resumed run."""
        if not self.keeps_history:
            raise SkipTest("the suite sets keeps_history = False")
        with TemporaryDirectory(prefix="mplug-run-") as folder:
            one, other, resumed = (Path(folder) / name / "run" for name in ("one", "other", "resumed"))
            for directory in (one, other):
                self.watched(directory, STEPS + 2)
            first, _ = self.watched(resumed)
            self.watched(resumed, STEPS + 2, resume_from=first.saved[0])
            written = [path for path in sorted(files_of(one)) if self._names_file(path)]
            if not written:
                raise SkipTest("it writes no file in the run folder")
            refuse(*(lost_word(path, (one, other), resumed) for path in written))

    def test_it_leaves_nothing_open_or_running(self, fails_at: int | None) -> None:
        """No thread, process or open file outlives the run, whether it finishes or fails."""
        with TemporaryDirectory(prefix="mplug-run-") as folder:
            directories = map(Path(folder).joinpath, ("first", "second"))
            by = "a run with it" if fails_at is None else "a run with it that fails"
            nothing_left(by, lambda: self.watched(next(directories), fails_at=fails_at))

    def test_it_writes_the_files_that_it_says_and_no_other(self) -> None:
        """It writes the files in `files`, and no others."""
        with TemporaryDirectory(prefix="mplug-run-") as folder:
            (report,) = self._on_ranks(1, Path(folder))
            written = files_of(Path(folder) / "with") - files_of(Path(folder) / "without")
        outside = [path for path in report.elsewhere if not self._names_file(path)]
        refuse(*(f"it writes '{path}', outside of the run folder" for path in outside))
        strays = [path for path in sorted(written) if not self._names_file(path)]
        refuse(*(f"it writes '{path}' in the run folder, and `files` does not name it" for path in strays))
        for pattern in self.files:
            found = Path(pattern).is_absolute() or any(fnmatch(path.as_posix(), pattern) for path in written)
            require(found, f"`files` names '{pattern}', and a run of {STEPS} steps writes no such file")

    def _names_file(self, path: Path) -> bool:
        return any(fnmatch(path.as_posix(), pattern) for pattern in self.files)

    def test_it_works_on_every_rank(self) -> None:
        """On two ranks, no hook raises, and no file is written by both ranks."""
        with TemporaryDirectory(prefix="mplug-run-") as folder:
            reports = self._on_ranks(2, Path(folder))
        first, second = ({*report.inside, *report.elsewhere} for report in reports)
        both = sorted(first & second)
        refuse(*(f"ranks 0 and 1 both write '{path}'; write it on rank 0 only, or one file per rank" for path in both))
        refuse(*(f"{sentence} on rank {rank}" for rank, report in enumerate(reports) for sentence in report.raised))

    def _on_ranks(self, world_size: int, folder: Path) -> "list[RankReport]":
        from mplug_testing.workers import WorkerFailed, run_workers

        layout = {"parallel.layout": f"{self.config().parallel.data}{world_size}"} if world_size > 1 else {}
        settings, plain = {**self.tiny(), **layout}, {**self.without(), **layout}
        try:
            return run_workers(world_size, be_rank, self.entry().label, settings, plain, str(folder))
        except (WorkerFailed, TimeoutError) as error:
            raise Fault(f"a run with it on {counted(world_size, 'rank')} fails: {error}") from error


# On a rank.


@dataclass(frozen=True)
class RankReport:
    """A rank's report of a run: the hooks that raised, and the files that hooks wrote."""

    raised: list[str]
    inside: list[Path]
    elsewhere: list[Path]


def be_rank(label: str, settings: Mapping[str, Any], plain: Mapping[str, Any], folder: str) -> RankReport:
    """Act as one rank of a run without the plugin, then of a run with it, in a process whose folder is empty."""
    from mplug_testing.runs import trained
    from mplug_testing.watch import Watch

    elsewhere, directory = Path(folder) / "elsewhere", Path(folder) / "with"
    elsewhere.mkdir(exist_ok=True)
    os.chdir(elsewhere)
    watch = Watch(label)
    trained(short(plain), Path(folder) / "without")
    watch.audit()
    trained(watch.over(short(settings)), directory)
    inside = sorted(path.relative_to(directory) for path in watch.written if path.is_relative_to(directory))
    outside = sorted(path for path in watch.written if not path.is_relative_to(directory))
    return RankReport(watch.raised, inside, outside)


# Functions that return a fault as a sentence, or the empty string if there is none.


def short(settings: Mapping[str, Any], steps: int = STEPS, saves_every: int = 2) -> "RunConfig":
    """The config of a run of a few steps that evaluates after the last step and keeps all its checkpoints."""
    own = {"trainer.steps": steps, "checkpoint.every": saves_every, "checkpoint.keep": 9}
    return tiny_config({**settings, **own})


def refuse(*faults: str) -> None:
    """Raise Fault for the first sentence that is not empty."""
    for fault in filter(None, faults):
        raise Fault(fault)


Calls = Sequence[tuple[str, int | None]]


def miscounted(calls: Calls, hooks: Iterable[str], expected: Mapping[str, int], run: str) -> str:
    """A hook whose number of calls differs from that of a run."""
    for hook, count in expected.items():
        found = sum(called == hook for called, _ in calls)
        if hook in hooks and found != count:
            return (
                f"'{hook}' is called {counted(found, 'time')} in {run} of {STEPS} steps, not {count}; {NAMES_ANOTHER}"
            )
    return ""


def misordered(calls: Calls, hooks: Iterable[str]) -> str:
    """A hook that was called in another order than in a run."""
    order = [hook for hook, _ in calls if hook in OBSERVING]
    for hook, place in (("run_started", 0), ("run_finished", -1)):
        if hook in hooks and order[place] != hook:
            return f"'{hook}' is not the {'last' if place else 'first'} hook of a run; {NAMES_ANOTHER}"
    steps = [step for hook, step in calls if step is not None]
    if steps != sorted(steps):
        return f"the hooks receive the steps in the order {steps}"
    return ""


LONG_NUMBER = 6
"""Number of digits from which two runs do not share a measured number, such as a duration, by chance."""
OBSERVING = ("run_started", "step_started", "step_finished", "checkpoint_saved", "run_failed", "run_finished")
NAMES_ANOTHER = "does its @hookimpl name another hook?"


def difference_of(found: "Witness", plain: "Witness") -> str:
    """The first difference between a run with the plugin and the run without it."""
    for step, figures in plain.figures.items():
        if step not in found.figures:
            return f"with it, the run ends after step {max(found.figures, default=0)} of {max(plain.figures)}"
        for name, one, other in zip(("loss", "gradient norm"), found.figures[step], figures, strict=True):
            if one != other:
                return f"with it, the {name} of step {step} is {one!r}, and without it {other!r}"
    if len(found.figures) > len(plain.figures):
        return f"with it, the run has {len(found.figures)} steps, and without it {len(plain.figures)}"
    for name, weight in plain.weights.items():
        if not bool((found.weights[name] == weight).all()):
            return f"with it, the run ends with other values of '{name}'"
    return ""


def lost_word(path: Path, wholes: tuple[Path, Path], resumed: Path) -> str:
    """A word that a file of two uninterrupted runs has in both, and that the file of the resumed run lacks."""
    one, other = (words_of(whole / path) for whole in wholes)
    missing = (one & other) - words_of(resumed / path)
    return (
        f"after a resume '{path}' lacks {min(missing)!r}, which uninterrupted runs write; continue the existing file "
        f"after run.step, or set keeps_history = False"
        if missing
        else ""
    )


def words_of(path: Path) -> set[str]:
    """The words and numbers of a text file; empty if the file does not exist or is no text."""
    try:
        return set(re.findall(r"[\w.+-]+", path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return set()


def words_without_chance(path: Path) -> list[str]:
    """The words of a text file, without numbers that two equal runs may share by chance: those of few digits."""
    found = words_of(path)
    return sorted(word for word in found if not re.search(r"\d", word) or len(re.findall(r"\d", word)) >= LONG_NUMBER)


def files_of(directory: Path) -> set[Path]:
    """The files of a run, by their paths relative to its directory."""
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}
