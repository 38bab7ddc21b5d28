"""Loaders of a data plugin's tiny run, on every rank in one process, for the tests of `DataSuite`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mplug.run.prepare import check_data, prepare
from mplug_testing.fingerprints import FingerprintChecks
from mplug_testing.harness import tiny_config
from mplug_testing.missing_data import PATH
from mplug_testing.samples import read
from mplug_testing.stream_samples import watched
from mplug_testing.suite import naming_failures, require

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.contracts.loader import Loader
    from mplug.run.run import Run

LOOK = 64
"""Number of samples that a test reads if it needs no whole epoch."""
LONGEST_EPOCH = 2000
"""Maximum number of samples of an epoch that a test reads whole."""
TEXTS = ("", "plain text: 1 + 2 = 3\n\tdone.", "Grüße, 世界 🌍", "".join(map(chr, range(32, 127))))


class LoaderChecks(FingerprintChecks):
    """The part of `DataSuite` that builds loaders."""

    kind = "data"

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """`data.name`."""
        return {"data.name": cls.plugin}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """`data`."""
        return ("data",)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Both splits, and several numbers of data-parallel ranks."""
        for name, values in {
            "split": ("train", "validation"),
            "world_size": (2, 4),
            "sizes": ((1, 1), (1, 4), (4, 2)),
        }.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    # Loaders for the tests.

    @classmethod
    def layout(cls, world_size: int, **changes: Any) -> "RunConfig":
        """The config of the plugin's tiny run on `world_size` data-parallel ranks."""
        if world_size > 1:
            changes["parallel__layout"] = f"{cls.config().parallel.data}{world_size}"
        with naming_failures("its config"):
            return cls.config(**changes)

    @classmethod
    def ranks(cls, config: "RunConfig") -> "list[Run]":
        """The prepared runs of all ranks of a config, without starting a process."""
        from mplug.model.build import choose_device

        with naming_failures("preparing a run"):
            runs = [prepare(config)]
            runs += [prepare(config) for _ in range(1, runs[0].mesh.world_size)]
        for rank, run in enumerate(runs):
            run.rank, run.device = rank, choose_device(config)
        return runs

    @classmethod
    def loader(cls, run: "Run", split: str = "train") -> "Loader":
        """The loader of a split on a rank."""
        from mplug.training.assembly import build_loader

        with naming_failures(f"build_loader of the {split} split"):
            return watched(run, build_loader(run, split))

    @classmethod
    def loaders(cls, config: "RunConfig", split: str = "train") -> "list[Loader]":
        """New loaders of all ranks of a config."""
        return [cls.loader(run, split) for run in cls.ranks(config)]

    @classmethod
    def alone(cls, split: str = "train", **changes: Any) -> "Loader":
        """A new loader of a run with one rank, which reads the whole global order."""
        (loader,) = cls.loaders(cls.layout(1, **changes), split)
        return loader

    @classmethod
    def values_for(cls, field: str) -> Sequence[Any] | None:
        """A path that does not exist, for the field `path`: the plugin refuses it."""
        return super().values_for(field) or ([PATH] if field == "path" else None)

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The samples of both splits, what the loader states about itself, and the tokens of the plugin's tokenizer."""
        from mplug.model.build import choose_device
        from mplug_testing.fields import digest

        run = prepare(tiny_config(settings))
        check_data(run)
        run.device = choose_device(run.config)
        for split in ("train", "validation"):
            loader = cls.loader(run, split)
            epoch = loader.samples_per_epoch
            yield f"sizes of the {split} split", (loader.vocab_size, epoch)
            yield f"{split} samples", digest([dict(sample.rows) for sample in read(loader, LOOK)])
        tokenizer = run.hooks.call.build_tokenizer(run=run)
        yield "tokens", [list(tokenizer.encode(text)) for text in TEXTS] if tokenizer is not None else []

    def _epoch(self, loader: "Loader") -> int | None:
        """The number of samples of an epoch; None if the loader does not state it or it is too large to read."""
        stated = loader.samples_per_epoch
        require(stated is None or stated > 0, f"samples_per_epoch is {stated}; it must be positive, or None")
        return stated if stated is not None and stated <= LONGEST_EPOCH else None
