"""mplug plugins."""

import click

from mplug.cli.groups import OpenGroup
from mplug.cli.options import HOST_NAMES
from mplug.cli.tables import table
from mplug.config.entry import Entry
from mplug.errors import listed
from mplug.registry.entry_points import KINDS, Registry


class PluginCommands(OpenGroup):
    """The commands of `mplug plugins`."""

    path = ("plugins",)


@click.group(cls=PluginCommands)
def command() -> None:
    """List, show and check installed plugins, and create a new one.

    Installing a plugin changes no run. A run uses only the plugins that its config names.
    """


@command.command("list")
@click.option(
    "--kind", type=click.Choice((*KINDS, *Registry.of_process().lists())), help="List only plugins of this kind."
)
def list_(kind: str | None) -> None:
    """List installed plugins. The command reads metadata only, and imports no plugin.

    The kinds after 'commands' are open lists, whose entries are functions and no plugins: '--kind schedules' lists the
    pipeline schedules that are installed.
    """
    registry = Registry.of_process()
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
