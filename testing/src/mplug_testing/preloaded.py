"""Imported last by the server that forks the workers of `run_workers`: its workers inherit what this module reads.

Every worker would otherwise read the default settings and the metadata of all plugins again. Objects that the server
made before the forks are left out of the workers' garbage collections, which would copy their memory.
"""

import gc

from mplug_testing.harness import installed_plugins, tiny_settings

installed_plugins()
tiny_settings()
gc.collect()
gc.freeze()
