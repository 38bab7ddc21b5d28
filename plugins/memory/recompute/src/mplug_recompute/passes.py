"""Modules that read more than the arguments of a call."""

from mplug import Site


def reads_pass(site: Site) -> bool:
    """Whether an adapter in the module of a site reads tensors of the pass (`mplug_nn.LinearAdapter.reads_pass`).

    A call with a part of the sequence, or one that backward repeats after other micro batches, would read wrong ones.
    """
    return any(getattr(module, "reads_pass", False) for module in site.module.modules())
