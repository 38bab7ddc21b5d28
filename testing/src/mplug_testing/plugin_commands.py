"""`mplug plugins show`, `check`, `test` and `new`: look at installed plugins, test them, and write a new package."""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from mplug.cli.options import UserPath
from mplug.config.entry import Entry
from mplug.errors import UsageError, listed, suggest
from mplug.registry.entry_points import KINDS, Registry
from mplug_testing.inspection import TIMEOUT, check_apart, inspect_apart
from mplug_testing.scaffold import describe, write


class AnyPlugin(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """KIND/NAME or NAME of an installed plugin."""

    name = "plugin"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The installed plugins whose labels begin with `incomplete`."""
        return [CompletionItem(e.label, help=e.summary) for e in Registry().entries() if e.label.startswith(incomplete)]


def _named(word: str) -> list[Entry]:
    """The installed plugins that a word names; UsageError if there is none."""
    registry = Registry()
    entries = registry.entries()
    found = [e for e in entries if word in (e.label, e.name, f"{e.distribution}/{e.name}")]
    if not found:
        misplaced = [p for p in registry.misplaced() if word in (p.name, f"{p.distribution}/{p.name}")]
        if misplaced:
            raise UsageError(f"no plugin '{word}' is installed: {misplaced[0]}")
        candidates = [candidate for e in entries for candidate in (e.name, e.label)]
        raise UsageError(f"no plugin '{word}' is installed{suggest(word, candidates)} (see mplug plugins list)")
    return found


@click.command()
@click.argument("plugin", type=AnyPlugin())
def show(plugin: str) -> None:
    """Show one plugin: its distribution, hooks, presets and config fields.

    PLUGIN is a name, or KIND/NAME if several kinds use the name. The command imports the plugin in a separate process.
    """
    for entry in _named(plugin):
        click.echo(f"{entry.label}: {entry.summary}")
        click.echo(f"  from     {entry.origin}, in {entry.source}")
        click.echo(f"  class    {entry.target}")
        click.echo(
            f"  requires mplug {entry.requires}"
            if entry.requires
            else "  requires no stated version of mplug (no Requires-Dist: mplug)"
        )
        report = inspect_apart(entry)
        if report.fault:
            click.echo(f"  broken   {report.fault}")
        if report.hooks:
            click.echo(f"  hooks    {', '.join(report.hooks)}")
        if report.presets:
            click.echo(f"  presets  {', '.join(report.presets)}")
        for name, kind, default, description in report.fields:
            click.echo(f"  {name}: {kind}{f' = {default}' if default else ', required'}")
            if description:
                click.echo(f"      {description}")


@click.command()
@click.argument("plugins", nargs=-1, type=AnyPlugin())
def check(plugins: tuple[str, ...]) -> None:
    """Import every installed plugin in a separate process, and run the quick part of the suite of its kind.

    PLUGINS limits the check to these plugins. The exit status is 1 if one of them is broken.
    """
    registry = Registry()
    entries = [entry for word in plugins for entry in _named(word)] if plugins else registry.entries()
    misplaced = [] if plugins else registry.misplaced()
    broken = len(misplaced)
    for point in misplaced:
        click.echo(f"broken  {point}")
    workers = min(8, os.cpu_count() or 1)
    if len(entries) > workers:
        click.echo(
            f"checking {len(entries)} plugins, {workers} at a time and each for at most {TIMEOUT} s; "
            f"'mplug plugins check NAME ...' checks only these"
        )
    with ThreadPoolExecutor(workers) as pool:
        for entry, report in zip(entries, pool.map(check_apart, entries), strict=True):
            broken += bool(report.fault)
            note = f": {report.note}" if report.note else ""
            click.echo(f"{'broken' if report.fault else 'ok':<6}  {entry.label} ({entry.origin}){note}")
            if report.fault:
                click.echo("\n".join(f"          {line}" for line in report.fault.splitlines()))
    click.echo(
        f"{len(entries) + len(misplaced) - broken} of {len(entries) + len(misplaced)} plugins pass the quick checks; "
        f"'mplug plugins test NAME' runs a complete suite"
    )
    raise SystemExit(1 if broken else 0)


@click.command()
@click.argument("plugin", type=AnyPlugin())
@click.option("--fast", is_flag=True, help="Of mplug's suite, run only the tests of 'mplug plugins check': seconds.")
@click.option("--select", metavar="WORDS", help="Run only tests whose names match, as -k of pytest selects them.")
def test(plugin: str, fast: bool, select: str | None) -> None:
    """Run the tests of one plugin with the Python of this environment; print the reason of each skipped test.

    The tests are those in the plugin's source folder (pip install -e FOLDER). If it is installed without its source,
    they are the suite of its kind. The exit status is that of pytest: 0 if all tests pass.

    \b
    mplug plugins test ringo --fast
    """
    from mplug_testing.plugin_tests import run_tests

    entries = _named(plugin)
    if len(entries) > 1:
        choices = listed(f"{entry.kind}/{entry.name} ({entry.origin})" for entry in entries)
        raise UsageError(f"'{plugin}' names {choices}; use one of them with its kind")
    options = ["-rs", *(["-p", "mplug_testing.fast_tests"] if fast else []), *(["-k", select] if select else [])]
    raise SystemExit(run_tests(entries[0], options))


@click.command()
@click.argument("distribution")
@click.option("--kind", type=click.Choice(KINDS), required=True, help="Kind of the plugin.")
@click.option("--folder", type=UserPath(), help="Folder to create; default: ./DISTRIBUTION.")
def new(distribution: str, kind: str, folder: Path | None) -> None:
    """Write the package of a new plugin: a working example that can be installed and passes its suite.

    The part of DISTRIBUTION after the first '-' becomes the plugin's name, which users type.

    \b
    mplug plugins new --kind kernels acme-ringo
    """
    package = describe(kind, distribution)
    folder = folder or Path(distribution)
    for path in write(package, folder):
        click.echo(f"wrote {path}")
    python = _python()
    pip, mplug = (f"{python} -m pip", f"{python} -m mplug") if python else ("pip", "mplug")
    use = package.use.replace("mplug ", f"{mplug} ", 1)
    click.echo(f"\nThe plugin is named '{package.name}'. Next:\n")
    click.echo(f"  {pip} install -e {folder}\n  {mplug} plugins test {kind}/{package.name}\n  {use}")


def _python() -> str:
    """The path of this environment's Python; empty if the shell finds the commands of the environment."""
    found, own = shutil.which("mplug"), Path(sys.executable)
    if found is not None and Path(found).parent.resolve() == own.parent.resolve():
        return ""
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)
