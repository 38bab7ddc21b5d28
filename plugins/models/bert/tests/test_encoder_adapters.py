"""Adapters of encoders: PEFT computes with our folder what the run computes, and a run exports what it began with."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from beside_library import library_config  # noqa: E402
from encoder_models import CONFIGS, MASKED, TOKENS  # noqa: E402
from library_models import relative, wide  # noqa: E402
from peft_models import loaded_here, require_adapters_return, run_of, write_adapters  # noqa: E402
from published import logits, save  # noqa: E402

from mplug.model.build import build_model  # noqa: E402

ADAPTED = {"bert": 3 * 6, "roberta": 3 * 6, "modernbert": 4 * 4}
"""Layers of the library's models that have adapters: q, k, v, their output and both of the MLP, or the fused ones."""
WIDE = pytest.mark.wide("families")
OTHERS = [pytest.param(kind, marks=WIDE) for kind in CONFIGS if kind != "bert"]


def folder_of(kind: str, parent: Path) -> Path:
    """A folder of a random tiny model."""
    save(transformers.AutoModelForMaskedLM.from_config(library_config(CONFIGS[kind])), parent, dtype=torch.float64)
    return parent


def with_peft(base: Path, adapters: Path) -> Any:
    """The library's model with the adapters of a folder, in fp64."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, adapters).double().eval()


@pytest.mark.parametrize("kind", ["bert", *OTHERS])
def test_peft_computes_with_our_adapters_what_the_run_computes(kind: str, tmp_path: Path) -> None:
    base, adapters = folder_of(kind, tmp_path / "base"), tmp_path / "adapters"
    settings = {
        **MASKED,
        "checkpoint.pretrained.path": str(base),
        "adapters.lora.rank": 2,
        "trainer.precision": "fp64",
    }
    assert write_adapters(build_model(run_of(settings)), adapters) == 2 * ADAPTED[kind]
    _, model = loaded_here({**settings, "adapters.lora.path": str(adapters)}, base)
    with wide(kind), torch.no_grad():
        theirs = with_peft(base, adapters)
        expected, plain = theirs(TOKENS).logits, theirs.get_base_model()
        with theirs.disable_adapter():
            plain = theirs(TOKENS).logits
    assert relative(plain, expected) > 0.01
    assert relative(logits(model, TOKENS), expected) < 1e-10


def test_a_run_exports_its_adapters_and_the_merged_model(
    tmp_path: Path, cli_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapters = folder_of("bert", tmp_path / "base"), tmp_path / "adapters"
    settings = {**MASKED, "checkpoint.pretrained.path": str(base), "adapters.lora.rank": 2}
    write_adapters(build_model(run_of(settings)), adapters, torch.float32)
    require_adapters_return({**settings, "adapters.lora.path": str(adapters)}, adapters, tmp_path, cli_here)
    merged = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        assert relative(merged(TOKENS).logits, with_peft(base, adapters)(TOKENS).logits) < 1e-5
