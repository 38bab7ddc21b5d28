"""Plotter keeps the contract of extensions."""

from mplug_testing import ExtensionSuite


class TestPlotter(ExtensionSuite):
    plugin = "plotter"
    settings = {"extensions.plotter.every": 2}
    files = ("loss.svg",)
