"""CUDA graphs: recordings of GPU work (`recording`), and the stepper that replays whole steps (`stepper`).

This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_graphs.obstacles import forward_obstacles as forward_obstacles
    from mplug_graphs.obstacles import step_obstacles as step_obstacles
    from mplug_graphs.own_stream import use_own_stream as use_own_stream
    from mplug_graphs.recorder import Recorder as Recorder
    from mplug_graphs.recording import CudaGraph as CudaGraph
    from mplug_graphs.recording import Recording as Recording
    from mplug_graphs.stepper import WARMUP as WARMUP
    from mplug_graphs.stepper import GraphedStepper as GraphedStepper

publish(__name__)
