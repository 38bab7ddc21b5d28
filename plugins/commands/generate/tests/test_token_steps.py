"""Steps of sampling with static caches: a recording gives the tokens of eager steps, and says why if there is none."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mplug_generate.command import Asked, command
from mplug_generate.pictures import Encoded
from mplug_generate.prompts import Prompt
from sampled import FAMILIES, PROMPTS, built, texts
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mplug.errors import RunError
from mplug.model.slots.selection import Selection
from mplug_compile.compilation import compiled_graphs
from mplug_nn.rotary import Turns
from mplug_nn.static_cache import static_keys
from mplug_nn.turning import Turning, table_of_rotations
from mplug_sampling import fast_steps, token_steps
from mplug_sampling.decoding import sample
from mplug_sampling.fast_steps import compiled_step
from mplug_sampling.sampling import Sampling
from mplug_sampling.token_steps import Replays, TokenSteps, replays_for
from mplug_testing.harness import TinySettings
from mplug_testing.recording import Operations

HOT = Sampling(2.0, top_k=100, top_p=0.9, seed=7)


LONGER = ("mixtral", "llama", "qwen", "gpt-oss")
SOME = [pytest.param(name, marks=pytest.mark.wide("families")) if name in LONGER else name for name in FAMILIES]
COMPILED = [name if name == "gemma" else pytest.param(name, marks=pytest.mark.wide("families")) for name in FAMILIES]
"""Gemma has blocks of two kinds."""


@pytest.mark.wide("families", quick=["deepseek"])
@pytest.mark.parametrize("family", SOME)
def test_a_replayed_step_gives_the_tokens_of_eager_steps(family: str) -> None:
    """Operations of a CPU are replayed as a graph replays kernels, also for a second batch, and past a window."""
    _, sampler = built(FAMILIES[family])
    assert sampler.growing == ""
    replays = Replays(Operations)
    for prompts in (PROMPTS[:3], PROMPTS[3:6]):
        found = texts(sampler, prompts, sampling=HOT, replays=replays)
        assert found == texts(sampler, prompts, sampling=HOT)
    assert replays.num_recorded == 1


def test_a_text_that_outgrows_its_cache_and_its_context_is_replayed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of 8, 16 and 24 rows beside those of windows; then the context of 20 positions is full."""
    monkeypatch.setattr(token_steps, "MULTIPLE", 8)
    monkeypatch.setattr(token_steps, "FIRST", 1)
    _, sampler = built(FAMILIES["gemma"])
    replays, prompts = Replays(Operations), [[5], [200, 7, 7]]
    found = texts(sampler, prompts, context=20, sampling=HOT, num_tokens=22, replays=replays)
    assert replays.num_recorded == 3
    sampler.growing = "the test says so"
    assert found == texts(sampler, prompts, context=20, sampling=HOT, num_tokens=22)


def test_a_short_batch_does_not_share_the_caches_of_a_long_one() -> None:
    _, sampler = built(FAMILIES["llama"])
    replays = Replays(Operations)
    for length, recorded in ((40, 1), (190, 2), (150, 2), (40, 3)):  # 64, 256, 192 and 64 positions
        texts(sampler, [[7] * length], context=256, num_tokens=5, replays=replays)
        assert replays.num_recorded == recorded


def test_the_next_step_begins_before_the_cpu_reads_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step more than the text has tokens after its first; none more if the text ends by its length."""
    _, sampler = built(FAMILIES["llama"])
    steps, advance = [], TokenSteps.advance
    monkeypatch.setattr(TokenSteps, "advance", lambda self, most: steps.append(len(found)) or advance(self, most))
    for ends_after, expected in ((3, [0, 1, 2]), (99, [0, 1, 2, 3])):
        steps.clear()
        found: list[int] = []

        def take(number: int, token: int, found: list[int] = found, ends_after: int = ends_after) -> bool:
            found.append(token)
            return len(found) == ends_after

        sample(sampler, [[1, 2]], [1], 5, 64, HOT, take)
        assert steps == expected


def test_a_step_that_makes_the_cpu_wait_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sampler = built(FAMILIES["llama"])
    choose = token_steps.choose
    monkeypatch.setattr(token_steps, "choose", lambda logits, *given: [choose(logits, *given), logits.max().item()][0])
    with pytest.raises(RunError, match=r"cannot be recorded .* the CPU reads a value .*; sample with --graphs never"):
        texts(sampler, PROMPTS[:1], replays=Replays(Operations))


class _Largest(TorchDispatchMode):
    """The size in bytes of the largest tensor that an operation returns in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        output = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        new = [one.untyped_storage().nbytes() for one in made if one.untyped_storage().data_ptr() not in given]
        self.nbytes = max(self.nbytes, *new, 0)
        return output


@pytest.mark.parametrize(("kernels", "numbers"), [("sdpa", 1), (None, 4)])
def test_a_step_copies_no_cache(kernels: str | None, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of a step has `numbers` for each row: a distance, or the scores of four heads.

    The keys of a layer are 16 numbers for each row.
    """
    monkeypatch.setattr(token_steps, "MULTIPLE", 4096)
    _, sampler = built({**FAMILIES["llama"], "kernels.default": kernels})
    step, seen = TokenSteps._step, list[int]()

    def measured(self: TokenSteps) -> None:
        with _Largest() as largest:
            step(self)
        seen.append(largest.nbytes)

    monkeypatch.setattr(TokenSteps, "_step", measured)
    texts(sampler, [[1, 2, 3]], num_tokens=4)
    assert seen == [numbers * 4096 * 8] * 3


def test_rows_of_a_static_cache_are_a_ring() -> None:
    """Newest positions 0, 2 and 6 in four rows, by hand."""
    keys = static_keys(torch.tensor([0, 2, 6]), 4)
    assert keys.distances.tolist() == [[0, 1, 1, 1], [-2, -1, 0, 1], [-2, -1, 0, -3]]
    assert keys.filled.tolist() == [1, 3, 4]
    assert keys.begins.tolist() == [0, 4, 8, 12]


# What is replayed.


def obstacles(settings: TinySettings) -> list[str]:
    run, sampler = built(settings, padded=False, graphs=True)
    run.device = "cuda"
    return fast_steps.obstacles(run, sampler)


@pytest.mark.parametrize("layout", ["", "dp2", "zero2"])
def test_one_process_and_ranks_that_divide_the_batch_replay_their_steps(layout: str) -> None:
    assert obstacles({**FAMILIES["llama"], "parallel.layout": layout}) == []


EAGER: dict[str, tuple[TinySettings, str]] = {
    "tp2": ({"parallel.layout": "tp2"}, r"the ranks of parallel/tp exchange activations \(tp=2\)"),
    "ep2": ({**FAMILIES["mixtral"], "parallel.layout": "ep2"}, r"parallel/ep exchange activations \(ep=2\)"),
    "chunks": (
        {"parallel.layout": "pp1", "parallel.pp.schedule": "zb-v", "model.num_layers": 4},
        "its caches grow, because the model is divided into the chunks of a pipeline",
    ),
    "flex": ({"kernels.attention": "flex"}, "its caches grow, because kernels/flex does not offer 'static keys'"),
}


@pytest.mark.parametrize("name", EAGER)
def test_other_runs_sample_eagerly_and_say_why(name: str) -> None:
    settings, sentence = EAGER[name]
    found = obstacles({**FAMILIES["llama"], **settings})
    assert any(re.search(sentence, one) for one in found), found


def test_a_default_kernel_whose_caches_would_grow_is_replaced_by_plain_torch() -> None:
    """A kernel that is named for attention stays (`EAGER`)."""
    _, sampler = built({**FAMILIES["llama"], "kernels.default": "flex"}, padded=False)
    assert sampler.growing == ""
    (message,) = sampler.replaced
    assert re.fullmatch(r"kernels/flex does not offer 'static keys' for .*; plain torch computes it", message)


def test_a_plugin_that_does_not_state_it_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from mplug_sdpa import SDPA

    monkeypatch.setattr(SDPA, "captures", None)
    assert "kernels/sdpa does not state that its part of a step can be replayed" in obstacles(FAMILIES["llama"])[0]
    assert obstacles({**FAMILIES["llama"], "kernels.default": "reference"}) == []


def test_without_the_setting_no_step_is_recorded_and_no_message_says_so() -> None:
    run, sampler = built(FAMILIES["llama"], graphs=True)
    assert replays_for(run, sampler)[1] == ["the run is on the CPU"]
    run, sampler = built(FAMILIES["llama"])
    replays, reasons = replays_for(run, sampler)
    assert (replays.make, reasons) == (None, [])
    for device in ("cpu", "cuda"):
        run.device = device
        sampler.offers_selected(run=run, model=sampler.model, selection=Selection())
        assert sampler.growing == ""


# Compiled steps.


@pytest.mark.wide("compile")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("family", COMPILED)
def test_a_compiled_step_gives_the_tokens_of_eager_steps(family: str) -> None:
    """One graph for each kind of unit: no step compiles again, also not those of a second batch."""
    run, sampler = built({**FAMILIES[family], "trainer.compile": "aot_eager"})
    compiled, reason = compiled_step(run, sampler)
    assert (list(compiled), reason) == (["embedding", "blocks.0", "blocks.1", "head"], "")
    kinds = 3 + (family in ("gemma", "gpt-oss", "deepseek"))  # these have blocks of two kinds
    before, replays = compiled_graphs(), Replays(compiled=compiled)
    for prompts in (PROMPTS[:3], PROMPTS[3:6]):
        found = texts(sampler, prompts, sampling=HOT, replays=replays)
        assert compiled_graphs() == before + kinds
        assert found == texts(sampler, prompts, sampling=HOT)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("turning", [1e4, Turns((1.0, 0.25), 1.5, False, frozenset())], ids=["plain", "scaled"])
def test_a_compiler_computes_plain_angles_of_a_token_where_they_are_used(turning: Turning, length: int) -> None:
    """Given frequencies would be a constant on the CPU, which a recorded step cannot copy to a GPU."""
    targets: list[str] = []

    def keep(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def table(positions: Tensor) -> Tensor:
        return table_of_rotations(positions, 4, turning, torch.float32)

    torch.compiler.reset()
    positions = torch.arange(5, 5 + length)[None]
    with torch.no_grad():
        found = torch.compile(table, backend=keep, fullgraph=True, dynamic=False)(positions)
    torch.testing.assert_close(found, table(positions))
    operators = {"mplug.rotations.default", "mplug.scaled_rotations.default"} & set(targets)
    own = "mplug.rotations.default" if isinstance(turning, float) else "mplug.scaled_rotations.default"
    assert operators == (set() if length == 1 and isinstance(turning, float) else {own})


@pytest.mark.wide("compile")
@pytest.mark.filterwarnings("ignore")
def test_a_step_that_inductor_compiles_gives_the_tokens_of_eager_steps() -> None:
    run, sampler = built({**FAMILIES["llama"], "trainer.compile": "inductor"})
    found = texts(sampler, PROMPTS[:3], sampling=HOT, replays=Replays(compiled=compiled_step(run, sampler)[0]))
    assert found == texts(sampler, PROMPTS[:3], sampling=HOT)


@pytest.mark.wide("compile")
@pytest.mark.filterwarnings("ignore")
def test_a_unit_with_hooks_stays_eager() -> None:
    run, sampler = built({**FAMILIES["llama"], "trainer.compile": "aot_eager"})
    calls: list[int] = []
    sampler.model.module.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: calls.append(1))
    compiled, _ = compiled_step(run, sampler)
    assert list(compiled) == ["embedding", "blocks.0", "head"]
    texts(sampler, PROMPTS[:1], num_tokens=4, replays=Replays(compiled=compiled))
    assert len(calls) == 4


NOT_COMPILED: dict[str, tuple[TinySettings, str]] = {
    "never": ({"trainer.compile": "never"}, ""),
    "auto": ({"trainer.compile": "auto"}, "trainer.compile=auto compiles nothing on this machine's CPU"),
    "flex": (
        {"trainer.compile": "aot_eager", "kernels.attention": "flex"},
        "its caches grow, because kernels/flex does not offer 'static keys' for Attention.core of 'blocks.*.attn'",
    ),
    "copies of tokens": (
        {
            **FAMILIES["mixtral"],
            "trainer.compile": "aot_eager",
            "parallel.layout": "tp2ep2",
            "parallel.tp.sequence_parallel": False,
        },
        "its caches grow, because the layout divides the positions of a call among 2 ranks",
    ),
    "no cache": (
        {**FAMILIES["mixtral"], "trainer.compile": "aot_eager", "model.capacity_factor": 1.0},
        "the model has no cache, because 'blocks.*.moe' (MixtureOfExperts) mixes the batch",
    ),
}


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_a_step_that_is_not_compiled_has_a_reason(name: str) -> None:
    settings, reason = NOT_COMPILED[name]
    run, sampler = built({**FAMILIES["llama"], **settings}, padded=False)
    assert compiled_step(run, sampler) == ({}, reason)


@pytest.mark.parametrize(
    ("options", "graphs", "compiler"),
    [([], True, "never"), (["--graphs", "never"], False, "never"), (["--compile", "auto"], True, "auto")],
)
def test_the_command_replays_steps_unless_it_must_not_and_compiles_them_on_request(
    options: list[str], graphs: bool, compiler: str
) -> None:
    asked = Asked(**command.make_context("generate", options).params)
    assert asked.wanted([Prompt("--prompt", "a")], [Encoded.of_text([1])], 8, None).graphs is graphs
    assert asked.sampling_settings()["trainer", "compile"].value == compiler
