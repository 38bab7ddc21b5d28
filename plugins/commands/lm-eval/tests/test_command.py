"""mplug lm-eval keeps the contract of commands. The other file compares its scores with the harness's own backend."""

import pytest

from mplug_testing import CommandSuite

pytest.importorskip("lm_eval")


class TestLmEval(CommandSuite):
    plugin = "lm-eval"
    refused = (
        (),
        ("--tasks", "a,", "--name", "nowhere"),
        ("--tasks", "a", "--name", "nowhere"),
        ("--tasks", "a", "--limit", "0"),
        ("--tasks", "a", "--log-samples"),
        ("--tasks", "a", "--adapt", "lora"),
        ("--tasks", "a", "--include-path", "nowhere"),
        ("--tasks", "a", "--pretrained", "nowhere"),
        ("--tasks", "a", "--pretrained", ".", "--name", "both"),
        ("--tasks", "a", "--set", "steps=3"),
    )
