"""What can be said about the images of a run: where they lie, how large, which part is seen, how they are augmented."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from tyro.conf import FlagCreatePairsOff

from stoker.data.locations import DataPath
from stoker.data.storage.urls import Url
from stoker.recipes.imagenet.broken import Policy
from stoker.settings import AlsoCalled, config


@config
class ImageNetData:
    path: Annotated[DataPath, AlsoCalled("dir", "data_dir", "root")] | None = None  # None: images are drawn
    size: Annotated[int, Field(ge=8), AlsoCalled("image_size", "img_size", "resolution")] = 224  # pixels of a side
    first_size: Annotated[int, Field(ge=8)] | None = None  # grow from this, in steps of 32 pixels, by the epoch
    grown_after: Annotated[float, Field(gt=0, le=1)] = 0.8  # share of the epochs after which `size` is reached
    validation_size: Annotated[int, Field(ge=8)] | None = None  # None: `size`
    validation_crop: Annotated[float, Field(gt=0, le=1)] = 0.875  # share of the shorter side that validation sees
    crop: Literal["random", "shift"] = "random"  # a random part, or the whole moved by a few pixels (small images)
    smallest_crop: Annotated[float, Field(gt=0, le=1)] = 0.08  # share of the area
    shift: Annotated[int, Field(ge=0)] = 4  # pixels, of crop shift
    flip: bool = True  # left and right, half of the time

    rand_augment: Annotated[int, Field(ge=0)] = 0  # operations in a row
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0  # of 30
    magnitude_spread: Annotated[float, Field(ge=0)] = 0.0  # standard deviation of the magnitude
    erasing: Annotated[float, Field(ge=0, le=1)] = 0.0  # probability
    mixup: Annotated[float, Field(ge=0)] = 0.0  # alpha of its beta distribution
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    mix_probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    mix_switch: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of cutmix where both are used
    repeats: Annotated[int, Field(ge=1)] = 1  # augmentations of the same image a step

    max_classes: Annotated[int, Field(ge=2)] | None = None  # a subset, drawn with subset_seed
    max_per_class: Annotated[int, Field(ge=1)] | None = None  # training images of each class
    subset_seed: Annotated[int, Field(ge=0)] = 0
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1  # share held out, where there is no validation folder
    processes: Annotated[int, Field(ge=0)] | None = (
        None  # that decode; None: one a loader thread beside a GPU or where there are more than four threads, else none
    )
    decode_on_gpu: bool = False  # also, training images for which no process is free; not the same to the bit
    broken: Policy = "few"  # images that cannot be decoded: few (1 %) or all are skipped, or the first stops the run
    check_labels: bool = True  # a quick classifier tells before the first step whether labels of both sides agree

    draw_per_class: Annotated[int, Field(ge=1)] = 500  # images drawn where there is no path
    draw_held_out: Annotated[int, Field(ge=1)] = 60

    def __post_init__(self) -> None:
        if self.decode_on_gpu and self.crop == "shift":
            raise ValueError("decode_on_gpu is for crops of large images, and crop is shift")
        if self.first_size is not None and self.first_size > self.size:
            raise ValueError(f"first_size {self.first_size} is larger than size {self.size}")

    def without_effect(self) -> dict[str, str]:
        """Keys that change nothing beside the others, and why."""
        found = {"smallest_crop" if self.crop == "shift" else "shift": f"data.crop is {self.crop}"}
        if not isinstance(self.path, Url):
            found["loader.window"] = "the order of local images is exact"
        if self.first_size is None:
            found["grown_after"] = "data.first_size is not set"
        if not self.rand_augment:
            found |= dict.fromkeys(("magnitude", "magnitude_spread"), "data.rand_augment is 0")
        if not (self.mixup or self.cutmix):
            found["mix_probability"] = "data.mixup and data.cutmix are 0"
        if not (self.mixup and self.cutmix):
            found["mix_switch"] = "it chooses between data.mixup and data.cutmix, and not both are used"
        if self.max_classes is None and self.max_per_class is None:
            found["subset_seed"] = "neither data.max_classes nor data.max_per_class is set"
        if self.processes == 0:
            found["decode_on_gpu"] = "it helps the processes that decode, and data.processes is 0"
        if self.path is not None:
            found |= dict.fromkeys(("draw_per_class", "draw_held_out"), "data.path is given, nothing is drawn")
        return found


@dataclass(frozen=True)
class PackOptions:
    """Of `stoker pack imagenet`."""

    short_side: int | None = None  # shrink larger images so that their shorter side has this many pixels
    quality: int | None = None  # of shrunk images, 1 to 100; default 90
    decoded: FlagCreatePairsOff[bool] = (
        False  # pixels instead of JPEG: several times the disk, next to no work for the cores; best with --short-side
    )
    keep: FlagCreatePairsOff[bool] = False  # the original bytes, which is the default
    max_classes: int | None = None  # only so many classes
    max_per_class: int | None = None  # only so many training images of each class
    broken: Policy = "few"  # images that cannot be decoded: few (1 %) or all are left out, or the first is an error


def size_at(config: ImageNetData, epoch: int, epochs: int) -> int:
    """Pixels of a side in an epoch: from first_size up, in steps of 32, and `size` from grown_after on."""
    if config.first_size is None:
        return config.size
    until = max(1.0, config.grown_after * epochs)
    share = min(1.0, epoch / until)
    grown = config.first_size + share * (config.size - config.first_size)
    return config.size if share >= 1 else min(config.size, int(grown // 32 * 32) or config.first_size)
