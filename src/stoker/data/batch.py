"""What a batch must offer, and the one walk through the tensors inside it.

A batch is whatever the last stage of a recipe gives: tensors in dataclasses, dicts or tuples, nested as they like. The only
thing it must hold is `rows`, which samples they are; a class of its own may offer more, such as what happens on the way to
the device. A plain dict of tensors is a batch too.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.errors import UserError

ALONE_FROM = 1 << 15  # elements: from here on torch copies with several threads


class Batch(Protocol):
    """All that is asked of a batch. Of what it does not offer itself, everything but `rows` is done for it."""

    @property
    def rows(self) -> Tensor:
        """(samples,) rows of the sample table, in the order of the batch."""

    @property
    def num_samples(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def pin(self) -> "Batch":
        """The same in memory that a GPU can copy from by itself."""

    def to(self, device: torch.device) -> "Batch":
        """What the task gets, on the device."""


def rows_of(batch: Any) -> Tensor:
    rows: Tensor = batch["rows"] if isinstance(batch, Mapping) else batch.rows
    return rows


def num_samples(batch: Any) -> int:
    own = None if isinstance(batch, Mapping) else getattr(batch, "num_samples", None)
    return len(rows_of(batch)) if own is None else own


def num_bytes(value: Any) -> int:
    own = getattr(value, "num_bytes", None)
    return sum(map(tensor_bytes, tensors_in(value))) if own is None else int(own)


def tensor_bytes(tensor: Tensor) -> int:
    """Of a sparse tensor only what is there."""
    return tensor.nbytes if tensor.layout == torch.strided else int(tensor.element_size() * tensor._nnz())


def pin(batch: Any) -> Any:
    return batch.pin() if hasattr(batch, "pin") else map_tensors(batch, pin_tensor)


def pin_tensor(tensor: Tensor) -> Tensor:
    """Copied by the calling thread alone: torch's own copy wakes a thread a core, for each thread of the loader.

    In as few calls as there can be: each of them gives the interpreter back and asks for it again, and whoever launches
    kernels meanwhile has to wait for it.
    """
    if tensor.is_cuda:
        return tensor
    plain = (
        type(tensor) is Tensor
        and not tensor.requires_grad
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )
    if not plain or tensor.numel() < ALONE_FROM or tensor.is_pinned():
        return tensor.pin_memory()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    ctypes.memmove(pinned.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return pinned


def to_device(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):
        return batch.to(device)
    if device.type == "cpu":
        return batch  # the loader made it there
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; what is neither a tensor nor holds any stays as it is."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with everything changed that is no dataclass, dict, list or tuple itself."""
    if _is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: map_leaves(getattr(value, name), change) for name in fields})
    if isinstance(value, Mapping):
        changed = {key: map_leaves(item, change) for key, item in value.items()}
        return changed if type(value) is dict else _alike(value, changed)
    if isinstance(value, list | tuple):
        items = [map_leaves(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything inside that is no dataclass, dict or tuple itself, with its place."""
    if _is_dataclass(value):
        items: Any = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from leaves(item, f"{name}.{key}" if name else str(key))


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def check_batch(batch: Any, made_by: str) -> None:
    """Says what a batch lacks, before anything is trained with it."""
    try:
        rows = rows_of(batch)
    except (KeyError, AttributeError):
        key = 'a key "rows"' if isinstance(batch, Mapping) else "an attribute `rows`"
        raise UserError(
            f"A batch ({type(batch).__name__}, {made_by}) needs {key}: the rows of the sample table that its samples are, "
            f"as a tensor. The micro-batch that it was made of has them."
        ) from None
    if not isinstance(rows, Tensor) or rows.ndim != 1 or rows.is_floating_point():
        raise UserError(
            f"`rows` of a batch ({made_by}) must be a tensor of whole numbers, one a sample, not {rows!r:.80}."
        )
    if num_samples(batch) != len(rows):
        raise UserError(
            f"A batch ({made_by}) says that it has {num_samples(batch)} samples, and its `rows` has {len(rows)}."
        )


def _alike(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """The same kind of mapping, where it can be made of items: some are more than a dict to who uses them."""
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
