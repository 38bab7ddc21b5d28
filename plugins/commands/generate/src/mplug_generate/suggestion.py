"""What `mplug train` says at the end about a run whose texts can be sampled."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mplug import Run


def after_training(run: "Run") -> str:
    """The command that samples from the run, or nothing.

    It is nothing if the run has saved nothing, if its model continues no text, or if no plugin has its tokenizer.

    A tokenizer with a chat template is that of a run on conversations.
    """
    from mplug_sampling.sampler import reason_against_text  # imports torch

    assert run.directory is not None
    if not (run.directory / "checkpoints").is_dir():
        return ""
    tokenizer = run.hooks.call.build_tokenizer(run=run)
    if tokenizer is None or reason_against_text(run.hooks.call.build_model(run=run)):
        return ""
    chat = ' --chat --prompt "..."' if hasattr(tokenizer, "encode_chat") else ""
    return f"sample from it with: mplug generate --name {run.directory.name}{chat}"
