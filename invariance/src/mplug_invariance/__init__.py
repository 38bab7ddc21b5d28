"""Whether a layout computes a model as one process does. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_invariance.checks import Invariance as Invariance
    from mplug_invariance.mixing import INDEX_OF as INDEX_OF
    from mplug_invariance.mixing import NAME as NAME
    from mplug_invariance.mixing import covers as covers
    from mplug_invariance.mixing import divides_samples_alone as divides_samples_alone
    from mplug_invariance.mixing import mixes_samples as mixes_samples
    from mplug_invariance.mixing import statements as statements
    from mplug_invariance.statement import Statement as Statement
    from mplug_invariance.variance import layout_dependence as layout_dependence

publish(__name__)
