"""Bytes: mplug's suite for tokenizers, and the numbers themselves."""

from mplug_bytes import ByteTokenizer

from mplug_testing import TokenizerSuite


class TestBytes(TokenizerSuite):
    plugin = "bytes"
    num_tokens = 257

    def reference(self, text: str) -> list[int]:
        return list(text.encode())


def test_token_256_ends_a_document_and_half_a_character_is_replaced() -> None:
    assert (ByteTokenizer.vocab_size, ByteTokenizer.eod) == (257, 256)
    assert ByteTokenizer().decode([97, 0xC3, 256, 98]) == "a\ufffdb"
