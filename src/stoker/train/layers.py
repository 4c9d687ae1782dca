"""Layers of a model by the names of their parameters: which are frozen, and how much slower the early ones learn."""

from collections.abc import Iterator, Sequence

from torch import nn

from stoker.errors import UserError

STACKS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("train.freeze leaves nothing to train. '!NAME' excepts a layer, as in '[\"!head\"]'.")
    for module in model.modules():
        inside = list(module.parameters())
        if inside and not any(parameter.requires_grad for parameter in inside):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,misc]
    return frozen


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Which layer each parameter is of, from 0, in the order in which the model names them.

    Blocks of a stack (a Sequential or ModuleList of modules that have modules) are layers, wherever the stack stands; so is
    anything beside it. Norms belong to the layer before them, and parameters of no module of their own (positions, class
    tokens) to the first.
    """
    numbers = {name: 0 for name, _ in model.named_parameters()}
    last = -1
    for prefix, unit in _units(model):
        inside = dict(unit.named_parameters(prefix))
        if last < 0 or any(parameter.ndim > 1 for parameter in inside.values()):
            last += 1
        numbers |= dict.fromkeys(inside, last)
    return numbers


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that are layers, in their order: a stack is opened, and whatever holds one."""
    children = [
        (f"{prefix}{name}", child) for name, child in module.named_children() if any(True for _ in child.parameters())
    ]
    children = [(name, child) for name, child in children if not isinstance(child, nn.ParameterList | nn.ParameterDict)]
    for name, child in children:
        if (len(children) == 1 and next(child.children(), None) is not None) or _holds_stack(child):
            yield from _units(child, f"{name}.")
        else:
            yield name, child


def _holds_stack(module: nn.Module) -> bool:
    return any(isinstance(one, STACKS) and sum(map(_is_composite, one.children())) >= 2 for one in module.modules())


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _begins(name: str, with_: str) -> bool:
    return name == with_ or name.startswith(f"{with_}.")
