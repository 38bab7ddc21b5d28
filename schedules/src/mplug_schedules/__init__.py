"""Pipeline schedules as tables of actions, for authors of schedules and for strategies that run them.

`actions` has the parts of a table, and `proof` proves it. `times` and `memory` predict its course and its peaks.
`installed` finds the schedules of installed packages, `handovers` counts the bytes that ranks send, and
`weight_gradients` runs backward passes in two halves.

This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_schedules.actions import COMPUTE as COMPUTE
    from mplug_schedules.actions import Action as Action
    from mplug_schedules.actions import Kind as Kind
    from mplug_schedules.actions import Row as Row
    from mplug_schedules.actions import Shape as Shape
    from mplug_schedules.actions import Table as Table
    from mplug_schedules.actions import forward_half as forward_half
    from mplug_schedules.actions import with_transfers as with_transfers
    from mplug_schedules.handovers import bytes_sent as bytes_sent
    from mplug_schedules.handovers import shape_of as shape_of
    from mplug_schedules.installed import find_schedule as find_schedule
    from mplug_schedules.installed import proven_table as proven_table
    from mplug_schedules.memory import Footprint as Footprint
    from mplug_schedules.memory import held_bytes as held_bytes
    from mplug_schedules.memory import peak_bytes as peak_bytes
    from mplug_schedules.proof import check as check
    from mplug_schedules.proof import peak as peak
    from mplug_schedules.times import Costs as Costs
    from mplug_schedules.times import Span as Span
    from mplug_schedules.times import Timeline as Timeline
    from mplug_schedules.times import timeline as timeline
    from mplug_schedules.weight_gradients import WeightGradients as WeightGradients

publish(__name__)
