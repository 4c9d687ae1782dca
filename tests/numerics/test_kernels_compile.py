"""Every kernel becomes machine code of a Hopper GPU, on any machine: the interpreter takes much that the compiler does not.

In a process of its own, because the others interpret (tests/conftest.py).
"""

import json
import os
import subprocess
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stoker.recipes.icecube.kernels import attention, norm, products, segments

HALF, FLOAT, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"
TYPES = {
    "scales": FLOAT, "lse": FLOAT, "d_table": FLOAT, "spacetime": FLOAT, "table": FLOAT, "bounds": INT,
    "offsets": LONG, "number": LONG, "num_tokens": "i32", "num_segments": "i32", "num_channels": "i32",
    "eps": "fp32", "scale": "fp32", "per_unit": "fp32",
}  # fmt: skip
ATTENTION = {"H": 8, "C": 32, "M": 64, "N": 32, "R": 32, "KNOTS": 0, "UNIT": False, "INSIDE": True, "EXACT": "tf32"}
LONELY = {"spacetime": None, "table": None}  # no bias
EXACT = {"EXACT": "ieee", "qkv": FLOAT, "out": FLOAT, "d_out": FLOAT, "d_qkv": FLOAT}
FORWARD, BACKWARD = attention._attend_kernel, attention._attend_backward_kernel
SHORT = {"M": 32, "N": 16, "INSIDE": False}
KNOTS: Any = type("Table", (), {})()  # any table: options ask only whether there is one
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (FORWARD, ATTENTION | LONELY | attention._forward_options(64, None)),
    "attention, short": (FORWARD, ATTENTION | LONELY | SHORT | attention._forward_options(32, None)),
    "attention, normed": (FORWARD, ATTENTION | LONELY | {"UNIT": True} | attention._forward_options(64, None)),
    "attention, knots": (FORWARD, ATTENTION | {"KNOTS": 17} | attention._forward_options(64, KNOTS)),
    "attention, float32": (FORWARD, ATTENTION | LONELY | EXACT | attention._forward_options(64, None)),
    "backward": (BACKWARD, ATTENTION | LONELY | attention._backward_options(64, None, None)),
    "backward, short": (BACKWARD, ATTENTION | LONELY | SHORT | attention._backward_options(32, None, None)),
    "backward, normed": (BACKWARD, ATTENTION | LONELY | {"UNIT": True} | attention._backward_options(64, None, 1e-6)),
    "backward, knots": (BACKWARD, ATTENTION | {"KNOTS": 17} | attention._backward_options(64, KNOTS, None)),
    "backward, float32": (BACKWARD, ATTENTION | LONELY | EXACT | attention._backward_options(64, None, None)),
    "backward, short, float32": (
        BACKWARD,
        ATTENTION | LONELY | EXACT | SHORT | attention._backward_options(32, None, None),
    ),
    "norm": (norm._norm_kernel, {"W": 128, "M": 8, "CENTRED": True}),
    "spread": (segments._spread_kernel, {"C": 128, "M": 16}),
    "sum": (segments._sum_kernel, {"R": 8, "C": 128, "MEAN": True}),
    "few sums": (segments._few_sums_kernel, {"M": 64, "C": 4, "MEAN": True}),
}
for width in (128, 256):
    wide = {"W": width, "K": width, "I": 4 * width, "O": 4 * width, "CENTRED": True, "GELU": width == 128}
    if width in products.TILED:
        CASES[f"activation, {width}"] = products._activate_kernel, wide | products.TILED[width]
        CASES[f"slope, {width}"] = products._slope_kernel, wide | products.SLOPE[width]
    else:
        CASES[f"activation, {width}"] = products._norm_activate_kernel, wide | products.WALKED[width]
        CASES[f"feed-forward backward, {width}"] = products._feed_backward_kernel, wide | products.BACKWARD[width]
    CASES[f"sum with tokens, {width}"] = (products._add_kernel, wide | {"K": 4 * width} | products.ROWS[width])
    CASES[f"through norm, {width}"] = (products._through_norm_kernel, wide | products.ROWS[width])


SHARED_BYTES = 232_448  # that a program can have on such a GPU


def test_kernels_compile_for_hopper() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(CASES)
    assert {name: size for name, size in found.items() if size > SHARED_BYTES} == {}


def shared_bytes(kernel: Any, words: dict[str, Any]) -> int:
    """Compiles a kernel, and says how much of a multiprocessor's memory it takes."""
    options = {key: words[key] for key in ("num_warps", "num_stages", "maxnreg") if key in words}
    signature, constants, attributes = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in words and words[argument] != FLOAT:
            signature[argument], constants[argument] = "constexpr", words[argument]
            continue
        signature[argument] = words.get(argument) or TYPES.get(argument, HALF)
        if signature[argument].startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return int(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)


if __name__ == "__main__":
    print(json.dumps({name: shared_bytes(*case) for name, case in CASES.items()}))
