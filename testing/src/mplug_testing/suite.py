"""The base of the suites of all kinds.

A suite is a class. The plugin's author subclasses it in a test module, and pytest collects it:

    from mplug_testing import KernelSuite

    class TestRingo(KernelSuite):
        plugin = "ringo"
        settings = {"kernels.ringo.block": 16}

A failing test raises a `Fault`. Its message states the violation in the words of the contract. Tests marked `@smoke`
need neither pytest nor other processes; `mplug plugins check` runs them too.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from unittest import SkipTest

from mplug.config.binding import RunConfig
from mplug.config.entry import Entry
from mplug.errors import UsageError
from mplug.registry.entry_points import BrokenPlugin
from mplug_testing.faults import Fault as Fault
from mplug_testing.faults import naming_failures as naming_failures
from mplug_testing.faults import require as require
from mplug_testing.harness import installed_plugins, tiny_config

F = TypeVar("F", bound=Callable[..., Any])

_IMPORTED, _CONFIGURED = 77, 78
_WITHOUT_TORCH = f"""
import importlib, sys
sys.path[:] = {{path!r}}
importlib.import_module({{module!r}})
if "torch" in sys.modules:
    sys.exit({_IMPORTED})
from mplug.run.prepare import check_data, prepare
from mplug_testing.harness import tiny_config
check_data(prepare(tiny_config({{settings!r}})))
sys.exit({_CONFIGURED} if "torch" in sys.modules else 0)
"""
"""A script for a separate process.

Its exit status tells which step imported torch: importing the plugin, or checking the config and the data.
"""


@contextmanager
def refusals(subject: str, named_by_author: bool) -> Iterator[None]:
    """Classify a refusal (UsageError) in the block; `subject` names the refused layout or device.

    If the suite chose the subject itself, the refusal skips the test. If the suite's author named it, it is meant to be
    tested, and the refusal is a Fault. A plugin that cannot be imported or that violates the contract is always a
    Fault.
    """
    try:
        yield
    except BrokenPlugin as error:
        raise Fault(f"{subject}: {error}") from error
    except UsageError as error:
        if named_by_author:
            raise Fault(f"{subject} is refused; set 'settings' or 'layouts' that are not refused: {error}") from error
        raise SkipTest(f"{subject} is refused: {error}") from None


def smoke(test: F) -> F:
    """Mark a test that needs neither arguments nor processes, so that 'mplug plugins check' runs it."""
    test.smoke = True  # type: ignore[attr-defined]
    return test


class PluginSuite:
    """The requirements for plugins of every kind.

    `plugin` is the name that a user types. `settings` are further settings of the plugin's tiny run, as
    {"section.field": value}. They override the suite's tiny run (`tiny.yaml` beside this file). `kind` decides which
    setting names the plugin.
    """

    kind: ClassVar[str]
    plugin: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    examples: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Field of the Config -> other valid values, if none can be derived from the field's type or those have no effect.

    If a run refuses all of them, the refusal is the field's effect.
    """
    beside: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Field of the Config -> further settings under which it has an effect, as {"section.field": value}."""
    without_effect: ClassVar[Mapping[str, str]] = {}
    """Field of the Config -> the reason why the suite cannot see an effect of it."""

    uses_torch: ClassVar[bool] = True
    """Whether the tests compute with torch in this process."""
    checks_fields: ClassVar[bool] = True
    """Whether this suite tests the fields of the Config; False in a further suite of the same plugin."""

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """The settings that name the plugin in a run."""
        raise NotImplementedError(f"{cls.__name__} must define `naming`: the settings that name the plugin in a run")

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """The config section that the plugin's `Config` binds."""
        raise NotImplementedError(f"{cls.__name__} must define `section`: the config section of its plugins")

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        """The settings of the plugin's tiny run with `changes`; in a change's name, '__' stands for '.'."""
        named = {name.replace("__", "."): value for name, value in changes.items()}
        return {**cls.naming(), **cls.settings, **named}

    @classmethod
    def entry(cls) -> Entry:
        """The registry entry of the installed plugin."""
        return installed_plugins().find(cls.kind, cls.plugin)

    @classmethod
    def fields(cls) -> dict[str, Any]:
        """The fields of the plugin's `Config`."""
        fields: dict[str, Any] = installed_plugins().load(cls.entry()).Config.model_fields
        return fields

    @classmethod
    def config(cls, **changes: Any) -> RunConfig:
        """The config of the plugin's tiny run."""
        return tiny_config(cls.tiny(**changes))

    def setup_method(self) -> None:
        """Before each test: one thread. Tensors of a tiny run are small, and more threads would wait for each other."""
        if self.uses_torch:
            import torch

            self._threads = torch.get_num_threads()
            torch.set_num_threads(1)

    def teardown_method(self) -> None:
        """After each test: the number of threads as before."""
        if self.uses_torch:
            import torch

            torch.set_num_threads(self._threads)

    # Fields of its Config.

    @classmethod
    def with_fields(cls, fields: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the tiny run with other values of fields, and with the settings `beside` them."""
        own = {".".join((*cls.section(), field)): value for field, value in fields.items()}
        return {**cls.tiny(), **beside, **own}

    @classmethod
    def accept(cls, settings: Mapping[str, Any]) -> None:
        """UsageError if a Config refuses the settings. What hooks refuse later counts as an effect of a field."""
        tiny_config(settings)

    @classmethod
    def config_of(cls, settings: Mapping[str, Any]) -> Any:
        """The plugin's own Config object in a run with these settings."""
        return next(one.config for one in tiny_config(settings).chosen if one.entry == cls.entry())

    @classmethod
    def values_for(cls, field: str) -> Sequence[Any] | None:
        """Other values of a field; None if they are derived from its type."""
        return cls.examples.get(field)

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """What the suite sees of a run with these settings: (what it is, a plain value), the cheapest first.

        Equal runs have equal evidence.
        """
        raise NotImplementedError(f"{cls.__name__} must define `evidence`: what it sees of a run")

    trains_ahead: ClassVar[bool] = False
    """Whether `foresee` does something."""

    @classmethod
    def foresee(cls, runs: Sequence[Mapping[str, Any]]) -> None:
        """Called before `evidence`, with the settings of runs of which it is probably asked."""

    def test_every_field_of_its_config_has_an_effect(self) -> None:
        """Another value changes what the suite sees; `without_effect` lists the other fields with their reasons."""
        from mplug_testing.fields import require_effects

        if not self.checks_fields:
            raise SkipTest("the suite sets checks_fields = False: another suite of the plugin tests its fields")
        if type(self).evidence.__func__ is PluginSuite.evidence.__func__:  # type: ignore[attr-defined]
            raise SkipTest(f"{type(self).__name__} defines no `evidence`, so it sees no effect of a field")
        require_effects(self)

    @smoke
    def test_it_is_installed_and_says_which_mplug_it_speaks(self) -> None:
        """It has an entry point of its kind, and its distribution requires a version of mplug."""
        try:
            entry = self.entry()
        except UsageError as error:
            raise Fault(str(error)) from None
        require(
            entry.requires,
            f"{entry.distribution} does not state the mplug version that it supports; add 'mplug>=0.1,<0.2' to its "
            f"dependencies",
        )
        for misplaced in installed_plugins().misplaced():
            require(misplaced.distribution != entry.distribution, str(misplaced))

    @smoke
    def test_it_keeps_the_contract(self) -> None:
        """It can be imported; its hooks exist and have valid arguments.

        Its Config forbids extra fields and describes all.
        """
        try:
            installed_plugins().load(self.entry())
        except BrokenPlugin as error:
            raise Fault(str(error)) from None

    @smoke
    def test_neither_importing_nor_configuring_it_imports_torch(self) -> None:
        """Help, completion and validation must stay fast."""
        script = _WITHOUT_TORCH.format(
            path=sys.path, module=self.entry().target.partition(":")[0], settings=dict(self.tiny())
        )
        finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        action = {_IMPORTED: "importing", _CONFIGURED: "checking the config or the data of"}.get(
            finished.returncode, ""
        )
        require(not action, f"{action} '{self.plugin}' imports torch; import it inside hooks")
        require(finished.returncode == 0, f"importing or configuring '{self.plugin}' fails:\n{finished.stderr}")

    @smoke
    def test_its_config_survives_being_saved_and_read_again(self) -> None:
        """A config that is read from the saved `config.yaml` equals the config of the run."""
        config = self.config()
        kept = config.resolved()
        again = tiny_config(kept)
        require(again.resolved() == kept, f"the config changes when it is saved and read again: {again.resolved()}")
        for chosen in config.chosen:
            if chosen.entry == self.entry():
                twin = next(other for other in again.chosen if other.entry == chosen.entry)
                changed = f"{chosen.config!r} -> {twin.config!r}"
                require(twin.config == chosen.config, f"its config changes when it is saved and read again: {changed}")

    @smoke
    def test_an_unknown_field_is_an_error_that_names_it(self) -> None:
        """A misspelt field must never be ignored."""
        field = ".".join((*self.section(), "no_such_field"))
        try:
            tiny_config({**self.tiny(), field: 1})
        except UsageError as error:
            require(field in str(error), f"the error of an unknown field does not name '{field}': {error}")
        else:
            raise Fault(f"'{field}' is not a field of its Config, and its Config accepts it; forbid extra fields")


def unset_fields(suite: type[PluginSuite]) -> list[str]:
    """The fields of the plugin's Config without a default.

    The plugin cannot run unless its author's settings give them.
    """
    return [name for name, field in suite.fields().items() if field.is_required()]


def smoke_faults(suite: type[PluginSuite]) -> list[str]:
    """The messages of the failing smoke tests of a suite. The plugin's author runs the other tests."""
    found = []
    for name, test in _tests(suite):
        if getattr(test, "smoke", False):
            try:
                getattr(suite(), name)()
            except (Fault, UsageError) as fault:
                found.append(str(fault))
            except SkipTest:  # the test does not apply to this plugin
                continue
            except Exception as error:
                found.append(f"{name}: it raises {type(error).__name__}: {error}")
    return found


def _tests(suite: type[PluginSuite]) -> list[tuple[str, Any]]:
    return [(name, getattr(suite, name)) for name in dir(suite) if name.startswith("test_")]
