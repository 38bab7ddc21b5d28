"""The slots of the building blocks by kind, as configs name them."""

from collections.abc import Iterable

from mplug.errors import UsageError, listed, suggest

SLOT_KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("Attention.core",),
    "qk": ("Attention.prepare_qk", "Attention.prepare_qkv"),
    "linear": ("Linear.product", "Linear.gemm", "Linear.gather", "Linear.scatter"),
    "norm_product": ("Linear.norm_product",),
    "activation_product": ("Linear.activation_product",),
    "norm": ("Norm.norm_residual",),
    "activation": ("MLP.activation",),
    "mlp": ("MLP.core",),
    "embedding": ("Embedding.lookup",),
    "dropout": ("Dropout.rows",),
    "loss": ("Loss.cross_entropy",),
    "router": ("Router.summed",),
    "experts": ("Experts.dispatch", "Experts.compute", "Experts.product", "Experts.combine"),
}
"""Kinds of slots (the keys of the config's `kernels` section) -> the slots of each kind."""
CALLED_BY: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "Attention.prepare_qk"): ("Attention.prepare_qkv",),
    ("", "Linear.product"): ("Linear.norm_product", "Linear.activation_product"),
    ("", "Linear.gemm"): ("Linear.product", "Linear.norm_product", "Linear.activation_product"),
    ("", "MLP.activation"): ("Experts.compute", "MLP.core"),
    ("", "Experts.product"): ("Experts.compute",),
    ("up", "Linear.norm_product"): ("MLP.core",),
    ("up", "Linear.product"): ("MLP.core",),
    ("up", "Linear.gemm"): ("MLP.core",),
    ("up", "Linear.scatter"): ("MLP.core",),
    ("down", "Linear.gather"): ("MLP.core",),
    ("down", "Linear.activation_product"): ("MLP.core",),
    ("down", "Linear.product"): ("MLP.core",),
    ("down", "Linear.gemm"): ("MLP.core",),
}
"""(part, slot) -> the wider slots whose default calls this slot. Other suppliers of a wider slot do not call it.

`part` is the name of the submodule that has the slot, in the module of the wider slot; '' is that module itself.
"""
FUSED_PRODUCTS = ("Linear.norm_product", "Linear.activation_product")
"""The slots of a linear layer together with what computes its input."""
WHOLE_PRODUCTS = ("Linear.product", *FUSED_PRODUCTS)
"""The slots of a linear layer whose suppliers do the work of the collectives around the product."""
PRODUCTS = (*WHOLE_PRODUCTS, "Linear.gemm", "Experts.compute", "Experts.product", "MLP.core")
"""The slots whose suppliers multiply by weights: the recipe of a precision applies to them (`mplug.Recipe`)."""
WIDE_PRODUCTS = (*WHOLE_PRODUCTS, "Experts.product")
"""Those that the default of a wider slot calls, unless that default is wrapped: then it calls the narrower slots."""
KIND_OF = {slot: kind for kind, slots in SLOT_KINDS.items() for slot in slots}


def slots_named(words: Iterable[str], field: str) -> tuple[str, ...]:
    """The slots that a user's words name; each word is a kind ('attention') or a slot ('Attention.core').

    Raises UsageError for any other word. `field` is the config field that holds the words; the error names it.
    """
    slots: dict[str, None] = {}
    for word in words:
        if word not in SLOT_KINDS and word not in KIND_OF:
            names = [*SLOT_KINDS, *KIND_OF]
            raise UsageError(f"{field}: '{word}' names no slot{suggest(word, names)} (kinds: {listed(SLOT_KINDS)})")
        slots |= dict.fromkeys(SLOT_KINDS.get(word, (word,)))
    return tuple(slots)
