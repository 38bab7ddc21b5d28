"""Sampling from a saved model: with a cache, for many prompts at once, under any layout that divides the computation.

A command builds the model of a run with a `Sampler` (`sampling_run`), loads its weights, and calls `sample` on every
rank (`Ranks`). This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_sampling.continuous import Lanes as Lanes
    from mplug_sampling.decoding import Alone as Alone
    from mplug_sampling.decoding import Ranks as Ranks
    from mplug_sampling.decoding import refuse_undivided as refuse_undivided
    from mplug_sampling.decoding import sample as sample
    from mplug_sampling.filling import LaneText as LaneText
    from mplug_sampling.filling import fill_lanes as fill_lanes
    from mplug_sampling.rollouts import Completion as Completion
    from mplug_sampling.rollouts import TrainedSampler as TrainedSampler
    from mplug_sampling.rollouts import complete as complete
    from mplug_sampling.sampler import Sampler as Sampler
    from mplug_sampling.sampler import sampling_run as sampling_run
    from mplug_sampling.sampling import Sampling as Sampling
    from mplug_sampling.sampling import sample_key as sample_key
    from mplug_sampling.scoring import Score as Score
    from mplug_sampling.scoring import score as score
    from mplug_sampling.text import Text as Text
    from mplug_sampling.together import Together as Together
    from mplug_sampling.together import part_of_samples as part_of_samples
    from mplug_sampling.together import prompt_shard as prompt_shard
    from mplug_sampling.together import stores_parts as stores_parts
    from mplug_sampling.token_steps import Replays as Replays
    from mplug_sampling.token_steps import replays_for as replays_for
    from mplug_sampling.trainer_scores import TrainerScores as TrainerScores

publish(__name__)
