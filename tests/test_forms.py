"""What follows from the form of a call is remembered, and is never served to a call of another form."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash as cf
from cupyflash import _attention, _check, _cuda, _interop, _overlap
from tests import fake_cuda as stand_in

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS = 4
ROWS = (2, HEADS, 70)  # of lse

Problem = dict[str, Any]  # options and arguments of a call, q, k, v and dout among them
Change = Callable[[Any, Problem], None]  # takes the stand-in for CuPy, and a problem to be made another


def array(cupy: Any, *shape: int, dtype: Any = BF16, device: int = 0, shift: int = 0) -> Any:
    """Zeros whose address is `shift` bytes past a multiple of 256."""
    return cupy.ndarray(np.zeros(shape, dtype), device, cupy.at + shift)


def base(cupy: Any, device: int = 0) -> Problem:
    shapes = {"q": (2, 70, HEADS, 64), "k": (2, 90, 2, 64), "v": (2, 90, 2, 64), "dout": (2, 70, HEADS, 64)}
    return {name: array(cupy, *shape, device=device) for name, shape in shapes.items()}


def put(**arrays: tuple[tuple[int, ...], Any]) -> Change:
    """Gives arrays of these shapes and dtypes."""

    def change(cupy: Any, problem: Problem) -> None:
        problem |= {name: array(cupy, *shape, dtype=dtype) for name, (shape, dtype) in arrays.items()}

    return change


def say(**values: Any) -> Change:
    """Gives options and plain arguments."""
    return lambda cupy, problem: problem.update(values)


def both(*changes: Change) -> Change:
    def change(cupy: Any, problem: Problem) -> None:
        for each in changes:
            each(cupy, problem)

    return change


def from_elsewhere(cupy: Any, problem: Problem) -> None:
    problem.update(base(cupy, device=1))


def shifted(name: str, by: int) -> Change:
    return lambda cupy, problem: problem.update({name: array(cupy, *problem[name].shape, shift=by)})


def viewed(name: str, shape: tuple[int, ...], view: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Gives a view of a larger array."""
    return lambda cupy, problem: problem.update({name: cupy.ndarray(view(np.zeros(shape, BF16)), 0)})


def with_another_plan(cupy: Any, problem: Problem) -> None:
    q, k, v = (problem[name] for name in "qkv")
    plan = cf.Attention().plan(q, k, v)
    constants = dataclasses.replace(plan.constants, key_tile=plan.constants.key_tile - 16)
    problem["forward_plan"] = dataclasses.replace(plan, constants=constants)


def lengthwise(cupy: Any, problem: Problem) -> None:
    """The same shapes, read as [B, H, N, D]."""
    problem["layout"] = "bhsd"
    problem |= {name: array(cupy, 2, 4, 70 if name in ("q", "dout") else 90, 64) for name in ("q", "k", "v", "dout")}


def packed(lengths_dtype: Any, **hints: int) -> Change:
    def change(cupy: Any, problem: Problem) -> None:
        problem |= {"layout": "thd", **hints}
        problem |= {name: array(cupy, 70, 2, 64) for name in ("q", "k", "v", "dout")}
        problem |= {name: array(cupy, 4, dtype=lengths_dtype) for name in ("cu_seqlens_q", "cu_seqlens_k")}

    return change


F32, I32, I64, U8 = np.dtype("float32"), np.dtype("int32"), np.dtype("int64"), np.dtype("uint8")
GRADIENTS = {"dq": ((2, 70, HEADS, 64), F32), "dk": ((2, 90, 2, 64), F32), "dv": ((2, 90, 2, 64), F32)}
FORMS: dict[str, Change] = {
    "a length": put(k=((2, 91, 2, 64), BF16), v=((2, 91, 2, 64), BF16)),
    "few keys": put(k=((2, 12, 2, 64), BF16), v=((2, 12, 2, 64), BF16)),
    "a batch": put(**{name: ((3, 70 + 20 * (name in "kv"), 2, 64), BF16) for name in ("q", "k", "v", "dout")}),
    "a head dim": put(v=((2, 90, 2, 32), BF16), dout=((2, 70, HEADS, 32), BF16)),
    "another dtype": put(
        **{name: ((2, 70 + 20 * (name in "kv"), 4, 64), np.float16) for name in ("q", "k", "v", "dout")}
    ),
    "a dtype of dout": put(dout=((2, 70, HEADS, 64), F32)),
    "a stride": viewed("k", (2, 90, 3, 64), lambda whole: whole[:, :, :2]),
    "a reversed axis": viewed("k", (2, 90, 2, 64), lambda whole: whole[:, ::-1]),
    "a stride of two elements": viewed("k", (2, 90, 2, 128), lambda whole: whole[..., ::2]),
    "an alignment of 8": shifted("q", 8),
    "an alignment of 2": shifted("v", 2),
    "another device": from_elsewhere,
    "another layout": lengthwise,
    "packed": packed(I32),
    "packed with offsets of 64 bits": packed(I64),
    "packed with hints": packed(I32, max_seqlen_q=12, max_seqlen_k=300),
    "scale": say(scale=0.5),
    "a negative scale": say(scale=-0.5),
    "causal": say(causal=True),
    "top-left": say(causal="top-left"),
    "a window": say(window=(3, 1)),
    "an endless window": say(window=(3, None)),
    "softcap": say(softcap=2.0),
    "dropout": say(dropout_p=0.5, seed=0),
    "a seed": say(dropout_p=0.5, seed=7),
    "an offset": say(dropout_p=0.5, seed=7, offset=9),
    "a seed in an array": both(put(seed=((1,), I64)), say(dropout_p=0.5)),
    "an offset in an array": both(put(seed=((1,), I64), offset=((1,), I64)), say(dropout_p=0.5)),
    "q_start zero": say(q_start=0),
    "q_start": say(q_start=5),
    "a negative q_start": say(q_start=-5),
    "q_start in an array": put(q_start=((2,), I32)),
    "k_start": say(k_start=5),
    "k_start in an array": put(k_start=((2,), I32)),
    "live lengths": put(seqused_k=((2,), I32)),
    "bias": put(bias=((2, HEADS, 70, 90), BF16)),
    "a bias for all": put(bias=((70, 90), BF16)),
    "a bias of another dtype": put(bias=((70, 90), F32)),
    "alibi": put(alibi_slopes=((HEADS,), F32)),
    "alibi of each batch": put(alibi_slopes=((2, HEADS), F32)),
    "a sink": put(sink=((HEADS,), F32)),
    "out": put(out=((2, 70, HEADS, 64), BF16)),
    "out and lse": put(out=((2, 70, HEADS, 64), BF16), lse=(ROWS, F32)),
    "another out": say(out_dtype="float32"),
    "delta": put(delta=(ROWS, F32)),
    "dlse": put(dlse=(ROWS, F32)),
    "deterministic": say(deterministic=True),
    "gradients of another dtype": say(grad_dtype="float32"),
    "one gradient": put(dk=((2, 90, 2, 64), BF16)),
    "gradients": both(say(grad_dtype="float32"), put(**GRADIENTS)),
    "added gradients": both(say(grad_dtype="float32", accumulate=True), put(**GRADIENTS)),
    "a workspace": put(workspace=((1 << 22,), U8)),
    "another plan": with_another_plan,
}
OPTIONS = {option.name for option in dataclasses.fields(cf.Attention)}
FORWARD_ONLY = {"out", "lse", "forward_plan"}
BACKWARD_ONLY = {"dout", "dlse", "delta", "dq", "dk", "dv", "accumulate"}


def both_directions(cupy: Any, problem: Problem) -> tuple[Any, ...]:
    """All that a forward and a backward launch and return, at addresses that depend on the problem alone."""
    cupy.at, cupy.launches, cupy.allocations = 1 << 40, [], []
    arrays = {name: value for name, value in problem.items() if name not in OPTIONS}
    attention = cf.Attention(**{name: value for name, value in problem.items() if name in OPTIONS})
    forward = {name: value for name, value in arrays.items() if name not in BACKWARD_ONLY | {"forward_plan"}}
    saved = attention.fwd(**forward, plan=arrays.get("forward_plan"))
    backward = {name: value for name, value in arrays.items() if name not in FORWARD_ONLY}
    grads = attention.bwd(out=saved.out, lse=saved.lse, **backward)
    returned = [(a.data.ptr, a.shape, a.dtype, a.device.id) for a in (*saved, *grads)]
    return cupy.launches, cupy.allocations, returned, grads._fields


@pytest.mark.parametrize("name", FORMS)
def test_no_form_is_served_what_another_left(fake_cuda: Any, name: str) -> None:
    """Beside a call that differs in one thing, before it and after it, in every order of first calls."""
    plain, changed = base(fake_cuda), base(fake_cuda)
    FORMS[name](fake_cuda, changed)
    stand_in.forget_forms()
    want = both_directions(fake_cuda, changed)
    stand_in.forget_forms()
    want_plain = both_directions(fake_cuda, plain)
    assert want != want_plain
    for _ in range(2):
        assert both_directions(fake_cuda, changed) == want
        assert both_directions(fake_cuda, plain) == want_plain


def test_no_form_is_served_what_any_other_left(fake_cuda: Any) -> None:
    problems = {}
    for name, change in FORMS.items():
        change(fake_cuda, problems.setdefault(name, base(fake_cuda)))
    want = {}
    for name, problem in problems.items():
        stand_in.forget_forms()
        want[name] = both_directions(fake_cuda, problem)
    for _ in range(2):
        for name, problem in problems.items():
            assert both_directions(fake_cuda, problem) == want[name], name


def test_a_warm_call_decides_nothing(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other arrays, other seeds, another stream: nothing is judged, planned or looked up again."""
    problem = base(fake_cuda) | {"dropout_p": 0.5, "seed": 1, "causal": True}
    both_directions(fake_cuda, problem)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("decided again")

    for module, name in (
        (_check, "_check_shapes"),
        (_check, "Call"),
        (_cuda, "plan"),
        (_cuda, "problem"),
        (importlib.import_module("cupyflash._cuda.launch"), "kernel"),
    ):
        monkeypatch.setattr(module, name, refuse)
    kernels = ["fwd_sm90", "bwd_preprocess", "bwd_sm90"]
    both_directions(fake_cuda, problem)  # a glance knows no type that was never adopted
    monkeypatch.setattr(_interop, "adopt", refuse)
    launches, *_ = both_directions(fake_cuda, base(fake_cuda) | {"dropout_p": 0.5, "seed": 2, "causal": True})
    assert [launch.binary[0] for launch in launches] == kernels
    monkeypatch.setattr(fake_cuda.cuda, "get_current_stream", lambda device: type("Stream", (), {"ptr": 77}))
    launches, *_ = both_directions(fake_cuda, problem)
    assert {launch.stream for launch in launches} == {77}


def test_seeds_and_positions_are_each_calls_own(fake_cuda: Any) -> None:
    """One form for all their values, and what is out of bounds is refused beside what is not."""
    problem = base(fake_cuda) | {"dropout_p": 0.5, "causal": True}
    want: dict[Any, Any] = {}
    values = [{"seed": seed, "offset": offset, "q_start": start} for seed, offset, start in
              ((0, 0, 0), (1, 0, 0), (1, 2, 0), (1, 2, -3), (2**64 - 1, 2**32 - 1, 2**60 - 1))]  # fmt: skip
    for number, ints in enumerate(values):
        stand_in.forget_forms()
        want[number] = both_directions(fake_cuda, problem | ints)
    for _ in range(2):
        for number, ints in enumerate(values):
            assert both_directions(fake_cuda, problem | ints) == want[number]
            for name, wrong in (("seed", 2**64), ("seed", -1), ("offset", 2**32), ("q_start", 2**60), ("seed", True)):
                with pytest.raises((ValueError, TypeError), match=f"`{name}` is {wrong}"):
                    both_directions(fake_cuda, problem | ints | {name: wrong})
    assert len(_attention._accepted) == 4  # in each direction an offset that is 0, and one that is not


def test_a_warm_call_launches_on_the_arrays_it_is_given(fake_cuda: Any) -> None:
    first, second = base(fake_cuda), base(fake_cuda)
    both_directions(fake_cuda, first)
    launches, *_ = both_directions(fake_cuda, second)
    for name in ("q", "k", "v"):
        for launch in launches:
            if launch.binary[0] in ("fwd_sm90", "bwd_sm90"):
                assert second[name].data.ptr.to_bytes(8, "little") in launch.struct
                assert first[name].data.ptr.to_bytes(8, "little") not in launch.struct


@pytest.mark.parametrize(("shift", "copy_bytes"), [(0, 16), (8, 4), (4, 4), (2, 2)])
def test_an_alignment_reaches_the_binary(fake_cuda: Any, shift: int, copy_bytes: int) -> None:
    both_directions(fake_cuda, base(fake_cuda))
    launches, *_ = both_directions(fake_cuda, base(fake_cuda) | {"q": array(fake_cuda, 2, 70, HEADS, 64, shift=shift)})
    assert launches[0].binary[2].copy_bytes == copy_bytes


def test_an_array_that_is_read_through_a_copy_is_copied_each_time(fake_cuda: Any) -> None:
    """A last axis of stride two, of which a kernel gets the copy's address."""
    problem = base(fake_cuda)
    FORMS["a stride of two elements"](fake_cuda, problem)
    for _ in range(2):
        launches, allocations, *_ = both_directions(fake_cuda, problem)
        assert allocations.count(((2, 90, 2, 64), 0)) == 4  # dk and dv, and a copy for each direction
        for launch in launches:
            assert problem["k"].data.ptr.to_bytes(8, "little") not in launch.struct


def test_launches_go_to_the_datas_device_and_stream(fake_cuda: Any) -> None:
    for device in (0, 1, 0):
        launches, allocations, *_ = both_directions(fake_cuda, base(fake_cuda, device))
        assert {(launch.device, launch.stream) for launch in launches} == {(device, 1000 + device)}
        assert {current for _, current in allocations} == {device}
        assert fake_cuda.current == 0


def wrong(name: str, cupy: Any, problem: Problem) -> Problem:
    """The problem of a forward that is refused, by what is wrong with it."""
    q, k = problem["q"], problem["k"]
    changes: dict[str, Problem] = {
        "a shape": {"v": array(cupy, 2, 91, 2, 64)},
        "a dtype": {"v": array(cupy, 2, 90, 2, 64, dtype=F32)},
        "a bool for an int": {"q_start": True},
        "a float for an int": {"k_start": 0.0},
        "None for an int": {"offset": None},
        "an int for a bool": {"check": 0},
        "a seed out of range": {"seed": 2**64},
        "an output that is an input": {"out": q},
        "an output into another": {"out": q, "q": cupy.ndarray(q.host, 0, q.data.ptr + 64)},
        "a head dim": {name: array(cupy, 2, 70 + 20 * (name != "q"), 4, 320) for name in "qkv"},
        "a device": {"k": cupy.ndarray(k.host, 1, k.data.ptr)},
        "a list": {"k": [1.0]},
        "a workspace past 16 bytes": {"workspace": array(cupy, 64, dtype=U8, shift=8)},
        "a plan": {"plan": "fast"},
        "a plan that cannot be hashed": {"plan": []},
    }
    return {name: value for name, value in (problem | changes[name]).items() if name != "dout"}


@pytest.mark.parametrize(
    "name",
    [
        "a shape", "a dtype", "a bool for an int", "a float for an int", "None for an int", "an int for a bool",
        "a seed out of range", "an output that is an input", "an output into another", "a head dim", "a device",
        "a list", "a workspace past 16 bytes", "a plan", "a plan that cannot be hashed",
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_each_time_in_the_same_words(fake_cuda: Any, name: str) -> None:
    """Before anything like it has been taken, and after its nearest right neighbours have."""
    problem = base(fake_cuda)
    refused = wrong(name, fake_cuda, problem)
    right = {key: value for key, value in problem.items() if key != "dout"}
    neighbours: list[Problem] = [right, right | {"q_start": 1}, right | {"seed": 1}]
    neighbours += [right | {"out": array(fake_cuda, 2, 70, HEADS, 64), "workspace": array(fake_cuda, 64, dtype=U8)}]
    said = []
    for _ in range(2):
        for _ in range(2):
            fake_cuda.allocations, fake_cuda.launches = [], []
            with pytest.raises((TypeError, ValueError, cf.UnsupportedError)) as caught:
                cf.attn_fwd(**refused)
            said.append((type(caught.value), str(caught.value)))
            assert fake_cuda.allocations == fake_cuda.launches == []
        for neighbour in neighbours:
            cf.attn_fwd(**neighbour)
    assert len(set(said)) == 1, said


def test_a_workspace_that_is_too_small_is_refused_each_time(fake_cuda: Any) -> None:
    problem = base(fake_cuda)
    saved = cf.attn_fwd(problem["q"], problem["k"], problem["v"])
    arrays = [problem["q"], problem["k"], problem["v"], *saved, problem["dout"]]
    size = cf.Attention().workspace_size(*arrays[:3], backward=True, out=saved.out, lse=saved.lse, dout=arrays[-1])
    for _ in range(2):
        with pytest.raises(ValueError, match=f"`workspace` has {size - 1} bytes"):
            cf.attn_bwd(*arrays, workspace=array(fake_cuda, size - 1, dtype=U8))
        cf.attn_bwd(*arrays, workspace=array(fake_cuda, size, dtype=U8))


@pytest.mark.parametrize("name", ["q", "v", "lse", "bias", "dout"])
def test_a_gpu_array_of_elements_out_of_place_is_refused_by_name(fake_cuda: Any, name: str) -> None:
    problem = base(fake_cuda)
    arrays = problem | {
        "out": array(fake_cuda, 2, 70, HEADS, 64),
        "lse": array(fake_cuda, *ROWS, dtype=np.float32),
        "bias": array(fake_cuda, 70, 90, dtype=np.float32),
    }
    arrays[name] = array(fake_cuda, *arrays[name].shape, dtype=arrays[name].dtype, shift=1)
    with pytest.raises(ValueError, match=f"attn_bwd: `{name}` starts 1 bytes past a multiple of its element size"):
        cf.attn_bwd(**arrays)
    assert not fake_cuda.launches


def test_a_state_of_elements_out_of_place_is_refused_by_name(fake_cuda: Any) -> None:
    outs, lses = (
        [array(fake_cuda, *shape, dtype=np.float32) for _ in range(2)] for shape in ((2, 70, 4, 8), (2, 4, 70))
    )
    outs[1] = array(fake_cuda, 2, 70, 4, 8, dtype=np.float32, shift=2)
    with pytest.raises(ValueError, match=r"merge_states: `outs\[1\]` starts 2 bytes past"):
        cf.merge_states(outs, lses)
    with pytest.raises(ValueError, match="attn_bwd_preprocess: `dout` starts 2 bytes past"):
        cf.attn_bwd_preprocess(outs[0], outs[1])


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_the_stride_of_an_only_row_counts(fake_cuda: Any, layout: str) -> None:
    """Kernels step over rows that are not there, so their addresses are aligned too."""
    shape = {"bshd": (1, 1, 4, 64), "bhsd": (1, 4, 1, 64), "thd": (1, 4, 64)}[layout]
    host = np.zeros((*shape[:-1], 65), np.float16)[..., :64]
    odd, even = (fake_cuda.ndarray(rows, 0) for rows in (host, np.zeros(shape, np.float16)))
    only_row = shape.index(1, 1) if layout == "bshd" else {"bhsd": 2, "thd": 0}[layout]
    assert odd.shape[only_row] == 1
    options: dict[str, Any] = {"layout": layout}
    if layout == "thd":
        offsets = fake_cuda.ndarray(np.array([0, 1], np.int32), 0)
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    for arrays, copies in ((odd, 2), (even, 16)):
        plan = cf.Attention(layout=layout).plan(
            arrays, arrays, arrays, **{name: value for name, value in options.items() if name != "layout"}
        )
        assert plan.constants.copy_bytes == copies


def test_libraries_take_turns(rng: np.random.Generator) -> None:
    """One form in two libraries, results in the kind of each; the copies that bfloat16 needs are each call's own."""
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    problems = [[rng.standard_normal((1, 9, 2, 16)).astype(np.float32) for _ in range(3)] for _ in range(2)]
    want = [cf.attn_fwd(*arrays, causal=True).out for arrays in problems]
    for _ in range(2):
        for arrays, out in zip(problems, want, strict=True):
            got = cf.attn_fwd(*arrays, causal=True)
            assert type(got.out) is type(got.lse) is np.ndarray
            assert got.out.tobytes() == out.tobytes()
            got = cf.attn_fwd(*map(torch.from_numpy, arrays), causal=True)
            assert type(got.out) is type(got.lse) is torch.Tensor
            assert got.out.numpy().tobytes() == out.tobytes()


def test_a_tensor_that_requires_grad_is_refused_though_its_form_was_taken(rng: np.random.Generator) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    q = torch.zeros(1, 9, 2, 16)
    cf.attn_fwd(q, q, q)
    with torch.no_grad():
        cf.attn_fwd(q.clone().requires_grad_(), q, q)
    with pytest.raises(TypeError, match="`q` requires grad"):
        cf.attn_fwd(q.clone().requires_grad_(), q, q)
    negated = torch.zeros(1, 9, 2, 16, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="`out` has a pending negation"):
        cf.attn_fwd(q, q, q, out=negated)


def test_what_is_remembered_is_bounded() -> None:
    stand_in.forget_forms()
    for length in range(1, _check.FORMS + 20):
        x = np.zeros((1, length, 1, 1), np.float32)
        cf.Attention(window=(0, 0)).prepare(x, x, x)
    for memo in (_check._judge, _attention._ready):
        assert memo.cache_info().currsize == memo.cache_info().maxsize == _check.FORMS
    for memo in (_overlap._reach, _overlap._steps, _overlap._is_injective):
        assert memo.cache_info().maxsize is not None


def test_what_a_glance_finds_is_bounded(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_check, "FORMS", 8)
    problem = base(fake_cuda)
    q, k, v = (problem[name] for name in "qkv")
    cf.attn_fwd(q, k, v)  # a glance knows no type that was never adopted
    for left in range(30):
        cf.attn_fwd(q, k, v, window=(left, 0))
        assert 0 < len(_attention._accepted) <= 8
