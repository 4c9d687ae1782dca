"""JPEG decoded on the GPU, for chunks of a batch for which no core is free. NVIDIA's decoder, by way of torchvision."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from stoker import console
from stoker.recipes.imagenet.decode import JPEG

PLAIN = ("YCbCr", "Gray")  # colour spaces; others go to Pillow
REFUSALS = 3  # chunks in a row that are not for a GPU: then nobody asks any more


class GpuDecoder:
    """Used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._refused = 0
        self.works = True

    def decode(self, contents: list[bytes]) -> list[Tensor] | None:
        """(3, height, width) each, not cropped and not scaled; None: these are not for a GPU."""
        if not self.works or (self._stream is None and not self._begin()):
            return None
        images = None
        if contents and all(map(_is_plain, contents)):
            images = self._try(contents)
        self._refused = self._refused + 1 if contents and images is None else 0
        if self._refused == REFUSALS:
            self.works = False
            console.say(
                f"The GPU decoded nothing of {REFUSALS} chunks in a row: the processes decode all images from now on."
            )
        return images

    @contextmanager
    def stream(self) -> Iterator[torch.cuda.Stream]:
        """A thread begins on the first device, whichever is ours."""
        assert self._stream is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield self._stream

    def _begin(self) -> bool:
        """At first use: processes are forked before, and must not see CUDA. Is there a decoder at all?"""
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            self._decode([simplejpeg.encode_jpeg(np.zeros((64, 64, 3), np.uint8))])
        except (ImportError, RuntimeError) as error:
            self.works = False
            console.say(f"JPEG is not decoded on the GPU: {str(error).strip().splitlines()[0]}")
        return self.works

    def _try(self, contents: list[bytes]) -> list[Tensor] | None:
        try:
            return self._decode(contents)
        except RuntimeError:  # one of them is broken, and it does not say which
            return None

    def _decode(self, contents: list[bytes]) -> list[Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg

        files = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
        with self.stream():
            images: list[Tensor] = decode_jpeg(files, mode=ImageReadMode.RGB, device=self._device)
        return images


def _is_plain(content: bytes) -> bool:
    if content[:3] != JPEG:
        return False
    try:
        return simplejpeg.decode_jpeg_header(content, strict=False)[2] in PLAIN
    except (ValueError, KeyError):
        return False
