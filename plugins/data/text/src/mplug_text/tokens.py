"""The tokens of a stream of bytes, by a tokenizer plugin."""

import numpy as np
from numpy.typing import NDArray

from mplug_text.corpus import SEPARATOR
from mplug_tokenization import CorpusTokenizer


def tokens_of(stream: NDArray[np.uint8], tokenizer: CorpusTokenizer) -> NDArray[np.int32]:
    """The tokens of a split: those of each document, and the tokenizer's end of a document if it has one.

    Bytes that are not UTF-8 become U+FFFD.
    """
    texts = [text.decode(errors="replace") for text in stream.tobytes().split(SEPARATOR) if text]
    end = np.array([] if tokenizer.eod is None else [tokenizer.eod], dtype=np.int32)
    parts = [part for tokens in tokenizer.encode_batch(texts) for part in (np.asarray(tokens, dtype=np.int32), end)]
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])
