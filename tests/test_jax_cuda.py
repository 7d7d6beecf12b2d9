"""JAX on a GPU: what a callback launches, held to what a plain call on CuPy arrays launches, and what XLA is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash._cuda import compile as _compile
from tests.fake_cuda import forget_forms

jax: Any = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("jax.experimental.buffer_callback", reason="jax is older than 0.6.2")

import jax.numpy as jnp  # noqa: E402

from cupyflash.jax import _memory, _primitive, attention  # noqa: E402
from cupyflash.jax._calls import AttentionCall, MergeCall, PreprocessCall  # noqa: E402

STREAM = 0x5EED
BF16 = np.dtype(ml_dtypes.bfloat16)


class Buffer:
    """What XLA hands to a callback on a GPU: an address under a protocol without a word for bfloat16."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.array.data.device_id

    def __array__(self, *_: Any) -> Any:
        raise AssertionError("a buffer of a GPU's was read by the host")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        array = self.array
        return {"shape": array.shape, "typestr": "<V2", "data": (array.data.ptr, False), "version": 2}


def form(array: Any) -> Any:
    return tuple(array.shape), np.dtype(array.dtype).name


def run_callback(call: Any, inputs: list[Any], outputs: list[Any]) -> None:
    context = SimpleNamespace(stream=STREAM)
    buffers = [Buffer(array) for array in outputs], *(Buffer(array) for array in inputs)
    _primitive._execute(call, [form(a) for a in inputs], [form(a) for a in outputs], context, *buffers)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("options", "extras", "len_q"),
    [({"causal": True}, (), 77), ({"deterministic": True}, ("sink",), 77), ({}, ("bias",), 77), ({}, (), 1)],
    ids=str,
)
def test_a_callback_launches_what_a_plain_call_launches_on_xlas_stream(
    fake_cuda: Any, options: Any, extras: tuple[str, ...], len_q: int, backward: bool, device: int
) -> None:
    with fake_cuda.cuda.Device(device):
        shapes: dict[str, Any] = {"q": (2, len_q, 4, 64), "k": (2, 900, 2, 64), "v": (2, 900, 2, 64)}
        shapes |= {name: {"sink": (4,), "bias": (4, 1, 900)}[name] for name in extras}
        dtypes = {"sink": np.float32}
        names = {"out": "q", "dout": "q"} if backward else {}
        shapes |= {name: shapes[like] for name, like in names.items()} | ({"lse": (2, 4, len_q)} if backward else {})
        dtypes["lse"] = np.float32
        arrays = {
            name: fake_cuda.ndarray(np.zeros(shape, dtypes.get(name, BF16)), device) for name, shape in shapes.items()
        }
        attn, at = cf.Attention(**options), fake_cuda.at
        results = list((attn.bwd if backward else attn.fwd)(**arrays))  # allocates the results, then the workspace
        want, allocated = list(fake_cuda.launches), list(fake_cuda.allocations)
        call = AttentionCall(attn, tuple(arrays), backward=backward)
        needed = call.workspace_bytes([_memory.formless(form(a), ("cuda", device)) for a in arrays.values()])
        used = allocated[len(results) :]
        assert (needed > 0) == bool(used) and all(shape[0] <= needed for shape, _ in used)
        fake_cuda.at = at  # XLA's results lie where CuPy's lay
        made = [fake_cuda.ndarray(np.zeros(result.shape, result.dtype), device) for result in results]
        made += [fake_cuda.ndarray(np.zeros(needed, np.uint8), device)] if needed else []
        assert want
        forget_forms()
        for _ in range(2):  # a form that is new, and one that is known
            fake_cuda.launches.clear()
            fake_cuda.allocations.clear()
            run_callback(call, list(arrays.values()), made)
            assert fake_cuda.launches == [launch._replace(stream=STREAM) for launch in want]
            assert fake_cuda.allocations == []


def test_merges_and_preprocess_launch_on_xlas_stream_and_allocate_nothing(fake_cuda: Any) -> None:
    def array(*shape: int, dtype: Any = np.float32) -> Any:
        return fake_cuda.ndarray(np.zeros(shape, dtype), 0)

    outs, lses = [array(2, 5, 3, 8) for _ in range(24)], [array(2, 3, 5) for _ in range(24)]
    out, lse = array(2, 5, 3, 8), array(2, 3, 5)
    run_callback(MergeCall("bshd", None, 24, 24), [*outs, *lses], [out, lse])
    backward = MergeCall("bshd", None, 24, 24, backward=True)
    run_callback(backward, [*outs, *lses, out, lse, out, lse], [array(*x.shape) for x in (*outs, *lses)])
    run_callback(PreprocessCall("bshd"), [out, out, lse], [array(2, 3, 5)])
    assert len(fake_cuda.launches) >= 3
    assert {launch.stream for launch in fake_cuda.launches} == {STREAM}
    assert fake_cuda.allocations == []


def test_seeds_are_read_where_they_lie(fake_cuda: Any) -> None:
    x = fake_cuda.ndarray(np.zeros((1, 33, 2, 64), BF16), 0)
    words = [fake_cuda.ndarray(np.zeros(2, np.uint32), 0) for _ in range(2)]
    attn = cf.Attention(dropout_p=0.5)
    at = fake_cuda.at
    own = [fake_cuda.ndarray(np.zeros(1, np.uint64), 0, word.data.ptr) for word in words]
    fake_cuda.at = at
    results = attn.fwd(x, x, x, seed=own[0], offset=own[1])
    [want] = fake_cuda.launches
    fake_cuda.launches.clear()
    run_callback(AttentionCall(attn, ("q", "k", "v", "seed", "offset")), [x, x, x, *words], list(results))
    assert fake_cuda.launches == [want._replace(stream=STREAM)]


@pytest.fixture
def cuda_client(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if JAX had a GPU to compile for."""
    monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(local_hardware_id=0)])
    return fake_cuda


def lowered(function: Any, *arrays: Any) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_the_workspace_is_one_more_result_of_xlas(cuda_client: Any) -> None:
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 4, 64), (2, 3000, 2, 64)))
    needed = AttentionCall(cf.Attention(), ("q", "k", "v")).workspace_bytes(
        [_memory.formless(form(x), ("cuda", 0)) for x in (q, k, k)]
    )
    text = lowered(lambda q, k: attention(q, k, k).out, q, k)
    assert needed > 0 and f"tensor<{needed}xui8>" in text
    assert text.count("xla_buffer_python_gpu_callback") == 1
    assert cuda_client.allocations == cuda_client.launches == []


def test_what_the_kernels_cannot_do_is_refused_before_it_runs(cuda_client: Any) -> None:
    x = jax.ShapeDtypeStruct((1, 3, 2, 320), jnp.float32)
    with pytest.raises(cf.UnsupportedError, match=r"attn_fwd: .*head_dim 320.*256"):
        lowered(lambda x: attention(x, x, x).out, x)
    with jax.default_device(jax.devices("cpu")[0]):
        assert attention(*[jnp.zeros(x.shape)] * 3).out.shape == x.shape  # the NumPy backend takes any


def test_other_devices_are_refused() -> None:
    x = jax.ShapeDtypeStruct((1, 3, 2, 4), jnp.float32)
    with pytest.raises(cf.UnsupportedError, match="JAX arrays on a CPU or an NVIDIA GPU are accepted"):
        jax.jit(lambda x: attention(x, x, x).out).trace(x).lower(lowering_platforms=("tpu",))


def test_kernels_are_loaded_before_a_callback_runs(cuda_client: Any) -> None:
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    lowered(lambda x: attention(x, x, x).out, x)
    known = set(_compile._kernels)
    out, lse = (
        cuda_client.ndarray(np.zeros(shape, dtype), 0) for shape, dtype in ((x.shape, BF16), ((1, 2, 128), "f"))
    )
    run_callback(AttentionCall(cf.Attention(), ("q", "k", "v")), [out] * 3, [out, lse])
    assert known == set(_compile._kernels) and len(cuda_client.launches) == 1


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("jax_device", ["cuda"], indirect=True)
def test_no_array_passes_the_host(jax_device: str) -> None:
    """Under XLA's own guard, eager and jitted, with gradients, dropout and a workspace."""
    q, k = (jax.random.normal(jax.random.key(0), (2, n, 4, 64), jnp.bfloat16) for n in (1, 4096))
    x, key = jax.random.normal(jax.random.key(1), (2, 512, 4, 64), jnp.bfloat16), jax.random.key(2)

    def loss(x: Any, key: Any) -> Any:
        out, lse = attention(x, x, x, causal=True, dropout_p=0.1, seed=key)
        return out.astype(jnp.float32).sum() + lse.sum()

    step = jax.jit(jax.value_and_grad(loss))
    decode = jax.jit(lambda q, k: attention(q, k, k).out)
    jax.block_until_ready((step(x, key), decode(q, k), loss(x, key)))
    with jax.transfer_guard("disallow"):
        jax.block_until_ready((step(x, key), decode(q, k)))


@pytest.mark.gpu
@pytest.mark.parametrize("jax_device", ["cuda"], indirect=True)
def test_work_is_ordered_with_xlas_own(jax_device: str, rng: np.random.Generator) -> None:
    """Chains of XLA's kernels and ours, many steps in one program, give what the CPU gives."""
    x = rng.standard_normal((2, 300, 4, 64)).astype(np.float32)

    def chain(x: Any) -> Any:
        def step(x: Any, _: None) -> Any:
            y = x / jnp.sqrt((x * x).mean())
            return y + attention(y, y * 1.5, y - 0.5, causal=True).out, None

        return jax.lax.scan(step, x, None, length=20)[0]

    got = jax.jit(chain)(jnp.asarray(x))
    want = jax.jit(chain)(jax.device_put(x, jax.devices("cpu")[0]))
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-3, atol=1e-3)
