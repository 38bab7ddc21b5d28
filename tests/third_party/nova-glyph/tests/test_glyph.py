"""Glyph: mplug's suite for tokenizers, and what is glyph's own: words."""

from pathlib import Path

from nova_glyph import END

from mplug_testing import TokenizerSuite

WORDS = Path(__file__).with_name("words.txt")


class TestGlyph(TokenizerSuite):
    plugin = "glyph"
    settings = {"path": str(WORDS)}
    num_tokens = 256 + 1 + 8  # bytes, the end of a document, and the words of the file
    longest_match = True

    def reference(self, text: str) -> list[int]:
        """Greedy: the longest word at each place, else the bytes of a character."""
        words, tokens = WORDS.read_text(encoding="utf-8").splitlines(), list[int]()
        while text:
            found = max((word for word in words if text.startswith(word)), key=len, default=text[0])
            tokens += [END + 1 + words.index(found)] if found in words else found.encode()
            text = text[len(found) :]
        return tokens
