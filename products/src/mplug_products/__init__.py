"""What products of a model keep beside their weights. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_products.delayed import Later as Later
    from mplug_products.delayed import hand_out as hand_out
    from mplug_products.gathering import GatheredCopies as GatheredCopies
    from mplug_products.gathering import gathered_copies as gathered_copies
    from mplug_products.kept import Products as Products
    from mplug_products.states import HeldBuffers as HeldBuffers
    from mplug_products.states import slot_updates as slot_updates
    from mplug_products.states import updated as updated
    from mplug_products.weights import ProductWeight as ProductWeight
    from mplug_products.weights import weights_at_rest as weights_at_rest

publish(__name__)
