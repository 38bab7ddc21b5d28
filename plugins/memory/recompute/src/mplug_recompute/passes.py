"""Slots that read more than the arguments of a call."""

from mplug import Site


def reads_pass(site: Site) -> bool:
    """Whether the slot of a site calls linears, one of which has an adapter that reads tensors of the pass.

    (`mplug_nn.LinearAdapter.reads_pass`). A call with a part of the sequence, or one that backward repeats after other
    micro batches, would read wrong ones.
    """
    called = site.declared.calls.items()
    layers = [layer for layer, slots in called if any(slot.startswith("Linear.") for slot in slots)]
    modules = [site.module.get_submodule(layer) for layer in layers]
    return any(getattr(module, "reads_pass", False) for module in (one for m in modules for one in m.modules()))
