"""What `mplug train` says at the end about a run whose texts can be sampled."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mplug import Run


def after_training(run: "Run") -> str:
    """The command that samples from the run; empty if no plugin of the run has its tokenizer."""
    assert run.directory is not None
    if not run.hooks.implementers("build_tokenizer"):
        return ""
    return f"sample from it with: mplug generate --name {run.directory.name}"
