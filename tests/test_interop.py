"""Arrays in, arrays of the same library out; options that are said once."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash import _attention, _check, _environment, _interop
from cupyflash._interop import adopt, permute
from cupyflash.testing import check_backward, check_forward
from tests.fake_cuda import FIRST_ADDRESS

Random = np.random.Generator


def problem(rng: Random, dtype: Any = np.float32, dim: int = 16) -> Any:
    """q, k, v, dout"""
    shapes = (2, 9, 4, dim), (2, 11, 2, dim), (2, 11, 2, dim), (2, 9, 4, dim)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def run(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> tuple[Any, ...]:
    """out, lse, dq, dk, dv"""
    out, lse = cf.attn_fwd(q, k, v, **options)
    return out, lse, *cf.attn_bwd(q, k, v, out, lse, dout, **options)


def assert_same_bits(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# NumPy arrays.


def in_other_memory(array: np.ndarray) -> dict[str, np.ndarray]:
    """The same values in memory of every kind that NumPy knows."""
    record = np.zeros(array.shape, np.dtype([("flag", np.int8), ("value", array.dtype)]))  # a stride of 5 bytes
    record["value"] = array
    gaps = np.full((*array.shape, 3), 99, array.dtype)
    gaps[..., 1] = array
    frozen = array.copy()
    frozen.flags.writeable = False
    return {
        "Fortran order": np.asfortranarray(array),
        "reversed": array[::-1, ::-1, :, ::-1].copy()[::-1, ::-1, :, ::-1],
        "every third element": gaps[..., 1],
        "field of a record": record["value"],
        "read-only": frozen,
        "subclass": array.view(type("Sub", (np.ndarray,), {})),
    }


@pytest.mark.parametrize("memory", in_other_memory(np.zeros((1, 1, 1, 1))))
def test_memory_changes_nothing_and_inputs_are_not_written(rng: Random, memory: str) -> None:
    arrays = problem(rng)
    moved = [in_other_memory(array)[memory] for array in arrays]
    out, lse, *grads = results = run(*moved, causal=True)
    check_forward(out, lse, *arrays[:3], causal=True)
    check_backward(tuple(grads), *arrays, causal=True)
    for array, before in zip(moved, arrays, strict=True):
        assert np.array_equal(array, before)
    for result in results:
        assert type(result) is np.ndarray
        assert result.flags.c_contiguous
        assert result.flags.writeable
        assert not any(np.shares_memory(result, array) for array in moved)


def test_a_broadcast_gradient_is_read_by_its_strides(rng: Random) -> None:
    q, k, v, dout = problem(rng)
    one = np.broadcast_to(dout[:1, :1], dout.shape)
    check_backward(run(q, k, v, one)[2:], q, k, v, one.copy())


def test_layouts_say_the_same(rng: Random) -> None:
    q, k, v, dout = problem(rng)
    out, lse, *grads = run(q, k, v, dout, causal=True)
    swapped = [array.swapaxes(1, 2) for array in (q, k, v, dout)]
    got = run(*swapped, causal=True, layout="bhsd")
    back = [array if array.ndim == 3 else array.swapaxes(1, 2) for array in got]
    assert_same_bits(tuple(back), (out, lse, *grads))
    assert all(array.flags.c_contiguous for array in got)
    packed = [array.reshape(-1, *array.shape[2:]) for array in (q, k, v, dout)]
    offsets = {"cu_seqlens_q": np.array([0, 9, 18]), "cu_seqlens_k": np.array([0, 11, 22], np.int32)}
    got = run(*packed, causal=True, layout="thd", **offsets)
    check_forward(got[0], got[1], *packed[:3], causal=True, layout="thd", **offsets)
    check_backward(got[2:], *packed, causal=True, layout="thd", **offsets)
    assert got[1].shape == (4, 18)


def test_given_outputs_are_returned_themselves(rng: Random) -> None:
    q, k, v, dout = problem(rng)
    want = run(q, k, v, dout)
    given = [np.full(array.shape, np.nan, array.dtype) for array in want]
    out, lse = cf.attn_fwd(q, k, v, out=given[0], lse=given[1])
    grads = cf.attn_bwd(q, k, v, out, lse, dout, dq=given[2], dk=given[3], dv=given[4])
    assert all(result is array for result, array in zip((out, lse, *grads), given, strict=True))
    assert_same_bits(tuple(given), want)


# Torch tensors.


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def to_torch(torch: Any, array: np.ndarray) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(torch: Any, tensor: Any) -> np.ndarray:
    assert type(tensor) is torch.Tensor
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_give_torch_tensors_with_numpys_bits(torch: Any, rng: Random, dtype: str) -> None:
    arrays = problem(rng, _interop.NUMPY_DTYPES[dtype])
    got = run(*(to_torch(torch, array) for array in arrays), window=(3, 0))
    assert_same_bits(tuple(from_torch(torch, tensor) for tensor in got), run(*arrays, window=(3, 0)))


def test_torch_strides_are_read_in_place(torch: Any, rng: Random) -> None:
    arrays = problem(rng, ml_dtypes.bfloat16)
    q, k, v, dout = (to_torch(torch, array) for array in arrays)
    wide = dout[:1, :1].expand(dout.shape)
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    out, lse, *grads = (from_torch(torch, tensor) for tensor in run(q, k, v, wide))
    check_forward(out, lse, *arrays[:3])
    check_backward(tuple(grads), *arrays[:3], np.broadcast_to(arrays[3][:1, :1], arrays[3].shape))


def test_torch_outputs_are_returned_themselves(torch: Any, rng: Random) -> None:
    q, k, v, _ = (to_torch(torch, array) for array in problem(rng, ml_dtypes.bfloat16))
    out, lse = torch.full_like(q, float("nan")), torch.full((2, 4, 9), float("nan"))
    got = cf.attn_fwd(q, k, v, out=out, lse=lse)
    assert got.out is out
    assert got.lse is lse
    assert torch.equal(out, cf.attn_fwd(q, k, v).out)


def test_a_tensor_that_requires_grad_is_refused_while_grad_mode_is_on(torch: Any, rng: Random) -> None:
    q, k, v, dout = (to_torch(torch, array) for array in problem(rng))
    want = run(q, k, v, dout)
    for name, arrays in {"q": (q.clone().requires_grad_(), k, v), "v": (q, k, torch.nn.Parameter(v))}.items():
        with pytest.raises(TypeError, match=rf"`{name}` requires grad .*detach"):
            cf.attn_fwd(*arrays)
        with torch.no_grad():
            got = run(*arrays, dout)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert not any(tensor.requires_grad for tensor in got)


def test_pending_negations_and_conjugations_are_resolved_in_inputs_and_refused_in_outputs(torch: Any) -> None:
    complexes = torch.randn(3, 1, 9, 2, 8, dtype=torch.complex64)
    negated = complexes.conj().imag
    assert negated.is_neg()
    q, k, v = (tensor.contiguous() for tensor in (-complexes.imag))
    assert torch.equal(cf.attn_fwd(*negated).out, cf.attn_fwd(q, k, v).out)
    with pytest.raises(ValueError, match="`out` has a pending negation"):
        cf.attn_fwd(q, k, v, out=negated[0])


def test_torch_dtypes_spell_dtypes(torch: Any, rng: Random) -> None:
    q, k, v, _ = (to_torch(torch, array) for array in problem(rng, np.float16))
    assert cf.Attention(out_dtype=torch.float32) == cf.Attention(out_dtype="float32")
    assert cf.attn_fwd(q, k, v, out_dtype=torch.bfloat16).out.dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"`out_dtype` is torch\.int8"):
        cf.Attention(out_dtype=torch.int8)


def test_torch_and_numpy_do_not_mix(torch: Any, rng: Random) -> None:
    q, k, v, _ = problem(rng)
    with pytest.raises(TypeError, match="`k` is a torch array on cpu and `q` is a numpy array on cpu"):
        cf.attn_fwd(q, to_torch(torch, k), v)


def test_tensors_without_memory_of_their_own_are_refused(torch: Any, rng: Random) -> None:
    q, k, v, _ = (to_torch(torch, array) for array in problem(rng))
    with pytest.raises(cf.UnsupportedError, match="`q` is a torch array on meta"):
        cf.attn_fwd(*(tensor.to("meta") for tensor in (q, k, v)))
    with pytest.raises(TypeError, match=r"`k` is a tensor of layout torch\.sparse_coo"):
        cf.attn_fwd(q, k.to_sparse(), v)
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode().from_tensor(q)
    with pytest.raises(TypeError, match="`q` is a FakeTensor"):
        cf.attn_fwd(fake, fake, fake)
    with pytest.raises(TypeError, match="has no memory to read"):
        torch.func.vmap(lambda x: cf.attn_fwd(x, x, x).out)(q[None])


def test_a_prepared_call_takes_torch_tensors_on_the_cpu(torch: Any, rng: Random) -> None:
    q, k, v, _ = (to_torch(torch, array) for array in problem(rng))
    call = cf.Attention(causal=True).prepare(q, k, v)
    q.mul_(2)
    assert torch.equal(call().out, cf.attn_fwd(q, k, v, causal=True).out)


# Unknown producers, JAX.


class Foreign:
    """An array of a library that is known to nobody, and speaks DLPack only."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class ForeignWithNamespace(Foreign):
    """The same from a library that follows the array API standard."""

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        # The copy stands for a GPU, where an export is ordered after the work that is queued by then and no later.
        return SimpleNamespace(from_dlpack=lambda array: ForeignWithNamespace(np.from_dlpack(array).copy()))


def test_unknown_producers_get_numpy_arrays(rng: Random) -> None:
    arrays = problem(rng)
    q, k, v, dout = (Foreign(in_other_memory(array)["reversed"]) for array in arrays)
    out, lse = cf.attn_fwd(q, k, v)
    assert type(out) is np.ndarray
    grads = cf.attn_bwd(q, k, v, Foreign(out), Foreign(lse), dout)
    assert_same_bits((out, lse, *grads), run(*arrays))


def test_unknown_producers_with_a_namespace_get_their_own_kind(rng: Random) -> None:
    arrays = problem(rng)
    got = run(*(ForeignWithNamespace(array) for array in arrays))
    assert all(type(result) is ForeignWithNamespace for result in got)
    assert_same_bits(tuple(result.array for result in got), run(*arrays))


def test_unknown_producers_may_give_outputs(rng: Random) -> None:
    q, k, v, _ = problem(rng)
    out = Foreign(np.full(q.shape, np.nan, np.float32))
    assert cf.attn_fwd(Foreign(q), Foreign(k), Foreign(v), out=out).out is out
    assert np.array_equal(out.array, cf.attn_fwd(q, k, v).out)


def test_what_dlpack_cannot_carry_is_refused_by_name(rng: Random) -> None:
    q, k, v, _ = (Foreign(array) for array in problem(rng, ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match=r"`q` is a Foreign .*DLPack"):
        cf.attn_fwd(q, k, v)


def test_jax_arrays_are_refused_where_something_is_written_or_kept() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = jax.numpy.ones((1, 3, 2, 4))
    lengths = jax.numpy.ones((1,), int)
    with pytest.raises(cf.UnsupportedError, match=r"`q` is a JAX array; .* forward, backward, preprocess and merges"):
        cf.Attention().prepare(x, x, x)
    with pytest.raises(cf.UnsupportedError, match="`k_pages` is a JAX array"):
        cf.kv_append(x, x, x, x, block_table=lengths[None], seqused_k=lengths)


# GPUs, without one.


def test_cupy_arrays_are_read_by_their_attributes(fake_cupy: Any) -> None:
    host = np.zeros((3, 4, 8), ml_dtypes.bfloat16)[:, ::-2]
    adopted = adopt("f", {"q": fake_cupy.ndarray(host, 0)})
    view = adopted.views["q"]
    assert (view.shape, view.strides, view.dtype) == ((3, 2, 8), (32, -16, 1), "bfloat16")
    assert view.ptr == FIRST_ADDRESS
    assert (adopted.kind, adopted.backend, adopted.device, adopted.stream) == ("cupy", "cuda", 0, 1000)


def test_work_goes_to_the_datas_device_while_another_is_current(fake_cupy: Any) -> None:
    array = fake_cupy.ndarray(np.zeros((3, 8, 4), np.float32).swapaxes(1, 2), 1)
    adopted = adopt("f", {"q": array})
    assert (adopted.device, adopted.stream) == (1, 1001)
    made = adopted.give(adopted.empty((2, 5), "float32"))
    assert made.device.id == 1
    copied = _interop.require_unit_stride(adopted, "q")
    assert copied.strides == (32, 8, 1)
    assert fake_cupy.allocations == [((2, 5), 1), ((3, 4, 8), 1)]


def test_arrays_on_two_gpus_are_refused(fake_cupy: Any) -> None:
    q, k = (fake_cupy.ndarray(np.zeros((2, 3), np.float32), device) for device in (0, 1))
    with pytest.raises(TypeError, match="`k` is a cupy array on cuda:1 and `q` is a cupy array on cuda:0"):
        adopt("f", {"q": q, "k": k})


def test_nothing_is_copied_on_the_gpu_before_a_refusal(fake_cupy: Any) -> None:
    q = fake_cupy.ndarray(np.zeros((1, 3, 4, 2), np.float32).swapaxes(2, 3), 0)
    with pytest.raises(ValueError, match="`v`"):
        cf.attn_fwd(q, q, fake_cupy.ndarray(np.zeros((1, 4, 2, 4), np.float32), 0))
    assert fake_cupy.allocations == []


@pytest.mark.parametrize(
    ("look", "obstacle"),
    [("cupy_wheel", "no CuPy; in a clone, pip install -e '.[cuda12]'"), ("cache_folder", "set CUPY_CACHE_DIR")],
)
def test_a_cupy_that_cannot_work_is_said_so(monkeypatch: pytest.MonkeyPatch, look: str, obstacle: str) -> None:
    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **options: Any) -> Any:
            raise AssertionError("read before CuPy was looked at")

    monkeypatch.setattr(_environment, look, lambda: _environment.Fact(look, "", obstacle))
    _interop._cupy_trouble.cache_clear()
    try:
        with pytest.raises(cf.UnsupportedError) as caught:
            cf.attn_fwd(OnGpu(), OnGpu(), OnGpu())
    finally:
        _interop._cupy_trouble.cache_clear()
    assert str(caught.value).startswith("attn_fwd: ")
    assert "GPU" in str(caught.value)


# GPUs, with one.


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_arrays_give_arrays_of_their_library(rng: Random, library: str, dtype: str) -> None:
    xp = gpu_library(library)
    arrays = problem(rng, _interop.NUMPY_DTYPES[dtype], dim=32)
    moved = [to_gpu(xp, array) for array in arrays]
    transposed = [to_gpu(xp, np.ascontiguousarray(array.swapaxes(-1, -2))).swapaxes(-1, -2) for array in arrays]
    for given in (moved, transposed):
        results = run(*given, causal=True)
        assert all(type(result) is type(given[0]) and result.device == given[0].device for result in results)
        out, lse, *grads = (to_host(xp, result) for result in results)
        check_forward(out, lse, *arrays[:3], causal=True)
        check_backward(tuple(grads), *arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_check_looks_at_offsets_on_the_gpu(rng: Random, library: str) -> None:
    xp = gpu_library(library)
    packed = [to_gpu(xp, array.reshape(-1, *array.shape[2:])) for array in problem(rng, np.float16, dim=32)[:3]]
    good, bad = (to_gpu(xp, np.array(values, np.int32)) for values in ([0, 9, 18], [0, 20, 11]))
    with pytest.raises(ValueError, match="`cu_seqlens_k` falls from 20 to 11"):
        cf.attn_fwd(*packed, layout="thd", cu_seqlens_q=good, cu_seqlens_k=bad, check=True)


def gpu_library(name: str) -> Any:
    xp = pytest.importorskip(name, reason=f"{name} is not installed")
    if name == "torch":
        if not xp.cuda.is_available():
            pytest.skip("no CUDA GPU for torch")
    else:
        try:
            xp.cuda.runtime.getDeviceCount()
        except xp.cuda.runtime.CUDARuntimeError:
            pytest.skip("no CUDA GPU")
    return xp


def to_gpu(xp: Any, array: np.ndarray) -> Any:
    return to_torch(xp, array).cuda() if xp.__name__ == "torch" else xp.asarray(array)


def to_host(xp: Any, array: Any) -> np.ndarray:
    return from_torch(xp, array.cpu()) if xp.__name__ == "torch" else array.get()


# Views, options, results.


def test_permute_moves_shape_strides_and_array_alike() -> None:
    view = adopt("f", {"q": np.arange(24.0).reshape(2, 3, 4)}).views["q"]
    moved = permute(view, (None, 2, 0, 1))
    assert (moved.shape, moved.strides) == ((1, 4, 2, 3), (0, 1, 12, 4))
    assert np.array_equal(moved.array, view.array.transpose(2, 0, 1)[None])
    assert np.shares_memory(moved.array, view.array)


def test_threads_do_not_disturb_each_other(rng: Random) -> None:
    problems = [problem(rng) for _ in range(8)]
    want = [run(*arrays) for arrays in problems]
    got: list[Any] = [None] * len(problems)

    def work(index: int) -> None:
        for _ in range(5):
            got[index] = run(*problems[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_options_are_frozen_hashable_printable_and_picklable() -> None:
    attn = cf.Attention(causal=True, window=(1024, 0), softcap=30, out_dtype="float32")
    assert repr(attn) == "Attention(causal=True, window=(1024, 0), softcap=30.0, out_dtype='float32')"
    assert repr(cf.Attention()) == "Attention()"
    assert pickle.loads(pickle.dumps(attn)) == attn
    assert {attn: 1}[cf.Attention(causal=True, window=(1024, 0), softcap=30.0, out_dtype=np.float32)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        attn.causal = False  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        attn.casual = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"window": (2, 1)}, {"window": (2, 1.0)}),
        ({"dropout_p": 0}, {"dropout_p": False}),
        ({"num_splits": 1}, {"num_splits": 1.0}),
        ({"allow_tf32": False}, {"allow_tf32": 0}),
    ],
    ids=repr,
)
def test_an_option_is_refused_though_it_equals_one_that_was_taken(
    rng: Random, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    q, k, v, _ = problem(rng)
    cf.attn_fwd(q, k, v, **right)
    with pytest.raises((TypeError, ValueError), match=f"`{next(iter(wrong))}` is"):
        cf.attn_fwd(q, k, v, **wrong)
    cf.attn_fwd(q, k, v, **right)


def test_options_that_cannot_be_hashed_are_taken_and_refused_as_others(rng: Random) -> None:
    q, k, v, _ = problem(rng)
    assert_same_bits(cf.attn_fwd(q, k, v, window=[3, 0]), cf.attn_fwd(q, k, v, window=(3, 0)))
    with pytest.raises(ValueError, match="`window` is array"):
        cf.attn_fwd(q, k, v, window=np.array([3, 0]))  # type: ignore[arg-type]


def test_a_call_like_an_earlier_one_is_not_judged_again(rng: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def counted(module: Any, name: str) -> None:
        usual = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: (judged.append(name), usual(*arguments))[1])

    counted(_check, "checked_options")
    counted(_check, "_describe")
    _check._judge.cache_clear()
    _attention._remembered.cache_clear()
    arrays = problem(rng)
    run(*arrays, causal=True)
    assert sorted(judged) == ["_describe", "_describe", "checked_options"]  # forward, backward, the options of both
    judged.clear()
    run(*(array + 1 for array in arrays), causal=True)
    assert judged == []
    for start in range(3):
        run(*arrays, causal=True, q_start=start)
    assert judged == ["_describe", "_describe"]  # an int beside None is another form, one int beside another is not
    judged.clear()
    run(*arrays)
    assert sorted(judged) == ["_describe", "_describe", "checked_options"]
    judged.clear()
    q, k, v, dout = arrays
    run(q[:, 1:], k, v, dout[:, 1:], causal=True)
    assert judged == ["_describe", "_describe"]


def test_what_no_signature_shows_is_checked_every_time(rng: Random) -> None:
    q, k, v, _ = problem(rng)
    out, lse = np.empty_like(q), np.empty((2, 4, 9), np.float32)
    cf.attn_fwd(q, k, v, out=out, lse=lse, seed=1, seqused_k=np.array([3, 11], np.int32))
    with pytest.raises(ValueError, match="`seqused_k` is 12"):
        cf.attn_fwd(q, k, v, out=out, lse=lse, seed=1, seqused_k=np.array([3, 12], np.int32))
    with pytest.raises(ValueError, match="`seed` is -1"):
        cf.attn_fwd(q, k, v, out=out, lse=lse, seed=-1, seqused_k=np.array([3, 11], np.int32))
    cf.attn_fwd(q, k, v, out=out)
    with pytest.raises(ValueError, match="`out` overlaps `q`"):
        cf.attn_fwd(q, k, v, out=q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="`out` is read-only"):
        cf.attn_fwd(q, k, v, out=out)


def test_replace_changes_a_copy_and_checks_it() -> None:
    attn = cf.Attention(causal=True)
    assert attn.replace(window=[5, 0]) == cf.Attention(causal=True, window=(5, 0))
    assert attn == cf.Attention(causal=True)
    with pytest.raises(ValueError, match="`scale` is nan"):
        attn.replace(scale=float("nan"))
    with pytest.raises(TypeError, match="casual"):
        attn.replace(casual=True)


def test_gradients_are_named_by_what_was_given(rng: Random) -> None:
    q, k, v, dout = problem(rng)
    bias, sink = np.zeros((4, 1, 11), np.float32), np.zeros(4, np.float32)
    for extra, fields in [
        ({}, ()),
        ({"bias": bias}, ("dbias",)),
        ({"sink": sink}, ("dsink",)),
        ({"bias": bias, "sink": sink}, ("dbias", "dsink")),
    ]:
        out, lse = cf.attn_fwd(q, k, v, **extra)
        grads = cf.attn_bwd(q, k, v, out, lse, dout, **extra)
        assert isinstance(grads, cf.AttnGrads)
        assert grads._fields == ("dq", "dk", "dv", *fields)
        assert all(getattr(grads, name) is grad for name, grad in zip(grads._fields, grads, strict=True))
        assert_same_bits(pickle.loads(pickle.dumps(grads)), grads)


def test_a_prepared_call_reads_its_arrays_again_into_the_same_outputs(rng: Random) -> None:
    q, k, v, dout = problem(rng)
    attn = cf.Attention(causal=True)
    forward = attn.prepare(q, k, v)
    out, lse = forward()
    backward = attn.prepare(q, k, v, backward=True, out=out, lse=lse, dout=dout)
    for _ in range(2):
        for array in (q, k, v, dout):
            array[...] = rng.standard_normal(array.shape)
        assert forward().out is out
        assert_same_bits((out, lse, *backward()), run(q, k, v, dout, causal=True))


def test_a_prepared_call_looks_at_offsets_again(rng: Random) -> None:
    q, k, v, _ = (array.reshape(-1, *array.shape[2:]) for array in problem(rng))
    offsets = np.array([0, 9, 18])
    call = cf.Attention(layout="thd").prepare(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=np.array([0, 11, 22]))
    call()
    offsets[1] = 19
    with pytest.raises(ValueError, match="`cu_seqlens_q` falls from 19 to 18"):
        call()


def test_accumulation_adds_to_what_is_there(rng: Random) -> None:
    q, k, v, dout = problem(rng)
    out, lse = cf.attn_fwd(q, k, v)
    want = cf.attn_bwd(q, k, v, out, lse, dout)
    sums = [np.full_like(grad, 2) for grad in want]
    call = cf.Attention().prepare(
        q, k, v, backward=True, out=out, lse=lse, dout=dout, dq=sums[0], dk=sums[1], dv=sums[2], accumulate=True
    )
    call()
    assert all(result is total for result, total in zip(call(), sums, strict=True))
    for total, grad in zip(sums, want, strict=True):
        np.testing.assert_array_max_ulp(total, (2 + grad) + grad, maxulp=8)


def test_a_plan_is_printable_and_accepted_back(rng: Random) -> None:
    q, k, v, dout = problem(rng)
    attn = cf.Attention(causal=True)
    plan = attn.plan(q, k, v)
    assert "NumPy" in str(plan)
    out, lse = attn.fwd(q, k, v, plan=plan)
    grads = attn.bwd(q, k, v, out, lse, dout, plan=attn.plan(q, k, v, backward=True))
    assert_same_bits((out, lse, *grads), run(q, k, v, dout, causal=True))
    with pytest.raises(ValueError, match="`plan`"):
        attn.bwd(q, k, v, out, lse, dout, plan=plan)


def test_log_sum_exps_of_others_convert_in_every_library() -> None:
    values = np.array([[0.5, np.inf], [-np.inf, -3.0]], np.float32)
    libraries: dict[str, Any] = {"numpy": np.asarray}
    if "torch" in sys.modules or _is_importable("torch"):
        libraries["torch"] = pytest.importorskip("torch").from_numpy
    if _is_importable("jax"):
        libraries["jax"] = pytest.importorskip("jax").numpy.asarray
    for make in libraries.values():
        array = make(values)
        empty_rows = cf.lse_from_fa2(array)
        natural = cf.lse_from_log2(array)
        assert type(empty_rows) is type(natural) is type(array)
        assert empty_rows.dtype == natural.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(empty_rows), [[0.5, -np.inf], [-np.inf, -3.0]])
        np.testing.assert_array_equal(np.asarray(natural), values * np.float32(np.log(2)))
        np.testing.assert_array_equal(np.asarray(array), values)
    for convert in (cf.lse_from_fa2, cf.lse_from_log2):
        with pytest.raises(TypeError, match="`x` is of type list"):
            convert([1.0])


def _is_importable(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True
