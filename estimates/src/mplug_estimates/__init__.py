"""What a run needs, estimated before it starts: memory with activations, and the least time of a step.

`Preflight` is what the host asks before a run starts. Commands use the estimates alone. This module imports no torch: a
name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_estimates.activations import estimate_activations as estimate_activations
    from mplug_estimates.default_kernels import UNMEASURED as UNMEASURED
    from mplug_estimates.default_kernels import reason_against as reason_against
    from mplug_estimates.measured import measure_bytes as measure_bytes
    from mplug_estimates.memory_check import check_memory as check_memory
    from mplug_estimates.memory_limits import host_memory as host_memory
    from mplug_estimates.preflight import Preflight as Preflight
    from mplug_estimates.timing import timed as timed

publish(__name__)
