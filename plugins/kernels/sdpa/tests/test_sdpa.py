"""SDPA: what it claims, what it chooses, and what it says about itself. Its numbers are the suite's to judge."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from click.testing import CliRunner
from mplug_sdpa import SDPA
from mplug_sdpa.attention import CORES
from mplug_sdpa.limits import OFFERED

from mplug import Offer, Site
from mplug.cli import main
from mplug_nn import AttentionInputs, AttentionSpec, parts_of
from mplug_testing import KernelSuite, precision_named
from mplug_testing.attention_errors import Heads, attention_errors
from mplug_testing.capabilities import Setting, core_fault, parts_fault

SPEC = AttentionSpec(0.5, 8, 8)
BACKENDS = ("cudnn", "flash", "efficient", "math")


class TestSDPA(KernelSuite):
    plugin = "sdpa"
    dtypes = ("fp32", "bf16", "fp64")


class TestSDPAByMatrixProducts(KernelSuite):
    plugin = "sdpa"
    checks_fields = False
    settings = {"kernels.sdpa.backend": "math"}


def offers(backend: str = "auto") -> list[Offer]:
    return SDPA(SDPA.Config(backend=backend)).offer()  # type: ignore[arg-type]


def site(dropout: float = 0.0, needs: tuple[str, ...] = (), head_dim: int = 64) -> Site:
    module = SimpleNamespace(dropout=dropout, head_dim=head_dim)
    return Site("blocks.*.attn", "Attention.core", module, "blocks.0.attn", frozenset(needs))


def run(device: str = "cuda", precision: str = "bf16", deterministic: bool = False, seq_length: int = 4096) -> Any:
    trainer = SimpleNamespace(precision=precision, deterministic=deterministic, seq_length=seq_length)
    config = SimpleNamespace(trainer=trainer)
    return SimpleNamespace(device=device, config=config, precision=precision_named(precision))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine as the plugin sees one, of a GPU that it does not have to use."""
    chip(monkeypatch, (9, 0), 91501)


def chip(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cudnn: int | None) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: cudnn)


def chosen(at: Site, during: Any, backend: str = "auto") -> str:
    """What the one offer that supports a site says of itself."""
    (offer,) = (offer for offer in offers(backend) if offer.answer(at, during) is True)
    return offer.note(at, during)


def reasons(at: Site, during: Any, backend: str) -> list[bool | str]:
    return [offer.answer(at, during) for offer in offers(backend)]


def test_it_supplies_the_attention_core_and_nothing_else() -> None:
    for backend in ("auto", *BACKENDS):
        assert all(set(offer.suppliers) == {"Attention.core"} for offer in offers(backend))


@pytest.mark.parametrize(
    ("lowered", "precision", "expected"),
    [
        (False, "bf16", "torch's choice"),
        (True, "fp32", "torch's choice"),
        (True, "bf16", "torch's matrix products"),
    ],
)
def test_it_supports_any_site_that_needs_no_more_than_the_values(
    monkeypatch: pytest.MonkeyPatch, lowered: bool, precision: str, expected: str
) -> None:
    """On a CPU whose AVX-512 is hidden from torch, torch's own choice would fail in half precision."""
    monkeypatch.setattr("mplug_sdpa.limits.capability_is_lowered", lambda: lowered)
    for dropout in (0.0, 0.1):
        assert chosen(site(dropout=dropout), run("cpu", precision=precision)) == expected


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_it_says_once_which_needs_it_does_not_meet(backend: str) -> None:
    (answer,) = {one for one in reasons(site(needs=("varlen", "log_sum_exp")), run("cpu"), backend) if one}
    assert answer == "it does not offer log_sum_exp, varlen"


def test_it_speaks_up_on_dropout_because_its_mask_depends_on_the_layout() -> None:
    for offer in offers():
        assert offer.varies(site(), run()) == ""
        assert "dropout" in offer.varies(site(dropout=0.1), run())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("needs", "device", "precision", "expected"),
    [
        (("log-sum-exp",), "cuda", "bf16", "cuDNN"),
        (("full attention",), "cuda", "bf16", "cuDNN"),
        (("document_lengths",), "cuda", "bf16", "torch's flash attention"),
        (("document_lengths", "log-sum-exp"), "cuda", "bf16", "torch's flash attention"),
        (("log-sum-exp",), "cuda", "fp32", "torch's matrix products"),
        (("document_lengths", "log-sum-exp"), "cpu", "fp32", "torch's matrix products"),
        (("document_lengths",), "cpu", "fp32", "torch's choice"),
    ],
)
def test_what_a_site_needs_decides_what_serves_it(
    needs: tuple[str, ...], device: str, precision: str, expected: str
) -> None:
    assert chosen(site(needs=needs), run(device, precision)) == expected


@pytest.mark.usefixtures("hopper")
def test_documents_on_a_gpu_are_refused_in_fp32_with_the_reason() -> None:
    (answer,) = (one for one in reasons(site(needs=("document_lengths",)), run(precision="fp32"), "auto") if one)
    assert "does not offer document_lengths; torch's flash attention offers it, but computes in bf16" in str(answer)
    (answer,) = reasons(site(needs=("document_lengths",)), run(), "cudnn")
    assert answer == "it does not offer document_lengths"


# What it chooses.


@pytest.mark.usefixtures("hopper")
def test_on_hopper_it_chooses_cudnn_and_says_so() -> None:
    assert chosen(site(), run()) == "cuDNN"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("at", "during"),
    [
        (site(), run(precision="fp32")),
        (site(), run(deterministic=True)),
        (site(head_dim=192), run()),
        (site(head_dim=20), run()),
        (site(dropout=0.1), run()),
    ],
    ids=["fp32", "deterministic", "head dim 192", "head dim 20", "dropout 0.1"],
)
def test_where_cudnn_cannot_serve_it_leaves_the_choice_to_torch(at: Site, during: Any) -> None:
    assert chosen(at, during) == "torch's choice"


@pytest.mark.parametrize(("capability", "cudnn"), [((8, 0), 91501), ((9, 0), 91500), ((9, 0), None)])
def test_older_chips_and_older_cudnn_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cudnn: int | None
) -> None:
    chip(monkeypatch, capability, cudnn)
    assert chosen(site(), run(seq_length=100)) == "torch's choice"


def test_older_cudnn_serves_sequences_that_128_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    chip(monkeypatch, (9, 0), 91500)
    assert chosen(site(), run()) == "cuDNN"


@pytest.mark.usefixtures("hopper")
def test_a_backend_that_is_named_serves_where_it_can() -> None:
    said = {backend: chosen(site(), run(), backend) for backend in BACKENDS}
    assert said["cudnn"] == "cuDNN"
    assert len(set(said.values())) == len(BACKENDS)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("backend", "at", "during", "words"),
    [
        ("cudnn", site(), run("cpu"), ("CUDA", "CPU")),
        ("cudnn", site(), run(precision="fp32"), ("bf16", "trainer.precision")),
        ("cudnn", site(), run(deterministic=True), ("trainer.deterministic",)),
        ("cudnn", site(head_dim=192), run(), ("up to 128", "192")),
        ("cudnn", site(dropout=0.1), run(), ("steps of 1/16", "0.1")),
        ("flash", site(), run("cpu"), ("CUDA", "CPU")),
        ("flash", site(), run(precision="fp32"), ("bf16", "trainer.precision")),
        ("flash", site(head_dim=20), run(), ("multiples of 8", "20")),
        ("efficient", site(head_dim=20), run(), ("multiples of 8", "20")),
    ],
)
def test_a_backend_that_is_named_and_cannot_serve_is_refused_with_the_reason(
    backend: str, at: Site, during: Any, words: tuple[str, ...]
) -> None:
    (answer,) = reasons(at, during, backend)
    assert isinstance(answer, str)
    for word in (f"kernels.sdpa.backend={backend}", "set kernels.sdpa.backend=auto", *words):
        assert word in answer


def test_old_chips_and_old_cudnn_are_refused_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    chip(monkeypatch, (7, 5), 91501)
    assert "7.5" in str(reasons(site(), run(), "flash")[0])
    chip(monkeypatch, (9, 0), 90100)
    assert "90100" in str(reasons(site(), run(seq_length=100), "cudnn")[0])
    chip(monkeypatch, (8, 6), 91501)
    assert "up to 192" in str(reasons(site(head_dim=256), run(), "flash")[0])


@pytest.mark.usefixtures("hopper")
def test_deterministic_runs_may_name_flash_and_efficient_whose_backward_torch_makes_deterministic() -> None:
    for backend in ("flash", "efficient", "math"):
        assert reasons(site(), run(deterministic=True), backend) == [True]


def told(*options: str) -> tuple[int, str]:
    """The exit status of `mplug explain`, and what it says."""
    result = CliRunner().invoke(main, ["explain", "--attention", "sdpa", "--set", "trainer.device=cpu", *options])
    return result.exit_code, result.output


def test_explain_says_what_it_would_use() -> None:
    assert "kernels/sdpa (torch's choice)" in told()[1]
    assert "kernels/sdpa (torch's matrix products)" in told("--set", "kernels.sdpa.backend=math")[1]


def test_a_run_that_names_a_backend_that_cannot_serve_is_refused_before_it_starts() -> None:
    status, said = told("--set", "kernels.sdpa.backend=cudnn")
    assert status == 2
    assert (
        "kernels/sdpa cannot serve Attention.core of 'blocks.*.attn': kernels.sdpa.backend=cudnn needs a CUDA GPU"
        in said
    )


# What its suppliers do.


class Called(Exception):
    """An operator was called, with these shapes and strides."""


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[Any, ...]]]:
    """What torch's operators for GPUs are called with: here they are not there."""
    heard: dict[str, tuple[Any, ...]] = {}

    def hear(name: str) -> Any:
        def operator(*arguments: Any, **named: Any) -> tuple[torch.Tensor]:
            heard[name] = (*arguments, named)
            return (arguments[0].clone(),)

        return operator

    names = ("cudnn", "flash", "efficient")
    fake = SimpleNamespace(**{f"_scaled_dot_product_{name}_attention": hear(name) for name in names})
    monkeypatch.setattr("mplug_sdpa.attention.aten", fake)
    return heard


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_parts_of_one_tensor_reach_an_operator_without_a_copy_and_what_it_gives_is_contiguous(
    backend: str, operators: dict[str, tuple[Any, ...]]
) -> None:
    packed = torch.randn(2, 16, 12, 8)
    q, k, v = packed.split((4, 4, 4), dim=2)
    output = CORES[backend](q, k, v, SPEC, AttentionInputs())
    given = operators[backend]
    assert [x.data_ptr() for x in given[:3]] == [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    assert [x.shape for x in given[:3]] == [(2, 4, 16, 8)] * 3
    assert given[-1] == {"scale": 0.5}
    assert output.shape == (2, 16, 4, 8)
    assert output.is_contiguous()


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_operators_are_asked_for_a_causal_mask_and_for_the_dropout(
    backend: str, operators: dict[str, tuple[Any, ...]]
) -> None:
    x = torch.randn(2, 16, 4, 8)
    CORES[backend](x, x, x, replace(SPEC, dropout=0.25), AttentionInputs())
    positional = operators[backend][3:-1]
    assert (
        positional
        == {"cudnn": (None, True, 0.25, True), "flash": (0.25, True), "efficient": (None, True, 0.25, True)}[backend]
    )


@pytest.mark.usefixtures("operators")
def test_a_single_key_which_cudnn_does_not_take_is_left_to_torch() -> None:
    q, k, v = torch.randn(3, 2, 1, 4, 8).unbind()
    torch.testing.assert_close(CORES["cudnn"](q, k, v, SPEC, AttentionInputs()), v)


def test_every_choice_has_a_supplier() -> None:
    assert set(CORES) == {"torch", *BACKENDS}


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "heads",
    [Heads(2, 256, 8, 8, 64), Heads(2, 512, 8, 2, 128), Heads(1, 1000, 4, 1, 64), Heads(3, 131, 6, 2, 128)],
    ids=["64 wide", "grouped", "length 1000, one KV head", "length 131"],
)
@pytest.mark.parametrize("backend", ["torch", *BACKENDS])
def test_each_backend_is_within_the_bf16_band_of_the_composition_in_fp64(
    backend: str, heads: Heads, compiled: bool
) -> None:
    (supports, *_) = reasons(site(head_dim=heads.k), run(), "math" if backend == "torch" else backend)
    if supports is not True:
        pytest.skip(str(supports))
    core = CORES[backend]
    if compiled:
        torch.compiler.reset()
        core = torch.compile(core, fullgraph=True, dynamic=False)
    with catch_warnings(action="ignore"):  # those of torch's compiler are not the supplier's
        errors = attention_errors(core, heads, "cuda")
    for name, (error, usual) in errors.items():
        assert error <= min(1e-2, 2 * usual), f"{name} is off by {error:.2e}; plain torch in bf16 by {usual:.2e}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128)], ids=["64 wide", "grouped"])
@pytest.mark.parametrize("backend", ["cudnn", "flash", "math"])
def test_parts_and_documents_on_a_gpu_are_those_of_the_composition_in_fp64(
    backend: str, heads: tuple[int, int, int]
) -> None:
    (supports,) = reasons(site(head_dim=heads[2]), run(), backend)
    if supports is not True:
        pytest.skip(str(supports))
    setting, offered, core = Setting(*heads, torch.bfloat16, "cuda"), OFFERED[backend], CORES[backend]
    assert core_fault(core, setting, causal=False) == ""
    assert parts_fault(parts_of(core), setting, packed="document_lengths" in offered) == ""
    if "document_lengths" in offered:
        assert core_fault(core, setting, documents=True) == ""
