"""Classifiers: anything that timm has, and a small residual network for small images."""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.errors import UserError
from stoker.settings import AlsoCalled, config

SMALL = "resnet9"


@config
class ImageModelConfig:
    name: Annotated[str, AlsoCalled("arch", "architecture", "model_name")] = "resnet50"  # of timm, or resnet9
    width: Annotated[int, Field(ge=4)] = 64  # channels of resnet9's first layer; others have their own
    stochastic_depth: Annotated[float, Field(ge=0, lt=1), AlsoCalled("drop_path_rate", "drop_path")] = 0.0
    loss: Literal["ce", "bce"] = "ce"  # cross-entropy, or one yes or no a class
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of ce
    pretrained: str | None = None  # weights to begin with: a file (.safetensors, .pth) of timm or torchvision, or `hub`

    def __post_init__(self) -> None:
        if self.loss == "bce" and self.label_smoothing:
            raise ValueError(
                f"label_smoothing {self.label_smoothing} is for loss ce; bce has no use for it: set it to 0"
            )

    def without_effect(self) -> dict[str, str]:
        """Keys that change nothing beside the others, and why."""
        return {} if self.name == SMALL else {"width": f"{self.name} has a width of its own"}


def check_name(config: ImageModelConfig) -> None:
    """Whether there is such a model."""
    import timm

    if config.name != SMALL and not timm.is_model(config.name):
        near = timm.list_models(f"*{config.name[:6]}*")[:5]
        hint = f" Names like it: {', '.join(near)}." if near else ""
        raise UserError(f"timm has no model {config.name!r}.{hint}")


def build_model(config: ImageModelConfig, num_classes: int, size: int | None = None) -> nn.Module:
    """`size`: pixels of a side, for models that must know them; other sizes work all the same."""
    if config.name == SMALL:
        if config.stochastic_depth:
            raise UserError(f"model.stochastic_depth is not for {SMALL}, whose few blocks are all needed.")
        model: nn.Module = SmallResNet(config.width, num_classes)
    else:
        model = _from_timm(config, num_classes, size)
    return model.to(memory_format=torch.channels_last)


def _from_timm(config: ImageModelConfig, num_classes: int, size: int | None) -> nn.Module:
    import timm

    check_name(config)
    options: dict[str, Any] = {"drop_path_rate": config.stochastic_depth} if config.stochastic_depth else {}
    # timm's residual networks begin with the last norm of each block at zero, so that blocks start as identities.
    # Transformers must be told the size of the images; others do not take the word.
    sizes: list[dict[str, Any]] = [{"img_size": size, "dynamic_img_size": True}, {"img_size": size}] if size else []
    for sized in [*sizes, {}]:
        try:
            made: nn.Module = timm.create_model(config.name, num_classes=num_classes, **options, **sized)
        except TypeError as error:
            if not sized or "img_size" not in str(error):
                raise
        except AssertionError as error:
            raise UserError(f"{config.name} cannot be made for images of {size} pixels: {error}") from error
        else:
            return made
    raise AssertionError("the last try takes no size")


class SmallResNet(nn.Module):
    """Nine layers for images of 32 to 64 pixels: convolutions that halve the side, two residual blocks."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(3, width),
            _convolution(width, 2 * width),
            nn.MaxPool2d(2),
            _Residual(2 * width),
            _convolution(2 * width, 4 * width),
            nn.MaxPool2d(2),
            _convolution(4 * width, 8 * width),
            nn.MaxPool2d(2),
            _Residual(8 * width),
        )
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = F.adaptive_max_pool2d(self.layers(images), 1).flatten(1)
        # Largest values over a field are large: an eighth of them starts the softmax soft.
        return self.head(features) * 0.125  # type: ignore[no-any-return]


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(_convolution(width, width), _convolution(width, width))

    def forward(self, images: Tensor) -> Tensor:
        return torch.add(images, self.inner(images))


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )
