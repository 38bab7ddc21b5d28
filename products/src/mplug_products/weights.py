"""The weights of products, with the attributes of their modules that the host fills: copies, and later gradients."""

from typing import Literal, NamedTuple

from mplug.model.model import Model
from mplug_products.weight_product import ProductModule

Table = Literal["CASTS", "DELAYED"]
"""The class variable of a `ProductModule` that maps the names of its weights to attributes."""


class ProductWeight(NamedTuple):
    """A weight of a module, the attribute that belongs to it, and the weight's name in the whole model."""

    module: ProductModule
    weight: str
    attribute: str
    parameter: str


def weights_at_rest(model: Model, unit: str, table: Table) -> list[ProductWeight]:
    """The weights of a unit that a table names, without those that a strategy gathers for each pass."""
    names = {id(parameter): name for name, parameter in model.parameters().items()}
    found = [
        ProductWeight(module, weight, attribute, names[id(getattr(module, weight))])
        for module in model.module.get_submodule(unit).modules()
        if isinstance(module, ProductModule)
        for weight, attribute in (module.CASTS if table == "CASTS" else module.DELAYED).items()
    ]
    return [one for one in found if model.placements[one.parameter].gathered_along is None]
