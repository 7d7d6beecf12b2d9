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


@pytest.fixture
def cuda_client(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if JAX had a GPU to compile for."""
    monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(local_hardware_id=0)])
    return fake_cuda


ROWS = {"q": (2, 33, 4, 40), "k": (2, 70, 2, 40), "v": (2, 70, 2, 24)}
PACKED = {name: (shape[0] * shape[1], *shape[2:]) for name, shape in ROWS.items()}
OFFSETS = {"cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}
SAVED = {"out": (2, 33, 4, 24), "lse": (2, 4, 33), "dout": (2, 33, 4, 24), "dlse": (2, 4, 33)}
PACKED_SAVED = {"out": (66, 4, 24), "lse": (4, 66), "dout": (66, 4, 24), "dlse": (4, 66)}
DECODE = {"q": (2, 1, 4, 64), "k": (2, 3000, 2, 64), "v": (2, 3000, 2, 64)}
PAGES = {"q": (2, 3, 4, 64), "k": (99, 16, 2, 64), "v": (99, 16, 2, 64), "block_table": (2, 40), "seqused_k": (2,)}
ADDED = {"bias": (4, 1, 70), "sink": (4,), "alibi_slopes": (2, 4), "seqused_k": (2,), "q_start": (2,)}
WORDS = {"seed": (2,), "offset": (2,)}
WIDE = dict.fromkeys(("q", "k", "v", "out", "dout"), (1, 9, 2, 200)) | {"lse": (1, 2, 9)}
INTS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "q_start", "block_table"}


def asked(shapes: dict[str, Any], *, backward: bool = False, dtype: Any = BF16, **options: Any) -> Any:
    """A forward or backward, and arrays for it."""
    is_wide = dtype == np.float64
    dtypes = dict.fromkeys(("q", "k", "v", "out", "dout"), dtype) | dict.fromkeys(INTS, np.int32)
    dtypes |= dict.fromkeys(WORDS, np.uint32) | options.pop("dtypes", {})
    arrays = [
        np.zeros(shape, dtypes.get(name, np.float64 if is_wide else np.float32)) for name, shape in shapes.items()
    ]
    return AttentionCall(cf.Attention(**options), tuple(shapes), backward=backward), arrays


def merging(
    count: int, *, backward: bool = False, stacked: bool = False, packed: bool = False, dtypes: Any = (np.float32,),
    lse_dtype: Any = np.float32, out_dtype: str | None = None,
) -> Any:  # fmt: skip
    """A merge of so many states, and arrays for it."""
    out_shape, lse_shape = ((5, 3, 40), (3, 5)) if packed else ((2, 5, 3, 3), (2, 3, 5))
    outs = [np.zeros(out_shape, dtypes[i % len(dtypes)]) for i in range(count)]
    lses = [np.zeros(lse_shape, lse_dtype) for _ in range(count)]
    arrays = [np.stack(outs), np.stack(lses)] if stacked else [*outs, *lses]
    numbers = (None, None) if stacked else (count, count)
    merged = [outs[0], lses[0], outs[0], lses[0]] if backward else []
    return MergeCall("bshd", out_dtype, *numbers, backward=backward), [*arrays, *merged]


CALLS = {
    "forward": lambda: asked(ROWS, causal=True),
    "forward, float64": lambda: asked(ROWS, dtype=np.float64, softcap=3.0),
    "forward, float32 out of bfloat16": lambda: asked(ROWS, out_dtype="float32"),
    "forward, everything added": lambda: asked(ROWS | ADDED | WORDS, dropout_p=0.5, window=(9, 3)),
    "forward, bfloat16 bias": lambda: asked(ROWS | {"bias": (2, 4, 33, 1)}, dtypes={"bias": BF16}),
    "forward, packed": lambda: asked(PACKED | OFFSETS, layout="thd", causal=True),
    "forward, split keys": lambda: asked(DECODE),
    "forward, split by length": lambda: asked(DECODE, split_len=100, dtype=np.float32),
    "forward, pages": lambda: asked(PAGES, causal=True),
    "backward": lambda: asked(ROWS | SAVED, backward=True, causal=True),
    "backward, float64": lambda: asked(ROWS | SAVED, backward=True, dtype=np.float64),
    "backward, everything added": lambda: asked(ROWS | SAVED | ADDED | WORDS, backward=True, dropout_p=0.5),
    "backward, dout rounded": lambda: asked(ROWS | SAVED, backward=True, dtypes={"out": "f", "dout": "f"}),
    "backward, in turns": lambda: asked(ROWS | SAVED | {"sink": (4,)}, backward=True, deterministic=True),
    "backward, packed": lambda: asked(PACKED | PACKED_SAVED | OFFSETS, backward=True, layout="thd", causal=True),
    "backward, wide": lambda: asked(WIDE, backward=True, grad_dtype="float32"),
    "preprocess": lambda: (PreprocessCall("bhsd"), [np.zeros((2, 3, 5, 8), BF16)] * 2),
    "preprocess, dlse": lambda: (PreprocessCall("thd"), [np.zeros((5, 3, 7), "f")] * 2 + [np.zeros((3, 5), "f")]),
    "merge, one": lambda: merging(1, packed=True),
    "merge, a launch": lambda: merging(24),
    "merge, more": lambda: merging(30),
    "merge, many": lambda: merging(75, packed=True, dtypes=(BF16,)),
    "merge, stacked": lambda: merging(30, stacked=True, out_dtype="float16"),
    "merge, mixed": lambda: merging(49, dtypes=(BF16, np.float32, np.float16), out_dtype="float64"),
    "merge, float64": lambda: merging(25, lse_dtype=np.float64, packed=True),
    "merge backward": lambda: merging(3, backward=True),
    "merge backward, many": lambda: merging(49, backward=True, dtypes=(BF16, np.float32)),
    "merge backward, stacked": lambda: merging(30, backward=True, stacked=True, packed=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_callback_makes_and_compiles_nothing_that_was_not_asked_for_before(
    name: str, cuda_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        _primitive, "buffer_callback", lambda *given: told.append(given) or (lambda *arrays: [None] * 99)
    )
    call, arrays = CALLS[name]()
    _primitive._on_cuda(*[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays], call=call)
    [(execute, specs)] = told
    known = set(_compile._kernels)
    made, inputs = (
        [Buffer(cuda_client.ndarray(np.zeros(array.shape, array.dtype), 0)) for array in some]
        for some in (specs, arrays)
    )
    forget_forms()
    for _ in range(2):  # a form that is new, and one that is known
        execute(SimpleNamespace(stream=STREAM), made, *inputs)
    assert cuda_client.launches and {launch.stream for launch in cuda_client.launches} == {STREAM}
    assert known == set(_compile._kernels)
    assert cuda_client.allocations == []


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
