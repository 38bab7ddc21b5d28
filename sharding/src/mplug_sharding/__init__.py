"""Optimizer states that ranks share. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_sharding.gathered import GatheredPlacement as GatheredPlacement
    from mplug_sharding.owned_memory import Shard as Shard
    from mplug_sharding.shardings import Shardings as Shardings

publish(__name__)
