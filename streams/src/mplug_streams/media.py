"""The media of samples beside text, and what makes the entries of a model's streams from them. Imports no torch.

Shapes: `B` samples of a micro batch, `S` sequence length, `M` documents of a sample; `F` frames of `H` by `W` pixels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Medium:
    """Something beside text in a sample (a picture, a recording), as a `Processor` has prepared it.

    `tokens` stand for it in the text: its placeholders, and the special tokens around them. `rows` is the number of
    rows that it has in a stream, and `values` is what the processor makes them from. `mark` are the tokens that a
    published chat template writes for it, whatever its size; `tokens` take their place. Empty: no template writes it.
    A processor has no tokenizer: `texts` are texts among the tokens, each with the index of the token behind it. A
    plugin that writes a medium into a text encodes them (`written`).
    """

    tokens: tuple[int, ...]
    rows: int
    values: Any
    mark: tuple[int, ...] = ()
    texts: tuple[tuple[int, str], ...] = ()

    def written(self, encode: Callable[[str], Sequence[int]]) -> "Medium":
        """The medium with its texts as tokens. `encode` adds no special tokens."""
        found, begin = list[int](), 0
        for index, text in self.texts:
            found += [*self.tokens[begin:index], *encode(text)]
            begin = index
        return replace(self, tokens=(*found, *self.tokens[begin:]), texts=())


@dataclass(frozen=True, eq=False)
class Seen:
    """A medium in a micro batch, as the model receives it: after resizing and rounding.

    `positions` are those of its placeholders in the sample. `content` has the form that `Processor.prepare` takes.
    """

    positions: tuple[int, ...]
    content: "Tensor"


class Processor(Protocol):
    """Makes the entries of a model's streams from the media of samples. Its module imports without torch.

    `entries` are the names of what it makes; every micro batch has all of them. `placeholders` are the tokens that
    stand for rows of a stream. They occur nowhere else, and are never targets.

    Optional: `prepare_video(content, rate, encode)` prepares the frames [F, H, W, 3] of a video as `prepare` does those
    of a picture. `rate` is the number of frames in a second. `encode` gives the tokens of a text, for models that read
    times as text between the frames. A processor without this method takes no videos.

    Optional: `contents_of(batch)` undoes what the processor did. It returns the media (`Seen`) of each sample of a
    micro batch, in their order, from the batch's entries alone. Commands that show samples use it. Frames with text
    between them are media of their own.
    """

    entries: tuple[str, ...]
    placeholders: frozenset[int]

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """Prepare a medium from its decoded content: the colours [F, H, W, 3] of F frames, as uint8.

        `num_pictures` is the number of media of one frame in the text that it belongs to (a sample before packing, a
        prompt): a family may show a single picture in more detail than each of several. Raises UsageError for content
        that the model cannot take (too long and thin, say).
        """

    def entries_of(
        self, tokens: "Tensor", media: "Sequence[Sequence[Medium]]", document_lengths: "Tensor | None" = None
    ) -> "Mapping[str, Tensor]":
        """The entries of a micro batch with these tokens [B, S] and the media of each sample, in their order.

        A sample without media has an empty sequence. The lengths of documents [B, M] are those of packed samples; no
        medium crosses a border of documents. Raises ValueError, and names the sample by its index, if the placeholders
        in its tokens are not those of its media.

        What the entries say about a token does not depend on later tokens. So a command that samples calls this once,
        with any text in place of the tokens to come.
        """
