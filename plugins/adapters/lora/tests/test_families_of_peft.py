"""What mplug writes for PEFT: every family's adapters give PEFT's logits and gradients, in fp64 to 1e-10.

The references are PEFT and the transformers library, which load the folders that mplug writes.
"""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from library_models import wide  # noqa: E402
from mplug_lora.fields import FIELDS, FILE  # noqa: E402
from peft_models import exact, loaded_here, require_gradients_of_peft, run_of, write_adapters  # noqa: E402
from published import FAMILIES, save  # noqa: E402

from mplug.errors import UsageError  # noqa: E402
from mplug.model.build import build_model  # noqa: E402
from mplug_pretrained.adapter_files import adapters_of, refuse_other_adapters, unpublished  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning:peft", "ignore::RuntimeWarning:peft"
)
LINEAR, BOTH = ("linear",), ("linear", "experts")
ONE_LAYER = ("blocks.1.attn", "blocks.1.mlp.down")
EXPERTS = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {"targets": [*LINEAR]}) for family in FAMILIES},
    **{f"{one}, experts": (one, {"targets": [*BOTH]}) for one in EXPERTS},
    "one layer of experts": ("mixtral", {"targets": ["blocks.1.moe.experts.up", "blocks.2.moe.experts"]}),
    "one layer": ("qwen3", {"targets": [*ONE_LAYER], "rank_stabilized": True, "alpha": 2.5}),
    "dora": ("qwen3", {"targets": ["q_proj", "down_proj"], "dora": True, "alpha": 3}),
    "dora, gpt2": ("gpt2", {"targets": ["c_attn"], "dora": True}),
}
QUICK = ("mixtral, experts", "one layer")
BALANCED = ("mixtral", "qwen3-moe", "gpt-oss")
"""Families with a balancing loss, which the library adds on request only."""
KINDS = {"gemma3_text": "gemma3"}


def cases() -> list[Any]:
    return [one if one in QUICK else pytest.param(one, marks=pytest.mark.wide("families")) for one in CASES]


@pytest.mark.parametrize("case", cases())
def test_peft_computes_with_our_folder_what_the_run_computes(case: str, tmp_path: Path) -> None:
    family, own = CASES[case]
    library = save(FAMILIES[family](), tmp_path / "base", dtype=torch.float64)
    settings = {
        "checkpoint.pretrained.path": str(tmp_path / "base"),
        "adapters.lora.rank": 2,
        **{f"adapters.lora.{name}": value for name, value in own.items()},
        "trainer.precision": "fp64",
        "kernels.attention": "reference",
        **({"model.aux_loss_coefficient": 0.0} if family in BALANCED else {}),
    }
    model = build_model(run_of(settings))
    write_adapters(model, tmp_path / "adapters")
    _, model = loaded_here({**settings, "adapters.lora.path": str(tmp_path / "adapters")}, tmp_path / "base")
    module = KINDS.get(library.config.model_type, library.config.model_type)
    with wide(module):
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", **exact())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True)
    theirs = theirs.double()
    about = [str(one.message) for one in caught if re.search("adapter|target_|pattern|key", str(one.message))]
    assert about == []
    require_gradients_of_peft(model, theirs, module)


def test_the_written_fields_are_fields_of_peft_and_the_others_have_its_defaults(tmp_path: Path) -> None:
    save(FAMILIES["qwen3"](), tmp_path / "base")
    stated = {"adapters.lora.base": "org/model@v2"}
    for more, name, revision in (({}, str(tmp_path / "base"), None), (stated, "org/model", "v2")):
        model = build_model(
            run_of({"checkpoint.pretrained.path": str(tmp_path / "base"), "adapters.lora.rank": 2, **more})
        )
        written = dict(adapters_of(model).config)
        assert written.keys() <= FIELDS.keys()
        (tmp_path / FILE).write_text(json.dumps(written))
        theirs = peft.LoraConfig.from_pretrained(tmp_path).to_dict()
        assert {n: sorted(one) if isinstance(one, set) else one for n, one in theirs.items() if n in written} == written
        assert (theirs["base_model_name_or_path"], theirs["revision"]) == (name, revision)
        others = {n: one for n, one in theirs.items() if n not in written and n != "peft_version"}
        assert others == {n: FIELDS[n].default for n in others}


def test_a_folder_whose_dense_layers_peft_takes_for_experts_is_refused(tmp_path: Path) -> None:
    save(FAMILIES["deepseek-v3"](), tmp_path / "base")
    settings = {"checkpoint.pretrained.path": str(tmp_path / "base"), "adapters.lora.rank": 2}
    settings["adapters.lora.path"] = str(tmp_path / "adapters")
    model = build_model(run_of(settings))
    write_adapters(model, tmp_path / "adapters")
    refuse_other_adapters(model)
    config = dict(adapters_of(model).config)
    config["target_modules"] += [name.removesuffix(".weight") for name in config.pop("target_parameters")]
    (tmp_path / "adapters" / FILE).write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    found = {name for name, _ in peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters").named_modules()}
    assert "base_model.model.model.layers.0.mlp.gate_proj" in found
    assert "base_model.model.model.layers.0.mlp.gate_proj.lora_A" not in found
    with pytest.raises(UsageError, match=r"adapt 'model\.layers\.0\.mlp\.down_proj' by target_modules"):
        refuse_other_adapters(model)


@pytest.mark.parametrize(
    ("family", "own", "said"),
    [
        ("deepseek-v3", {"dropout": 0.1}, "PEFT takes 'model.layers.0.mlp.gate_proj' for a projection of experts"),
        ("qwen3-moe", {"dora": True}, "which excludes adapters.lora.dora; unset it, or leave the layer out of"),
        ("mixtral", {"targets": ["experts"], "experts": "shared"}, "PEFT has an A and a B for each expert, and"),
    ],
)
def test_what_peft_cannot_express_is_stated_before_the_run(
    family: str, own: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save(FAMILIES[family](), tmp_path / "base")
    settings = {f"adapters.lora.{name}": value for name, value in {"rank": 2, **own}.items()}
    settings["kernels.attention"] = "reference"
    model = build_model(run_of({"checkpoint.pretrained.path": str(tmp_path / "base"), **settings}))
    assert said in unpublished(model)
