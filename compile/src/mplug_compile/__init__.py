"""Compiled units (`trainer.compile`). This module imports no torch: a name is imported when it is first used."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_compile.compilation import UnitCompiler as UnitCompiler
    from mplug_compile.compilation import compile_units as compile_units
    from mplug_compile.compilation import compiled_graphs as compiled_graphs
    from mplug_compile.compilation import compiled_units as compiled_units
    from mplug_compile.compilation import compiler_of as compiler_of
    from mplug_compile.compiler_cache import repair_libraries as repair_libraries
    from mplug_compile.tracer import prepare_compiler as prepare_compiler

publish(__name__)
