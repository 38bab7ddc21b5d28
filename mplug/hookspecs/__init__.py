"""Every hook, in the order of a run. These files are the manual of the plugin interface.

A plugin implements a hook by a method of the same name, marked `@hookimpl`. The method may leave out arguments that it
does not need. Hooks build and observe: the host calls them a few times a run or once a step, never inside a layer. It
calls them in the same order on every rank. An exception in a hook ends the run on every rank; only an exception in an
observer does not.

Each hook says how many of the plugins that a run names may implement it: all, at most one, or exactly one. "Pure" means
that the answer depends on the arguments alone and that the call changes nothing: the host calls a pure hook again
whenever it needs the answer.
"""

# Both fill the table of specifications, in this order.
from mplug.hookspecs import building as building
from mplug.hookspecs import observing as observing
