"""ImageNet as a recipe: classifiers on folders, tar shards or packed shards of images."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.data.loader import LoaderConfig
from stoker.data.pack import PackRequest
from stoker.recipe import Recipe, RunConfig, Trained
from stoker.recipes.imagenet.batch import ImageBatch
from stoker.recipes.imagenet.classes import ClassMap
from stoker.recipes.imagenet.config import ImageNetData, PackOptions
from stoker.recipes.imagenet.data import open_data
from stoker.recipes.imagenet.model import ImageModelConfig
from stoker.recipes.imagenet.task import ClassificationTask
from stoker.train.config import TrainConfig
from stoker.train.run import Run
from stoker.train.task import Task

FED = "Computed from 6,636 images/s at 224 pixels, fed from shards of short side 288 on 16 cores; originals: 5,701."
EXPECTED = "The accuracy is that of the work cited: nobody has trained Stoker on the full ImageNet yet."


def demo() -> RunConfig:
    return RunConfig(
        recipe="imagenet:demo",
        data=ImageNetData(size=48, validation_crop=1.0, smallest_crop=0.6),
        model=ImageModelConfig(name="resnet9", width=16),
        loader=LoaderConfig(batch_size=64, threads=_cores()),
        train=TrainConfig(
            epochs=6, optimizer="sgd", lr=0.1, lr_batch=64, schedule="onecycle", weight_decay=5e-4, clip_norm=None
        ),
    )


def cifar10() -> RunConfig:
    return RunConfig(
        recipe="imagenet:cifar10",
        data=ImageNetData(size=32, validation_crop=1.0, crop="shift", erasing=0.25),
        model=ImageModelConfig(name="resnet9", width=128, label_smoothing=0.1),
        loader=LoaderConfig(batch_size=512, threads=_cores(), look_ahead=32),
        train=TrainConfig(
            epochs=50,
            optimizer="sgd",
            lr=0.4,
            lr_batch=512,
            schedule="onecycle",
            weight_decay=5e-4,
            clip_norm=None,
            ema=0.99,
        ),
    )


def fast() -> RunConfig:
    return RunConfig(
        recipe="imagenet:fast",
        data=ImageNetData(size=192, first_size=128, validation_size=224, smallest_crop=0.35, validation_crop=0.875),
        model=ImageModelConfig(label_smoothing=0.1),
        loader=_large(1024),
        train=TrainConfig(
            epochs=16, optimizer="sgd", lr=0.5, lr_batch=256, weight_decay=5e-5, clip_norm=None, compile=True,
            warmup_epochs=2, final_share=0.0,
        ),
    )  # fmt: skip


def baseline() -> RunConfig:
    return RunConfig(
        recipe="imagenet:baseline",
        data=ImageNetData(),
        model=ImageModelConfig(label_smoothing=0.1),
        loader=_large(256),
        train=TrainConfig(
            epochs=90, optimizer="sgd", lr=0.1, lr_batch=256, weight_decay=1e-4, clip_norm=None, compile=True,
            warmup_epochs=5, final_share=0.0,
        ),
    )  # fmt: skip


def rsb_a2() -> RunConfig:
    return RunConfig(
        recipe="imagenet:rsb-a2",
        data=ImageNetData(
            validation_crop=0.95, rand_augment=2, magnitude=7.0, magnitude_spread=0.5, mixup=0.1, cutmix=1.0, repeats=3
        ),
        model=ImageModelConfig(loss="bce", stochastic_depth=0.05),
        loader=_large(2048),
        train=TrainConfig(
            epochs=300, optimizer="lamb", lr=5e-3, lr_batch=2048, weight_decay=0.02, clip_norm=None, compile=True,
            warmup_epochs=5, final_share=0.0002,
        ),
    )  # fmt: skip


def _large(batch_size: int) -> LoaderConfig:
    """All cores decode; enough is made ahead that each of them always has a batch to work on."""
    return LoaderConfig(batch_size=batch_size, threads=_cores(), look_ahead=2 * _cores(), ram_bytes=_cores() << 30)


def _cores() -> int:
    """Of this process: those of the machine, shared by the processes that torchrun started on it."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


NOTES: dict[str, tuple[str, ...]] = {
    "demo": ("stoker train imagenet: ten classes of drawn images, two CPU cores, a few minutes; above 80 % top-1.",),
    "cifar10": (
        "stoker train imagenet:cifar10 --data.path DIR --train.evaluate_every 2000, with train/CLASS and test/CLASS.",
        "One H200: 90 s.",
        "Expected: 92.7 % top-1, measured once, on JPEG files of 800 bytes that keep colours at half the resolution.",
        "Nine-layer residual networks of the DAWNBench contest reach 94 % on the uncompressed images, in 24 epochs.",
        "Departures: twice their width and epochs, mirrored edges, random erasing instead of a fixed cut-out.",
    ),
    "fast": (
        "stoker train imagenet:fast --data.path DIR; one H200: 16 epochs in 52 minutes of training (computed).",
        FED,
        "Expected: about 71 % top-1, what ffcv-imagenet states for 16 epochs of ResNet-50 (recalled, not read again).",
        "Departures: no blur-pool, no flip at test time; crops from 35 % of the area; 128 to 192 pixels, 224 in validation.",
        EXPECTED,
    ),
    "baseline": (
        "stoker train imagenet:baseline --data.path DIR; one H200: 90 epochs in 4.8 hours of training (computed).",
        FED,
        "Expected: 76 to 77 % top-1. torchvision's weights of 90 epochs (IMAGENET1K_V1) have 76.13 %.",
        "Departures from torchvision's recipe: cosine instead of steps, warm-up of 5 epochs, label smoothing 0.1, no decay "
        "on norms and biases.",
        EXPECTED,
    ),
    "rsb-a2": (
        "stoker train imagenet:rsb-a2 --data.path DIR; one H200: not timed; 16 hours if its augmentations cost nothing.",
        FED,
        "Expected: 79.8 % top-1, ResNet strikes back (arXiv:2110.00476), procedure A2.",
        "Departures: RandAugment has torchvision's operations, not timm's increasing ones; images are mixed in pairs "
        "with a weight each, not one weight a batch; warps take the nearest pixel, about the centre; crops are bilinear.",
        EXPECTED,
    ),
}


def build_task(run: RunConfig, facts: Mapping[str, Any]) -> ClassificationTask:
    return ClassificationTask(run.model, ClassMap(tuple(facts["classes"])), run.data.size)


def initialise(run: RunConfig, task: Task) -> None:
    from stoker.recipes.imagenet.pretrained import load_pretrained

    load_pretrained(task.model, run.model)


def prepare(model: Trained, samples: Any) -> ImageBatch:
    from stoker.recipes.imagenet.predict import as_batch

    return as_batch(samples, model.config.data)


def result_table(models: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("accuracy on validation images", "top-1", "top-5", "worst class")]
    for label, metrics in models.items():
        rows.append((label, *(f"{metrics[name]:.4f}" for name in ("top1", "top5", "worst_class_top1"))))
    rows.append(("guessing", f"{next(iter(models.values()))['chance_top1']:.4f}", "", ""))
    return rows


def pack(request: PackRequest) -> Mapping[str, Any]:
    from stoker.recipes.imagenet.pack import pack as pack_images

    return pack_images(request)


def report(model: Trained, run: Run, folder: Path) -> Mapping[str, Any]:
    from stoker.recipes.imagenet.report import report as in_depth

    return in_depth(model, run, folder)


def predict(model: Trained, out: Path | None) -> Mapping[str, Any]:
    from stoker.recipes.imagenet.predict import predict as predict_images

    return predict_images(model, out)


def export(model: Trained, out: Path, samples: Path | None) -> Mapping[str, Any]:
    from stoker.recipes.imagenet.predict import export as export_model

    return export_model(model, out, samples)


RECIPE = Recipe(
    name="imagenet",
    presets={"demo": demo, "cifar10": cifar10, "fast": fast, "baseline": baseline, "rsb-a2": rsb_a2},
    open_data=open_data,
    build_task=build_task,
    result_table=result_table,
    report=report,
    initialise=initialise,
    predict=predict,
    prepare=prepare,
    export=export,
    pack=pack,
    pack_options=PackOptions,
    notes=NOTES,
)
