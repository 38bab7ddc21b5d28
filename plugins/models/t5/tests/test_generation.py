"""Greedy texts are those of the transformers library, token by token, and the encoder runs once for each batch."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from asked_models import answers  # noqa: E402
from mplug_t5.blocks import EncoderEnd  # noqa: E402
from published import edited, save  # noqa: E402
from t5_models import TINY, V, library_of  # noqa: E402

START, END, TOKENS, FILE = 3, 1, 16, "prompts.txt"
PROMPTS = ("w5 w9 w11", "w7 w8 w9 w10 w11 w12 w13", "w2", "w5 w9 w11")
GIVEN = {**TINY, "num_heads": 4, "tie_word_embeddings": True, "decoder_start_token_id": START}


def with_tokenizer(folder: Path) -> None:
    """Give a folder a tokenizer of words, which ends each text as T5's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {f"w{number}": number for number in range(V) if number != END}
    tokenizer = Tokenizer(models.WordLevel({**words, "</s>": END}, unk_token="w0"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", END)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("t5")
    library = save(library_of(GIVEN), folder, dtype=torch.float64)
    with_tokenizer(folder)
    edited(folder, eos_token_id=None)  # no text ends early
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / FILE).write_text("\n".join(PROMPTS))
    return folder, library.eval()


def of_library(library: Any, prompt: str) -> str:
    """The words of the library's answer; the end token has no word."""
    inputs = torch.tensor([[*(int(word[1:]) for word in prompt.split()), END]])
    how = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": START}
    with torch.no_grad():
        tokens = library.generate(inputs, **how)[0, 1:].tolist()
    return " ".join(f"w{token}" for token in tokens if token != END)


def test_greedy_answers_are_those_of_the_library_and_the_encoder_runs_once(made: tuple[Path, Any]) -> None:
    folder, library = made
    expected = [of_library(library, prompt) for prompt in PROMPTS]
    assert len(set(expected)) == 3
    assert len(set(" ".join(expected).split())) >= 5
    with mock.patch.object(EncoderEnd, "forward", autospec=True, side_effect=EncoderEnd.forward) as encoder:
        assert answers(folder, TOKENS, file=FILE) == expected
        assert encoder.call_count == 1
        assert answers(folder, TOKENS, "--batch-size", "1", file=FILE) == expected
        assert encoder.call_count == 1 + len(PROMPTS)


@pytest.mark.wide("families")
@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(one, marks=pytest.mark.wide("layouts")) for one in ("pp2", "tp2pp2", "dp2"))]
)
def test_a_layout_writes_the_answers_of_one_process(layout: str, made: tuple[Path, Any]) -> None:
    folder, _ = made
    expected = answers(folder, TOKENS, file=FILE)
    assert answers(folder, TOKENS, "--parallel", layout, file=FILE) == expected
