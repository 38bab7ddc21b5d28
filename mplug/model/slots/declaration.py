"""Slots as data: what a building block declares about the callables that plugins can replace. Imports no torch."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mplug.errors import UsageError, listed, suggest


def _needs_nothing(module: Any, entries: Container[str]) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True)
class Slot:
    """A callable attribute of a building block that a plugin can replace. A block's class lists its slots in `SLOTS`.

    `name` is 'Scan.core': a word for the block, and the attribute that holds the content. Blocks of several classes may
    declare one slot, so that one supplier serves them all. `kind` is the word that users write in the config: a slot of
    the kind 'scan' is filled by the plugin that `kernels.scan` names. `default` is the composition in plain torch, and
    `serves` are the needs that it serves beyond the plain case. A default that only calls narrower slots (`composes`)
    has no needs of its own.

    `calls` maps a submodule ('' is the module itself) to the slots there that the default calls. A supplier that does
    their work itself does not call them, and the host refuses a plugin whose part would never run. If a wrap surrounds
    the default, the module may call the narrower ones of these slots only; it does not call those in `unless_wrapped`.

    `needs(module, entries)` are what a supplier must offer for a module, in addition to the module's own method
    `needs(slot, entries)`; `entries` are the optional entries that micro batches have.

    - `multiplies`: suppliers multiply by weights, so the recipe of a precision applies to them (`mplug.Recipe`).
    - `collectives`: the slots with the collectives around a product. A supplier does their work itself, so the
      content of each of them must state its boundary.
    - `fuses`: what a supplier computes before the product ('norm'). A module has such a slot only where another module
      states it (`Fusible`).
    - `buffers`: what the names of a supplier's buffers (`Offer.buffers`) begin with; ('',) if any name will do. Empty
      if the block passes no buffers to the slot. A block with several products needs the name of the weight in front.
    - `sums_tokens`: a supplier is called as `supplier(values, over)` and sums over the ranks that divide the axes
      `over` of tokens. The host supplies it.
    - `joins_sequences`: a supplier is called as `supplier(function, *tensors, lengths=lengths)`, tensors [B, S, ...] of
      this rank's positions. It calls the function with those of whole sequences, and returns this rank's part of the
      result. Without `lengths` [B, M] of documents, the order of positions is not specified. The host supplies it.
    - `gathers_positions`: a supplier is called as `supplier(own, x, lengths)`, tensors [B, S, ...] of this rank and the
      lengths of documents or None, between the products of a pair, where only what divides entries divides sequences.
      It returns `own` of some positions, x of all, and the former: pairs (first, end). The host supplies it.
    - `sums_parts`: a supplier is called as `supplier(values)`, with sums [...] over this rank's positions of sequences.
      It returns those over whole sequences, whose gradient every rank receives, and a share: 1.0 on one of the ranks
      that know the same sums, and 0.0 on the others. The host supplies it.
    - `returns_rows`: a supplier is called as `supplier(rows, returns)`, with the rows [R, ...] of a stream that ranks
      have computed for one another, and the entry `mplug.RETURNS`. It returns the rows of this rank's own micro batch.
      The host supplies it if ranks balance streams (`parallel.balance`).
    - `keeps_pairs`: the default keeps a value for every pair of positions for backward. The estimate of
      a run's memory reads it.
    """

    name: str
    kind: str
    default: Any = None
    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unless_wrapped: tuple[str, ...] = ()
    serves: Iterable[str] = frozenset()
    composes: bool = False
    needs: Callable[[Any, Container[str]], frozenset[str]] = _needs_nothing
    multiplies: bool = False
    collectives: tuple[str, ...] = ()
    fuses: str = ""
    buffers: tuple[str, ...] = ()
    sums_tokens: bool = False
    joins_sequences: bool = False
    gathers_positions: bool = False
    sums_parts: bool = False
    returns_rows: bool = False
    keeps_pairs: bool = False

    def __post_init__(self) -> None:
        block, _, attribute = self.name.partition(".")
        if not (block.isidentifier() and attribute.isidentifier()):
            raise ValueError(f"'{self.name}' is no name of a slot: a word, a dot and an attribute, as in 'Scan.core'")
        if not self.kind.isidentifier():
            raise ValueError(f"the kind of the slot '{self.name}' is '{self.kind}'; it must be a word, as in 'scan'")

    @property
    def attribute(self) -> str:
        """The attribute of a module that holds the content of the slot."""
        return self.name.partition(".")[2]

    @property
    def _agreed(self) -> tuple[Any, ...]:
        """What all blocks with this slot must declare alike, because plugins and users rely on it."""
        of_host = self.sums_tokens, self.joins_sequences, self.gathers_positions, self.sums_parts, self.returns_rows
        return self.kind, self.multiplies, self.collectives, self.fuses, *of_host


def slots_of(module: Any) -> tuple[Slot, ...]:
    """The slots that the class of a module declares."""
    declared: tuple[Slot, ...] = getattr(type(module), "SLOTS", ())
    for slot in declared:
        if not isinstance(slot, Slot):
            raise UsageError(
                f"{type(module).__module__}.{type(module).__name__}.SLOTS contains {slot!r}, and each entry must be a "
                f"mplug.Slot, with its kind and its default in plain torch"
            )
    return declared


def slot_of(module: Any, name: str) -> Slot:
    """The slot of a module by its name. ValueError if the class of the module does not declare it."""
    for slot in slots_of(module):
        if slot.name == name:
            return slot
    raise ValueError(f"{type(module).__name__} declares no slot '{name}' (`SLOTS`)")


def set_defaults(module: Any) -> None:
    """Put the default of each declared slot into its attribute. A block calls it in `__init__`."""
    for slot in slots_of(module):
        setattr(module, slot.attribute, slot.default)


def declared_slots(modules: Iterable[Any]) -> dict[str, Slot]:
    """The slots that modules declare, by name, in order. UsageError if two of them contradict each other."""
    found: dict[str, tuple[Slot, type]] = {}
    for module in modules:
        for slot in slots_of(module):
            other, owner = found.setdefault(slot.name, (slot, type(module)))
            if other._agreed != slot._agreed:
                raise UsageError(
                    f"{owner.__module__}.{owner.__name__} and {type(module).__module__}.{type(module).__name__} "
                    f"declare the slot '{slot.name}' differently (kinds '{other.kind}' and '{slot.kind}'); a slot of "
                    f"this name has one kind and one purpose, so one of the blocks must use another name"
                )
    return {name: slot for name, (slot, _) in found.items()}


def slots_named(words: Iterable[str], field: str, slots: Mapping[str, Slot]) -> tuple[str, ...]:
    """The names of slots that a user's words mean; each word is a kind ('scan') or a slot ('Scan.core').

    `slots` are those of the model at hand (`Model.declared`). Raises UsageError for any other word. `field` is the
    config field that holds the words; the error names it.
    """
    found: dict[str, None] = {}
    kinds = dict.fromkeys(slot.kind for slot in slots.values())
    for word in words:
        named = [slot.name for slot in slots.values() if word in (slot.name, slot.kind)]
        if not named:
            names = [*kinds, *slots]
            raise UsageError(
                f"{field}: the model has no slot '{word}'{suggest(word, names)} (kinds: {listed(kinds)}); "
                f"remove '{word}'"
            )
        found |= dict.fromkeys(named)
    return tuple(found)


class Fusible(NamedTuple):
    """A norm or an activation whose result one module alone reads, so that one supplier may compute both.

    `slot` is the slot of the reading module that such a supplier fills (`Slot.fuses`). `inner` is the module before it,
    whose slot `inner_slot` the supplier does not call. `kind` is what `inner` computes, a need of the site.
    """

    slot: str
    reader: Any
    inner: Any
    inner_slot: str
    kind: str


def fusibles(module: Any) -> Iterator[Fusible]:
    """What a module states in its method `fusibles`, unless a subclass has overridden its `forward`."""
    method = getattr(type(module), "fusibles", None)
    if method is not None and states(module, "fusibles", "forward"):
        yield from method(module)


def states(module: Any, statement: str, method: str) -> bool:
    """Whether a module's statement is about the code that runs: no subclass of its class overrides the method."""
    for part in type(module).__mro__:
        if statement in vars(part):
            return True
        if method in vars(part):
            return False
    return False
