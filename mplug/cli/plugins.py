"""mplug plugins."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from mplug.cli.options import HOST_NAMES
from mplug.cli.tables import table
from mplug.config.entry import Entry
from mplug.errors import listed
from mplug.registry.entry_points import KINDS, Registry


@click.group()
def command() -> None:
    """List, show and check installed plugins, and create a new one.

    Installing a plugin changes no run. A run uses only the plugins that its config names.
    """


@command.command("list")
@click.option("--kind", type=click.Choice((*KINDS, *Registry().lists())), help="List only plugins of this kind.")
def list_(kind: str | None) -> None:
    """List installed plugins. The command reads metadata only, and imports no plugin.

    The kinds after 'commands' are open lists, whose entries are functions and no plugins: '--kind schedules' lists the
    pipeline schedules that are installed.
    """
    registry = Registry()
    entries = registry.entries(kind)
    if not entries:
        click.echo("no plugin is installed")
        return
    rows = [(e.kind, e.name, e.origin, f"mplug {e.requires}" if e.requires else "-", e.summary) for e in entries]
    click.echo(table(("KIND", "NAME", "DISTRIBUTION", "REQUIRES", "SUMMARY"), rows))
    for clash in _clashes(entries):
        click.echo(f"\n{clash}")
    for flag in _ignored_flags(registry):
        click.echo(f"\n{flag}")
    for misplaced in registry.misplaced():
        click.echo(f"\n{misplaced}")
    for copy in registry.shadowed():
        click.echo(f"\nanother copy of {copy.distribution} hides {copy.distribution} {copy.version} in {copy.source}")


def _clashes(entries: list[Entry]) -> list[str]:
    claims: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        claims.setdefault((entry.kind, entry.name), []).append(entry)
    return [
        f"'{name}' ({kind}) is claimed by {' and '.join(entry.origin for entry in claimed)}; "
        f"use {' or '.join(f'{entry.distribution}/{name}' for entry in claimed)}"
        for (kind, name), claimed in claims.items()
        if len(claimed) > 1
    ]


def _ignored_flags(registry: Registry) -> list[str]:
    claims: dict[str, list[Entry]] = {}
    for entry in registry.flags():
        claims.setdefault(entry.name, []).append(entry)
    return [
        f"the flag --{name} of {listed(entry.origin for entry in claimed)} is ignored, because "
        f"{'several distributions claim it' if len(claimed) > 1 else 'the host has an option of this name'}; "
        f"use {listed(f'--set {field}=VALUE' for field in sorted({entry.target for entry in claimed}))}"
        for name, claimed in claims.items()
        if name in HOST_NAMES or len(claimed) > 1
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
        misplaced = [p for p in registry.misplaced() if word in (p.name, f"{p.distribution}/{p.name}")]
        if misplaced:
            raise UsageError(f"no plugin '{word}' is installed: {misplaced[0]}")
        candidates = [candidate for e in entries for candidate in (e.name, e.label)]
        raise UsageError(f"no plugin '{word}' is installed{suggest(word, candidates)} (see mplug plugins list)")
    return found


@command.command()
@click.argument("plugin", type=AnyPlugin())
def show(plugin: str) -> None:
    """Show one plugin: its distribution, hooks, presets and config fields.

    PLUGIN is a name, or KIND/NAME if several kinds use the name. The command imports the plugin in a separate process.
    """
    from mplug.registry.inspection import inspect_apart

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


@command.command()
@click.argument("plugins", nargs=-1, type=AnyPlugin())
def check(plugins: tuple[str, ...]) -> None:
    """Import every installed plugin in a separate process, and run the quick part of the suite of its kind.

    PLUGINS limits the check to these plugins. The exit status is 1 if one of them is broken. The suites are in the
    package mplug-testing.
    """
    from mplug.registry.inspection import check_apart, refuse_missing_checks

    refuse_missing_checks()
    registry = Registry()
    entries = [entry for word in plugins for entry in _named(word)] if plugins else registry.entries()
    misplaced = [] if plugins else registry.misplaced()
    broken = len(misplaced)
    for point in misplaced:
        click.echo(f"broken  {point}")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for entry, report in zip(entries, pool.map(check_apart, entries), strict=True):
            broken += bool(report.fault)
            note = f": {report.note}" if report.note else ""
            click.echo(f"{'broken' if report.fault else 'ok':<6}  {entry.label} ({entry.origin}){note}")
            if report.fault:
                click.echo("\n".join(f"          {line}" for line in report.fault.splitlines()))
    click.echo(
        f"{len(entries) + len(misplaced) - broken} of {len(entries) + len(misplaced)} plugins pass the quick checks; "
        f"pytest runs their complete suites"
    )
    raise SystemExit(1 if broken else 0)


@command.command()
@click.argument("distribution")
@click.option("--kind", type=click.Choice(KINDS), required=True, help="Kind of the plugin.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder to create; default: ./DISTRIBUTION.")
def new(distribution: str, kind: str, folder: Path | None) -> None:
    """Write the package of a new plugin: a working example that can be installed and passes its suite.

    The part of DISTRIBUTION after the first '-' becomes the plugin's name, which users type.

    \b
    mplug plugins new --kind kernels acme-ringo
    """
    from mplug.registry.inspection import has_checks
    from mplug.registry.scaffold import describe, write

    package = describe(kind, distribution)
    folder = folder or Path(distribution)
    for path in write(package, folder):
        click.echo(f"wrote {path}")
    click.echo(f"\nThe plugin is named '{package.name}'. Next:\n")
    tests = "" if has_checks() else " pytest mplug-testing"
    click.echo(f"  pip install -e {folder}{tests}\n  pytest {folder}\n  {package.use}")
