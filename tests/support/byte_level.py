"""Byte-level BPE tokenizers, trained on a few texts. Test files import it after `pytest.importorskip("tokenizers")`."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def byte_level(
    texts: Iterable[str], *special: str, size: int, cut: pre_tokenizers.PreTokenizer = BYTE_LEVEL
) -> Tokenizer:
    """A tokenizer of `size` tokens, of which the first are special; `cut` divides texts into words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
