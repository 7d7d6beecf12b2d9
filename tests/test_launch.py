"""Which kernels start before the one in front of them is done, and that those wait for it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash._cuda import device, driver, params, source
from cupyflash._cuda.constants import KERNELS
from cupyflash._cuda.device import KNOWN

NEVER_EARLY = {"bwd_preprocess", "kv_append"}
WAITS = "ptx::await_previous();"


def call(cupy: Any, *, num_splits: int = 0, **options: Any) -> list[tuple[str, bool]]:
    """Every kernel of a forward and a backward in order, and whether it starts early."""
    q, out = (cupy.ndarray(np.zeros((1, 300, 4, 64), ml_dtypes.bfloat16), 0) for _ in range(2))
    lse = cupy.ndarray(np.zeros((1, 4, 300), np.float32), 0)
    cf.attn_fwd(q, q, q, num_splits=num_splits)
    cf.attn_bwd(q, q, q, out, lse, out, **options)
    return [(launched.binary[0], launched.is_early) for launched in cupy.launches]


@pytest.mark.parametrize(
    ("num_splits", "forward"), [(1, [("fwd_sm90", False)]), (2, [("fwd_generic", True), ("fwd_combine", True)])]
)
def test_all_start_early_but_first_kernels_of_many_blocks(fake_cuda: Any, num_splits: int, forward: Any) -> None:
    backward = [("bwd_preprocess", False), ("bwd_sm90", True), ("bwd_finish", True)]
    assert call(fake_cuda, num_splits=num_splits) == forward + backward


def test_few_queries_start_early_whether_split_or_not(fake_cuda: Any) -> None:
    q, k = (fake_cuda.ndarray(np.zeros((1, n, 4, 64), ml_dtypes.bfloat16), 0) for n in (1, 300))
    for num_splits in (1, 2):
        cf.attn_fwd(q, k, k, num_splits=num_splits)
    kernels = [(launched.binary[0], launched.is_early) for launched in fake_cuda.launches]
    assert kernels == [("fwd_generic", True)] * 2 + [("fwd_combine", True)]


@pytest.mark.parametrize(
    ("batch", "len_k", "blocks"),
    [
        (1, 131072, [8 * 16, 32]),  # a block of each multiprocessor, nearly
        (1, 8192, [8 * 16, 32]),
        (1, 1024, [8 * 4, 4]),
        (4, 512, [32]),  # two tiles of a block take less than a merge
        (16, 8192, [128]),
        (20, 1024, [640, 80]),  # small blocks
        (64, 8192, [512]),
        (128, 2048, [1024]),
    ],
)
def test_keys_are_split_as_far_as_it_pays(fake_cuda: Any, batch: int, len_k: int, blocks: list[int]) -> None:
    memory = np.empty(1, ml_dtypes.bfloat16)
    q, k = (
        fake_cuda.ndarray(np.lib.stride_tricks.as_strided(memory, (batch, *shape, 128), writeable=True), 0)
        for shape in ((1, 32), (len_k, 8))
    )
    cf.Attention().prepare(q, k, k)()
    assert [launched.grid[0] for launched in fake_cuda.launches] == blocks
    assert fake_cuda.launches[0].block == ((32, 1) if blocks[0] in (640, 1024) else (32, 4))


def test_a_merge_starts_early_behind_whatever_is_in_front(fake_cuda: Any) -> None:
    out, lse = (fake_cuda.ndarray(np.zeros(shape, "f"), 0) for shape in ((2, 5, 3, 40), (2, 3, 5)))
    cf.merge_states([out, out], [lse, lse])
    assert [(launched.binary[0], launched.is_early) for launched in fake_cuda.launches] == [("merge_states", True)]


def test_a_cascade_is_merged_by_the_kernel_that_merges_parts_of_its_keys(fake_cuda: Any) -> None:
    def zeros(*shape: int) -> Any:
        return fake_cuda.ndarray(np.zeros(shape, ml_dtypes.bfloat16), 0)

    def ends(*bounds: int) -> Any:
        return fake_cuda.ndarray(np.array(bounds, np.int32), 0)

    def level(*bounds: int) -> cf.CascadeLevel:
        return cf.CascadeLevel(zeros(bounds[-1], 2, 64), zeros(bounds[-1], 2, 64), cu_seqlens_k=ends(*bounds))

    packed, levels = cf.Attention(layout="thd"), [level(0, 9000, 18000), level(0, 5, 8)]
    out, lse = cf.attn_cascade(zeros(2, 4, 64), levels, attention=packed, cu_seqlens_q=ends(0, 1, 2), max_seqlen_q=1)

    own, _, combine = fake_cuda.launches
    assert [launched.binary[0] for launched in fake_cuda.launches] == ["fwd_sm90", "fwd_generic", "fwd_combine"]
    kernel = params.packer("fwd_combine")
    _, _, found_out, found_lse, beside_out, beside_lse = kernel.unpack(combine.struct[: kernel.size])[:24:4]
    assert (found_out, found_lse) == (out.data.ptr, lse.data.ptr)
    kernel = params.packer("fwd_sm90")
    assert {beside_out, beside_lse} <= set(kernel.unpack(own.struct[: kernel.size]))
    assert 0 not in (beside_out, beside_lse)


@pytest.mark.parametrize("sm_count", [60, 78, 114, 132])
def test_a_state_beside_is_never_forgotten(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch, sm_count: int) -> None:
    """Rounded results lie otherwise than float32 ones, so that the call that merges may have another kernel."""
    monkeypatch.setattr(device, "of", lambda ordinal: replace(KNOWN[90], sm_count=sm_count))

    def level(length: int, heads: int) -> cf.CascadeLevel:
        k, v = (fake_cuda.ndarray(np.zeros((length, heads, 256), ml_dtypes.bfloat16)[:, :, :252], 0) for _ in "kv")
        ends = fake_cuda.ndarray(np.array([0, length], np.int32), 0)
        return cf.CascadeLevel(k, v, cu_seqlens_k=ends, max_seqlen_k=length)

    for heads in (8, 44, 88):
        del fake_cuda.launches[:]
        prefix, own = level(2048, heads), level(100, heads)
        q = own.k
        call = {"attention": cf.Attention(layout="thd"), "cu_seqlens_q": own.cu_seqlens_k, "max_seqlen_q": 100}
        cf.attn_cascade(q, [prefix, own], **call)
        assert fake_cuda.launches[-1].binary[0] in ("fwd_combine", "merge_states")


def test_a_merge_goes_on_from_what_the_launch_before_has_left(fake_cuda: Any) -> None:
    """In one piece of memory, which is that of no array of the call."""
    outs, lses = (
        [fake_cuda.ndarray(np.zeros(shape, "f"), 0) for _ in range(50)] for shape in ((2, 5, 3, 40), (2, 3, 5))
    )
    out, lse = cf.merge_states(outs, lses)
    kernel = params.packer("merge_states")
    states, merged = [], []
    for launch in fake_cuda.launches:
        values = kernel.unpack(launch.struct[: kernel.size])
        pairs = [values[at : at + 2] for at in range(0, 10 * (params.MERGE_STATES + 1), 10)]
        merged.append(pairs.pop())
        states.append([pair for pair in pairs if pair != (0, 0)])
    running = merged[0]
    given = [(one.data.ptr, other.data.ptr) for one, other in zip(outs, lses, strict=True)]
    assert states == [given[:24], [running, *given[24:47]], [running, *given[47:]]]
    assert merged == [running, running, (out.data.ptr, lse.data.ptr)]
    [((made,), _)] = fake_cuda.allocations[2:]
    begin = lse.data.ptr + 512  # where the stand-in puts what comes next
    assert begin == running[0] and running[0] + 4 * 2 * 5 * 3 * 40 <= running[1]
    assert running[1] + 4 * 2 * 3 * 5 <= begin + made


def test_none_does_where_gpus_cannot(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "of", lambda ordinal: KNOWN[89])
    kernels = call(fake_cuda, num_splits=2, deterministic=True)
    assert len(kernels) > 4
    assert not any(is_early for _, is_early in kernels)


def test_none_does_where_a_drivers_graphs_cannot(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "launches_early", lambda: False)
    assert not any(is_early for _, is_early in call(fake_cuda, num_splits=2))


def test_a_refused_launch_is_an_error(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.library(), "cuLaunchKernelEx", lambda *_: 701)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx said 701"):
        call(fake_cuda)


@pytest.mark.parametrize("kernel", sorted(set(KERNELS.values()) - NEVER_EARLY))
def test_a_kernel_behind_another_waits_before_any_way_out(kernel: str) -> None:
    """Else the kernel behind it, which waits for it alone, could overtake the one in front."""
    text = (source.root() / f"{kernel}.cu").read_text("utf-8")
    entry = re.sub(r"//.*", "", text[text.index('extern "C"') :])
    before, _, _ = entry.partition(WAITS)
    assert WAITS in entry
    assert "return" not in before
