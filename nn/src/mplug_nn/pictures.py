"""Pictures as tensors: decoding of files, and resizing. F frames of H rows and W columns; colours are RGB, uint8.

It imports Pillow only in its functions: a family that takes pictures depends on it.
"""

import io
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_PIXELS = 1 << 27
"""Maximum number of pixels of a picture by default: a small file can hold a picture that fills the memory."""


def decode_picture(data: bytes, most_pixels: int = MOST_PIXELS) -> Tensor:
    """The colours [1, H, W, 3] of a picture in a file format that Pillow reads, turned as its EXIF entry says.

    Other modes become RGB as Pillow converts them: transparency is dropped. Raises ValueError if the bytes are no
    picture, if they are damaged, or if the picture has more than `most_pixels`; its header says so before any pixel is
    decoded.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as picture:
            width, height = picture.size
            if width * height > most_pixels:
                raise ValueError(f"a picture of {width} x {height} pixels has more than {most_pixels} pixels")
            picture.load()
            upright = ImageOps.exif_transpose(picture)
            return _tensor_of(upright.convert("RGB"))[None]
    except UnidentifiedImageError:
        raise ValueError("the bytes are no picture in a format that Pillow reads") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"the picture is damaged: {error}") from error


def resize_frames(
    frames: Tensor, height: int, width: int, resampling: Literal["bicubic", "bilinear"] = "bicubic"
) -> Tensor:
    """Frames [F, H, W, 3] at another size [F, height, width, 3], by a filter of Pillow."""
    from PIL import Image

    if tuple(frames.shape[1:3]) == (height, width):
        return frames
    pictures = (Image.fromarray(frame.numpy(), "RGB") for frame in frames)
    kernel = Image.Resampling[resampling.upper()]
    return torch.stack([_tensor_of(one.resize((width, height), kernel)) for one in pictures])


def standardized(frames: Tensor, mean: "Sequence[float]", std: "Sequence[float]") -> Tensor:
    """Colours from 0 to 255 [..., 3] as fp32: divided by 255, minus the mean, divided by the standard deviation."""
    return (frames.float() / 255 - torch.tensor(mean)) / torch.tensor(std)


def _tensor_of(picture: object) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(picture, dtype=np.uint8))
