"""The recipes of FP8 products that this plugin computes: their names and options are data. Imports no torch.

- `fp8-tensorwise`: a tensor has one scale, which maps its largest absolute value to the largest number of the format.
- `fp8-delayed`: the same, from the largest absolute values in the last steps (arXiv 2209.05433).
- `fp8-blockwise`: 128 consecutive numbers of activations and gradients have a scale, and so have 128 x 128 numbers of a
  weight (arXiv 2412.19437).
- `mxfp8`, `nvfp4`: formats with small blocks, for Blackwell.

Options: `forward`, the format of activations and weights; `gradient`, that of gradients; `power_of_two`, whether scales
are rounded down to a power of two; for `fp8-delayed` also `history`, the number of steps, and `margin`: a scale is
divided by 2^margin.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mplug import Recipe

if TYPE_CHECKING:
    from mplug_nn import DelayedScaling

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LIMITS = {E4M3: 448.0, E5M2: 57344.0}
"""The largest number of a format."""
INPUT, GRADIENT = "input", "gradient"
"""The operands of a product besides the weight, as `DelayedScaling` names them."""
TENSORWISE, DELAYED, BLOCKWISE = "fp8-tensorwise", "fp8-delayed", "fp8-blockwise"
BLACKWELL = {"mxfp8": "MXFP8", "nvfp4": "NVFP4"}
"""Recipe -> the name of the format, which needs compute capability 10.0."""
NAMES = (TENSORWISE, DELAYED, BLOCKWISE)
Scaling = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class Options:
    """The options of a recipe; their names in `Recipe.options` are those of the fields."""

    forward: str = E4M3
    gradient: str = E5M2
    power_of_two: bool = False
    history: int = 1
    margin: int = 0

    def fault(self, name: str) -> str:
        """Why this plugin does not compute the recipe `name` with these options, or the empty string."""
        gradients = (E4M3,) if name == BLOCKWISE else (E4M3, E5M2)
        if self.forward != E4M3 or self.gradient not in gradients:
            return f"it computes '{name}' in {E4M3} with gradients in {' or '.join(gradients)}"
        return ""


def options_of(recipe: Recipe) -> Options | str:
    """The options of a recipe of NAMES, or why this plugin cannot compute it."""
    known = Options.__dataclass_fields__
    unknown = sorted(set(recipe.options) - set(known))
    if unknown:
        return f"it does not know the option '{unknown[0]}' of the recipe '{recipe.name}'"
    options = Options(**recipe.options)
    return options.fault(recipe.name) or options


def delayed_scaling_of(options: Options) -> "DelayedScaling":
    """The scales of inputs and gradients. A weight is cast once for each version, so its scale is its own."""
    from mplug_nn import DelayedScaling  # imports torch

    limits = {INPUT: LIMITS[options.forward], GRADIENT: LIMITS[options.gradient]}
    return DelayedScaling(limits, options.history, options.margin, options.power_of_two)


def recipe_of(scaling: Scaling, power_of_two: bool | None, history: int, margin: int) -> Recipe:
    """The recipe of a config of the precision."""
    if scaling in BLACKWELL:
        return Recipe(scaling)
    blockwise = scaling == "blockwise"
    options: dict[str, Any] = {"forward": E4M3, "gradient": E4M3 if blockwise else E5M2}
    options["power_of_two"] = blockwise if power_of_two is None else power_of_two
    if scaling == "delayed":
        options |= {"history": history, "margin": margin}
    return Recipe(f"fp8-{scaling}", options)
