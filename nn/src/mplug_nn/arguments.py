"""Adapters for attention cores that are called as in version 0.1: by keyword arguments instead of a specification.

Suppliers, wraps and blocks written for version 0.1 need no change. The host puts one of these functions between them
and code that passes a specification. B batch, S queries, T keys, H query heads, G KV heads.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mplug.tensors.supplier import Supplier
from mplug_nn.core import AttentionCore
from mplug_nn.specification import DOCUMENTS, FULL, KNOWN, AttentionInputs, AttentionSpec

Core = Callable[..., Tensor]
SAID = frozenset({DOCUMENTS, FULL})
"""The needs of a site that keyword arguments can express."""


def takes_specification(core: Core) -> bool:
    """Whether a core is called as `core(q, k, v, spec, inputs)`, whatever the names of these arguments.

    It is if it has a parameter `spec`, or `*args` (which it passes on), or at least five positional parameters none of
    which is `scale`. A positional `scale` belongs to the signature of version 0.1.
    """
    function = core.function if isinstance(core, Supplier) else core
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    if any(one.name == "spec" or one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 5 and "scale" not in positional


def _with_parts_of(core: Core, called: Core) -> Core:
    """A function that calls a core in another convention, with the parts of the core."""
    return AttentionCore(called, parts=core.parts) if isinstance(core, AttentionCore) else called


def by_specification(core: Core, needs: frozenset[str] = frozenset()) -> Core:
    """Return a core that takes a specification, made from a core of either convention.

    Raises ValueError if the core takes keyword arguments and these cannot express `needs`.
    """
    if takes_specification(core):
        return core
    if unsaid := (needs & KNOWN) - SAID:
        raise ValueError(f"its core takes keyword arguments, which cannot say {', '.join(sorted(unsaid))}")

    def called(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        if unsaid := spec.needs - SAID:
            raise ValueError(f"{core!r} takes keyword arguments, which cannot say {', '.join(sorted(unsaid))}")
        named: dict[str, Any] = {"scale": spec.scale, "dropout": spec.dropout, "keys": inputs.keys}
        if inputs.first_head:
            named["first_head"] = inputs.first_head
        if inputs.document_lengths is not None:
            named[DOCUMENTS] = inputs.document_lengths
        if not spec.causal:
            named["causal"] = False
        return core(q, k, v, **named)

    return _with_parts_of(core, called)


def by_arguments(core: Core) -> Core:
    """Return a core that takes keyword arguments, made from one that takes a specification."""

    def called(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        keys: Tensor | None = None,
        first_head: int = 0,
        document_lengths: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        spec = AttentionSpec(
            scale, q.shape[3], v.shape[3], causal=causal, documents=document_lengths is not None, dropout=dropout
        )
        return core(q, k, v, spec, AttentionInputs(keys, document_lengths, first_head=first_head))

    return _with_parts_of(core, called)


def by_either(core: Core) -> Core:
    """Return a core that takes a specification or keyword arguments, made from one that takes a specification."""
    by_name = by_arguments(core)

    def called(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Tensor:
        return core(q, k, v, *rest) if rest else by_name(q, k, v, **named)

    return _with_parts_of(core, called)


def wrapped(wrap: Callable[[Core], Core], inner: Core, needs: frozenset[str] = frozenset()) -> Core:
    """Apply a wrap of either convention to a core that takes a specification; the result takes a specification too.

    Raises ValueError if the wrap takes keyword arguments and these cannot express `needs`.
    """
    core = wrap(inner)
    return core if takes_specification(core) else by_specification(wrap(by_arguments(inner)), needs)
