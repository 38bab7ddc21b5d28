"""mplug store."""

import click

from mplug import UsageError
from mplug.commands import RunName, human_bytes, table
from mplug_store.address import Store
from mplug_store.checkpoints import IDENTITY, MANIFEST
from mplug_store.download import download_run, newest_first
from mplug_store.joined import complete
from mplug_store.upload import copy_alone


@click.group()
def command() -> None:
    """Copy runs to object stores and back.

    ADDRESS is the folder of a run in a store: s3://BUCKET/runs/NAME, gs://..., or another protocol of fsspec. Its
    library reads the credentials, from its usual variables and files.

    \b
    mplug train --name first --set extensions.store.address=s3://BUCKET/runs
    mplug store list s3://BUCKET/runs/first
    mplug store pull s3://BUCKET/runs/first
    mplug train --resume --name first
    """


@command.command("list")
@click.argument("address")
def list_(address: str) -> None:
    """List the complete checkpoints of a run in a store, the oldest first."""
    store = Store(address)
    rows = [(one.step, human_bytes(sum(one.sizes.values())), f"{store.address}/{one.folder}")
            for one in reversed(newest_first(store))]  # fmt: skip
    if not rows:
        raise UsageError(f"'{address}' has no complete checkpoint; use the address of a run")
    click.echo(table(("STEP", "SIZE", "ADDRESS"), rows))


@command.command()
@click.argument("address")
@click.option("--name", type=RunName(), help="Name of the run on this machine; default: its name in the store.")
@click.option("--step", type=click.IntRange(0), help="Step of the checkpoint; default: the newest valid one.")
def pull(address: str, name: str | None, step: int | None) -> None:
    """Copy a run with its newest valid checkpoint from a store into the folder 'runs'.

    The command compares the checksums of all files. 'mplug train --resume' then continues the run, under any layout
    and with any number of processes. If the machine has a folder of the run without a common one (own_disks), the
    command completes it.
    """
    from mplug.commands import RUNS  # imports pydantic

    store = Store(address)
    target, skipped = RUNS / (name or store.address.rpartition("/")[2]), list[str]()
    own = step is None and (target / IDENTITY).exists() and (target / IDENTITY).read_bytes() == store.read(IDENTITY)
    if target.exists() and not own:
        raise UsageError(f"'{target}' exists already; use another name with --name, or remove it")
    try:
        found = complete(store, target) if own else None
        if found is None:
            one, skipped = download_run(store, target, step)
        else:
            one = found
    except OSError as error:
        raise UsageError(f"cannot write '{target}': {error.strerror or error}; free or change the disk") from error
    for reason in skipped:
        click.echo(f"mplug: skipped: {reason}", err=True)
    click.echo(f"run '{target}' has step {one.step}; continue with: mplug train --resume --name {target.name}")


@command.command()
@click.argument("address")
@click.option("--name", type=RunName(), help="Name of the run; default: the newest run.")
def push(address: str, name: str | None) -> None:
    """Copy the newest checkpoint of a run to a store. Nothing in the store is removed."""
    from mplug.commands import find_directory  # imports pydantic, as does the next line
    from mplug_store.plugin import refuse_other_run

    directory, store = find_directory(name), Store(address)
    paths = [path for path in sorted((directory / "checkpoints").glob("step_*")) if (path / MANIFEST).is_file()]
    if not paths:
        raise UsageError(f"there is no complete checkpoint in '{directory}'; use another run with --name")
    refuse_other_run(store, directory, "ADDRESS")
    newest = max(paths, key=lambda path: (len(path.name), path.name))
    manifest = copy_alone(store, newest, directory)
    click.echo(f"'{store.address}/{manifest.folder}' has step {manifest.step} of '{directory}'")
