"""Weights of others: the same answers, another head, and models that must know the size of an image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

import stoker
from stoker.errors import UserError
from stoker.recipes.imagenet.draw import draw_set
from stoker.recipes.imagenet.model import ImageModelConfig, build_model
from stoker.recipes.imagenet.pretrained import load_pretrained

SMALL = {"run": {"device": "cpu"}, "train": {"epochs": 1, "steps": 2, "log_every": 1}}


def test_weights_of_torchvision_give_its_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(num_classes=10).eval()
    for module in theirs.modules():  # as if trained: statistics that are not those of the beginning
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    torch.save(theirs.state_dict(), tmp_path / "resnet50.pth")
    save_file(theirs.state_dict(), tmp_path / "resnet50.safetensors")
    images = torch.randn(2, 3, 96, 96)
    for name in ("resnet50.pth", "resnet50.safetensors"):
        config = ImageModelConfig(name="resnet50", pretrained=str(tmp_path / name))
        ours = build_model(config, 10).eval()
        load_pretrained(ours, config)
        with torch.inference_mode():
            torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)
    other = build_model(config, 7)
    drawn = other.get_parameter("fc.weight").clone()
    load_pretrained(other, config)
    assert torch.equal(other.get_parameter("fc.weight"), drawn)
    assert torch.equal(other.get_parameter("conv1.weight"), theirs.conv1.weight)


def test_a_transformer_takes_weights_of_another_size(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=224)
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    config = ImageModelConfig(name="vit_tiny_patch16_224", pretrained=str(tmp_path / "vit.safetensors"))
    for size in (32, 96):
        ours = build_model(config, 10, size)
        load_pretrained(ours, config)
        assert ours(torch.randn(2, 3, size, size)).shape == (2, 10)
        assert ours(torch.randn(2, 3, 64, 64)).shape == (2, 10)  # another one in validation


def test_what_is_no_weights_is_named(tmp_path: Path) -> None:
    def fails(file: str | None, name: str = "resnet18") -> str:
        config = ImageModelConfig(name=name, pretrained=file)
        with pytest.raises(UserError) as error:
            load_pretrained(build_model(config, 3), config)
        return str(error.value)

    assert "no such file" in fails(str(tmp_path / "absent.pth"))
    (tmp_path / "text.pth").write_text("no weights")
    assert "read safely" in fails(str(tmp_path / "text.pth"))
    torch.save([1, 2], tmp_path / "list.pth")
    assert "no tensors by name" in fails(str(tmp_path / "list.pth"))
    torch.save(torchvision.models.resnet34().state_dict(), tmp_path / "other.pth")
    assert "of another model" in fails(str(tmp_path / "other.pth"), "resnet50")
    assert "nobody has weights" in fails("hub", "resnet9")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_nothing_in_a_file_of_weights_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"conv1.weight": Evil()}, tmp_path / "evil.pth")
    config = ImageModelConfig(name="resnet18", pretrained=str(tmp_path / "evil.pth"))
    with pytest.raises(UserError, match="read safely"):
        load_pretrained(build_model(config, 3), config)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_transformer_trains_from_weights_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_set(tmp_path / "set", per_class=4, held_out=2, seed=0)
    save_file(timm.create_model("vit_tiny_patch16_224").state_dict(), tmp_path / "vit.safetensors")
    outcome = stoker.train(  # type: ignore[operator]
        "imagenet",
        **SMALL,
        data={"path": str(tmp_path / "set"), "size": 32, "check_labels": False},
        model={"name": "vit_tiny_patch16_224", "pretrained": str(tmp_path / "vit.safetensors")},
        loader={"batch_size": 8},
    )
    assert "the head is for other classes and begins anew (head.bias, head.weight)" in capsys.readouterr().err
    assert outcome.metrics["samples"] == 20
    (tmp_path / "vit.safetensors").unlink()  # a run that is used has weights of its own
    used = stoker.load_run(outcome.folder.path, device="cpu")
    image = next((tmp_path / "set" / "val").rglob("*.jpg"))
    assert used([image, image.read_bytes()]).shape == (2, 10)
    with pytest.raises(UserError, match="1 of 1 images cannot be decoded"):
        used(b"no image")


def test_events_in_hand_get_an_answer(events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = stoker.train(  # type: ignore[operator]
        "icecube",
        **SMALL,
        data={"path": str(events_dir)},
        model={"width": 16, "heads": 2},
        loader={"batch_size": 32},
    )
    used = stoker.load_run(outcome.folder.path, device="cpu")
    event = {"sensor_id": np.array([5, 4000, 5]), "time": np.array([9000, 9500, 9900]), "charge": np.ones(3),
             "auxiliary": np.array([False, True, False])}  # fmt: skip
    answer = used([event, event])
    assert answer.shape == (2, 4)
    torch.testing.assert_close(answer[:, :3].norm(dim=1), torch.ones(2), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="lacks charge"):
        used({"sensor_id": [1], "time": [1], "auxiliary": [True]})
    with pytest.raises(UserError, match="sensor id"):
        used({**event, "sensor_id": [1, 2, 9999]})
