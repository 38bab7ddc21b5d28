"""SDPA: what it claims, what it chooses, and what it says about itself. Its numbers are the suite's to judge."""

from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from attention_bands import Heads, assert_within_bf16_band_of_views
from click.testing import CliRunner
from mplug_sdpa import SDPA
from mplug_sdpa.attention import CORES
from mplug_sdpa.limits import OFFERED
from offers import attention, note, refusal, run

from mplug import Offer, Site
from mplug.cli import main
from mplug_nn import AttentionInputs, AttentionSpec, parts_of
from mplug_testing import KernelSuite
from mplug_testing.capabilities import Setting, core_fault, parts_fault

BACKENDS = ("cudnn", "flash", "efficient", "math")
HOPPER = ((9, 0), 91501)
DOCUMENTS, SUMS = "document_lengths", "log-sum-exp"


class TestSDPA(KernelSuite):
    plugin = "sdpa"
    dtypes = ("fp32", "bf16", "fp64")


class TestSDPAByMatrixProducts(KernelSuite):
    plugin = "sdpa"
    checks_fields = False
    settings = {"kernels.sdpa.backend": "math"}


def offers(backend: str = "auto") -> list[Offer]:
    return SDPA(SDPA.Config(backend=backend)).offer()  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine as the plugin sees one, of a GPU that it does not have to use."""
    chip(monkeypatch, *HOPPER)


def chip(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cudnn: int | None) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: cudnn)


# What it chooses.


@pytest.mark.parametrize(
    ("at", "during", "expected"),
    [
        (attention(), run(), "cuDNN"),
        (attention(SUMS), run(), "cuDNN"),
        (attention("full attention"), run(), "cuDNN"),
        (attention(DOCUMENTS), run(), "torch's flash attention"),
        (attention(DOCUMENTS, SUMS), run(), "torch's flash attention"),
        (attention(SUMS), run(precision="fp32"), "torch's matrix products"),
        (attention(DOCUMENTS, SUMS), run("cpu", "fp32"), "torch's matrix products"),
        (attention(DOCUMENTS), run("cpu", "fp32"), "torch's choice"),
        (attention(), run(precision="fp32"), "torch's choice"),
        (attention(), run(deterministic=True), "torch's choice"),
        (attention(head_dim=192), run(), "torch's choice"),
        (attention(head_dim=20), run(), "torch's choice"),
        (attention(dropout=0.1), run(), "torch's choice"),
        (attention(dropout=0.1), run("cpu"), "torch's choice"),
    ],
)
def test_the_best_backend_that_a_site_and_a_run_allow_serves(
    monkeypatch: pytest.MonkeyPatch, at: Site, during: Any, expected: str
) -> None:
    monkeypatch.setattr("mplug_sdpa.limits.capability_is_lowered", lambda: False)
    assert note(offers(), at, during) == expected


def test_older_chips_are_left_to_torch_and_older_cudnn_serves_sequences_that_128_divides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for machine in (((8, 0), 91501), ((9, 0), 91500), ((9, 0), None)):
        chip(monkeypatch, *machine)
        assert note(offers(), attention(), run(seq_length=100)) == "torch's choice"
    chip(monkeypatch, (9, 0), 91500)
    assert note(offers(), attention(), run()) == "cuDNN"


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "torch's choice"), ("bf16", "torch's matrix products")])
def test_on_a_cpu_whose_avx_512_is_hidden_matrix_products_serve_half_precision(
    monkeypatch: pytest.MonkeyPatch, precision: str, expected: str
) -> None:
    monkeypatch.setattr("mplug_sdpa.limits.capability_is_lowered", lambda: True)
    for dropout in (0.0, 0.1):
        assert note(offers(), attention(dropout=dropout), run("cpu", precision)) == expected


def test_a_backend_that_is_named_serves_where_it_can() -> None:
    said = {backend: note(offers(backend), attention(), run()) for backend in BACKENDS}
    assert said["cudnn"] == "cuDNN"
    assert len(set(said.values())) == len(BACKENDS)
    for backend in ("flash", "efficient", "math"):  # torch makes their backward deterministic
        assert note(offers(backend), attention(), run(deterministic=True)) == said[backend]


def test_it_warns_of_dropout_because_its_mask_depends_on_the_layout() -> None:
    for offer in offers():
        assert offer.varies(attention(), run()) == ""
        assert "dropout" in offer.varies(attention(dropout=0.1), run())


# What it refuses.


@pytest.mark.parametrize(
    ("backend", "at", "during", "words"),
    [
        ("cudnn", attention(), run("cpu"), ("CUDA", "CPU")),
        ("cudnn", attention(), run(precision="fp32"), ("bf16", "trainer.precision")),
        ("cudnn", attention(), run(deterministic=True), ("trainer.deterministic",)),
        ("cudnn", attention(head_dim=192), run(), ("up to 128", "192")),
        ("cudnn", attention(dropout=0.1), run(), ("steps of 1/16", "0.1")),
        ("flash", attention(), run("cpu"), ("CUDA", "CPU")),
        ("flash", attention(), run(precision="fp32"), ("bf16", "trainer.precision")),
        ("flash", attention(head_dim=20), run(), ("multiples of 8", "20")),
        ("efficient", attention(head_dim=20), run(), ("multiples of 8", "20")),
    ],
)
def test_a_backend_that_is_named_and_cannot_serve_is_refused_with_the_reason(
    backend: str, at: Site, during: Any, words: tuple[str, ...]
) -> None:
    reason = refusal(offers(backend), at, during)
    for word in (f"kernels.sdpa.backend={backend}", "set kernels.sdpa.backend=auto", *words):
        assert word in reason


@pytest.mark.parametrize(
    ("machine", "backend", "at", "during", "words"),
    [
        (((7, 5), 91501), "flash", attention(), run(), "7.5"),
        (((9, 0), 90100), "cudnn", attention(), run(seq_length=100), "90100"),
        (((8, 6), 91501), "flash", attention(head_dim=256), run(), "up to 192"),
        (HOPPER, "auto", attention("varlen", "log_sum_exp"), run("cpu"), "it does not offer log_sum_exp, varlen"),
        (HOPPER, "math", attention("varlen", "log_sum_exp"), run("cpu"), "it does not offer log_sum_exp, varlen"),
        (HOPPER, "cudnn", attention(DOCUMENTS), run(), "it does not offer document_lengths"),
        (
            HOPPER,
            "auto",
            attention(DOCUMENTS),
            run(precision="fp32"),
            "does not offer document_lengths; torch's flash attention offers it, but computes in bf16",
        ),
    ],
)
def test_old_chips_old_cudnn_and_needs_are_refused_once_and_named(
    monkeypatch: pytest.MonkeyPatch, machine: Any, backend: str, at: Site, during: Any, words: str
) -> None:
    chip(monkeypatch, *machine)
    assert words in refusal(offers(backend), at, during)


def test_explain_says_what_it_would_use_and_refuses_a_backend_that_cannot_serve() -> None:
    for backend, status, words in (
        ("auto", 0, "kernels/sdpa (torch's choice)"),
        ("math", 0, "kernels/sdpa (torch's matrix products)"),
        ("cudnn", 2, "cannot serve Attention.core of 'blocks.*.attn': kernels.sdpa.backend=cudnn needs a CUDA GPU"),
    ):
        settings = ["--set", "trainer.device=cpu", "--set", f"kernels.sdpa.backend={backend}"]
        result = CliRunner().invoke(main, ["explain", "--attention", "sdpa", *settings])
        assert result.exit_code == status
        assert words in result.output


# What its suppliers do.


def test_every_choice_supplies_the_attention_core_and_nothing_else() -> None:
    assert set(CORES) == {"torch", *BACKENDS}
    for backend in ("auto", *BACKENDS):
        assert all(set(offer.suppliers) == {"Attention.core"} for offer in offers(backend))


@pytest.mark.parametrize(
    ("backend", "positional"),
    [("cudnn", (None, True, 0.25, True)), ("flash", (0.25, True)), ("efficient", (None, True, 0.25, True))],
)
def test_an_operator_gets_views_a_causal_mask_and_the_dropout_and_what_it_gives_is_contiguous(
    monkeypatch: pytest.MonkeyPatch, backend: str, positional: tuple[Any, ...]
) -> None:
    """The operators are for GPUs; here one that records its arguments takes their place."""
    heard: list[tuple[Any, ...]] = []

    def operator(*arguments: Any, **named: Any) -> tuple[torch.Tensor]:
        heard.append((*arguments, named))
        return (arguments[0].clone(),)

    fake = SimpleNamespace(**{f"_scaled_dot_product_{backend}_attention": operator})
    monkeypatch.setattr("mplug_sdpa.attention.aten", fake)
    q, k, v = torch.randn(2, 16, 12, 8).split((4, 4, 4), dim=2)
    output = CORES[backend](q, k, v, AttentionSpec(0.5, 8, 8, dropout=0.25), AttentionInputs())
    ((*given, named),) = heard
    assert [x.data_ptr() for x in given[:3]] == [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    assert [x.shape for x in given[:3]] == [(2, 4, 16, 8)] * 3
    assert (tuple(given[3:]), named) == (positional, {"scale": 0.5})
    assert output.shape == (2, 16, 4, 8)
    assert output.is_contiguous()


def test_a_single_key_which_cudnn_does_not_take_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mplug_sdpa.attention.aten", None)
    q, k, v = torch.randn(3, 2, 1, 4, 8).unbind()
    torch.testing.assert_close(CORES["cudnn"](q, k, v, AttentionSpec(0.5, 8, 8), AttentionInputs()), v)


# On a GPU.


def serving(backend: str, head_dim: int) -> Any:
    """The core of a backend; skips if this machine's does not serve such heads."""
    answer = offers("math" if backend == "torch" else backend)[0].answer(attention(head_dim=head_dim), run())
    if answer is not True:
        pytest.skip(str(answer))
    return CORES[backend]


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.fixture(autouse=True)
    def hopper(self) -> None:
        """The GPU of this machine."""

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    @pytest.mark.parametrize(
        "heads",
        [Heads(2, 256, 8, 8, 64), Heads(2, 512, 8, 2, 128), Heads(1, 1000, 4, 1, 64), Heads(3, 131, 6, 2, 128)],
        ids=["64 wide", "grouped", "length 1000, one KV head", "length 131"],
    )
    @pytest.mark.parametrize("backend", ["torch", *BACKENDS])
    def test_each_backend_is_within_the_bf16_band_of_the_composition_in_fp64(
        self, backend: str, heads: Heads, compiled: bool
    ) -> None:
        core = serving(backend, heads.k)
        if compiled:
            torch.compiler.reset()
            core = torch.compile(core, fullgraph=True, dynamic=False)
        with catch_warnings(action="ignore"):  # those of torch's compiler are not the supplier's
            assert_within_bf16_band_of_views(core, heads)

    @pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128)], ids=["64 wide", "grouped"])
    @pytest.mark.parametrize("backend", ["cudnn", "flash", "math"])
    def test_parts_and_documents_are_those_of_the_composition_in_fp64(
        self, backend: str, heads: tuple[int, int, int]
    ) -> None:
        core, packed = serving(backend, heads[2]), "document_lengths" in OFFERED[backend]
        setting = Setting(*heads, torch.bfloat16, "cuda")
        assert core_fault(core, setting, causal=False) == ""
        assert parts_fault(parts_of(core), setting, packed=packed) == ""
        if packed:
            assert core_fault(core, setting, documents=True) == ""
