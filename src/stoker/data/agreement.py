"""Do the labels of two groups of samples mean the same? A quick classifier, taught on one, is asked about both.

It must do about as well on the other group as on samples of its own that it has not seen. Where it knows something of the
one and nothing of the other, labels do not match; where some classes only look like each other's there, they were swapped.
A few samples a class are too few to see the latter.
"""

# N samples, F features, K classes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stoker.data.ragged import Indices

SIGMA = 5.0  # how sure the verdict must be
LEAST = 200  # samples to learn from

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    features: Floats  # (N, F)
    labels: Indices  # (N,) 0 .. K - 1


@dataclass(frozen=True)
class Agreement:
    held: float  # share of the known group's unseen samples that is classified right
    seen: float  # of the other group's
    chance: float
    differs: bool  # labels of the other group are others, surely
    swapped: tuple[tuple[int, int], ...]  # classes that stand in each other's place
    looks_like: tuple[tuple[int, int], ...]  # classes of the other group, and the class that they look like instead

    @property
    def is_sure(self) -> bool:
        return self.differs or bool(self.swapped)

    def named(self, names: Sequence[int]) -> "Agreement":
        """With classes by the numbers that they have elsewhere."""
        swapped, looks_like = (
            tuple((names[one], names[other]) for one, other in pairs) for pairs in (self.swapped, self.looks_like)
        )
        return replace(self, swapped=swapped, looks_like=looks_like)


def enough(num_classes: int, *sizes: int) -> bool:
    """Samples to learn from, and of each group that is judged."""
    return min(sizes) >= 5 * num_classes or sizes[0] >= LEAST


def agreement(learn: Group, judge: Group, other: Group, num_classes: int) -> Agreement:
    """Of the labels of `other` with those of `learn` and `judge`, which mean the same."""
    model = _fit(learn, num_classes)
    known_scores, unknown_scores = _scores(judge.features, model), _scores(other.features, model)
    known, unknown = known_scores.argmax(1), unknown_scores.argmax(1)
    held, seen = float(np.mean(known == judge.labels)), float(np.mean(unknown == other.labels))
    chance = 1 / num_classes
    error_held = np.sqrt(max(held * (1 - held), chance) / len(known))
    error_seen = np.sqrt(max(seen * (1 - seen), chance) / len(unknown))
    knows = held - chance > SIGMA * error_held
    differs = held - seen > SIGMA * np.hypot(error_held, error_seen) and seen < chance + 0.5 * (held - chance)
    differs = bool(knows and differs)
    swapped = () if differs else _swapped(known_scores, judge.labels, unknown_scores, other.labels)
    return Agreement(held, seen, chance, differs, swapped, _most_confused(unknown, other.labels, num_classes))


def _fit(group: Group, num_classes: int) -> tuple[Floats, Floats, Floats]:
    """A ridge regression onto the classes: mean and scale of the features, and weights (F + 1, K)."""
    features = group.features
    mean, scale = features.mean(0), features.std(0) + 1e-6
    inputs = np.column_stack([(features - mean) / scale, np.ones(len(features))])
    targets = np.eye(num_classes)[group.labels]
    penalty = 0.1 * len(features) * np.eye(inputs.shape[1]) / np.sqrt(inputs.shape[1])
    return mean, scale, np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ targets)


def _scores(features: Floats, model: tuple[Floats, Floats, Floats]) -> Floats:
    """(N, K) how much each sample looks like each class."""
    mean, scale, weights = model
    return np.asarray(np.column_stack([(features - mean) / scale, np.ones(len(features))]) @ weights)


def _swapped(held: Floats, held_labels: Indices, seen: Floats, seen_labels: Indices) -> tuple[tuple[int, int], ...]:
    """Pairs of classes whose samples each look like the other, surely, and whose own group's do not."""
    found = []
    centres = np.stack([seen[seen_labels == one].mean(0) if (seen_labels == one).any() else seen.mean(0)
                        for one in range(seen.shape[1])])  # fmt: skip
    own = centres.diagonal()
    apart = own[:, None] - centres - centres.T + own[None, :]  # negative where the two stand in each other's place
    for first, second in np.argwhere(np.triu(apart < 0, 1)).tolist():
        known = _sigmas_apart(held, held_labels, first, second)
        if known > SIGMA and _sigmas_apart(seen, seen_labels, first, second) < -SIGMA:
            found.append((first, second))
    return tuple(found)


def _sigmas_apart(scores: Floats, labels: Indices, first: int, second: int) -> float:
    """How surely samples of two classes differ in looking like the first rather than the second; negative: in reverse."""
    margin = scores[:, first] - scores[:, second]
    ours, theirs = margin[labels == first], margin[labels == second]
    if min(len(ours), len(theirs)) < 2:
        return 0.0
    error = np.sqrt(ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs))
    return float((ours.mean() - theirs.mean()) / max(error, 1e-12))


def _most_confused(guessed: Indices, labels: Indices, num_classes: int) -> tuple[tuple[int, int], ...]:
    """Classes that look like another one more than like their own."""
    table = np.zeros((num_classes, num_classes))
    np.add.at(table, (labels, guessed), 1)
    looks = table.argmax(1)
    return tuple((int(true), int(like)) for true, like in enumerate(looks) if like != true and table[true, like] > 0)
