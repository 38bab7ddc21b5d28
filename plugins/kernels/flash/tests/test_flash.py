"""Flash: which version it chooses, what it refuses, and on a GPU its numbers."""

from typing import Any

import pytest
import torch
from attention_bands import Heads, assert_within_bf16_band_of_views
from mplug_flash import Flash
from mplug_flash.attention import core
from mplug_flash.fourth import FourthPacked
from mplug_flash.versions import VERSIONS, Version
from offers import attention, note, refusal, run
from torch import Tensor

from mplug import Offer, Site
from mplug_nn import AttentionInputs, AttentionSpec, packed_heads_of
from mplug_testing import KernelSuite
from mplug_testing.harness import train_steps

quiet = pytest.mark.filterwarnings("ignore")
"""What flash-attn and compilers warn of is not the supplier's to answer for."""
HEADS_OF_64 = {"model.hidden_size": 128, "model.num_attention_heads": 2, "model.num_kv_heads": 1}


def offers(version: Any = "auto", during: Any = None) -> list[Offer]:
    return Flash(Flash.Config(version=version)).offer(during or run())


def machine(monkeypatch: pytest.MonkeyPatch, installed: tuple[int, ...], capability: tuple[int, int] = (9, 0)) -> None:
    """A machine as the plugin sees one: these versions of flash-attn, and such a GPU."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr(Version, "installed", property(lambda version: version.number in installed))
    monkeypatch.setattr("mplug_flash.versions._broken", lambda _: "")


# What it chooses.

ALL = (4, 3, 2)
PARTS = attention("log-sum-exp", "document_lengths")


@pytest.mark.parametrize(
    ("installed", "capability", "version", "at", "expected"),
    [
        (ALL, (9, 0), "auto", attention(), 4),
        ((3, 2), (9, 0), "auto", attention(), 3),
        ((2,), (9, 0), "auto", attention(), 2),
        ((4, 2), (8, 0), "auto", attention(), 2),
        ((4, 3), (10, 0), "auto", attention(), 4),
        ((4,), (12, 0), "auto", attention(), 4),
        *((ALL, (9, 0), version, attention(), version) for version in ALL),
        (ALL, (9, 0), "auto", attention(head_dim=256), 3),
        (ALL, (9, 0), "auto", attention(dropout=0.1), 2),
        ((4, 2), (9, 0), "auto", PARTS, 4),
        ((3,), (9, 0), "auto", attention("document_lengths", "full attention"), 3),
    ],
)
def test_the_newest_version_that_can_serve_or_the_named_one_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[int, ...],
    capability: tuple[int, int],
    version: Any,
    at: Site,
    expected: int,
) -> None:
    machine(monkeypatch, installed, capability)
    assert note(offers(version), at, run()) == f"flash-attn-{expected}"


@pytest.mark.parametrize(
    ("installed", "capability", "at", "during", "words"),
    [
        ((), 9.0, attention(), run(), "flash-attn is not installed; install mplug-flash[fa4] for Hopper and Blackwell"),
        ((4,), 9.0, attention(), run("cpu"), "CUDA … on the CPU"),
        ((4,), 9.0, attention(), run(precision="fp32"), "bf16 … trainer.precision"),
        ((4,), 9.0, attention("biases"), run(), "does not offer biases"),
        ((4,), 9.0, attention(head_dim=20), run(), "flash-attn-4 … 64 to 128 … 20"),
        ((4,), 9.0, attention(dropout=0.1), run(), "flash-attn-4 … does not support dropout … 0.1"),
        ((3,), 9.0, PARTS, run(), "flash-attn-3 does not support the site: it does not offer log-sum-exp"),
        ((4,), 12.0, attention(), run(deterministic=True), "trainer.deterministic"),
        ((4,), 8.9, attention(), run(), "flash-attn-4 supports compute … 9.0 to 12.x, and this GPU has 8.9"),
        ((4, 3), 8.9, attention(), run(), "flash-attn-3 supports compute"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[int, ...], capability: float, at: Site, during: Any, words: str
) -> None:
    major, minor = divmod(round(10 * capability), 10)
    machine(monkeypatch, installed, (major, minor))
    reason = refusal(offers("auto", during), at, during)
    assert all(word in reason for word in words.split(" … "))


def test_a_version_that_is_named_and_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, ())
    assert refusal(offers(3), attention(), run()).startswith("flash-attn-3 is not installed")


def test_a_version_that_is_installed_and_does_not_import_is_refused_with_what_python_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(Version, "installed", property(lambda version: version.number == 3))
    broken = Version(3, ("flash-attn-3",), "a_module_that_is_not_there", chips=(9,), head_dims=(8, 256))
    monkeypatch.setitem(VERSIONS, 3, broken)
    reason = refusal(offers(), attention(), run())
    assert "flash-attn-3 is installed and cannot be imported: No module named 'a_module_that_is_not_there'" in reason


def test_versions_are_found_without_importing_them() -> None:
    assert Version(9, ("no-such-distribution", "mplug"), "a_module_that_is_not_there", (9,), (8, 256)).installed
    assert not Version(9, ("no-such-distribution",), "mplug", (9,), (8, 256)).installed
    assert len({name for version in VERSIONS.values() for name in version.distributions}) == 4


def test_all_sites_share_one_callable_of_a_version_and_masks_of_dropout_are_its_own() -> None:
    for one, other in zip(offers(), offers(), strict=True):
        assert one.suppliers == other.suppliers
        assert one.varies(attention(dropout=0.1), run())


# The suite: without a GPU, what it checks of the package.


@quiet
class TestFlash(KernelSuite):
    plugin = "flash"
    settings = {"trainer.device": "cuda", "kernels.flash.packed_heads": True, **HEADS_OF_64}
    dtypes = ("bf16",)
    deterministic = False
    without_effect = {"version": "it names a release of the library, and a machine has one of them"}

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        if torch.cuda.is_available() and not any(version.installed for version in VERSIONS.values()):
            pytest.skip("flash-attn is not installed")


class TestDeterministicFlash(TestFlash):
    settings = {**TestFlash.settings, "trainer.deterministic": True}
    deterministic = True


# On a GPU.


def served(version: int, head_dim: int) -> None:
    """Skip what this machine does not have."""
    answer = offers(version)[0].answer(attention(head_dim=head_dim), run())
    if answer is not True:
        pytest.skip(str(answer))


def on_a_gpu(test: Any) -> Any:
    return pytest.mark.gpu(quiet(test))


@on_a_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "heads",
    [Heads(2, 256, 8, 8, 64), Heads(2, 512, 8, 2, 128), Heads(1, 1000, 4, 1, 64), Heads(3, 131, 6, 2, 128)],
    ids=["64 wide", "grouped", "length 1000, one KV head", "length 131"],
)
@pytest.mark.parametrize("version", [4, 3, 2])
def test_each_version_is_within_the_bf16_band_of_the_composition_in_fp64(
    version: int, heads: Heads, deterministic: bool, compiled: bool
) -> None:
    served(version, heads.k)
    call = core(version, deterministic)
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, dynamic=False)
    assert_within_bf16_band_of_views(call, heads)


@on_a_gpu
@pytest.mark.parametrize("version", [4, 3, 2])
def test_a_deterministic_backward_gives_the_same_bits(version: int) -> None:
    heads = Heads(2, 2048, 8, 2, 128)
    served(version, heads.k)
    packed, gradient = heads.drawn("cuda", torch.bfloat16)
    found = []
    for _ in range(3):
        leaf = packed.clone().requires_grad_()
        spec = AttentionSpec(0.1, heads.k, heads.k)
        core(version, True)(*leaf.split((8, 2, 2), dim=2), spec, AttentionInputs()).backward(gradient)
        found.append(leaf.grad)
    assert all(torch.equal(one, found[0]) for one in found[1:])


@on_a_gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    ("heads", "asked"),
    [
        (Heads(2, 512, 8, 8, 64), {}),
        (Heads(2, 512, 8, 2, 128), {}),
        (Heads(2, 131, 4, 1, 64), {"causal": False}),
        (Heads(2, 131, 6, 6, 72), {}),
        (Heads(2, 512, 8, 8, 64), {"documents": True}),
        (Heads(2, 131, 8, 2, 128), {"documents": True}),
    ],
    ids=["64 wide", "grouped", "full, one KV head", "72 wide", "documents", "documents, grouped"],
)
def test_packed_heads_give_the_bits_of_the_core(
    heads: Heads, asked: dict[str, bool], deterministic: bool, compiler: str
) -> None:
    served(4, heads.k)
    torch.manual_seed(0)
    drawn, gradient = heads.drawn("cuda", torch.bfloat16)
    lengths = torch.tensor([[100, heads.s - 100, 0], [1, 30, heads.s - 31]], device="cuda")
    spec = AttentionSpec(heads.k**-0.5, heads.k, heads.k, **asked)
    inputs = AttentionInputs(document_lengths=lengths if spec.documents else None)
    packed = packed_heads_of(core(4, deterministic, packed_heads=True))
    assert packed is not None
    assert packed.serves(spec)

    def by_core(x: Tensor) -> Tensor:
        return core(4, deterministic)(*x.split((heads.h, heads.g, heads.g), dim=2), spec, inputs)

    def by_packed_heads(x: Tensor) -> Tensor:
        return packed.attend(x, heads.h, heads.g, spec, inputs)

    found = []
    for attend in (by_core, by_packed_heads):
        torch.compiler.reset()
        call = torch.compile(attend, backend=compiler, fullgraph=True, dynamic=False) if compiler != "eager" else attend
        leaf = drawn.clone().requires_grad_()
        output = call(leaf)
        output.backward(gradient)
        assert leaf.grad is not None
        found.append((output.detach(), *leaf.grad.split((heads.h, heads.g, heads.g), dim=2)))
    for name, expected, ours in zip(("output", "dq", "dk", "dv"), *found, strict=True):
        if deterministic or name == "output":
            assert torch.equal(ours, expected), name
        else:  # atomic additions in fp32 round in any order; bf16 has 8 bits
            torch.testing.assert_close(ours, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()), msg=name)


PACKED_HEADS = {"model.position": "learned", "model.qk_norm": False}
"""Nothing stands between the projection and the core."""


@on_a_gpu
@pytest.mark.parametrize(
    ("packed", "compiler"), [({}, "inductor"), (PACKED_HEADS, "never")], ids=["rotary", "packed heads"]
)
def test_a_run_has_the_losses_of_plain_torch_and_attends_from_packed_heads_without_rotary_positions(
    monkeypatch: pytest.MonkeyPatch, packed: dict[str, Any], compiler: str
) -> None:
    number = next((number for number, version in VERSIONS.items() if version.installed), 4)
    served(4 if packed else number, 64)
    calls, attend = [], FourthPacked.attend

    def counted(self: FourthPacked, *given: Any) -> Tensor:
        calls.append(1)
        return attend(self, *given)

    if packed:
        monkeypatch.setattr(FourthPacked, "attend", counted)
    settings = {**TestFlash.settings, **packed, "trainer.precision": "bf16", "trainer.compile": compiler}
    found = train_steps({**settings, "kernels.attention": "flash"})
    plain = train_steps({**settings, "kernels.default": None})
    assert found.losses == pytest.approx(plain.losses, rel=1e-2)
    assert bool(calls) == bool(packed)


def test_a_cuda_graph_replays_the_version_that_a_gpu_has_replayed() -> None:
    answers = [one.captures for version in (4, 3, 2) for one in offers(version)]
    assert answers == [True, *(f"has not been tested in a CUDA graph with flash-attn {version}" for version in (3, 2))]
