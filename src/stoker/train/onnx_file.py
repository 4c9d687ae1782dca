"""A model as one ONNX file: written beside its name, told what it is, checked, and only then put in its place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.errors import UserError

OPSET = 18


def check_out(out: Path) -> None:
    """Before anything that takes long: whether the file can be made here."""
    if out.suffix != ".onnx":
        raise UserError(f"--out {out} should end in .onnx.")
    if out.exists():
        raise UserError(f"{out} exists, and nothing is overwritten: remove it, or name another --out.")
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("An export needs onnx and onnxruntime: pip install 'stoker[export]'.") from error


@contextmanager
def onnx_file(
    network: nn.Module,
    inputs: Mapping[str, Tensor],
    shapes: Any,
    output: str,
    about: Mapping[str, str],
    out: Path,
) -> Iterator[Any]:
    """A session of the written model, to compare answers with; the file appears when the block ends without an error.

    `inputs` are an example by name, `shapes` what of it is free, `about` goes into the file.
    """
    import onnx
    import onnxruntime

    partial = out.with_name(f".{out.name}.partial")
    try:
        torch.onnx.export(
            network,
            tuple(inputs.values()),
            str(partial),
            input_names=list(inputs),
            output_names=[output],
            dynamic_shapes=shapes,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        written = onnx.load(partial)
        onnx.helper.set_model_props(written, dict(about))
        onnx.save(written, partial)
        yield onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
        partial.rename(out)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"PyTorch cannot write {type(network).__name__} as ONNX: {reason}") from error
    finally:
        partial.unlink(missing_ok=True)
