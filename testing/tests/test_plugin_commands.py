"""The commands about plugins pass the suite of commands."""

from mplug_testing import CommandSuite


class TestShow(CommandSuite):
    plugin = "plugins.show"
    refused = ((), ("nowhere",))


class TestCheck(CommandSuite):
    plugin = "plugins.check"
    refused = (("nowhere",),)


class TestNew(CommandSuite):
    plugin = "plugins.new"
    refused = (("acme-ringo",), ("--kind", "wheels", "acme-ringo"), ("--kind", "kernels", "Acme Ringo"))
