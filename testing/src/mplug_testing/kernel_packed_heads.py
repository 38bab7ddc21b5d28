"""The part of the suite for kernels that checks attention from packed heads."""

from typing import TYPE_CHECKING, ClassVar
from unittest import SkipTest

from mplug.model.slots.offers import Offer
from mplug_testing.suite import naming_failures, require

if TYPE_CHECKING:
    from mplug.run.run import Run
    from mplug_testing.kernel_checks import Trial


class PackedHeadsChecks:
    """The test of `mplug_nn.PackedHeads`."""

    plugin: str
    compiles: ClassVar[bool] = True
    error_factor: ClassVar[float] = 4.0

    def test_attention_from_packed_heads_is_that_of_plain_torch(self, dtype: str) -> None:
        """Values, and the gradient of the packed heads, in every case that they serve; compiled in the first case."""
        from mplug_nn import packed_heads_of
        from mplug_testing.packed_head_checks import SLOT, is_served, packed_compiled_fault, packed_fault

        _, offers = self._offered(dtype)
        if not any(SLOT in offer.suppliers and packed_heads_of(offer.suppliers[SLOT]) for offer in offers):
            raise SkipTest(f"'{self.plugin}' computes no attention from packed heads")
        trials = [trial for trial in self._trials(dtype, SLOT) if is_served(trial)]
        require(trials, f"the packed heads of '{self.plugin}' serve none of the cases of {SLOT} in {dtype}")
        for trial in trials:
            with naming_failures(trial.where):
                found = packed_fault(trial, self.error_factor)
            require(not found, found)
        found = packed_compiled_fault(trials[0], self.error_factor) if self.compiles else ""
        require(not found, found)

    def _offered(self, dtype: str | None = None) -> "tuple[Run, list[Offer]]":
        raise NotImplementedError

    def _trials(self, dtype: str, only: str | None = None) -> "list[Trial]":
        raise NotImplementedError
