"""The number formats that tensors and their files can have, by torch's name. Torch-free: the only table of names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A number format: its code in a safetensors header, and the bytes of one number.

    `exponent` and `significand` are the bits of a floating-point number (the implicit leading bit included); 0 for any
    other format.
    """

    code: str
    bytes: int
    exponent: int = 0
    significand: int = 0

    @property
    def is_floating(self) -> bool:
        """Whether its numbers are floating-point numbers."""
        return self.exponent > 0

    def holds(self, other: "Format") -> bool:
        """Whether it represents every finite number of another floating-point format exactly."""
        return other.is_floating and self.exponent >= other.exponent and self.significand >= other.significand


FORMATS = {
    "float64": Format("F64", 8, 11, 53),
    "float32": Format("F32", 4, 8, 24),
    "float16": Format("F16", 2, 5, 11),
    "bfloat16": Format("BF16", 2, 8, 8),
    "float8_e4m3fn": Format("F8_E4M3", 1, 4, 4),
    "float8_e4m3fnuz": Format("F8_E4M3FNUZ", 1, 4, 4),
    "float8_e5m2": Format("F8_E5M2", 1, 5, 3),
    "float8_e5m2fnuz": Format("F8_E5M2FNUZ", 1, 5, 3),
    "complex64": Format("C64", 8),
    "int64": Format("I64", 8),
    "int32": Format("I32", 4),
    "int16": Format("I16", 2),
    "int8": Format("I8", 1),
    "uint64": Format("U64", 8),
    "uint32": Format("U32", 4),
    "uint16": Format("U16", 2),
    "uint8": Format("U8", 1),
    "bool": Format("BOOL", 1),
}
"""Attribute of torch -> its format: every format that torch and safetensors share."""
