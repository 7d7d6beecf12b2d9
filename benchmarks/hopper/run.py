"""The Hopper forward under construction, checked and timed: `python -m benchmarks.hopper.run`.

It is no part of the package yet. `--compile` only compiles it, without a GPU, and prints what ptxas says.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cupyflash as cf
from benchmarks import ptxas
from cupyflash import _check, testing
from cupyflash._cuda import arguments, source
from cupyflash._cuda.constants import ELEMENTS
from cupyflash._cuda.params import packer
from cupyflash._spec import Mask, filled

PANEL = 64  # columns of a box
ROWS = 64  # of a consumer warpgroup
MAP_BYTES = 128
# CUtensorMapDataType, and the other enumerations of cuTensorMapEncodeTiled.
MAP_DTYPES = {"float16": 6, "bfloat16": 9}
NO_INTERLEAVE, SWIZZLE_128, PROMOTE_256, ZERO_FILL = 0, 3, 3, 0


@dataclass(frozen=True)
class Constants:
    """As the kernel's text names them."""

    element: str
    head_dim: int
    query_tile: int
    key_tile: int
    stages: int
    is_masked: bool
    has_softcap: bool = False
    has_alibi: bool = False
    is_scale_negative: bool = False

    @property
    def threads(self) -> int:
        return 128 * (1 + self.query_tile // ROWS)

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * self.head_dim * (self.query_tile + 2 * self.stages * self.key_tile)
        return -(-(tiles + 8 * (2 + 4 * self.stages)) // 1024) * 1024

    def text(self) -> str:
        """What the compiler gets."""
        numbers = {
            "HeadDim": self.head_dim,
            "QueryTile": self.query_tile,
            "KeyTile": self.key_tile,
            "Stages": self.stages,
            "SmemBytes": self.smem_bytes,
        }
        switches = {
            "IsMasked": self.is_masked,
            "HasSoftcap": self.has_softcap,
            "HasAlibi": self.has_alibi,
            "HasBias": False,
            "IsScaleNegative": self.is_scale_negative,
        }
        lines = [f"using Element = {ELEMENTS[self.element]};", "using BiasElement = float;"]
        lines += [f"constexpr int k{name} = {value};" for name, value in numbers.items()]
        lines += [f"constexpr bool k{name} = {str(value).lower()};" for name, value in switches.items()]
        head = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\nnamespace cf {\n" + "\n".join(lines) + "\n}\n"
        return head + _flatten(Path(__file__).with_name("fwd_sm90.cu"), set())


# Head dim: query tile, key tile, stages.
TILES = {64: (192, 128, 2), 128: (128, 128, 2), 192: (128, 112, 2), 256: (128, 80, 2)}
CHANGED_TILES = TILES | {64: (128, 128, 2)}  # where scores are changed: three consumers have no registers for that
MULTIPROCESSORS = 132


def _flatten(path: Path, seen: set[Path]) -> str:
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith('#include "'):
            name = line.split('"')[1]
            own = Path(__file__).parent / name
            header = own if own.is_file() else source.root() / "include" / name
            if header not in seen:
                seen.add(header)
                lines.append(_flatten(header, seen))
        elif line != "#pragma once":
            lines.append(line)
    return "\n".join(lines) + "\n"


def complaints(constants: Constants) -> list[str]:
    """What must not be there: an error, spills, products made one after the other (C75xx)."""
    is_compiled, log = ptxas.compiled(constants.text(), "fwd_sm90.cu", "sm_90a")
    return re.findall(r".*C75\d\d.*|.*[1-9]\d* bytes spill.*", log) if is_compiled else [log]


def compile_all() -> int:
    """Without a GPU; how many have complaints."""
    switches: tuple[dict[str, bool], ...] = (
        {},
        {"has_softcap": True},
        {"has_alibi": True},
        {"is_scale_negative": True},
    )
    failures = 0
    for element, dim, masked, given in itertools.product(MAP_DTYPES, TILES, (False, True), switches):
        tile = (CHANGED_TILES if given else TILES)[dim]
        constants = Constants(element, dim, *tile, is_masked=masked, **given)
        found = complaints(constants)
        failures += bool(found)
        print(constants, *found, sep="\n  ")
    return failures


class Forward:
    """One problem's launch on torch tensors [B, N, H, D], with `out` and `lse` of its own, poisoned."""

    def __init__(
        self, attention: cf.Attention, q: Any, k: Any, v: Any, ctas: int = MULTIPROCESSORS, **arrays: Any
    ) -> None:
        import cupy
        import torch

        if (
            arrays.keys() - {"sink", "alibi_slopes", "q_start", "k_start"}
            or attention.dropout_p
            or 0 in q.shape + k.shape
        ):
            raise NotImplementedError("no kernel for this yet")
        self.out = torch.full_like(q, torch.nan)
        self.lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, device=q.device)
        checked = attention.prepare(q, k, v, out=self.out, lse=self.lse, **arrays).checked
        spec, call = checked.judged.spec, filled(checked.judged.call, _check.given(checked))
        features = spec.features
        is_changed = features.softcap or features.alibi or features.negative_scale
        query_tile, key_tile, stages = (CHANGED_TILES if is_changed else TILES)[spec.head_dim]
        constants = Constants(
            spec.dtype, spec.head_dim, query_tile, key_tile, stages, spec.mask is not Mask.NONE, features.softcap,
            features.alibi, features.negative_scale and not (features.softcap or features.alibi),
        )  # fmt: skip
        tensors = (value for view in (call.q, call.k, call.v, call.out) for value in arguments.rows(view))
        problem = arguments.problem(spec, call, query_tile, key_tile)
        values = (*problem, *arguments.scores(spec, call), *tensors, *arguments.per_row(call.lse))
        fwd = packer("fwd_generic").pack(*values)
        boxes = ((call.q, query_tile), (call.k, key_tile), (call.v, key_tile), (call.out, ROWS))
        blocks = arguments.tiles_of(call.len_q, query_tile, call) * spec.heads_q * call.batch
        packed = b"".join(_tensor_map(view, rows) for view, rows in boxes) + fwd + blocks.to_bytes(4, "little")
        packed += bytes(-len(packed) % 64)
        self.arguments = (np.frombuffer(packed, np.dtype((np.void, len(packed))))[0],)
        module = cupy.RawModule(code=constants.text(), options=("-std=c++17", "-arch=sm_90a"))
        self.kernel = module.get_function("fwd_sm90")
        self.kernel.max_dynamic_shared_size_bytes = constants.smem_bytes
        self.grid, self.block, self.smem = (min(blocks, ctas),), (constants.threads,), constants.smem_bytes
        self.stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        self.kept = q, k, v, arrays

    def __call__(self) -> tuple[Any, Any]:
        self.kernel(self.grid, self.block, self.arguments, shared_mem=self.smem, stream=self.stream)
        return self.out, self.lse


def _tensor_map(view: Any, rows: int) -> bytes:
    """Boxes of PANEL columns and so many rows of a canonical [B, N, H, D] view, swizzled over 128 bytes."""
    batch, length, heads, dim = view.shape
    stride_b, stride_n, stride_h, _ = (2 * stride for stride in view.strides)
    buffer = ctypes.create_string_buffer(2 * MAP_BYTES)
    at = -(-ctypes.addressof(buffer) // 64) * 64
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        MAP_DTYPES[view.dtype],
        4,
        ctypes.c_void_p(view.ptr),
        (ctypes.c_uint64 * 4)(dim, length, heads, batch),
        (ctypes.c_uint64 * 3)(stride_n, stride_h, stride_b),
        (ctypes.c_uint32 * 4)(PANEL, rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        NO_INTERLEAVE,
        SWIZZLE_128,
        PROMOTE_256,
        ZERO_FILL,
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {status} for {view}")
    return ctypes.string_at(at, MAP_BYTES)


def check() -> int:
    """Against float64, odd lengths, every option that the kernel has, and many blocks to a CTA; how many were wrong."""
    import ml_dtypes
    import torch

    rng, wrong = np.random.default_rng(), 0
    lengths = ((1, 1), (63, 65), (128, 128), (129, 127), (200, 300), (500, 1000), (257, 31), (300, 1000))
    options: tuple[dict[str, Any], ...] = (
        {}, {"causal": True}, {"causal": "top-left"}, {"window": (70, 9)}, {"softcap": 3.0}, {"scale": -0.3},
    )  # fmt: skip
    dtypes = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
    for dim, (len_q, len_k), given, dtype in itertools.product(TILES, lengths, options, dtypes):
        if dtype == "float16" and given:
            continue
        name = f"D {dim}, {len_q} x {len_k}, {dtype}, {given}"
        print(name, end=" ", flush=True)  # the last one printed is the one that hangs
        shapes = (2, len_q, 4, dim), (2, len_k, 2, dim), (2, len_k, 2, dim)
        host = [rng.standard_normal(shape).astype(np.float32).astype(dtypes[dtype]) for shape in shapes]
        tensors = [torch.from_numpy(array.view(np.int16)).view(getattr(torch, dtype)).cuda() for array in host]
        for ctas in (3, MULTIPROCESSORS):
            out, lse = Forward(cf.Attention(**given), *tensors, ctas=ctas)()
            torch.cuda.synchronize()
            made = out.view(torch.int16).cpu().numpy().view(dtypes[dtype]), lse.cpu().numpy()
            try:
                testing.check_forward(*made, *host, name=name, **given)
                print("right", end=" ", flush=True)
            except AssertionError as error:
                wrong += 1
                print("WRONG", str(error).splitlines()[:3], flush=True)
        print()
    print(f"{wrong} wrong")
    return wrong


def time(lengths: Sequence[int]) -> None:
    """TFLOP/s beside cuDNN, FlashAttention-2 and the generic kernel, taking turns."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def torch_call(backend: Any, tensors: Any, causal: bool) -> Any:
        def call() -> None:
            with sdpa_kernel([backend]), torch.no_grad():
                torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

        return call

    for dim, causal, length in itertools.product(TILES, (False, True), lengths):
        shape = (16_384 // length, length, 2_048 // dim, dim)
        q, k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
        ours, attention = Forward(cf.Attention(causal=causal), q, k, v), cf.Attention(causal=causal)
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        calls: dict[str, Any] = {"hopper": ours, "generic": attention.prepare(q, k, v)}
        calls["one block a CTA"] = Forward(attention, q, k, v, ctas=2**31)  # the hardware hands them out
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
            calls[name] = torch_call(backend, turned, causal)
        events: dict[str, list[Any]] = {name: [] for name in calls}
        for turn in range(12):
            for name, call in calls.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                if turn >= 3:
                    events[name].append((begin, end))
        torch.cuda.synchronize()
        times = {name: float(np.median([a.elapsed_time(b) for a, b in pairs])) for name, pairs in events.items()}
        flops = testing.flops(
            batch=shape[0], len_q=length, len_k=length, heads_q=shape[2], head_dim=dim, causal=causal, window=None
        )
        ratios = "  ".join(f"{name}/ours {taken / times['hopper']:.2f}" for name, taken in times.items())
        rate = flops / times["hopper"] / 1e9
        print(f"D {dim} {'causal' if causal else 'full  '} {length:>6}: {rate:.0f} TFLOP/s  {ratios}", flush=True)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper.run", description="The Hopper forward so far.")
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--check", action="store_true", help="only check: give it a time limit of its own")
    parser.add_argument("--n", type=int, nargs="+", default=[512, 2048, 8192])
    options = parser.parse_args(given)
    if options.compile:
        return compile_all()
    if options.check:
        return check()
    time(options.n)
    return 0


if __name__ == "__main__":
    sys.exit(main())
