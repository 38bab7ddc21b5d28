"""The upper tail of the standard normal distribution as one power of two, for suppliers that compute GELU (torch-free).

With a = |x| and Phi the distribution function, 1 - Phi(a) = 2^p(a), where p is a polynomial. `NORMAL_TAIL` states the
error. So

    GELU(x)  = max(x, 0) - a 2^p(a)
    GELU'(x) = h if x < 0, else 1 - h, with h = 2^p(a) r(a) and r(a) = 1 + a ln 2 p'(a)

h is the exact derivative of a 2^p(a). So value and slope are consistent, and one power serves both.
"""

from math import log
from typing import Any

NORMAL_TAIL = (
    -1.0000077244106982,
    -1.1509984503418076,
    -0.4595150094680092,
    -0.05228464765352901,
    0.007276323037842475,
    -0.0005022307732969162,
)
"""The coefficients of p, the constant first.

They are a least-squares fit of log2 of the tail over 0 <= a <= 12. The weights were adjusted iteratively to minimise
the maximum error of GELU and its slope. In exact arithmetic the error of GELU is at most 8.6e-7 (at a = 3.6) and that
of its slope 2.7e-6 (at 0, where the slope jumps by twice that); in fp32 they are 1e-6 and 2.8e-6. These errors are
absolute. The relative error of the tail is 4e-5 up to a = 3, 0.6% up to a = 4, and larger beyond, where the tail is
nearly 0.
"""

NORMAL_TAIL_SLOPE = (1.0, *(log(2) * power * c for power, c in enumerate(NORMAL_TAIL) if power))
"""The coefficients of r, the constant first."""

NORMAL_TAIL_END = 16.0
"""From this a on, 2^p(a) is 0 in fp32. min(a, NORMAL_TAIL_END) in place of a gives 0 also if powers of a overflow."""


def polynomial(coefficients: tuple[float, ...], a: Any) -> Any:
    """The value of a polynomial at a, by Horner's rule; `coefficients` begin with the constant.

    a may be of any type that supports multiplication and addition with floats.
    """
    value: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = a * value + coefficient
    return value
