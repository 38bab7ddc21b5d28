"""Files of pictures of all modes, as processors of pictures must read them."""

import io

import numpy as np

MODES = ("RGB", "L", "RGBA", "P", "CMYK", "I;16", "LA", "1")
FORMATS = {"CMYK": "JPEG", "I;16": "PNG", "RGB": "JPEG"}
ORIENTATION = 0x0112


def coded_picture(number: int, mode: str, smallest: int = 1, *, is_smooth: bool = False) -> bytes:
    """A picture of random colours with a random size, of which every third is turned by its EXIF entry.

    A smooth one has few colours that run into each other, which it keeps if it is resized.
    """
    from PIL import Image

    drawn = np.random.default_rng(number)
    height, width = (int(size) for size in drawn.integers(smallest, 90, 2))
    if mode == "I;16":
        picture = Image.fromarray(drawn.integers(0, 1 << 16, (height, width), dtype=np.uint16))
    else:
        sizes = (5, 5, 3) if is_smooth else (height, width, 3)
        colours = Image.fromarray(drawn.integers(0, 256, sizes, dtype=np.uint8))
        picture = colours.resize((width, height), Image.Resampling.BICUBIC) if is_smooth else colours
        picture = picture.convert(mode)
    data, exif = io.BytesIO(), Image.Exif()
    if number % 3 == 0:
        exif[ORIENTATION] = 1 + number % 8
    picture.save(data, FORMATS.get(mode, "PNG"), exif=exif)
    return data.getvalue()
