"""Folders that the transformers library writes: what is read computes the same, and what is exported equals them."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli

transformers = pytest.importorskip("transformers")

from exported_folders import ONE_STEP, assert_exported_as_it_was  # noqa: E402
from folder_claims import assert_each_rank_reads_its_boxes  # noqa: E402
from published import edited, loaded, save  # noqa: E402
from t5_models import SPANS, TINY, V, library_of, micro_batch, padded  # noqa: E402

DATA: dict[str, Any] = {**SPANS, "data.of": {"name": "mock", "vocab_size": V - 9}, "trainer.seq_length": 14}
GIVEN = {key.replace(".", "__"): value for key, value in DATA.items()}
KINDS = {"v1.1": TINY, "first": {**TINY, "feed_forward_proj": "relu", "tie_word_embeddings": True}}


class Folders(dict[str, tuple[Path, Any]]):
    """By kind, a folder in three files and the library's model that wrote it.

    The released folders of v1.1 say `tie_word_embeddings: false`, which the library turns into true when it saves.
    """

    def __init__(self, parent: Path) -> None:
        super().__init__()
        self.parent = parent

    def __missing__(self, kind: str) -> tuple[Path, Any]:
        folder = self.parent / kind
        folder.mkdir()
        library = save(library_of({**KINDS[kind], "num_heads": 4}).float(), folder)
        if kind == "v1.1":
            edited(folder, tie_word_embeddings=False)
        self[kind] = folder, library.eval()
        return self[kind]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("t5"))


def logits_of(library: Any) -> torch.Tensor:
    batch = micro_batch()
    tokens, present = padded(batch)
    with torch.no_grad():
        found: torch.Tensor = library(
            input_ids=tokens, attention_mask=present, decoder_input_ids=batch["tokens"]
        ).logits
    return found


@pytest.mark.wide("families", quick=["first"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_librarys_logits_and_each_rank_reads_its_boxes(kind: str, made: Folders) -> None:
    folder, library = made[kind]
    _, model = loaded(folder, **GIVEN)
    expected = logits_of(library)
    with torch.no_grad():
        found = model.logits(micro_batch())
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
    assert_each_rank_reads_its_boxes(folder, model, GIVEN)


@pytest.mark.wide("families", quick=["v1.1"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_a_folder_is_exported_as_that_folder(kind: str, made: Folders, tmp_path: Path, cli_here: Cli) -> None:
    folder, library = made[kind]
    assert_exported_as_it_was(folder, {**DATA, **ONE_STEP}, tmp_path, cli_here)
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "exported", **how)
    assert torch.equal(logits_of(again.eval()), logits_of(library))


def test_peft_computes_with_our_adapters_what_the_run_computes(made: Folders, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from peft_models import loaded_here, run_of, write_adapters

    from mplug.model.build import build_model

    folder, adapters = made["v1.1"][0], tmp_path / "adapters"
    settings = {"checkpoint.pretrained.path": str(folder), "adapters.lora.rank": 2, **DATA}
    number = write_adapters(build_model(run_of(settings)), adapters, torch.float32)
    assert number == 2 * (3 * 7 + 2 * 11)  # q, k, v, o, wi_0, wi_1, wo; and q, k, v, o of the decoder
    assert json.loads((adapters / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    _, model = loaded_here({**settings, "adapters.lora.path": str(adapters)}, folder)
    base = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(base, adapters).eval()
    expected, plain = logits_of(theirs), logits_of(made["v1.1"][1])
    model.module.eval()
    with torch.no_grad():
        found = model.logits(micro_batch())
    assert (expected - plain).abs().max() > 0.01 * expected.abs().max()
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.wide("families")
def test_a_run_exports_its_adapters_and_the_merged_model(made: Folders, tmp_path: Path, cli_here: Cli) -> None:
    peft = pytest.importorskip("peft")
    from peft_models import require_adapters_return, run_of, write_adapters

    from mplug.model.build import build_model

    folder, adapters = made["v1.1"][0], tmp_path / "adapters"
    settings = {"checkpoint.pretrained.path": str(folder), "adapters.lora.rank": 2, **DATA}
    write_adapters(build_model(run_of(settings)), adapters, torch.float32)
    require_adapters_return({**settings, "adapters.lora.path": str(adapters)}, adapters, tmp_path, cli_here)
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    merged, base = (
        transformers.T5ForConditionalGeneration.from_pretrained(one, **how) for one in (tmp_path / "merged", folder)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = logits_of(peft.PeftModel.from_pretrained(base, adapters).eval())
    assert (logits_of(merged.eval()) - expected).abs().max() < 2e-5 * expected.abs().max()
