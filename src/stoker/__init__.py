"""Stoker trains PyTorch models on large sharded data sets at the speed of the hardware.

What is listed here is meant to be used, and documented in docs/api.md; everything else may change without a word. Names are
imported when they are first used: `import stoker` itself needs no torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stoker import train as _train

if TYPE_CHECKING:
    from stoker.data.arrays import from_arrays
    from stoker.data.batch import Batch
    from stoker.data.columns import from_parquet
    from stoker.data.loader import Loader, LoaderConfig
    from stoker.data.own import Samples, from_dataset, from_files
    from stoker.data.pack import pack
    from stoker.data.source import RunData
    from stoker.data.store import open_store
    from stoker.doctor.finding import Finding
    from stoker.doctor.probe import Probe
    from stoker.doctor.watch import watch
    from stoker.errors import MachineError, UserError
    from stoker.launch.notebook import load_run
    from stoker.recipe import Recipe, RunConfig, RunSettings
    from stoker.settings import config
    from stoker.train.config import TrainConfig
    from stoker.train.supervised import Supervised, metrics_table
    from stoker.train.task import Task
    from stoker.train.trackers import LogConfig
    from stoker.tune.space import Tunable

_HOMES = {
    "Batch": "data.batch",
    "Finding": "doctor.finding",
    "Loader": "data.loader",
    "LoaderConfig": "data.loader",
    "LogConfig": "train.trackers",
    "MachineError": "errors",
    "Probe": "doctor.probe",
    "Recipe": "recipe",
    "RunConfig": "recipe",
    "RunData": "data.source",
    "RunSettings": "recipe",
    "Samples": "data.own",
    "Supervised": "train.supervised",
    "Task": "train.task",
    "TrainConfig": "train.config",
    "Tunable": "tune.space",
    "UserError": "errors",
    "config": "settings",
    "from_arrays": "data.arrays",
    "from_dataset": "data.own",
    "from_files": "data.own",
    "from_parquet": "data.columns",
    "load_run": "launch.notebook",
    "metrics_table": "train.supervised",
    "open_store": "data.store",
    "pack": "data.pack",
    "watch": "doctor.watch",
}

try:
    __version__ = version("stoker")
except PackageNotFoundError:  # a source tree that nobody installed
    __version__ = "0+source"
__all__ = [
    "Batch",
    "Finding",
    "Loader",
    "LoaderConfig",
    "LogConfig",
    "MachineError",
    "Probe",
    "Recipe",
    "RunConfig",
    "RunData",
    "RunSettings",
    "Samples",
    "Supervised",
    "Task",
    "TrainConfig",
    "Tunable",
    "UserError",
    "__version__",
    "config",
    "from_arrays",
    "from_dataset",
    "from_files",
    "from_parquet",
    "load_run",
    "metrics_table",
    "open_store",
    "pack",
    "train",
    "watch",
]


class _Train(ModuleType):
    """The package `stoker.train`, which can also be called: stoker.train(target, **overrides)."""

    def __call__(self, target: Any, preset: str | None = None, **overrides: Any) -> Any:
        from stoker.launch.notebook import train as start

        return start(target, preset, **overrides)


_train.__class__ = _Train


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    return getattr(import_module(f"stoker.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
