"""Files tokenizer.json: mplug's suite on byte-level BPE and on word pieces, and which token ends a document."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from mplug_huggingface import HuggingFace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mplug import UsageError
from mplug_testing import TokenizerSuite

TEXTS = ["the quick brown fox", "jumps over the lazy dog", "Grüße, 世界 🌍", "long long text: 1 + 2 = 3"] * 3


def trained(path: Path, *special: str, size: int = 400) -> Path:
    """A byte-level BPE tokenizer, with a post-processor that would put special tokens around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if special:
        around = [(special[0], tokenizer.token_to_id(special[0]))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=around)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return path


def by_the_library(settings: Mapping[str, Any], text: str) -> list[int]:
    """The tokens of the library alone, which would add special tokens, cut and fill up, and find special tokens."""
    tokenizer = Tokenizer.from_file(settings["path"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


class TestHuggingFace(TokenizerSuite):
    plugin = "huggingface"
    examples = {"eod": ["</s>"]}

    def reference(self, text: str) -> list[int]:
        return by_the_library(self.settings, text)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _file(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.settings = {
            "path": str(trained(tmp_path_factory.mktemp("bpe") / "tokenizer.json", "<|endoftext|>", "</s>"))
        }


class TestWordPieces(TokenizerSuite):
    """A vocabulary that lower-cases and does not know every character: what comes back once comes back always."""

    plugin = "huggingface"
    lossless = False
    examples = {"eod": ["no-such-token"]}

    def reference(self, text: str) -> list[int]:
        return by_the_library(self.settings, text)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _file(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=100, special_tokens=["[UNK]"], show_progress=False)
        tokenizer.train_from_iterator(TEXTS, trainer)
        path = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
        tokenizer.save(str(path))
        cls.settings = {"path": str(path)}


def built(path: Path, **options: str) -> tuple[int, int | None]:
    tokenizer = HuggingFace(HuggingFace.Config(path=str(path), **options)).build_tokenizer()
    return tokenizer.vocab_size, tokenizer.eod


def test_the_option_eod_or_the_first_known_special_token_ends_a_document(tmp_path: Path) -> None:
    path = trained(tmp_path / "a.json", "<pad>", "</s>", "<mine>")
    assert built(path)[1] == 1
    assert built(path, eod="<mine>")[1] == 2
    assert built(trained(tmp_path / "b.json"))[1] is None


def test_the_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    path = trained(tmp_path / "a.json", "</s>")
    tokenizer = Tokenizer.from_file(str(path))
    before = built(path)[0]
    tokenizer.add_special_tokens(["<late>"])
    tokenizer.save(str(path))
    assert built(path)[0] == before + 1


def test_an_unknown_end_token_and_a_wrong_file_are_refused(tmp_path: Path) -> None:
    path = trained(tmp_path / "a.json")
    with pytest.raises(UsageError, match=r"eod '<end>' is no token of path '.*a\.json'"):
        built(path, eod="<end>")
    (tmp_path / "b.json").write_text('{"model": 1}')
    for name in ("b.json", "nowhere.json"):
        with pytest.raises(UsageError, match=rf"cannot read path '.*{name}'"):
            built(tmp_path / name)


def test_a_tokenizer_that_cannot_encode_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    words.save(str(tmp_path / "words.json"))
    tokenizer = HuggingFace(HuggingFace.Config(path=str(tmp_path / "words.json"))).build_tokenizer()
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UsageError, match=r"the tokenizer cannot encode a text: .*correct its tokenizer\.json"):
            encode("b")
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(UsageError, match=r"empty\.json' has no tokens"):
        HuggingFace(HuggingFace.Config(path=str(tmp_path / "empty.json"))).build_tokenizer()


def test_special_tokens_are_listed_by_text_and_are_not_made_from_texts(tmp_path: Path) -> None:
    path = trained(tmp_path / "tokenizer.json", "<|im_start|>", "</s>")
    tokenizer = HuggingFace(HuggingFace.Config(path=str(path))).build_tokenizer()
    assert set(tokenizer.special_tokens) == {"<|im_start|>", "</s>"}
    for text, number in tokenizer.special_tokens.items():
        assert tokenizer.tokenizer.token_to_id(text) == number
        assert number not in tokenizer.encode(f"a {text} b")
