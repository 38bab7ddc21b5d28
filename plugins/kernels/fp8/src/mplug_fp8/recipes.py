"""The recipes of FP8 products: names and options, which every supplier of these products reads. Imports no torch.

- `fp8-tensorwise`: a tensor has one scale, which maps its largest absolute value to the largest number of the format.
- `fp8-delayed`: the same, from the largest absolute values in the last steps (arXiv 2209.05433).
- `fp8-rowwise`: every row of an operand has a scale.
- `fp8-blockwise`: 128 consecutive numbers of a row of activations and gradients have a scale, and so have blocks of
  128 x 128 numbers of a weight (arXiv 2412.19437).

Options: `forward` and `gradient`, the formats of activations and weights and of gradients; `power_of_two`, whether
scales are rounded down to a power of two; for `fp8-delayed` also `history`, the number of steps, and `margin`: a scale
is divided by 2 to the power of `margin`.
"""

from dataclasses import dataclass
from typing import Any

from mplug import Recipe

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LIMITS = {E4M3: 448.0, E5M2: 57344.0}
"""The largest number of a format."""
INPUT, GRADIENT = "input", "gradient"
"""The operands of a product besides the weight, as `DelayedScaling` names them."""
TENSORWISE, DELAYED, ROWWISE, BLOCKWISE = "fp8-tensorwise", "fp8-delayed", "fp8-rowwise", "fp8-blockwise"
NAMES = (TENSORWISE, DELAYED, ROWWISE, BLOCKWISE)


@dataclass(frozen=True)
class Options:
    """The options of a recipe; their names in `Recipe.options` are those of the fields."""

    forward: str = E4M3
    gradient: str = E5M2
    power_of_two: bool = False
    history: int = 1
    margin: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> "Options":
        """The options of a recipe. TypeError for an option that this plugin does not know."""
        return cls(**recipe.options)

    def fault(self, name: str) -> str:
        """Why the products of this plugin do not compute the recipe `name` with these options, or empty."""
        formats: dict[str, tuple[str, ...]] = {
            TENSORWISE: (E4M3, E5M2),
            DELAYED: (E4M3, E5M2),
            ROWWISE: (E4M3,),
            BLOCKWISE: (E4M3,),
        }
        if self.forward != E4M3 or self.gradient not in formats[name]:
            return f"it computes '{name}' in {E4M3}, with gradients in {' or '.join(formats[name])}"
        if name == BLOCKWISE and not self.power_of_two:
            return f"its scales of '{name}' are powers of two"
        return ""


def recipe_of(scaling: str, when: str, power_of_two: bool | None, history: int, margin: int) -> Recipe:
    """The recipe of a config of the precision."""
    delayed = scaling == "tensorwise" and when == "delayed"
    name = DELAYED if delayed else f"fp8-{scaling}"
    options: dict[str, Any] = {
        "forward": E4M3,
        "gradient": E5M2 if scaling == "tensorwise" else E4M3,
        "power_of_two": scaling != "tensorwise" if power_of_two is None else power_of_two,
    }
    return Recipe(name, {**options, **({"history": history, "margin": margin} if delayed else {})})
