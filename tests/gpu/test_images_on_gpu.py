"""Images on the GPU: recorded steps learn what others learn, and JPEG decoded there is the same picture."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.data.plan import Position, Step
from stoker.recipes.imagenet.batch import ImageBatch
from stoker.recipes.imagenet.classes import ClassMap
from stoker.recipes.imagenet.decode import decode
from stoker.recipes.imagenet.draw import CLASSES, draw, draw_set
from stoker.recipes.imagenet.gpu_decode import GpuDecoder
from stoker.recipes.imagenet.model import ImageModelConfig
from stoker.recipes.imagenet.task import ClassificationTask
from stoker.train.config import TrainConfig
from stoker.train.optim import build_optimizer
from stoker.train.step import Stepper

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")  # torchvision 0.29
DEVICE = torch.device("cuda")


def batch_of(count: int, seed: int) -> ImageBatch:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    images = torch.randn(count, 3, 32, 32, generator=generator, device=DEVICE).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (count,), generator=generator, device=DEVICE)
    return ImageBatch(images, labels, labels, torch.ones(count, device=DEVICE), torch.arange(count, device=DEVICE))


def losses_of(sizes: list[int], *, graphs: bool, bad: int | None = None) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    task = ClassificationTask(ImageModelConfig(name="resnet9", width=8), ClassMap(CLASSES))
    task.model.to(DEVICE).train()
    config = TrainConfig(optimizer="sgd", lr=0.05, cuda_graphs=graphs, ema=0.9)
    stepper = Stepper(task, build_optimizer(task.model, config), config, "fp32", DEVICE)
    losses = []
    for number, size in enumerate(sizes):
        batch = batch_of(size, number)
        if number == bad:
            batch.images[0, 0, 0, 0] = float("nan")
        step = Step(np.arange(size), Position(0), Position(0), batches=(batch,))
        result = stepper.compute(step)
        stepper.update(result, 0.05)
        losses.append(result.loss.clone())
    assert (stepper._graphed is not None) == graphs
    assert not graphs or stepper._graphed._recorded is not None  # type: ignore[union-attr]
    assert stepper.average is not None
    averaged = {f"average of {name}": value for name, value in stepper.average.weights.items()}
    return torch.stack(losses).tolist(), task.model.state_dict() | averaged


@pytest.mark.parametrize("bad", [None, 9])
def test_a_recorded_step_is_the_same_step(bad: int | None) -> None:
    """A shorter batch in between, a new usual size later, and a step that is not finite."""
    sizes = [32] * 8 + [20] + [32] * 6 + [48] * 8
    plain, weights = losses_of(sizes, graphs=False, bad=bad)
    graphed, same = losses_of(sizes, graphs=True, bad=bad)
    np.testing.assert_allclose(graphed, plain, rtol=2e-2)
    for name, value in weights.items():
        torch.testing.assert_close(same[name].float(), value.float(), rtol=5e-2, atol=5e-3, msg=name)
        assert torch.isfinite(value.float()).all()


def test_jpeg_decoded_on_the_gpu_is_the_same_picture() -> None:
    contents = []
    for number, name in enumerate(CLASSES):
        file = io.BytesIO()
        Image.fromarray(draw(name, np.random.default_rng(number))).save(
            file, "JPEG", quality=95, subsampling=number % 3
        )
        contents.append(file.getvalue())
    decoder = GpuDecoder(DEVICE)
    images = decoder.decode(contents)
    assert images is not None
    torch.cuda.synchronize()
    for content, image in zip(contents, images, strict=True):
        theirs = image.permute(1, 2, 0).cpu().numpy().astype(int)
        ours = decode(content, fast=True).astype(int)
        assert theirs.shape == ours.shape
        assert np.abs(theirs - ours).mean() < 3


def test_what_a_gpu_cannot_decode_is_left_to_others() -> None:
    file = io.BytesIO()
    Image.new("CMYK", (40, 40)).save(file, "JPEG")
    decoder = GpuDecoder(DEVICE)
    assert decoder.decode([file.getvalue()]) is None
    assert decoder.decode([b"no image"]) is None
    assert decoder.decode([]) is None
    assert decoder.works


def test_batches_are_the_same_whoever_decodes(tmp_path: Path) -> None:
    from stoker.data.device import feed
    from stoker.launch.build import build_run
    from stoker.launch.targets import resolve_target
    from stoker.recipes.imagenet.recipe import RECIPE
    from stoker.train.parallel import Ranks

    draw_set(tmp_path / "set", per_class=30, held_out=10, seed=0)
    words = ["--data.path", str(tmp_path / "set"), "--data.size", "32", "--loader.batch_size", "128"]
    words += ["--data.check_labels", "false", "--run.device", "cuda", "--data.processes", "1"]
    found = []
    for on_gpu in ("false", "true"):
        run = resolve_target("imagenet", [*words, "--data.decode_on_gpu", on_gpu]).config
        parts = build_run(RECIPE, run, Ranks())
        steps = feed(parts.training.steps(Position(0), 1), DEVICE)
        found.append([(step.batches[0].images.cpu(), step.batches[0].labels.cpu()) for step in steps])
    for (images, labels), (others, same) in zip(*found, strict=True):
        assert torch.equal(labels, same)
        assert (images - others).abs().mean() < 0.15  # in standard deviations of a colour
    assert any(not torch.equal(images, others) for (images, _), (others, _) in zip(*found, strict=True))
