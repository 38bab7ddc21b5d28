"""SentencePiece models: mplug's suite on one that changes nothing and one that normalizes, and what ends a document."""

import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentencepiece")

import sentencepiece
from mplug_sentencepiece import SentencePiece

from mplug import UsageError
from mplug_testing import TokenizerSuite

TEXTS = ["the quick brown fox", "jumps over the lazy dog", "plain text: 1 + 2 = 3", "Grüße"] * 10


def trained(path: Path, **options: object) -> Path:
    model = io.BytesIO()
    options = {"vocab_size": 330, "byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, **options)
    path.write_bytes(model.getvalue())
    return path


class TestSentencePiece(TokenizerSuite):
    """As llama's: bytes where no piece is, and no normalization."""

    plugin = "sentencepiece"
    examples = {"eod": ["no-such-piece"]}

    def reference(self, text: str) -> list[int]:
        found: list[int] = sentencepiece.SentencePieceProcessor(model_file=self.settings["path"]).encode(text)
        return found

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _file(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        same = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": True}
        cls.settings = {"path": str(trained(tmp_path_factory.mktemp("pieces") / "same.model", **same))}


class TestNormalizing(TestSentencePiece):
    """With the library's defaults, which change spaces and characters."""

    lossless = False

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _file(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        path = trained(tmp_path_factory.mktemp("pieces") / "nfkc.model")
        cls.settings = {"path": str(path)}


def built(path: Path, **options: str) -> Any:
    return SentencePiece(SentencePiece.Config(path=str(path), **options)).build_tokenizer()


def test_the_models_end_piece_or_the_named_piece_ends_a_document(tmp_path: Path) -> None:
    path = trained(tmp_path / "a.model", user_defined_symbols=["<mine>"])
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert built(path).eod == processor.eos_id()
    assert built(path, eod="<mine>").eod == processor.piece_to_id("<mine>")
    assert built(trained(tmp_path / "b.model", eos_id=-1)).eod is None
    with pytest.raises(UsageError, match=r"eod '<end>' is no piece of path '.*a\.model'"):
        built(path, eod="<end>")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.model").write_text("no model")
    for name in ("b.model", "nowhere.model"):
        with pytest.raises(UsageError, match=rf"{name}' is no SentencePiece model"):
            built(tmp_path / name)


def test_special_tokens_are_the_models_control_pieces(tmp_path: Path) -> None:
    tokenizer = built(trained(tmp_path / "a.model", control_symbols=["<turn>"]))
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2, "<turn>": 3}
    assert not set(tokenizer.special_tokens.values()) & set(tokenizer.encode("a <turn> b </s>"))
