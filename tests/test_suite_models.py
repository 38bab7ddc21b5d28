"""The suite of models: a sound third party's model passes it, and it catches what authors get wrong."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import yaml
from mplug_testing import Fault, ModelSuite

WHOLE_STREAM = "tp2 parallel.tp.sequence_parallel=false"
"""The layout of tensor parallelism that divides the sequence nowhere: its blocks do not say that they mix none."""
PEREGRINE = Path(__file__).parent / "third_party" / "nova-peregrine"


def suite(package: str = "nova-peregrine") -> Any:
    """The suite of the third party's own test module, for the package that is planted."""
    name = package.partition("-")[2]
    path = PEREGRINE.with_name(package) / "tests" / f"test_{name}.py"
    spec = importlib.util.spec_from_file_location(f"tests_of_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, f"Test{name.capitalize()}")()


@pytest.mark.wide("suites")
def test_the_package_as_it_is_passes_its_own_tests(own_tests: Callable[..., str]) -> None:
    told = own_tests("nova-peregrine", "-rA").splitlines()
    one, tied = "TestPeregrine", "TestPeregrineWithTiedEmbeddingsAndOneKVHead"
    passed = [(one, "pp2"), (one, "dp2"), (one, "dp2pp2"), (tied, WHOLE_STREAM)]
    for suite_of, layout in passed:
        name = f"{suite_of}::test_a_layout_gives_the_run_of_one_process[{layout}]"
        assert any(line.startswith("PASSED") and line.endswith(name) for line in told), name
    skipped = [line for line in told if line.startswith("SKIPPED")]
    undeclared = "(ParallelBlock) and 'readout' (Readout) declare no mixing"  # it was written before declarations
    expected = (
        "is refused",
        undeclared,
        "does not state that its steps can be replayed",
        "has no external names",
        "is sampled from without a cache",
    )
    assert all(any(words in line for words in expected) for line in skipped), skipped


def test_it_trains_by_its_name(
    plant: Callable[..., None], cli: Callable[..., Any], tmp_path: Path, text_file: Path
) -> None:
    plant("nova-peregrine")
    settings = (
        "parallel.tp.sequence_parallel=false",
        "trainer.steps=2",
        "trainer.seq_length=32",
        "trainer.eval_every=0",
        "trainer.device=cpu",
    )
    settings += ("trainer.global_batch_size=2", f"data.path={text_file}")
    options = [word for setting in settings for word in ("--set", setting)]
    finished = cli("train", "--model", "peregrine", "--preset", "nano", "--parallel", "tp2", *options, path=sys.path[0])
    assert finished.returncode == 0, finished.stderr
    assert "run runs/peregrine-" in finished.stdout
    assert "done in" in finished.stdout
    config = yaml.safe_load(next(tmp_path.glob("runs/*/config.yaml")).read_text())
    assert config["model"]["num_layers"] == 4  # the preset's


# Planted faults.


@dataclass(frozen=True)
class Planted:
    """`old` in the package's source becomes `new`; the suite's `test` (of a layout) must say `words`."""

    old: str
    new: str
    test: str
    words: str
    layout: str | None = None
    package: str = "nova-peregrine"


ON_META, COVERED = "test_it_is_built_on_the_meta_device", "test_its_plan_covers_exactly_its_parameters"
FITTING, FLOPS = "test_its_units_fit_together", "test_its_flops_are_those_of_its_matrix_products"
SUM, PARITY = "test_its_loss_is_a_sum_with_a_count", "test_a_layout_gives_the_run_of_one_process"
TABLE = "self.embedding = Embedding(config.vocab_size, config.hidden_size)"

FAULTS = {
    "weights drawn by the constructor": Planted(
        TABLE,
        f"{TABLE}\n        torch.nn.init.normal_(torch.empty(3, 3, device='cpu'))",
        ON_META,
        "build_model draws random numbers from torch's generator; describe initial values in the plan",
    ),
    "a parameter made on the CPU": Planted(
        TABLE,
        f"with torch.device('cpu'):\n            {TABLE}",
        ON_META,
        "'embedding.weight' is on cpu",
    ),
    "a table computed by the constructor": Planted(
        'self.mlp = Activation("swiglu")',
        'self.mlp = Activation("swiglu")\n        self.turns = torch.arange(config.head_dim) / config.rope_theta',
        ON_META,
        "'layers.0.turns' is neither a parameter nor a buffer",
    ),
    "memory used by the constructor": Planted(
        TABLE,
        f"{TABLE}\n        torch.ones(config.vocab_size, 2000, device='cpu')",
        ON_META,
        "build_model allocates 2,072,000 bytes",
    ),
    "a buffer": Planted(
        TABLE,
        f"{TABLE}\n        self.register_buffer('seen', torch.zeros(3))",
        COVERED,
        "buffer 'seen' has no initial value",
    ),
    "a parameter that is frozen in secret": Planted(
        TABLE,
        f"{TABLE}\n        self.embedding.requires_grad_(False)",
        COVERED,
        "sets requires_grad=False on parameter 'embedding.weight', and its plan trains the parameter",
    ),
    "a frozen layer that keeps its input's gradient": Planted(
        "*qkv, gate_up = self.enter(h)",
        "h = h if self.enter.weight.requires_grad else h.detach()\n        *qkv, gate_up = self.enter(h)",
        "test_what_is_frozen_changes_no_other_gradient",
        "gradients must flow through frozen parameters to trained ones",
    ),
    "a parameter that the plan does not know": Planted(
        'parameters["layers.*.attn.k_norm"]',
        'parameters["layers.*.attn.q_norm"]',
        COVERED,
        "no pattern of the plan describes parameter 'layers.0.attn.k_norm'",
    ),
    "a pattern of a parameter that is gone": Planted(
        "    if config.qk_norm:",
        '    parameters["layers.*.enter.bias"] = Parameter(("mlp",), ONES)\n    if config.qk_norm:',
        COVERED,
        "no parameter matches the plan's pattern 'layers.*.enter.bias'",
    ),
    "a fused weight whose gate is forgotten in the plan": Planted(
        "keys_or_values, mlp, mlp)",
        "keys_or_values, mlp)",
        COVERED,
        "segments of parameter 'layers.0.enter.weight' do not sum to its shape (112, 32)",
    ),
    "a dimension too many": Planted(
        '"layers.*.norm.weight": Parameter(("embed",), ONES)',
        '"layers.*.norm.weight": Parameter(("embed", "embed"), ONES)',
        COVERED,
        "the plan gives parameter 'layers.0.norm.weight' 2 dimensions; it has shape (32,)",
    ),
    "embeddings tied in secret": Planted(
        "if config.tie_embeddings:\n            self",
        "if True:\n            self",
        COVERED,
        "embedding.weight and readout.project.weight are one parameter, and Plan.tied lacks them",
    ),
    "ties that the module does not have": Planted(
        "if config.tie_embeddings else ()",
        "if True else ()",
        COVERED,
        "Plan.tied ties embedding.weight and readout.project.weight, and they are different parameters",
    ),
    "an axis misspelt": Planted(
        '("batch", "sequence", "kv_heads")',
        '("batch", "sequence", "kv_head")',
        COVERED,
        "'layers.*.attn.k_norm' is broadcast over 'kv_head', and no parameter, entry or activation "
        "has this axis; did you mean 'kv_heads'?",
    ),
    "a parameter outside all units": Planted(
        TABLE,
        f"{TABLE}\n        self.scale = nn.Parameter(torch.ones(()))",
        COVERED,
        "parameter 'scale' is in no unit of the plan",
    ),
    "a unit that takes what no unit gives": Planted(
        '("hidden", "positions", "keys")',
        '("hidden", "position", "keys")',
        FITTING,
        "unit 'layers.0' takes 'position', which is neither an entry of the plan's context nor an output of an "
        "earlier unit; did you mean 'positions'?",
    ),
    "a unit named after no module": Planted(
        'Unit("readout", ("hidden", "labels")',
        'Unit("head", ("hidden", "labels")',
        FITTING,
        "unit 'head' of the plan is not a submodule of the model",
    ),
    "a unit whose method does not exist": Planted(
        'method="logits"',
        'method="predict"',
        FITTING,
        "unit 'readout' of the plan has no method 'predict'",
    ),
    "a loss without its count": Planted(
        '("loss", "num_targets"))',
        '("loss",))',
        FITTING,
        "the last unit, 'readout', returns loss; it must return loss and num_targets",
    ),
    "a preset with a field that does not exist": Planted(
        '"vocab_size": 256,',
        '"vocabulary_size": 256,',
        "test_its_presets_are_valid",
        "a run with the preset 'nano' is refused: model.vocabulary_size (preset nano): unknown field",
    ),
    "activations whose axes are swapped": Planted(
        '"hidden": ("batch", "sequence", "embed")',
        '"hidden": ("sequence", "batch", "embed")',
        "test_the_plan_names_the_axes_of_all_that_flows",
        "the axis 'sequence' has length 4 in 'hidden' of shape (4, 16, 32), and length 16 in 'tokens'",
    ),
    "dropout by torch's generator": Planted(
        "return x + y",
        "return x + torch.dropout(y, 0.1, self.training)",
        "test_a_seed_gives_one_model_and_one_loss",
        "the loss of one micro batch depends on torch's generator",
    ),
    "weights that all begin alike": Planted(
        'weight = Init("normal", std=config.init_std)',
        'weight = ONES\n    config = config.model_copy(update={"init_std": 0.0})',
        "test_a_seed_gives_one_model_and_one_loss",
        "no parameter has random initial values (Init)",
    ),
    "a mean for a sum": Planted(
        "return loss\n",
        "return loss[0] / loss[1], loss[1]\n",
        SUM,
        "the loss must be a sum over targets, not a mean",
    ),
    "ignored labels that count": Planted(
        "return loss\n",
        "return loss[0], torch.tensor(labels.numel())\n",
        SUM,
        "the loss counts 64 targets in a micro batch of 58; count every label except -100",
    ),
    "ignored labels that contribute": Planted(
        "self.loss(h, self.project, labels)",
        "(self.loss(h, self.project, labels.clamp(min=0))[0], (labels >= 0).sum())",
        SUM,
        "ignored labels change the loss",
    ),
    "a layer cut off from the loss": Planted(
        "self.enter(h)",
        "self.enter(h.detach())",
        "test_every_trained_parameter_gets_a_gradient",
        "parameter 'layers.0.norm.weight' gets no gradient",
    ),
    "something kept of a micro batch": Planted(
        "h, _ = self.norm(x)\n        loss:",
        "h, _ = self.norm(x)\n        h, self.seen = h - getattr(self, 'seen', 0), h.detach().mean(1)[:, None]\n"
        "        loss:",
        "test_gradients_of_two_micro_batches_add_up_in_the_sinks",
        "does the model keep state of one micro batch for the next?",
    ),
    "dropout in evaluation": Planted(
        "return x + y",
        "return x + torch.dropout(y, 0.1, True)",
        "test_evaluation_draws_no_random_numbers",
        "in evaluation the loss of one micro batch depends on torch's generator",
    ),
    "logits without the last norm": Planted(
        "h, _ = self.norm(x)\n        logits: Tensor = self.project(h)",
        "logits: Tensor = self.project(x)",
        "test_the_loss_is_the_cross_entropy_of_the_logits",
        "the units of inference must compute the same function as those of training",
    ),
    "a block that looks ahead": Planted(
        "h, x = self.norm(x)",
        "h, x = self.norm(x)\n        h = h + h.roll(-1, dims=1)",
        "test_a_later_token_changes_no_earlier_logit",
        "change the logits of position 5, so the model is not causal",
    ),
    "FLOPs without the readout": Planted(
        "(config.num_layers * (enter + leave) + config.vocab_size)",
        "config.num_layers * (enter + leave)",
        FLOPS,
        "the plan states 96,768 FLOPs per token, and the products with weights need 146,496",
    ),
    "attention counted twice": Planted(
        "6 * config.num_layers * queries)",
        "12 * config.num_layers * queries)",
        FLOPS,
        "the plan states 1,152 FLOPs per squared length, and causal attention, counted once, needs 576",
    ),
    "a QK-norm whose gradient is not summed over heads": Planted(
        'ONES, over=("batch", "sequence", "heads"))',
        "ONES)",
        COVERED,
        "'layers.0.attn.q_norm' is broadcast over batch and sequence; add heads to its `over`",
    ),
    "fused parts in another order than the plan's": Planted(
        "(heads, keys_or_values, keys_or_values, mlp, mlp)",
        "(mlp, mlp, heads, keys_or_values, keys_or_values)",
        PARITY,
        f"the run under layout '{WHOLE_STREAM}' differs from one process: the loss of step 1",
        layout=WHOLE_STREAM,
    ),
    "widths of the whole model on every rank": Planted(
        "(self.query_width + self.mlp_width) // self.leave.weight.shape[1]",
        "1",
        PARITY,
        f"the run under layout '{WHOLE_STREAM}' fails: rank",
        layout=WHOLE_STREAM,
    ),
    "numbers that depend on which samples are together": Planted(
        "h, x = self.norm(x)",
        "h, x = self.norm(x - x.mean(dim=0))",
        SUM,
        "the loss must be a sum over targets, not a mean, and no sample may change the loss of another",
    ),
    "positions that are ignored": Planted(
        "q, k, v, positions, keys, document_lengths",
        "q, k, v, torch.zeros_like(positions), keys, document_lengths",
        "test_it_reads_positions_as_it_declares",
        "units of the plan take 'positions', and the losses do not depend on them",
    ),
    "positions that do not begin with the document": Planted(
        "q, k, v, positions, keys, document_lengths",
        "q, k, v, positions.square(), keys, document_lengths",
        "test_it_reads_positions_as_it_declares",
        "the suite declares positions = 'relative', and positions that begin at 1 instead of 0 change the losses",
    ),
    "documents of a packed sample that are ignored": Planted(
        "positions, keys, document_lengths).flatten(-2)",
        "positions, keys).flatten(-2)",
        "test_documents_of_a_packed_sample_are_apart",
        "no token may read another document: pass 'document_lengths' to the attention",
    ),
    "an MLP that reads the residual stream": Planted(
        "mixed = self",
        "gate_up = self.enter(x).split(self._widths(), dim=-1)[-1]\n        mixed = self",
        "test_it_computes_what_its_reference_computes",
        "its logits differ from those of the suite's reference",
    ),
    "a recurrent state that carries no gradient": Planted(
        "state = a * state + (1 - a) * v",
        "state = a * state.detach() + (1 - a) * v",
        "test_its_gradients_are_differences_of_its_loss",
        "is not the derivative of the loss: along a direction the loss changes by",
        package="nova-lento",
    ),
    "a field that is ignored": Planted(
        "theta=config.rope_theta",
        "theta=10000.0",
        "test_every_field_of_its_config_has_an_effect",
        "the field 'rope_theta' of 'peregrine' has no effect: with 20000.0, 5000.0, 0.5 and 0.25 the suite sees what "
        "it sees with 10000.0",
    ),
    "a unit that reaches for the weights of another": Planted(
        "self.readout = Readout(config)",
        "self.readout = Readout(config)\n"
        "        self.readout.project.product = lambda h: nn.functional.linear(h, self.embedding.weight)",
        PARITY,
        "the run under layout 'pp2' fails: rank 1 failed",
        layout="pp2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches(fault: str, plant: Callable[..., None]) -> None:
    planted = FAULTS[fault]
    plant(planted.package, planted.old, planted.new)
    test = getattr(suite(planted.package), planted.test)
    with pytest.raises(Fault) as caught:
        test(*([planted.layout] if planted.layout else []))
    assert planted.words in str(caught.value)


# Refusals.


def test_a_layout_that_the_author_names_may_not_be_refused(plant: Callable[..., None]) -> None:
    """One that the suite tries on its own account may."""
    plant("nova-peregrine")
    tried = suite()
    with pytest.raises(SkipTest, match=r"^layout 'tp3' is refused"):
        tried.test_a_layout_gives_the_run_of_one_process("tp3")
    type(tried).layouts = ("tp3",)
    with pytest.raises(
        Fault, match=r"^layout 'tp3' is refused; set 'settings' or 'layouts' that are not refused: .*tp=3"
    ):
        tried.test_a_layout_gives_the_run_of_one_process("tp3")


def test_settings_that_are_refused_in_one_process_fail(plant: Callable[..., None]) -> None:
    plant("nova-peregrine")
    tried = suite()
    type(tried).settings = {**tried.settings, "model.num_kv_heads": 3}
    with pytest.raises(Fault, match=r"^the run is refused in one process.*num_kv_heads=3 does not divide"):
        tried.test_a_layout_gives_the_run_of_one_process("")


class Unimportable(ModelSuite):
    plugin = "peregrine"


def test_a_plugin_that_does_not_import_is_a_fault_and_no_refusal(plant: Callable[..., None]) -> None:
    plant("nova-peregrine", "from pydantic import", "import no_such_module\nfrom pydantic import")
    with pytest.raises(Fault, match=r"(?s)^layout 'tp2': .*cannot be imported.*No module named 'no_such_module'"):
        Unimportable().test_a_layout_gives_the_run_of_one_process("tp2")
