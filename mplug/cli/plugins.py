"""mplug plugins."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from mplug.cli.options import OWN
from mplug.cli.tables import table
from mplug.config.entry import Entry
from mplug.errors import listed
from mplug.registry.entry_points import KINDS, Registry


@click.group()
def command() -> None:
    """List, show and check installed plugins, and begin a new one.

    Installing a plugin changes nothing; naming it in a run's config does.
    """


@command.command("list")
@click.option("--kind", type=click.Choice(KINDS), help="Only plugins of this kind.")
def list_(kind: str | None) -> None:
    """List installed plugins by reading metadata only: no plugin is imported."""
    registry = Registry()
    entries = registry.entries(kind)
    if not entries:
        click.echo("no plugin is installed")
        return
    rows = [(e.kind, e.name, e.origin, f"mplug {e.speaks}" if e.speaks else "-", e.summary) for e in entries]
    click.echo(table(("KIND", "NAME", "DISTRIBUTION", "SPEAKS", "WHAT IT IS"), rows))
    for clash in _clashes(entries):
        click.echo(f"\n{clash}")
    for flag in _lost_flags(registry):
        click.echo(f"\n{flag}")
    for misplaced in registry.misplaced():
        click.echo(f"\n{misplaced}")
    for copy in registry.shadowed():
        click.echo(f"\nmetadata of {copy.distribution} {copy.version} in {copy.source} is hidden by another copy of it")


def _clashes(entries: list[Entry]) -> list[str]:
    claims: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        claims.setdefault((entry.kind, entry.name), []).append(entry)
    return [
        f"'{name}' ({kind}) is claimed by {' and '.join(entry.origin for entry in claimed)}; "
        f"choose one as {' or '.join(f'{entry.distribution}/{name}' for entry in claimed)}"
        for (kind, name), claimed in claims.items()
        if len(claimed) > 1
    ]


def _lost_flags(registry: Registry) -> list[str]:
    claims: dict[str, list[Entry]] = {}
    for entry in registry.flags():
        claims.setdefault(entry.name, []).append(entry)
    return [
        f"--{name} of {listed(entry.origin for entry in claimed)} is no option: "
        f"{'several claim it' if len(claimed) > 1 else 'the host has one'}; "
        f"use --set with {listed(sorted({entry.target for entry in claimed}))}"
        for name, claimed in claims.items()
        if name in OWN or len(claimed) > 1
    ]


class AnyPlugin(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """KIND/NAME or NAME of an installed plugin."""

    name = "plugin"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The installed plugins whose labels begin with `incomplete`."""
        return [CompletionItem(e.label, help=e.summary) for e in Registry().entries() if e.label.startswith(incomplete)]


def _named(word: str) -> list[Entry]:
    """The installed plugins that a word names; UsageError if there is none."""
    from mplug.errors import UsageError, suggest

    registry = Registry()
    entries = registry.entries()
    found = [e for e in entries if word in (e.label, e.name, f"{e.distribution}/{e.name}")]
    if not found:
        if lost := [one for one in registry.misplaced() if word in (one.name, f"{one.distribution}/{one.name}")]:
            raise UsageError(f"no plugin '{word}' is installed: {lost[0]}")
        known = [w for e in entries for w in (e.name, e.label)]
        raise UsageError(f"no plugin '{word}' is installed{suggest(word, known)} (see mplug plugins list)")
    return found


@command.command()
@click.argument("plugin", type=AnyPlugin())
def show(plugin: str) -> None:
    """Show one plugin: where it comes from, its hooks, presets and config fields.

    PLUGIN is its name, or KIND/NAME where several kinds use the name. It is imported, in a process of its own.
    """
    from mplug.registry.inspection import inspect_apart

    for entry in _named(plugin):
        click.echo(f"{entry.label}: {entry.summary}")
        click.echo(f"  from     {entry.origin}, in {entry.source}")
        click.echo(f"  class    {entry.target}")
        click.echo(
            f"  speaks   mplug {entry.speaks}"
            if entry.speaks
            else "  speaks   it does not say (no Requires-Dist: mplug)"
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


@command.command()
@click.argument("plugins", nargs=-1, type=AnyPlugin())
def check(plugins: tuple[str, ...]) -> None:
    """Import every installed plugin, each in a process of its own, and run the quick part of its kind's suite.

    With names, only those. Exit status 1 if any is broken.
    """
    from mplug.registry.inspection import check_apart

    registry = Registry()
    entries = [entry for word in plugins for entry in _named(word)] if plugins else registry.entries()
    lost = [] if plugins else registry.misplaced()
    broken = len(lost)
    for misplaced in lost:
        click.echo(f"broken  {misplaced}")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for entry, report in zip(entries, pool.map(check_apart, entries), strict=True):
            broken += bool(report.fault)
            note = f": {report.note}" if report.note else ""
            click.echo(f"{'broken' if report.fault else 'ok':<6}  {entry.label} ({entry.origin}){note}")
            if report.fault:
                click.echo("\n".join(f"          {line}" for line in report.fault.splitlines()))
    click.echo(
        f"{len(entries) + len(lost) - broken} of {len(entries) + len(lost)} plugins pass the quick checks; "
        f"pytest runs their whole suites"
    )
    raise SystemExit(1 if broken else 0)


@command.command()
@click.argument("distribution")
@click.option("--kind", type=click.Choice(KINDS), required=True, help="What the plugin is.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write it; without it, ./DISTRIBUTION.")
def new(distribution: str, kind: str, folder: Path | None) -> None:
    """Write the package of a new plugin, which installs, passes its suite and runs as it is.

    The plugin's name, the word that users type, is what follows the first '-' of DISTRIBUTION.

    \b
    mplug plugins new --kind kernels acme-ringo
    """
    from mplug.registry.scaffold import describe, write

    package = describe(kind, distribution)
    folder = folder or Path(distribution)
    for path in write(package, folder):
        click.echo(f"wrote {path}")
    click.echo(f"\nThe plugin is named '{package.name}'. Next:\n")
    click.echo(f"  pip install -e {folder}\n  pytest {folder}\n  {package.use}")
