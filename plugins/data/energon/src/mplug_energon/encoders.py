"""Task encoders: they turn a sample of a data set into the tokens that a model learns.

A task encoder is a subclass of Energon's `TaskEncoder`, named `module:Class` in the config. Its arguments are
`data.task_encoder_options`, and `seq_length` and `tokenizer` if it accepts them. Its encoded samples are mappings or
dataclasses with `tokens` [S] and `labels` [S] (shifted; -100 without a target), `positions` [S] if they are not
0, 1, 2 ..., and the entries that `data.entries` names. It may have an attribute `vocab_size`; the default is the
tokenizer's.

`S` sequence length, `P` pixels of an image's side.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.energon import Cooker, CrudeSample, DefaultTaskEncoder, SampleDecoder, basic_sample_keys, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import Sample
from torch import Tensor

from mplug import UsageError
from mplug_tokenization import CorpusTokenizer

IGNORED = -100
"""The label of a position without a target."""
TEXTS = ("txt", "text", "caption")
IMAGES = ("png", "jpg", "jpeg", "webp", "bmp", "image")


@edataclass
class Encoded(Sample):
    """An encoded sample: tokens [S] and labels [S]."""

    tokens: Tensor
    labels: Tensor


@edataclass
class EncodedImage(Encoded):
    """An encoded sample with its image [3, P, P], from 0 to 1."""

    images: Tensor


@edataclass
class Raw(Sample):
    """A sample of an untyped data set: its text, and its image if it has one."""

    text: str
    image: Tensor | None = None


@stateless
def cook(crude: CrudeSample) -> Raw:
    """Make a sample of an untyped data set, by the extensions of its files or the fields of its JSON."""
    fields = {**crude, **crude["json"]} if isinstance(crude.get("json"), dict) else dict(crude)
    text = next((fields[name] for name in TEXTS if isinstance(fields.get(name), str)), None)
    image = next((fields[name] for name in IMAGES if isinstance(fields.get(name), Tensor)), None)
    if text is None:
        parts = ", ".join(sorted(name for name in fields if not name.startswith("__")))
        raise UsageError(
            f"sample '{crude['__key__']}' has {parts}, and no text ({', '.join(TEXTS)}); set data.task_encoder to "
            f"your own encoder"
        )
    return Raw(**basic_sample_keys(crude), text=text, image=image)


def text_and_image(sample: Any) -> tuple[str, Tensor | None]:
    """(text, image or None) of a sample: its field `text` or `caption`, and its field `image`."""
    text = getattr(sample, "text", getattr(sample, "caption", None))
    if text == "":
        raise UsageError(f"sample '{sample.__key__}' has an empty text; remove it, or set data.on_error=skip")
    if not isinstance(text, str):
        raise UsageError(
            f"sample '{sample.__key__}' is a {type(sample).__name__}, which has no text and no caption; "
            f"set data.task_encoder to your own encoder"
        )
    return text, getattr(sample, "image", None)


class Text(DefaultTaskEncoder):
    """Splits every text into consecutive windows of S tokens; the last is padded, without targets for the padding."""

    cookers = (Cooker(cook),)
    decoder = SampleDecoder(image_decode="torchrgb8")

    def __init__(self, seq_length: int, tokenizer: CorpusTokenizer) -> None:
        super().__init__()
        self.seq_length, self.tokenizer = seq_length, tokenizer
        self.end = [] if tokenizer.eod is None else [tokenizer.eod]
        self.filler = tokenizer.eod or 0

    @stateless
    def encode_sample(self, sample: Sample) -> Iterator[Encoded]:
        """One encoded sample for each window of the text."""
        tokens = [*self.tokenizer.encode(text_and_image(sample)[0]), *self.end]
        for start in range(0, max(len(tokens) - 1, 0), self.seq_length):
            window, labels = self.window(tokens[start : start + self.seq_length + 1])
            yield Encoded.derive_from(sample, tokens=window, labels=labels)

    def window(self, tokens: list[int], without_target: int = 0) -> tuple[Tensor, Tensor]:
        """(tokens [S], labels [S]) from at most S + 1 tokens; the first `without_target` tokens are not targets."""
        filled = torch.full((self.seq_length + 1,), self.filler)
        filled[: len(tokens)] = torch.tensor(tokens)
        labels = filled[1:].clone()
        labels[len(tokens) - 1 :] = IGNORED
        labels[: max(without_target - 1, 0)] = IGNORED
        return filled[:-1].clone(), labels


class ImageText(Text):
    """Encodes an image and its caption; only the caption has targets.

    With `pixels`, `pixels` x `pixels` grey tokens, numbered after the tokenizer's, precede the caption; so any decoder
    can learn from them. Without `pixels`, the image is the entry `images` [B, 3, P, P] with P = `image_size`, for a
    model that takes it (`data.entries=[images]`). Then the end-of-document token precedes the caption, so that the
    caption's first token is a target too.
    """

    def __init__(
        self, seq_length: int, tokenizer: CorpusTokenizer, image_size: int = 64, pixels: int | None = None
    ) -> None:
        super().__init__(seq_length, tokenizer)
        self.image_size, self.pixels = image_size, pixels
        self.first_grey = tokenizer.vocab_size
        self.vocab_size = self.first_grey + (0 if pixels is None else 256)
        if pixels is not None and pixels**2 >= seq_length:
            raise UsageError(
                f"data.task_encoder_options.pixels={pixels}: an image of {pixels} x {pixels} tokens leaves no room for "
                f"a caption in trainer.seq_length={seq_length}; use a smaller number"
            )

    @stateless
    def encode_sample(self, sample: Sample) -> Iterator[Encoded]:
        """One encoded sample; a caption that is too long is truncated."""
        caption, image = text_and_image(sample)
        if image is None:
            raise UsageError(f"sample '{sample.__key__}' has no image; set data.task_encoder to an encoder for text")
        tokens, prefix = [*self.tokenizer.encode(caption), *self.end], self.end
        if self.pixels is not None:
            prefix = (resized(image, self.pixels).mean(0) * 255).round().long().flatten().add(self.first_grey).tolist()
        window, labels = self.window([*prefix, *tokens][: self.seq_length + 1], without_target=len(prefix))
        if self.pixels is not None:
            yield Encoded.derive_from(sample, tokens=window, labels=labels)
        else:
            scaled = resized(image, self.image_size)
            yield EncodedImage.derive_from(sample, tokens=window, labels=labels, images=scaled)


def resized(image: Tensor, size: int) -> Tensor:
    """An image [3, height, width] of bytes or numbers from 0 to 1 -> [3, size, size] of numbers from 0 to 1."""
    scaled = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    whole = F.interpolate(scaled[None], (size, size), mode="bilinear", antialias=True, align_corners=False)
    return whole[0].clamp(0, 1)
