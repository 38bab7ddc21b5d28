"""Decoders of quantised public weights, by the method that config.json names. Importing this module imports no torch.

A decoder stands between a public tensor, as the dequantised folder has it, and the tensors that the folder stores
instead. External names describe the dequantised folder alone.
"""

from collections.abc import Container, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from mplug import OpenList

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
WEIGHT_DECODERS = OpenList("decoder of quantised weights", "mplug_huggingface_format.weight_decoders", {})
"""Names are those of `quant_method` in a config.json, targets are `WeightDecoder` classes."""
Box = tuple[Shape, Shape]
"""The start and the shape of a part of a tensor."""


class WeightDecoder(Protocol):
    """Reads boxes of quantised tensors. All methods but `decode` compute with shapes alone.

    A distribution adds a class by an entry point in the group 'mplug_huggingface_format.weight_decoders'; its name is
    the `quant_method`. The constructor takes the `quantization_config`, and raises ValueError if the decoder does not
    support it.
    """

    def stored(self, tensor: str, shape: Shape, present: Container[str]) -> Mapping[str, Shape]:
        """The names and shapes of the tensors that hold a public tensor; empty if the folder has it as it is.

        `present` are the names of the folder's tensors.
        """

    def dtypes(self, part: str) -> tuple[str, ...]:
        """The types that one of these tensors may have, by torch's names ('uint8')."""

    def boxes(self, tensor: str, start: Shape, shape: Shape) -> Mapping[str, Box]:
        """The boxes of the stored tensors, by their names, that decode a box of the public tensor."""

    def decode(self, tensor: str, start: Shape, shape: Shape, parts: Mapping[str, "Tensor"]) -> "Tensor":
        """The box of the public tensor, in fp32, from these boxes."""


def weight_decoder(config: Mapping[str, Any]) -> WeightDecoder:
    """The decoder for a `quantization_config`. ValueError if no decoder has the name of its `quant_method`."""
    if config.get("quant_method") is None:
        raise ValueError("it lacks the field 'quantization_config.quant_method'")
    found: WeightDecoder = WEIGHT_DECODERS.load(str(config["quant_method"]))(config)
    return found


def _refuse_unknown(config: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError for a field of `quantization_config` that could change the format."""
    if unknown := sorted(name for name, value in config.items() if value is not None and name not in known):
        method = config["quant_method"]
        raise ValueError(f"the field '{unknown[0]}' of its quantization_config is unknown for '{method}'")


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)


COMMON = ("quant_method", "modules_to_not_convert", "dequantize")
"""Fields of `quantization_config` that say what the names of the tensors say too, or how others decode."""


class BlockwiseFP8:
    """e4m3 weights [out, in] with one fp32 factor for each block, 'NAME_scale_inv' (arXiv 2412.19437, section 3.3).

    The activations are not quantised. `scale_fmt` says how factors were rounded: they are read as they are.
    """

    KNOWN = (*COMMON, "fmt", "weight_block_size", "activation_scheme", "scale_fmt")

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse_unknown(config, self.KNOWN)
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise ValueError("its fp8 weights are for an 'activation_scheme' other than 'dynamic'")
        block = config.get("weight_block_size")
        if config.get("fmt", "e4m3") != "e4m3" or not isinstance(block, list) or len(block) != 2:
            raise ValueError("its fp8 weights are not in e4m3 with a 'weight_block_size' of two numbers")
        self.block: Shape = tuple(block)
        if not all(isinstance(size, int) and size > 0 for size in block):
            raise ValueError(f"its 'weight_block_size' is {block}")

    def stored(self, tensor: str, shape: Shape, present: Container[str]) -> Mapping[str, Shape]:
        """The weight and its factors, if it has factors."""
        factors = f"{tensor}_scale_inv"
        if factors not in present or len(shape) != 2:
            return {}
        return {tensor: shape, factors: tuple(_up(n, size) for n, size in zip(shape, self.block, strict=True))}

    def dtypes(self, part: str) -> tuple[str, ...]:
        """e4m3; factors are plain numbers."""
        return ("float32", "bfloat16") if part.endswith("_scale_inv") else ("float8_e4m3fn",)

    def boxes(self, tensor: str, start: Shape, shape: Shape) -> Mapping[str, Box]:
        """The same box of the weight, and the factors of the blocks that it touches."""
        low = tuple(s // size for s, size in zip(start, self.block, strict=True))
        high = (_up(s + n, size) for s, n, size in zip(start, shape, self.block, strict=True))
        return {
            tensor: (start, shape),
            f"{tensor}_scale_inv": (low, tuple(b - a for a, b in zip(low, high, strict=True))),
        }

    def decode(self, tensor: str, start: Shape, shape: Shape, parts: Mapping[str, "Tensor"]) -> "Tensor":
        """weight * factor of its block."""
        factors = parts[f"{tensor}_scale_inv"].float()
        for dim, (first, length, size) in enumerate(zip(start, shape, self.block, strict=True)):
            factors = factors.repeat_interleave(size, dim).narrow(dim, first % size, length)
        return parts[tensor].float() * factors


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7; the codes 8 to 15 are their negatives (OCP MX specification, version 1.0)."""


class MXFP4:
    """Experts [E, in, out] as e2m1 codes 'NAME_blocks' [E, out, in / 32, 16] and exponents 'NAME_scales' [E, out, in / 32].

    Byte j of a block has the values 2 j (low half) and 2 j + 1.
    """  # noqa: E501

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse_unknown(config, COMMON)  # the method has no options that change the format

    def stored(self, tensor: str, shape: Shape, present: Container[str]) -> Mapping[str, Shape]:
        """Blocks and exponents, if the folder has them."""
        if f"{tensor}_blocks" not in present or len(shape) != 3 or shape[1] % 32:
            return {}
        groups = (shape[0], shape[2], shape[1] // 32)
        return {f"{tensor}_blocks": (*groups, 16), f"{tensor}_scales": groups}

    def dtypes(self, part: str) -> tuple[str, ...]:
        """Bytes."""
        return ("uint8",)

    def boxes(self, tensor: str, start: Shape, shape: Shape) -> Mapping[str, Box]:
        """The groups of 32 values that the box touches."""
        low, high = start[1] // 32, _up(start[1] + shape[1], 32)
        first, groups = (start[0], start[2], low), (shape[0], shape[2], high - low)
        return {f"{tensor}_blocks": ((*first, 0), (*groups, 16)), f"{tensor}_scales": (first, groups)}

    def decode(self, tensor: str, start: Shape, shape: Shape, parts: Mapping[str, "Tensor"]) -> "Tensor":
        """value of the code * 2 ** (exponent - 127)."""
        import torch  # shapes are computed without it

        codes, exponents = parts[f"{tensor}_blocks"].int(), parts[f"{tensor}_scales"].int() - 127
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1)  # [e, out, g, 16, 2]
        values = torch.tensor((*E2M1, *(-value for value in E2M1)))[pairs].flatten(-2)  # [e, out, g, 32]
        decoded = torch.ldexp(values, exponents[..., None]).flatten(-2).mT  # [e, in, out]
        assert prod(decoded.shape) >= prod(shape)
        return decoded.narrow(1, start[1] % 32, shape[1])
