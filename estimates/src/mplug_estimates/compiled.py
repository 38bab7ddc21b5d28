"""What compiled units keep for backward, which is less than eager units keep.

The compiler computes the input of a product again if a norm or an activation function made it from what is kept anyway.
It keeps the results of products, and what operators of their own made: attention, rotations, the gathering of a
sequence, and norms that a kernel supplies. `docs/memory.md` compares the rule with the peaks of GPUs.
"""

from collections.abc import Set
from typing import TYPE_CHECKING, Any

from mplug.layout.names import role_of

if TYPE_CHECKING:
    from mplug.layout.work import Work
    from mplug.model.model import Model

BEFORE = {"Linear.norm_product": "norm", "Linear.activation_product": "activation"}
"""By the slot that a product has, what makes its input."""


class CompiledUnits:
    """The facts about the slots of a model that decide what its compiled units keep.

    `supplied` are kinds of slots that kernels of the run fill, beside those that are filled in `model`.
    """

    def __init__(self, model: "Model", supplied: Set[str]) -> None:
        self._norms = "norm" in supplied
        self._makers, self._gathered, self._supplied = dict[str, str](), set[str](), set[str]()
        self._turning = dict[str, Any]()
        for filled in model.slots:
            role, slot = filled.site.role, filled.site.slot
            if slot in BEFORE:
                self._makers[role] = BEFORE[slot]
            if filled.site.kind == "qk" and _turns(filled.site.module):
                self._turning[role] = filled.site.module
            if filled.offer is None:
                continue
            self._norms |= filled.site.kind == "norm" and filled.offer.plugin.startswith("kernels/")
            if slot == "Linear.gather":
                self._gathered.add(role)
            elif slot == "Linear.product":
                self._supplied.add(role)

    def keeps_whole_input(self, work: "Work") -> bool:
        """Whether the input of a product is kept as ranks have gathered it along the sequence."""
        role = _module_of(work)
        return role in self._gathered and role not in self._supplied

    def keeps_input(self, work: "Work", previous: "Work | None", from_rows: bool) -> bool:
        """Whether the input of a product is kept; `from_rows`: it consists of rows that a router has moved."""
        if from_rows or (previous is not None and not previous.is_weight):
            return True
        return self._norms and self._makers.get(_module_of(work)) == "norm"

    def turned(self, work: "Work") -> int:
        """The elements per token of queries and keys that a module of attention turns or normalises, of all heads."""
        module = self._turning.get(role_of(work.name))
        return 0 if module is None else (module.num_heads + module.num_kv_heads) * module.head_dim


def _module_of(work: "Work") -> str:
    """The role of the module that has the weight."""
    return role_of(work.name.rpartition(".")[0])


def _turns(module: Any) -> bool:
    return getattr(module, "theta", None) is not None or getattr(module, "q_norm", None) is not None
