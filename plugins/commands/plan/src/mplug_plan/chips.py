"""The machine that a plan is for: built-in limits of a chip, or those that `mplug bench --limits` measured."""

from pathlib import Path
from typing import Any

import yaml

from mplug import UsageError, listed
from mplug_plan.limits_file import measured
from mplug_plan.machine import Link, Load, Machine, Power


def machine_of(word: str, limits: Path | None, gpus_per_node: int | None, memory_gib: float | None) -> Machine:
    """The built-in limits of the chip that `word` names, with those of a file of `mplug bench --limits`, if any."""
    chips: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("chips.yaml").read_text(encoding="utf-8")
    )
    if word.lower() not in chips:
        raise UsageError(
            f"--gpu: no limits of '{word}' are built in (built in: "
            f"{listed(list(chips))}); name one of them, and give the measured limits of your GPU by --limits FILE"
        )
    facts = chips[word.lower()]
    peaks = facts["peak_tflops"]
    found = Machine(
        title=facts["title"],
        source=f"built-in limits of {facts['title']} (chips.yaml has the source of each)",
        memory=(memory_gib or facts["memory_gib"]) * 2**30,
        peak=peaks[2] * 1e12,
        speedup8=peaks[1] / peaks[2],
        product_rate=facts["product_tflops"] * 1e12,
        half_depth=facts["half_depth"],
        attention_rate=facts["attention_tflops"] * 1e12,
        half_length=facts["half_length"],
        copy_rate=facts["copy_tb"] * 1e12,
        kernel_rate=facts["kernel_tb"] * 1e12,
        cast_rate=facts["cast_tb"] * 1e12,
        cpu_rate=facts["cpu_gb"] * 1e9,
        grouped=facts["grouped"],
        grouped_weights=facts["grouped_weights"],
        gpus_per_node=gpus_per_node or facts["gpus_per_node"],
        node=Link(facts["node"]["gb_per_s"] * 1e9, facts["node"]["seconds"]),
        pair=Link(facts["pair"]["gb_per_s"] * 1e9, facts["pair"]["seconds"]),
        network=Link(facts["network"]["gb_per_s"] * 1e9, facts["network"]["seconds"]),
        power=_power(facts["power"]) if "power" in facts else None,
    )
    return found if limits is None else measured(found, limits)


def _power(facts: dict[str, Any]) -> Power:
    loads = {kind: Load(*facts[kind]) for kind in ("products", "attention", "memory")}
    return Power(facts["limit"], facts["largest_mhz"], **loads)
