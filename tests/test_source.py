"""CUDA sources: flattened text, generated constants, the include graph, parameter structs that mirror the header."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest

from cupyflash._cuda import constants, params, source
from cupyflash._cuda.constants import KERNELS
from cupyflash._cuda.device import KNOWN
from cupyflash._cuda.plan import ROW_PAD
from cupyflash._spec import Blank, View
from tests import binaries

HEADER = (source.root() / "include" / "params.cuh").read_text(encoding="utf-8")
QUOTED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
LAYERS = ("ptx", "tile", "attn")  # who may include whom: only what stands further left, or beside it
C_TYPES = {"i": "int", "I": "uint32", "d": "double", "q": "int64", "Q": "uint64"}


@pytest.mark.parametrize("kernel", KERNELS.values())
def test_flattened_text_has_every_header_once_and_no_include_of_ours(kernel: str) -> None:
    text = source.flatten(kernel)
    assert not QUOTED.search(text)
    assert "#pragma once" not in text
    opened = re.findall(r'^#line 1 "([^"]+)"$', text, re.MULTILINE)
    assert len(opened) == len(set(opened)) and opened[0] == f"{kernel}.cu"


@pytest.mark.parametrize("kernel", KERNELS.values())
def test_line_directives_lead_back_to_the_file(kernel: str) -> None:
    name, number = "", 0
    for line in source.flatten(kernel).splitlines():
        directive = re.fullmatch(r'#line (\d+) "([^"]+)"', line)
        if directive:
            number, name = int(directive[1]), directive[2]
            continue
        path = source.root() / (name if name.endswith(".cu") else f"include/{name}")
        original = path.read_text(encoding="utf-8").splitlines()[number - 1]
        assert line == original or (not line and re.match(r"#include|#pragma once", original))
        number += 1


def test_every_kernel_is_one_file_with_one_entry_of_its_name() -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in source.root().glob("*.cu")}
    assert set(files) == set(KERNELS.values())
    for kernel, text in files.items():
        assert re.findall(
            r"^(?:extern \"C\" __global__[^\n]*\s)(\w+)\(|__launch_bounds__\([^)]*\) (\w+)\(", text, re.MULTILINE
        )
        assert len(re.findall(r"\b__global__\b", text)) == 1
        assert re.search(rf"\b{kernel}\(const __grid_constant__ cf::\w+ params\)", text)


def test_includes_point_one_way() -> None:
    for path in (source.root() / "include").rglob("*.cuh"):
        layer = path.parent.name
        for included in QUOTED.findall(path.read_text(encoding="utf-8")):
            if "/" in included and layer in LAYERS:
                assert LAYERS.index(included.split("/")[0]) <= LAYERS.index(layer), f"{path.name} includes {included}"
            assert (source.root() / "include" / included).is_file()


def test_constants_become_typed_cpp() -> None:
    plan = next(plan for plan in binaries.cover(KNOWN[80]).values() if plan.kernel == "fwd_generic")
    text = constants.render(plan.constants)
    assert "using Element = __nv_bfloat16;" in text
    assert "constexpr bool kIsMasked = false;" in text
    assert f"constexpr int kSmemBytes = {plan.smem_bytes};" in text


@pytest.mark.parametrize("name", params.STRUCTS)
def test_the_packed_struct_mirrors_the_header(name: str) -> None:
    body = re.search(rf"struct (?:alignas\(64\) )?{name} \{{[^\n]*\n(.*?)\n\}};", HEADER, re.DOTALL)
    assert body, f"{name} is not in params.cuh"
    declared = re.findall(r"^  (?:const )?([\w:]+)(\*?) (\w+)(?:\[(\w+)\])?;", body[1], re.MULTILINE)
    mirrored = params.STRUCTS[name]
    assert [field for _, _, field, _ in declared] == [field for field, _ in mirrored]
    for (c_type, star, field, count), (_, kind) in zip(declared, mirrored, strict=True):
        if isinstance(kind, str):
            assert (kind == "P") == bool(star), field
            assert kind == "P" or C_TYPES[kind] == c_type, field
        elif count:
            element = params.STRUCTS.get(c_type) or next(code for code in C_TYPES if C_TYPES[code] == c_type)
            assert kind == (element, params.MERGE_STATES if count == "kMergeStates" else int(count)), field
        else:
            assert kind == params.STRUCTS[c_type], field


def test_header_and_host_agree_on_shared_numbers() -> None:
    assert f"constexpr int kMergeStates = {params.MERGE_STATES};" in HEADER
    text = (source.root() / "include" / "attn" / "sequence.cuh").read_text(encoding="utf-8")
    assert f"constexpr int kRowPad = {ROW_PAD};" in text


@pytest.mark.parametrize("kernel", params.PARAMS)
def test_packing_puts_every_value_into_its_field(kernel: str, rng: np.random.Generator) -> None:
    """By `struct.Struct` as by field name, padding between fields included."""
    dtype = _dtype(params.STRUCTS[params.PARAMS[kernel]])
    flat = list(_leaves(dtype))
    values = [float(np.float32(rng.random())) if leaf.kind == "f" else int(rng.integers(1, 2**31)) for leaf in flat]
    fields = params.packer(kernel).pack(*values)
    assert list(_values(np.frombuffer(fields, dtype)[0])) == values
    assert struct.calcsize(params.packer(kernel).format) == dtype.itemsize


@pytest.mark.parametrize("kernel", params.PARAMS)
def test_blanks_are_filled_as_if_they_had_been_packed(kernel: str, rng: np.random.Generator) -> None:
    """Any of the integers: those of 4 bytes behind ones of 8, neighbours, the first and the last."""
    codes = params.packer(kernel).unpack(bytes(params.packer(kernel).size))
    wanted = [0.5 if isinstance(code, float) else int(rng.integers(2**31)) for code in codes]
    for share in (0.0, 0.1, 0.5, 1.0):
        is_blank = [isinstance(value, int) and rng.random() < share for value in wanted]
        offsets = [int(rng.integers(100)) * at % 3 for at in range(len(wanted))]
        values = [
            Blank(f"x{at}", offset) if blank else value
            for at, (value, blank, offset) in enumerate(zip(wanted, is_blank, offsets, strict=True))
        ]
        views = {
            f"x{at}": View(value - offset, (1,), (1,), "uint8", None)
            for at, (value, offset) in enumerate(zip(wanted, offsets, strict=True))
        }
        packed = params.Template(kernel, tuple(values)).filled(views)
        fields = params.packer(kernel).pack(*wanted)
        assert packed.tobytes() == fields + bytes(-len(fields) % 64)
        assert packed.dtype.fields is None and packed.ndim == 0


def test_an_int_fills_a_blank_as_it_is() -> None:
    size = len(params.packer("fwd_generic").unpack(bytes(params.packer("fwd_generic").size)))
    position = [name for name, _ in params.PROBLEM].index("q_start_value")
    values = [0] * size
    values[position] = Blank("q_start")
    packed = params.Template("fwd_generic", tuple(values)).filled({"q_start": -5})
    fields = packed.tobytes()[: params.packer("fwd_generic").size]
    assert params.packer("fwd_generic").unpack(fields)[position] == -5


def _dtype(fields: params.Fields) -> np.dtype:
    """An aligned struct of NumPy's, which has C's layout."""
    numpy_codes = {"P": "u8", "q": "i8", "Q": "u8", "i": "i4", "I": "u4", "d": "f8"}
    described: list[Any] = []
    for name, kind in fields:
        if isinstance(kind, str):
            described.append((name, numpy_codes[kind]))
        elif isinstance(kind[1], int):
            element = numpy_codes[kind[0]] if isinstance(kind[0], str) else _dtype(kind[0])
            described.append((name, element, (kind[1],)))
        else:
            described.append((name, _dtype(kind)))
    return np.dtype(described, align=True)


def _leaves(dtype: np.dtype) -> list[np.dtype]:
    if dtype.subdtype:
        base, shape = dtype.subdtype
        return _leaves(base) * int(np.prod(shape))
    if dtype.names is None:
        return [dtype]
    assert dtype.fields is not None
    return [leaf for name in dtype.names for leaf in _leaves(dtype.fields[name][0])]


def _values(value: Any) -> list[float]:
    if isinstance(value, np.ndarray):
        return [x for item in value for x in _values(item)]
    if value.dtype.names is None:
        return [value.item()]
    return [x for name in value.dtype.names for x in _values(value[name])]
