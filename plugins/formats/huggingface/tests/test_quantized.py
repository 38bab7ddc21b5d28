"""Quantised exports: what transformers loads with torchao computes nearly what the plain export does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli

transformers = pytest.importorskip("transformers")

ERRORS = {"int8": 0.03, "int4": 0.3}
"""The largest relative error of logits."""
SIZES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 2, "vocab_size": 300}


def logits(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model, model(torch.arange(40)[None]).logits


def trained(cli: Cli, **more: int) -> None:
    sizes = [word for name, value in {**SIZES, **more}.items() for word in ("--set", f"model.{name}={value}")]
    words = "train --name a --model llama --data mock --attention reference --set trainer.seq_length=16"
    result = cli(*words.split(), *sizes, "--set", "trainer.steps=1", "--set", "trainer.eval_every=0")
    assert result.returncode == 0, result.stderr


@pytest.mark.wide("families")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_transformers_loads_a_quantised_export(name: str, cli_here: Cli, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    trained(cli_here)
    for folder, words in (("plain", ()), ("small", ("--quantize", name))):
        cli_here("checkpoint", "export", "--to", "huggingface", folder, *words)
    _, plain = logits(tmp_path / "plain")
    model, found = logits(tmp_path / "small")
    error = float((found - plain).abs().max() / plain.abs().max())
    assert 0 < error < ERRORS[name]
    weight = model.model.layers[0].mlp.up_proj.weight
    assert type(weight).__module__.startswith("torchao")
    assert "quantization_config" in json.loads((tmp_path / "small/config.json").read_text())
    assert not list(tmp_path.glob(".plain-*"))


def test_what_is_not_quantised_is_refused_with_the_reason(cli_here: Cli) -> None:
    trained(cli_here, hidden_size=40)
    for words, sentence in (
        ("peft --quantize int8", "the format 'peft' writes no quantised weights"),
        ("huggingface --quantize int3", "the format 'huggingface' writes int8 and int4"),
        ("huggingface --quantize int4", "the 40 columns of 'model.layers.0."),
    ):
        if "int4" in words:
            pytest.importorskip("torchao")
        result = cli_here("checkpoint", "export", "a", "--to", *words.split())
        assert result.returncode == 2
        assert sentence in result.stderr
