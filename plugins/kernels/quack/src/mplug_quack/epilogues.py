"""QuACK epilogues: the arithmetic on a product's tile before it leaves the registers.

QuACK traces these functions into the kernel; each is plain fp32 arithmetic on one number. `acc` is the product and `c`
a second input. "D" is the first output, in place of the product, and "y" the second.

GELU is computed with a fitted power of two (`mplug_nn.normal_tail`), the only transcendental function in both passes.

QuACK names a compiled kernel after the source of its epilogue and of what the epilogue refers to. Two rules follow:

- An epilogue calls QuACK's functions through their module (`activation.gelu_tanh_approx`). QuACK identifies a module by
  its name. It follows a function that is imported by name into CUTLASS, unless CUTLASS is below `site-packages`; from
  CUTLASS DSL 4.8.0 on, it finds a `ContextVar` there that it has no identity for, and refuses the epilogue.
- `EXTRA_SOURCE_DIRS` holds the folders of the functions below. Without them, QuACK identifies an epilogue
  below `site-packages` by its name alone. A newer release of mplug would then run kernels that an older one compiled.
"""

from pathlib import Path
from typing import Any

from cutlass import cute
from quack import activation
from quack.cache import EXTRA_SOURCE_DIRS
from quack.epilogue import gemm_epilogue
from quack.epilogue.ops import RowVecLoad

from mplug_nn import NORMAL_TAIL, NORMAL_TAIL_END, NORMAL_TAIL_SLOPE, normal_tail
from mplug_nn.normal_tail import polynomial

EXTRA_SOURCE_DIRS.extend(Path(file).parent for file in (__file__, normal_tail.__file__))

HUGE = 1e30
"""A factor that makes any nonzero x, except negligible ones, larger in size than any slope."""


def tail(x: Any) -> tuple[Any, Any]:
    """(|x| clamped to the end of the fitted tail, the probability of the normal distribution beyond it)."""
    distance = cute.arch.fmin(abs(x), NORMAL_TAIL_END)
    return distance, cute.math.exp2(polynomial(NORMAL_TAIL, distance), fastmath=True)


def gelu(x: Any) -> Any:
    """GELU(x)."""
    distance, beyond = tail(x)
    return cute.arch.fmax(x, 0.0) - distance * beyond


def gelu_gradient(x: Any, grad_y: Any) -> tuple[Any, Any]:
    """(grad_y times the slope at x, GELU(x)). The slope is h for x < 0 and 1 - h for x > 0."""
    distance, beyond = tail(x)
    from_half = 0.5 - beyond * polynomial(NORMAL_TAIL_SLOPE, distance)  # 0.5 - h, never below 0
    slope = cute.arch.fmin(from_half, x * HUGE, abs=True) + 0.5  # `abs`: the smaller size, with x's sign
    return grad_y * slope, cute.arch.fmax(x, 0.0) - distance * beyond


@gemm_epilogue(outputs=("y",))
def up_gelu(acc):  # type: ignore[no-untyped-def]
    """D: the product; y: its GELU."""
    return {"D": acc, "y": gelu(acc)}


@gemm_epilogue(outputs=("y",), ops={"bias": RowVecLoad("bias")})
def up_gelu_bias(acc, bias):  # type: ignore[no-untyped-def]
    """D: the product plus bias; y: the GELU of D."""
    x = acc + bias
    return {"D": x, "y": gelu(x)}


@gemm_epilogue(outputs=("y",))
def down_gelu(acc, c):  # type: ignore[no-untyped-def]
    """With y = GELU(c), and `acc` the gradient of y: D: the gradient of c; y: GELU(c), recomputed."""
    grad, y = gelu_gradient(c, acc)
    return {"D": grad, "y": y}


@gemm_epilogue(outputs=("y",))
def up_gelu_tanh(acc):  # type: ignore[no-untyped-def]
    """As `up_gelu`, by tanh."""
    return {"D": acc, "y": activation.gelu_tanh_approx(acc)}


@gemm_epilogue(outputs=("y",), ops={"bias": RowVecLoad("bias")})
def up_gelu_tanh_bias(acc, bias):  # type: ignore[no-untyped-def]
    """As `up_gelu_bias`, by tanh."""
    x = acc + bias
    return {"D": x, "y": activation.gelu_tanh_approx(x)}


@gemm_epilogue(outputs=("y",))
def down_gelu_tanh(acc, c):  # type: ignore[no-untyped-def]
    """As `down_gelu`, by tanh."""
    grad, y = activation.dgelu_tanh_approx(c, acc)
    return {"D": grad, "y": y}


UP = {
    ("gelu", False): up_gelu,
    ("gelu", True): up_gelu_bias,
    ("gelu_tanh", False): up_gelu_tanh,
    ("gelu_tanh", True): up_gelu_tanh_bias,
}
"""(activation, whether there is a bias) -> epilogue."""
DOWN = {"gelu": down_gelu, "gelu_tanh": down_gelu_tanh}
