"""The upper tail of the standard normal distribution as one power of two, for suppliers that compute GELU (torch-free).

With a = |x| and Phi the distribution, 1 - Phi(a) = 2^p(a) to within what is said below, p being a polynomial. So

    GELU(x)  = max(x, 0) - a 2^p(a)
    GELU'(x) = h where x < 0, else 1 - h, with h = 2^p(a) r(a) and r(a) = 1 + a ln 2 p'(a)

h is the derivative of a 2^p(a) itself, so that value and slope fit each other, and one power serves both.
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

Found by a fit of log2 of the tail over 0 <= a <= 12: least squares, their weights changed again and again towards the
smallest largest error of GELU and its slope. In exact arithmetic GELU is off by 8.6e-7 at most (at a = 3.6) and its
slope by 2.7e-6 (at 0, where it jumps by twice that), in fp32 by 1e-6 and 2.8e-6. These are absolute: the tail is off by
4e-5 of itself up to a = 3, by 0.6% up to 4, and by more where it is next to nothing.
"""

NORMAL_TAIL_SLOPE = (1.0, *(log(2) * power * c for power, c in enumerate(NORMAL_TAIL) if power))
"""The coefficients of r, the constant first."""

NORMAL_TAIL_END = 16.0
"""From here on 2^p(a) is 0 in fp32. Who takes the lesser of a and this for a gets 0 where a or its powers overflow."""


def polynomial(coefficients: tuple[float, ...], a: Any) -> Any:
    """Its value at a, whatever a can be multiplied with and added to, by Horner's rule; the constant comes first."""
    value: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = a * value + coefficient
    return value
