"""Layers of a model by the names of their parameters: which are frozen, and how much slower the early ones learn."""

from collections.abc import Sequence

from torch import nn

from stoker.errors import UserError


def freeze(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Parameters whose names begin with one of `names` are trained no more; `!name` stands for all but those.

    A module of which nothing is trained stays in evaluation mode: its running statistics are as fixed as its weights.
    Returns the names of what is frozen.
    """
    parameters = dict(model.named_parameters())
    for name in names:
        if not any(_begins(one, name.removeprefix("!")) for one in parameters):
            tops = dict.fromkeys(one.partition(".")[0] for one in parameters)
            raise UserError(f"train.freeze names {name}, and no parameter begins so. There are {', '.join(tops)}.")
    kept = [name[1:] for name in names if name.startswith("!")]
    given = [name for name in names if not name.startswith("!")]
    frozen = [
        one
        for one in parameters
        if (not given or any(_begins(one, name) for name in given)) and not any(_begins(one, name) for name in kept)
    ]
    if len(frozen) == len(parameters):
        raise UserError("train.freeze leaves nothing to train. '!NAME' excepts a layer, as in '[\"!head\"]'.")
    for name in frozen:
        parameters[name].requires_grad_(False)
    for module in model.modules():
        inside = list(module.parameters())
        if inside and not any(parameter.requires_grad for parameter in inside):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,misc]
    return frozen


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Which layer each parameter is of, from 0, in the order in which the model names them.

    A block of a numbered list (`blocks.3`, `layer1.0`) is a layer, and so is anything else at the top. Norms belong to the
    layer before them, and parameters of the model itself (positions, class tokens) to the first.
    """
    numbers: dict[str, int] = {}
    seen: dict[str, int] = {}
    wide = {_block(name) for name, parameter in model.named_parameters() if parameter.ndim > 1}
    last = 0
    for name, _ in model.named_parameters():
        block = _block(name)
        if "." not in name:
            numbers[name] = 0
            continue
        if block not in seen:
            seen[block] = last if block not in wide else (max(seen.values()) + 1 if seen else 0)
        numbers[name] = last = seen[block]
    return numbers


def _block(name: str) -> str:
    """The name up to its first number, or to its first dot."""
    words = name.split(".")
    number = next((at for at, word in enumerate(words[:-1]) if word.isdigit()), 0)
    return ".".join(words[: number + 1])


def _begins(name: str, with_: str) -> bool:
    return name == with_ or name.startswith(f"{with_}.")
