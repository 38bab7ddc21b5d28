"""Every field of adapter_config.json is read, fixed or unused, and PEFT itself says that the table is right."""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from mplug_lora.checking import Layers, _refuse_another_base, adapted, named_base  # noqa: E402
from mplug_lora.fields import FIELDS, FILE, WEIGHTS  # noqa: E402
from mplug_lora.matching import of_pattern  # noqa: E402
from peft.tuners.tuners_utils import check_target_module_exists  # noqa: E402
from peft.utils.other import get_pattern_key  # noqa: E402
from peft_models import Pair, llama, run_of  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from mplug.errors import UsageError  # noqa: E402
from mplug.model.build import build_model  # noqa: E402
from mplug.model.model import Model  # noqa: E402
from mplug_pretrained.adapter_files import refuse_other_adapters  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft", "ignore::RuntimeWarning")
OLDER = {"enable_lora", "merge_weights"}
"""Fields of PEFT before version 0.3."""
MODULES = ["q_proj", "v_proj", "up_proj"]
TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))


def default_of(field: Any) -> Any:
    if field.name == "peft_type":
        return str(peft.LoraConfig().peft_type.value)  # LoraConfig sets it
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return dataclasses.asdict(made) if dataclasses.is_dataclass(made) else made
    return field.default


def test_the_table_has_every_field_of_peft_with_its_default() -> None:
    theirs = {field.name: default_of(field) for field in dataclasses.fields(peft.LoraConfig)}
    assert theirs.keys() == FIELDS.keys() - OLDER
    assert {name: (type(one), one) for name, one in theirs.items()} == {
        name: (type(row.default), row.default) for name, row in FIELDS.items() if name not in OLDER
    }
    assert all(row.reason for row in FIELDS.values())


def test_the_docs_name_every_field() -> None:
    page = (Path(__file__).parents[4] / "docs" / "adapters.md").read_text()
    assert [name for name in FIELDS if f"`{name}`" not in page] == []


class Made(Pair):
    """A pair of a base model and adapters in fp32, and the model of a run that begins with both."""

    def __init__(self, folder: Path) -> None:
        super().__init__("llama q v", folder, torch.float32, rank=4)  # PEFT's orthogonal values need an even rank
        self.run, self.expected = build_model(run_of(self.settings)), self.logits_of_peft(self.adapters)

    def changed(self, folder: Path, fields: dict[str, Any], without: tuple[str, ...] = ()) -> Path:
        """A copy of the adapters with these fields, and without others."""
        shutil.copytree(self.adapters, folder)
        config = {**json.loads((folder / FILE).read_text()), **fields}
        (folder / FILE).write_text(json.dumps({name: one for name, one in config.items() if name not in without}))
        return folder

    def logits_of_peft(self, folder: Path) -> torch.Tensor:
        base = transformers.AutoModelForCausalLM.from_pretrained(self.base)
        with torch.no_grad():
            found: torch.Tensor = peft.PeftModel.from_pretrained(base, folder)(TOKENS).logits
            return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def refuse(model: Model, folder: Path) -> None:
    assert model.adapters is not None
    kept = model.adapters
    model.adapters = replace(kept, path=folder)
    try:
        refuse_other_adapters(model)
    finally:
        model.adapters = kept


UNUSED: dict[str, Any] = {
    "lora_dropout": 0.3,
    "fan_in_fan_out": True,
    "inference_mode": False,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
    "peft_version": "0.11.0",
    "runtime_config": {"ephemeral_gpu_offload": True},
    "megatron_core": "other.core",
    "qalora_group_size": 32,
    "loftq_config": {"loftq_bits": 8},
    "eva_config": {"rho": 1.5},
    "corda_config": {"cache_file": "x"},
    "lora_ga_config": {"direction": "ArBr"},
    "ensure_weight_tying": True,
    "merge_weights": True,
}


WAYS_TO_BEGIN = [("init_lora_weights", value) for value in (False, "gaussian", "orthogonal", "eva")]


def test_every_unused_field_has_a_case() -> None:
    assert UNUSED.keys() == {name for name, row in FIELDS.items() if row.rule == "unused"}


@pytest.mark.parametrize(("name", "value"), [*UNUSED.items(), *WAYS_TO_BEGIN], ids=str)
def test_an_unused_field_or_a_way_to_begin_changes_nothing_in_peft_and_is_accepted(
    made: Made, name: str, value: Any, tmp_path: Path
) -> None:
    folder = made.changed(tmp_path / "changed", {name: value})
    assert torch.equal(made.logits_of_peft(folder), made.expected)
    refuse(made.run, folder)


BEGIN = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica")
REFUSED: list[tuple[str, Any]] = [
    ("peft_type", "LOHA"),
    ("task_type", "SEQ_CLS"),
    *(("bias", value) for value in ("lora_only", "all")),
    *(("lora_bias", value) for value in (True, 0)),
    ("modules_to_save", ["lm_head"]),
    ("trainable_token_indices", [1, 2]),
    *(("init_lora_weights", value) for value in BEGIN),
    ("layer_replication", [[0, 2], [1, 2]]),
    ("alora_invocation_tokens", [3, 4]),
    ("use_qalora", True),
    ("velora_config", {"num_groups": 4}),
    ("monteclora_config", {"num_samples": 2}),
    ("use_bdlora", {"nblocks": 2}),
    ("arrow_config", {"top_k": 1}),
    ("kasa_config", {}),
    ("megatron_config", {"tensor_model_parallel_size": 1}),
    ("enable_lora", [True, False, True]),
]


def test_every_fixed_field_has_a_case() -> None:
    assert {name for name, _ in REFUSED} == {name for name, row in FIELDS.items() if row.rule == "fixed"}


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_another_value_of_a_fixed_field_is_refused_with_the_field_the_value_and_a_remedy(
    made: Made, name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        refuse(made.run, made.changed(tmp_path / "changed", {name: value}))
    said = str(caught.value)
    assert f"have {name}={value!r} in {FILE}, which mplug does not support: " in said
    assert "; use adapters with " in said or "; convert them with PEFT" in said


@pytest.mark.parametrize("value", ["pissa", "olora"])
def test_peft_changes_the_base_model_for_the_refused_ways_to_begin(made: Made, value: str, tmp_path: Path) -> None:
    found = made.logits_of_peft(made.changed(tmp_path / "changed", {"init_lora_weights": value}))
    assert (found - made.expected).abs().max() > 1e-2


READ: list[tuple[dict[str, Any], str]] = [
    ({"r": 2}, "r=2 in adapter_config.json, and the run has 4; use the settings of the folder (adapters.lora.rank"),
    ({"r": True}, "have r=True"),
    ({"r": None}, "have r=None"),
    ({"lora_alpha": 8}, "the run has 5; use the settings of the folder (adapters.lora.alpha)"),
    ({"use_rslora": False}, "and the run has True; use the settings of the folder (adapters.lora.rank_stabilized)"),
    ({"use_dora": True}, "and the run has False; use the settings of the folder (adapters.lora.dora)"),
    ({"use_dora": "no"}, "have use_dora='no'"),
    ({"rank_pattern": {"v_proj": 2}}, "have r=2 of 'model.layers.0.self_attn.v_proj' (rank_pattern)"),
    ({"alpha_pattern": {r"layers\.1\..*": 6}}, "have lora_alpha=6 of 'model.layers.1.mlp.up_proj' (alpha_pattern)"),
    ({"rank_pattern": {"(": 2}}, "have the pattern '(.*\\\\.)?(()$' in rank_pattern"),
    ({"rank_pattern": [2]}, "have rank_pattern=[2] in adapter_config.json, which is no mapping"),
    ({"target_modules": ["q_proj"]}, "adapter_model.safetensors has tensors for 'model.layers.0.mlp.up_proj', and"),
    ({"target_modules": [*MODULES, "lm_head"]}, "PEFT adapts 'lm_head', and adapter_model.safetensors has no tensors"),
    ({"target_modules": [*MODULES, "embed_tokens"]}, "PEFT adapts 'model.embed_tokens', and adapter_model"),
    ({"target_modules": "all-linear"}, "PEFT adapts 'model.layers.0.mlp.down_proj', and adapter_model.safetensors has"),
    ({"target_modules": None}, "have target_modules=None in adapter_config.json, for which each version of PEFT"),
    ({"target_modules": 3}, "have target_modules=3 in adapter_config.json, which is neither a text nor a list"),
    ({"target_modules": "q_proj("}, "have the pattern 'q_proj(' in target_modules"),
    ({"exclude_modules": r".*layers\.1\.mlp.*"}, "has tensors for 'model.layers.1.mlp.up_proj', and"),
    ({"layers_to_transform": [0]}, "has tensors for 'model.layers.1.mlp.up_proj', and"),
    ({"layers_to_transform": ["0"]}, "have layers_to_transform=['0'] in adapter_config.json, which is no list of"),
    ({"layers_to_transform": [0, 1], "layers_pattern": "h"}, "has tensors for 'model.layers.0.mlp.up_proj', and"),
    ({"layers_to_transform": [0, 1], "layers_pattern": "layers|h"}, "have layers_pattern='layers|h' in adapter_config"),
    ({"layers_to_transform": [0, 1], "layers_pattern": "(layers)"}, "with which PEFT fails; correct the file"),
    ({"target_parameters": ["gate_proj.weight"]}, "PEFT adapts 'model.layers.0.mlp.gate_proj', and adapter_model"),
    ({"target_parameters": "gate_proj.weight"}, "have target_parameters='gate_proj.weight' in adapter_config.json"),
    ({"base_model_name_or_path": "org/other"}, "were trained on the base model 'org/other' (base_model_name_or_path"),
    ({"revision": "v2"}, "base@v2' (base_model_name_or_path in adapter_config.json), and the run begins with"),
    ({"base_model_name_or_path": 3}, "have base_model_name_or_path=3 in adapter_config.json, which is no text"),
    ({"new_option": 0}, "have new_option=0 in adapter_config.json, a field that mplug does not know"),
]


@pytest.mark.parametrize(("fields", "said"), READ, ids=str)
def test_what_the_run_does_not_compute_is_refused(
    made: Made, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        refuse(made.run, made.changed(tmp_path / "changed", fields))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"q_proj": 5}},
        {"rank_pattern": None, "alpha_pattern": None, "loftq_config": None, "use_dora": None},
        {"target_modules": r".*\.(q_proj|v_proj|up_proj)"},
        {"target_modules": [*MODULES, "k_proj"], "exclude_modules": ["k_proj"]},
        {"layers_to_transform": [0, 1, 7], "layers_pattern": ["h", "layers"]},
        {"layers_to_transform": []},
        {"target_modules": ["q_proj", "v_proj"], "target_parameters": ["mlp.up_proj.weight"]},
        {"base_model_name_or_path": None, "revision": None},
        {"revision": "main", "new_option": None},
        {"lora_alpha": 5.0},
    ],
    ids=str,
)
def test_another_way_to_say_what_the_run_computes_is_accepted_and_is_the_same_in_peft(
    made: Made, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = made.changed(tmp_path / "changed", fields)
    refuse(made.run, folder)
    theirs = {name: one for name, one in fields.items() if one is not None}  # PEFT fails for a pattern that is null
    found = made.logits_of_peft(made.changed(tmp_path / "theirs", theirs))
    assert (found - made.expected).abs().max() < 1e-5


def test_a_folder_without_peft_type_or_with_absent_fields(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="have no peft_type in adapter_config"):
        refuse(made.run, made.changed(tmp_path / "one", {}, ("peft_type",)))
    with pytest.raises(UsageError, match="have r=8 in adapter_config"):
        refuse(made.run, made.changed(tmp_path / "two", {}, ("r",)))
    kept = ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "base_model_name_or_path")
    refuse(made.run, made.changed(tmp_path / "three", {}, tuple(FIELDS.keys() - {*kept})))


def renamed(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def tensors_of(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return apply


PLACE = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (tensors_of(lambda found: found.pop(PLACE.format("B"))), f"they lack '{PLACE.format('B')}'"),
        (
            tensors_of(lambda found: found.update({PLACE.format("C"): torch.zeros(2)})),
            f"the run has no place for '{PLACE.format('C')}'",
        ),
        (renamed, r"has its tensors in 'adapter_model\.bin', a pickle.*; save the adapters with"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"has a adapter_config\.json and no adapter_model\.safetensors"),
    ],
)
def test_a_folder_with_other_tensors_a_pickle_or_none_is_refused(
    made: Made, damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    folder = made.changed(tmp_path / "changed", {})
    damage(folder)
    with pytest.raises(UsageError, match=said):
        refuse(made.run, folder)


def test_adapters_of_more_layers_than_the_run_has_are_refused(made: Made) -> None:
    settings = {**made.settings, "adapters.lora.targets": ["q_proj", "v_proj"]}
    with pytest.raises(UsageError, match=r"'model\.layers\.0\.mlp\.up_proj', and the run does not; add it to adapters"):
        refuse_other_adapters(build_model(run_of(settings)))


BASES = [
    ("org/model", None, "/data/org/model", None, True),
    ("org/model", None, "/data/model", None, False),
    ("org/model", None, "/data/model", "org/model", True),
    ("org/model", "v2", "/data/model", "org/model", False),
    ("org/model", "v2", "/data/model", "org/model@v2", True),
    ("org/model", None, "/c/models--org--model/snapshots/abc", None, True),
    ("org/model", "abc", "/c/models--org--model/snapshots/abc", None, True),
    ("org/model", "abd", "/c/models--org--model/snapshots/abc", None, False),
    ("other/model", None, "/c/models--org--model/snapshots/abc", None, False),
    ("/data/base", None, "/data/x/../base", None, True),
    ("/other/base", None, "/data/base", None, False),
    ("org/model", None, None, None, False),
    ("", None, "/data/base", None, True),
]


@pytest.mark.parametrize(("name", "revision", "path", "stated", "same"), BASES)
def test_the_base_model_is_compared_by_name_path_and_revision(
    name: str, revision: str | None, path: str | None, stated: str | None, same: bool
) -> None:
    refused = pytest.raises(ValueError, match=f"set adapters.lora.base='{named_base(name, revision)}'")
    with nullcontext() if same else refused:
        _refuse_another_base({"base_model_name_or_path": name, "revision": revision}, path, stated)


def drawn(generator: random.Random) -> dict[str, Any]:
    """Fields that choose layers, as PEFT allows them together."""
    words = ["q_proj", "v_proj", "self_attn.o_proj", "mlp.down_proj", "model.layers.1.mlp.up_proj", "lm_head", "proj"]
    regexes = [r".*\.(q|k)_proj", r"model\.layers\.1\..*_proj", "q_proj", r".*self_attn.*", "lm_head"]
    fields: dict[str, Any] = {"target_modules": generator.sample(words, generator.randint(1, 4))}
    if generator.random() < 0.3:
        fields["target_modules"] = generator.choice(regexes)
    elif generator.random() < 0.6:
        fields["layers_to_transform"] = generator.choice([0, 1, [0], [1, 3], [], [0, 1]])
        fields["layers_pattern"] = generator.choice([None, "layers", ["h", "layers"], "h", [], "model.layers"])
        if fields["layers_to_transform"] == []:
            fields["layers_pattern"] = None
    if generator.random() < 0.5:
        fields["exclude_modules"] = generator.choice([regexes[0], [words[1]], words[2:5], [], "", r".*\.1\..*"])
    return fields


def test_the_layers_of_every_choice_are_those_that_peft_adapts() -> None:
    names = [name for name, _ in llama().named_modules() if name]
    layers = Layers(frozenset(names), frozenset(), frozenset(), frozenset())
    generator, sizes = random.Random(11), set()
    for _ in range(400):
        fields = drawn(generator)
        config = peft.LoraConfig(**fields)
        found = set(adapted(fields, layers))
        hits = {name: check_target_module_exists(config, name) for name in names}
        theirs = {name for name, hit in hits.items() if bool(hit) and "Excluded" not in type(hit).__name__}
        assert found == theirs, fields
        sizes.add(len(found))
    assert len(sizes) > 8


def test_ranks_of_patterns_are_those_of_peft() -> None:
    names = [name for name, _ in llama().named_modules() if name]
    patterns = {
        r"layers\.0\..*v_proj": 2,
        "q_proj": 3,
        "self_attn.k_proj": 5,
        "proj": 7,
        r"^model\.layers\.1\.mlp\..*": 9,
    }
    fields = {"r": 4, "rank_pattern": patterns}
    found = {name: of_pattern(fields, "rank_pattern", "r", name) for name in names}
    assert found == {name: patterns.get(get_pattern_key(patterns.keys(), name), 4) for name in names}
    assert len(set(found.values())) == 5
