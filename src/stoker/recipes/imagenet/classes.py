"""One class map for a run: made from the training samples, and every other list of classes must agree with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.errors import UserError

SHOWN = 20  # names of a list that a message holds


@dataclass(frozen=True)
class ClassMap:
    """Names in their order: a label is a place in this list."""

    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def check(self, other: Mapping[str, int], origin: str) -> None:
        """Refuses classes (name -> number of images) that are not these, with both lists."""
        known = set(self.names)
        missing = [name for name in self.names if not other.get(name)]
        extra = [name for name, count in other.items() if name not in known and count]
        if missing or extra:
            parts = [f"{origin} and the training set do not have the same classes."]
            parts += [f"Only in training, or empty in {origin}: {listed(missing)}."] if missing else []
            parts += [f"Only in {origin}: {listed(extra)}."] if extra else []
            parts.append(
                f"Training has {len(self)}: {listed(self.names)}. {origin} has {len(other)}: {listed(list(other))}."
            )
            raise UserError(" ".join(parts))

    def chosen(self, max_classes: int | None, seed: int) -> "ClassMap":
        """Some of the classes, drawn with a seed, in their old order."""
        if max_classes is None or max_classes >= len(self):
            return self
        drawn = np.sort(np.random.default_rng(seed).choice(len(self), max_classes, replace=False))
        return ClassMap(tuple(self.names[number] for number in drawn))

    def labels(self, old: "ClassMap") -> npt.NDArray[np.int64]:
        """For each label of another map its label here, or -1."""
        here = {name: number for number, name in enumerate(self.names)}
        return np.array([here.get(name, -1) for name in old.names], np.int64)


def class_map(counts: Mapping[str, int], origin: str) -> ClassMap:
    """From the training set's classes and numbers of images; an empty class is an error."""
    empty = [name for name, count in counts.items() if not count]
    if empty:
        raise UserError(f"{origin} has classes without a single image: {listed(empty)}. Remove them, or fill them.")
    if len(counts) < 2:
        raise UserError(f"{origin} has {len(counts)} class(es), and telling classes apart needs at least two.")
    return ClassMap(tuple(sorted(counts)))


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
