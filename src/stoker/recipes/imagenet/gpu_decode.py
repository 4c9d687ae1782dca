"""JPEG decoded on the GPU, for parts of a batch for which no core is free. NVIDIA's decoder, by way of torchvision."""

import simplejpeg
import torch
from torch import Tensor

from stoker import console
from stoker.recipes.imagenet.decode import JPEG

PLAIN = ("YCbCr", "Gray")  # colour spaces; others go to Pillow


class GpuDecoder:
    """Used by one thread at a time."""

    total = 0  # images, of all decoders of this process

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.num_images = 0
        self.works = True

    def decode(self, contents: list[bytes]) -> list[Tensor] | None:
        """(3, height, width) each, not cropped and not scaled; None: these are not for a GPU."""
        if not self.works or not all(map(_is_plain, contents)):
            return None
        from torchvision.io import ImageReadMode, decode_jpeg

        files = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
        try:
            with torch.cuda.stream(self.stream()):
                images: list[Tensor] = decode_jpeg(files, mode=ImageReadMode.RGB, device=self._device)
        except RuntimeError as error:
            if not self.num_images:  # not a broken image but a build or a machine without the decoder
                self.works = False
                console.say(f"JPEG is not decoded on the GPU: {str(error).strip().splitlines()[0]}")
            return None
        self.num_images += len(images)
        GpuDecoder.total += len(images)
        return images

    def stream(self) -> torch.cuda.Stream:
        """Made at first use: processes are forked before, and must not see CUDA."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._stream


def _is_plain(content: bytes) -> bool:
    if content[:3] != JPEG:
        return False
    try:
        return simplejpeg.decode_jpeg_header(content, strict=False)[2] in PLAIN
    except (ValueError, KeyError):
        return False
