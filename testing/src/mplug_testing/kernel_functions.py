"""The part of the suite for kernels about cores that compute another function than softmax attention."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.model.slots.offers import Offer, Site
from mplug_testing.kernel_buffers import answer_of
from mplug_testing.suite import require, smoke

if TYPE_CHECKING:
    from mplug.run.run import Run
    from mplug_testing.kernel_cases import Case


class FunctionChecks:
    """The tests of `KernelSuite.computes` and `KernelSuite.reference`."""

    plugin: str
    computes: ClassVar[str] = ""

    def reference(self, q: Any, k: Any, v: Any, spec: Any, inputs: Any) -> Any:
        """The function that a core other than softmax attention is compared with; differentiable, in plain torch.

        q [B, S, H, K], k [B, T, G, K], v [B, T, G, V], an `AttentionSpec` and `AttentionInputs` -> [B, S, H, V]. In
        fp64 its result counts as exact. In the dtype of a trial its error measures the rounding, so it must be finite
        there too.
        """
        raise NotImplementedError(f"'{self.plugin}' computes '{self.computes}'; override 'reference'")

    @smoke
    def test_another_function_has_a_name_and_a_reference(self) -> None:
        """The suite compares a core other than softmax attention only with its author's reference; both must be set."""
        if not self.computes and not self._has_reference():
            raise SkipTest(f"'{self.plugin}' computes no other function than softmax attention")
        self._require_named_function()

    @smoke
    def test_it_refuses_sites_that_ask_for_another_function(self) -> None:
        """A core other than softmax attention must not fill a site that does not request its function."""
        if not self.computes:
            raise SkipTest(f"'{self.plugin}' computes no other function than softmax attention")
        run, offers = self._offered()
        for offer, case, site in self._sites(run, offers):
            plain = replace(site, needs=case.needs - {self.computes})
            require(
                site.slot != "Attention.core" or answer_of(offer, plain, run) is not True,
                f"supports returns True for {case_name(case, site)}, which does not need '{self.computes}': a model "
                f"with softmax attention would get another function; require '{self.computes}' in site.needs",
            )

    def _has_reference(self) -> bool:
        return type(self).reference is not FunctionChecks.reference

    def _require_named_function(self) -> None:
        """`computes` and `reference` are set together, and `computes` is no need that `mplug_nn` serves itself."""
        from mplug_nn.specification import CAPABILITIES, KNOWN

        setting, has_reference = f"the suite sets computes = '{self.computes}'", self._has_reference()
        require(has_reference or not self.computes, f"{setting} without a reference; override 'reference'")
        require(
            self.computes or not has_reference,
            "the suite overrides 'reference' without 'computes'; set 'computes' to the need of the sites",
        )
        require(
            self.computes not in KNOWN | CAPABILITIES,
            f"{setting}, whose reference is mplug_nn, which computes it; remove 'computes' and 'reference'",
        )

    def _about_computes(self) -> str:
        if self.computes:
            return f" (every case needs '{self.computes}', because the suite sets 'computes')"
        return "; if the core is not softmax attention, set the suite's 'computes' to the need of its sites"

    def _offered(self, dtype: str | None = None) -> "tuple[Run, list[Offer]]":
        raise NotImplementedError

    def _sites(self, run: "Run", offers: list[Offer]) -> "Iterator[tuple[Offer, Case, Site]]":
        raise NotImplementedError


def case_name(case: "Case", site: Site) -> str:
    """The slot and the case, for messages."""
    return f"{site.slot} with {case.name}"
