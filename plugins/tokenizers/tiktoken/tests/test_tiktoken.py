"""Files of ranks: mplug's suite, and what is refused: names that would be downloaded, broken files, taken numbers."""

import base64
import socket
from itertools import pairwise
from pathlib import Path

import pytest
from mplug_tiktoken import Tiktoken

from mplug import UsageError
from mplug_testing import TokenizerSuite

BYTES = [bytes([byte]) for byte in range(256)]
MERGES = [b"th", b"the", b" the", b"in", b"er", b"  ", "ü".encode(), "世".encode(), b"lo", b"ng", b"long", b" long"]


def write(path: Path, tokens: list[bytes]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path


GPT_2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class TestTiktoken(TokenizerSuite):
    plugin = "tiktoken"
    num_tokens = 256 + len(MERGES) + 1
    examples = {"pattern": ["(?s:.)"], "eod": ["<end>"], "eod_id": [400]}

    def reference(self, text: str) -> list[int]:
        """Byte pairs (arXiv 1508.07909): a piece that is a token, or else merge the pair of the lowest rank again."""
        import regex

        ranks, tokens = {token: rank for rank, token in enumerate(BYTES + MERGES)}, list[int]()
        for piece in regex.findall(GPT_2, text):
            whole = piece.encode()
            parts = [whole] if whole in ranks else [bytes([byte]) for byte in whole]
            while True:
                pairs = [ranks.get(one + other, 1 << 30) for one, other in pairwise(parts)]
                if not pairs or min(pairs) == 1 << 30:
                    break
                at = pairs.index(min(pairs))
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            tokens += [ranks[part] for part in parts]
        return tokens

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _file(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.settings = {"path": str(write(tmp_path_factory.mktemp("ranks") / "small.tiktoken", BYTES + MERGES))}


def build(path: Path | str, **options: object) -> tuple[int, int | None, list[int]]:
    tokenizer = Tiktoken(Tiktoken.Config(path=str(path), **options)).build_tokenizer()
    return tokenizer.vocab_size, tokenizer.eod, tokenizer.encode("in the")


def test_tokens_are_ranks_and_the_end_token_follows_them_or_has_the_given_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tiktoken", BYTES + MERGES)
    after = 256 + len(MERGES)
    assert build(path) == (after + 1, after, [259, 258])
    assert build(path, eod_id=300) == (301, 300, [259, 258])
    assert build(path, eod=None) == (after, None, [259, 258])
    assert build(path, pattern="(?s:.)")[2] == list(b"in the")
    assert Tiktoken(Tiktoken.Config(path=str(path), eod="<end>")).build_tokenizer().special_tokens == {"<end>": after}


def test_the_end_token_follows_the_largest_rank_and_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tiktoken", BYTES)
    assert build(path)[2] == list(b"in the")
    write(path, BYTES + MERGES)
    assert build(path)[2] == [259, 258]
    path.write_text(path.read_text() + f"{base64.b64encode(b'in the').decode()} 400\n")
    assert build(path, pattern="(?s:.+)") == (402, 401, [400])


def test_a_named_encoding_is_refused_and_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("it opens a connection"))
    said = r"'cl100k_base' is the name of an encoding, and mplug downloads no files.*set path=cl100k_base\.tiktoken"
    with pytest.raises(UsageError, match=said):
        build("cl100k_base")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (BYTES[:200] + MERGES, "has no rank for the byte 200"),
        (["!!! 1"], "line 1 is not a base64 token and a number"),
        (["YQ== -1"], "line 1 is not a base64 token and a number from 0 to"),
        ([f"YQ== {2**31}"], "line 1 is not a base64 token and a number from 0 to"),
        (["YQ== 1", "YQ== 2"], "line 2, repeats the token of an earlier line"),
        ([""], "is no file of ranks: it is empty; download the file again"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, tokens: list, said: str) -> None:
    path = tmp_path / "a.tiktoken"
    write(path, tokens) if isinstance(tokens[0], bytes) else path.write_text("\n".join(tokens))
    with pytest.raises(UsageError, match=said):
        build(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eod_id": 5}, "eod_id=5 is a rank"),
        ({"pattern": "q+"}, r"pattern 'q\+' does not match all text, so tokens would be missing"),
        ({"pattern": "["}, r"pattern '\[' is not valid"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build(write(tmp_path / "a.tiktoken", BYTES), **options)
