"""The number formats that a run and its checkpoints can have, by name. Torch-free: this is the only table of names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A number format: its code in a safetensors header, and the bytes of one number."""

    code: str
    bytes: int


FORMATS = {
    "float64": Format("F64", 8),
    "float32": Format("F32", 4),
    "float16": Format("F16", 2),
    "bfloat16": Format("BF16", 2),
    "float8_e4m3fn": Format("F8_E4M3", 1),
    "float8_e4m3fnuz": Format("F8_E4M3FNUZ", 1),
    "float8_e5m2": Format("F8_E5M2", 1),
    "float8_e5m2fnuz": Format("F8_E5M2FNUZ", 1),
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
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""The config's `trainer.precision` -> the attribute of torch."""
