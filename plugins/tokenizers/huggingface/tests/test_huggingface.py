"""Files tokenizer.json: mplug's suite on byte-level BPE and on word pieces, and which token ends a document."""

from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from byte_level import byte_level
from mplug_huggingface import FileTokenizer, HuggingFace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mplug import UsageError
from mplug_testing import TokenizerSuite

TEXTS = ["the quick brown fox", "jumps over the lazy dog", "Grüße, 世界 🌍", "long long text: 1 + 2 = 3"] * 3


def trained(path: Path, *special: str) -> Path:
    """A file with a post-processor that would put special tokens around a text, and with truncation and padding."""
    tokenizer = byte_level(TEXTS, *special, size=400)
    if special:
        around = [(special[0], tokenizer.token_to_id(special[0]))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=around)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return path


class TestHuggingFace(TokenizerSuite):
    plugin = "huggingface"
    examples = {"eod": ["</s>"]}

    def reference(self, text: str) -> list[int]:
        """The library alone would add special tokens, cut and fill up, and find special tokens."""
        tokenizer = Tokenizer.from_file(self.settings["path"])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _file(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.settings = {
            "path": str(trained(tmp_path_factory.mktemp("bpe") / "tokenizer.json", "<|endoftext|>", "</s>"))
        }


class TestWordPieces(TestHuggingFace):
    """A vocabulary that lower-cases and does not know every character: what comes back once comes back always."""

    lossless = False
    examples = {"eod": ["no-such-token"]}

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


def built(path: Path, **options: str) -> FileTokenizer:
    return HuggingFace(HuggingFace.Config(path=str(path), **options)).build_tokenizer()


def test_the_option_eod_or_the_first_known_special_token_ends_a_document(tmp_path: Path) -> None:
    path = trained(tmp_path / "a.json", "<pad>", "</s>", "<mine>")
    assert built(path).eod == 1
    assert built(path, eod="<mine>").eod == 2
    assert built(trained(tmp_path / "b.json")).eod is None


def test_the_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    path = trained(tmp_path / "a.json", "</s>")
    tokenizer = Tokenizer.from_file(str(path))
    before = built(path).vocab_size
    tokenizer.add_special_tokens(["<late>"])
    tokenizer.save(str(path))
    assert built(path).vocab_size == before + 1


def test_an_unknown_end_token_and_a_file_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"eod '<end>' is no token of path '.*a\.json'"):
        built(trained(tmp_path / "a.json"), eod="<end>")
    (tmp_path / "b.json").write_text('{"model": 1}')
    with pytest.raises(UsageError, match=r"cannot read path '.*b\.json'"):
        built(tmp_path / "b.json")
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(UsageError, match=r"empty\.json' has no tokens"):
        built(tmp_path / "empty.json")


def test_a_tokenizer_that_cannot_encode_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")).save(str(tmp_path / "words.json"))
    tokenizer = built(tmp_path / "words.json")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UsageError, match=r"the tokenizer cannot encode a text: .*correct its tokenizer\.json"):
            encode("b")


def test_special_tokens_are_listed_by_text_and_are_not_made_from_texts(tmp_path: Path) -> None:
    tokenizer = built(trained(tmp_path / "tokenizer.json", "<|im_start|>", "</s>"))
    assert set(tokenizer.special_tokens) == {"<|im_start|>", "</s>"}
    for text, number in tokenizer.special_tokens.items():
        assert tokenizer.tokenizer.token_to_id(text) == number
        assert number not in tokenizer.encode(f"a {text} b")


def test_a_part_of_a_text_has_no_added_tokens(tmp_path: Path) -> None:
    trained(tmp_path / "tokenizer.json", "<|endoftext|>")
    folder = HuggingFace.read_folder(tmp_path)
    whole, part = folder.encode_prompt("quick fox"), folder.encode_part("quick fox")
    assert part
    assert whole == [folder.tokenizer.token_to_id("<|endoftext|>"), *part]
