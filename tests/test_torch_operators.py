"""`cupyflash.torch.attention`: the plain functions' results, with a gradient, under what torch does to operators."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any, ClassVar

import numpy as np
import pytest

import cupyflash as cf

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cupyflash.torch import _operators, attention  # noqa: E402

Tensors = dict[str, Any]
NAMES = ("q", "k", "v", "bias", "sink")  # what has a gradient


def problem(device: str, dtype: Any = torch.float64, layout: str = "bshd") -> Tensors:
    row = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = {"q": (2, 5, 4, 3), "k": (2, 7, 2, 3), "v": (2, 7, 2, 2)}
    tensors = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    if layout == "bhsd":
        tensors = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items()}
    if layout == "thd":
        return {name: tensor.flatten(0, 1) for name, tensor in tensors.items()} | {
            "cu_seqlens_q": torch.tensor([0, 4, 10], device=device),
            "cu_seqlens_k": torch.tensor([0, 8, 14], device=device),
            "sink": torch.randn(4, device=device, dtype=row),
        }
    tensors["bias"] = torch.randn(4, 5, 7, device=device, dtype=row)
    tensors["sink"] = torch.randn(4, device=device, dtype=row)
    return tensors


def with_gradients(tensors: Tensors) -> Tensors:
    return {name: x.detach().requires_grad_() if name in NAMES else x for name, x in tensors.items()}


def call(tensors: Tensors, **options: Any) -> Any:
    given = dict(tensors)
    return attention(given.pop("q"), given.pop("k"), given.pop("v"), **given, **options)


def gradients(tensors: Tensors, results: Any, douts: Any, **how: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(results, [tensors[name] for name in NAMES if name in tensors], douts, **how)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "scale": -0.3},
    {"causal": "top-left", "softcap": 2.0},
    {"window": (3, None), "dropout_p": 0.25, "seed": 7},
    {"causal": "bottom-right", "q_start": 1, "k_start": -1, "num_splits": 2, "deterministic": True},
]


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_and_gradients_have_the_plain_functions_bits(torch_device: str, layout: str, options: Any) -> None:
    options = {**options, "layout": layout, "deterministic": True}
    for dtype in (torch.bfloat16, torch.float32):
        tensors = problem(torch_device, dtype, layout)
        tracked = with_gradients(tensors)
        results = call(tracked, **options)
        douts = torch.randn_like(results.out), torch.randn_like(results.lse)
        got = gradients(tracked, tuple(results), douts)
        given = dict(tensors)
        q, k, v = (given.pop(name) for name in "qkv")
        for name in options.keys() & {"q_start", "k_start"}:  # which operators take as arrays
            given[name] = torch.full((2,), options[name], dtype=torch.int32, device=torch_device)
        want = cf.attn_fwd(q, k, v, **(options | given))
        grads = cf.attn_bwd(q, k, v, *want, douts[0], dlse=douts[1], **(options | given))
        for a, b in zip((*results, *got), (*want, *grads), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(torch_device: str, options: Any) -> None:
    tensors = with_gradients(problem(torch_device))

    def function(*arrays: Any) -> Any:
        return tuple(call(dict(zip(NAMES, arrays, strict=True)), **options))

    # A GPU sums dq by atomics, so that its last bits vary.
    assert torch.autograd.gradcheck(function, tuple(tensors[name] for name in NAMES), nondet_tol=1e-12)


def test_gradcheck_of_packed_sequences_and_live_keys(torch_device: str) -> None:
    packed = with_gradients(problem(torch_device, layout="thd"))

    def function(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return tuple(call({**packed, "q": q, "k": k, "v": v, "sink": sink}, layout="thd", causal=True))

    assert torch.autograd.gradcheck(function, [packed[name] for name in ("q", "k", "v", "sink")], nondet_tol=1e-12)
    dense = with_gradients(problem(torch_device))
    live = torch.tensor([7, 0], dtype=torch.int32, device=torch_device)
    slopes = torch.rand(4, dtype=torch.float64, device=torch_device)

    def shortened(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, seqused_k=live, alibi_slopes=slopes).out

    assert torch.autograd.gradcheck(shortened, [dense[name] for name in "qkv"], nondet_tol=1e-12)


def operator_call(tensors: Tensors, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments of `attn_fwd`, as a program that calls the operator may give them."""
    options: dict[str, Any] = dict.fromkeys(
        ("scale", "window_left", "window_right", "softcap", "out_dtype", "split_len", "max_seqlen_q", "max_seqlen_k")
    )
    options |= {"layout": "bshd", "causal": "none", "dropout_p": 0.0, "deterministic": True, "num_splits": 0}
    options |= {"allow_tf32": False, **changes}
    arrays = dict.fromkeys(_operators._ARRAYS) | tensors
    return tuple(arrays[name] for name in ("q", "k", "v", *_operators._ARRAYS)), options


def test_shapes_alone(torch_device: str) -> None:
    q = torch.empty(2, 5, 4, 8, device="meta", requires_grad=True)
    out, lse = attention(q, q, q, causal=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 5) and out.requires_grad
    slopes = torch.ones(4, device=torch_device, requires_grad=True)
    x = torch.randn(2, 5, 4, 8, device=torch_device)
    assert torch.equal(
        attention(x, x, x, alibi_slopes=slopes).out, attention(x, x, x, alibi_slopes=slopes.detach()).out
    )


def test_an_operator_has_defaults(torch_device: str) -> None:
    tensors = with_gradients(problem(torch_device))
    q, k, v = (tensors[name] for name in "qkv")
    for found, plain in zip(torch.ops.cupyflash.attn_fwd(q, k, v), attention(q, k, v), strict=True):
        assert torch.equal(found, plain)
    arguments, options = operator_call({"q": q, "k": k, "v": v})
    found = torch.autograd.grad(_operators.attn_fwd(*arguments, **options)[0].sum(), (q, k, v))
    plain = torch.autograd.grad(torch.ops.cupyflash.attn_fwd(q, k, v)[0].sum(), (q, k, v))
    assert all(torch.allclose(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_opcheck(torch_device: str, layout: str) -> None:
    tensors = problem(torch_device, torch.float32, layout)
    arguments, options = operator_call(with_gradients(tensors), layout=layout, causal="bottom-right")
    torch.library.opcheck(_operators.attn_fwd, arguments, options)
    arguments, options = operator_call(tensors, layout=layout, causal="bottom-right")
    out, lse = _operators.attn_fwd(*arguments, **options)
    for dlse, bias_grad in ((None, True), (lse, False)):
        saved = torch.ones_like(out), dlse, out, lse
        torch.library.opcheck(_operators.attn_bwd, (*saved, *arguments), options | {"bias_grad": bias_grad})


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_masks_gradient_is_computed_where_it_is_asked_for(torch_device: str, needs_gradient: bool) -> None:
    class Seen(TorchDispatchMode):
        bias_grads: ClassVar[list[bool]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _operators.attn_bwd:
                self.bias_grads.append(kwargs.get("bias_grad", True))
            return func(*args, **kwargs or {})

    tensors = with_gradients(problem(torch_device))
    tensors["bias"] = tensors["bias"].detach().requires_grad_(needs_gradient)
    out, _ = call(tensors)
    with Seen():
        out.sum().backward()
    assert Seen.bias_grads == [needs_gradient]
    assert (tensors["bias"].grad is not None) == needs_gradient


class Wrapped(torch.Tensor):
    """Holds a tensor, and knows the operators that were called on its kind."""

    seen: ClassVar[list[Any]] = []
    held: Any

    @staticmethod
    def __new__(cls: Any, held: Any) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return func(*[x.held if isinstance(x, cls) else x for x in args], **kwargs or {})


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


def test_who_listens_to_operators_hears_ours_and_it_has_the_bits_that_it_has_alone(torch_device: str) -> None:
    tensors = problem(torch_device)
    options = {"causal": True, "softcap": 3.0, "window": (4, 1), "max_seqlen_k": 7}
    expected = call(tensors, **options)

    with torch.profiler.profile() as profile:
        profiled = call(tensors, **options)
    with Functions() as functions:
        overridden = call(tensors, **options)
    subclassed = call(tensors | {"q": Wrapped(tensors["q"])}, **options)
    traced = make_fx(lambda q: call(tensors | {"q": q}, **options))(tensors["q"])

    assert "cupyflash::attn_fwd" in [event.name for event in profile.events()]
    for seen in (functions.seen, Wrapped.seen, [node.target for node in traced.graph.nodes]):
        assert _operators.attn_fwd in seen
    for found in (profiled, overridden, subclassed, traced(tensors["q"])):
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=0, atol=0)


def test_opcheck_with_inputs_of_any_strides(torch_device: str) -> None:
    tensors = problem(torch_device, torch.float32, "bhsd")
    tensors |= {name: tensors[name].transpose(1, 2) for name in "qkv"}
    tensors["k"] = tensors["k"][:1].expand(2, -1, -1, -1)
    arguments, options = operator_call(with_gradients(tensors), out_dtype=torch.float32)
    torch.library.opcheck(_operators.attn_fwd, arguments, options)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_of_the_full_graph_forward_and_backward(torch_device: str, compiler: str) -> None:
    def step(tensors: Tensors) -> Any:
        out, lse = call({**tensors, "q": tensors["q"] * 2}, causal=True, window=(4, 0), deterministic=True, seed=3)
        return (out.sin().sum() + lse.square().sum()), out

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for len_q in (5, 4, 3):  # the second compiles for any length
        tensors = problem(torch_device)
        tensors |= {"q": tensors["q"][:, :len_q], "bias": tensors["bias"][:, :len_q]}
        tensors = with_gradients(tensors)
        (loss, out), (want_loss, want_out) = compiled(tensors), step(tensors)
        torch.testing.assert_close((loss, out), (want_loss, want_out))
        torch.testing.assert_close(gradients(tensors, loss, None), gradients(tensors, want_loss, None))


def test_each_output_alone_has_its_gradient_and_the_graph_can_be_used_twice(torch_device: str) -> None:
    tensors = with_gradients(problem(torch_device))
    out, lse = call(tensors, causal=True)
    of_out = gradients(tensors, out.sum(), None, retain_graph=True)
    of_lse = gradients(tensors, lse.sum(), None, retain_graph=True)
    of_both = gradients(tensors, out.sum() + lse.sum(), None, retain_graph=True)
    torch.testing.assert_close(of_both, tuple(a + b for a, b in zip(of_out, of_lse, strict=True)))
    torch.testing.assert_close(gradients(tensors, out.sum() + lse.sum(), None), of_both)
    assert not of_lse[2].any()


def test_a_result_that_is_changed_in_place_is_noticed(torch_device: str) -> None:
    tensors = with_gradients(problem(torch_device))
    out, _ = call(tensors)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_queries_keys_and_values_and_nothing_else(torch_device: str, dtype: Any) -> None:
    tensors = with_gradients(problem(torch_device, torch.float32))
    tensors["k"] = tensors["k"].detach().to(dtype).requires_grad_()  # as what is behind a linear layer
    with torch.autocast(torch_device, dtype):
        out, lse = call(tensors, causal=True, deterministic=True)
    grads = gradients(tensors, (out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert [grad.dtype for grad in grads] == [tensors[name].dtype for name in NAMES]
    want = call(tensors | {name: tensors[name].detach().to(dtype) for name in "qkv"}, causal=True)
    assert torch.equal(out, want.out)
    exact = problem(torch_device)
    with torch.autocast(torch_device, dtype):
        assert call(exact).out.dtype == torch.float64


def test_no_graph_is_recorded_where_none_is_wanted(torch_device: str) -> None:
    tensors = with_gradients(problem(torch_device))
    want = call(tensors)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = call(tensors)
        assert not got.out.requires_grad and torch.equal(got.out, want.out)
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    assert not call(plain).lse.requires_grad
    only_bias = call(plain | {"bias": tensors["bias"]})
    only_bias.out.sum().backward()
    assert tensors["bias"].grad.shape == tensors["bias"].shape


def test_dropout_without_a_seed_follows_torchs_generator(torch_device: str) -> None:
    tensors = problem(torch_device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(call(tensors, dropout_p=0.5).out)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    again = torch.utils.checkpoint.checkpoint(
        lambda q: call({**tensors, "q": q}, dropout_p=0.5).out, tensors["q"].requires_grad_(), use_reentrant=False
    )
    again.sum().backward()  # checked by torch itself


def test_partial_results_in_float32(torch_device: str) -> None:
    tensors = with_gradients(problem(torch_device, torch.bfloat16))
    out, _ = call(tensors, out_dtype=torch.float32)
    assert out.dtype == call(tensors, out_dtype="float32").out.dtype == torch.float32
    grads = gradients(tensors, out.sum(), None)
    assert [grad.dtype for grad in grads] == [tensors[name].dtype for name in NAMES]


def test_pages_without_a_gradient_only(torch_device: str) -> None:
    tensors = problem(torch_device, torch.float32)
    q, k, v = (tensors[name] for name in "qkv")
    pages = {
        "block_table": torch.tensor([[1], [0]], dtype=torch.int32, device=torch_device),
        "seqused_k": torch.tensor([7, 5], dtype=torch.int32, device=torch_device),
    }
    want = cf.attn_fwd(q, k, v, **pages)
    assert torch.equal(attention(q, k, v, **pages).out, want.out)
    with pytest.raises(cf.UnsupportedError, match="`block_table` is given; with pages no input may require grad"):
        attention(q.requires_grad_(), k, v, **pages)


def test_a_second_derivative_is_refused(torch_device: str) -> None:
    tensors = with_gradients(problem(torch_device))
    [dq, *_] = gradients(tensors, call(tensors).out.sum(), None, create_graph=True)
    with pytest.raises(cf.UnsupportedError, match="attn_bwd: has no gradient of its own"):
        dq.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_derivatives_are_refused(torch_device: str, name: str) -> None:
    """And not 0, as torch has it for what records no graph of a forward mode."""
    tensors = problem(torch_device)

    def function(x: Any) -> Any:
        return call({**tensors, name: x}).out

    message = f"attention: `{name}` has a forward-mode tangent"
    for derivative in (torch.func.jacfwd(function), lambda x: torch.func.jvp(function, (x,), (x,))):
        with pytest.raises(cf.UnsupportedError, match=message):
            derivative(tensors[name])
    forward_ad = torch.autograd.forward_ad
    for x in (tensors[name], tensors[name].clone().requires_grad_()):
        with forward_ad.dual_level(), pytest.raises(cf.UnsupportedError, match=message):
            function(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_call_for_each(torch_device: str) -> None:
    tensors = [problem(torch_device) for _ in range(3)]
    stacked = {name: torch.stack([each[name] for each in tensors]).requires_grad_() for name in NAMES}
    got = torch.func.vmap(lambda given: tuple(call(given, causal=True, deterministic=True)))(stacked)
    douts = tuple(torch.randn_like(result) for result in got)
    grads = gradients(stacked, got, douts)
    for i, each in enumerate(map(with_gradients, tensors)):
        want = tuple(call(each, causal=True, deterministic=True))
        torch.testing.assert_close(tuple(result[i] for result in got), want)
        torch.testing.assert_close(
            tuple(grad[i] for grad in grads), gradients(each, want, tuple(dout[i] for dout in douts))
        )


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"causal": 1}, ValueError, "Attention: `causal` is 1; False, True, 'bottom-right' or 'top-left' is accepted"),
        ({"window": 3}, ValueError, "Attention: `window` is 3; None or a pair"),
        ({"window": (3, -2)}, ValueError, "Attention: `window` is -2"),
        ({"layout": "sbhd"}, ValueError, "Attention: `layout` is 'sbhd'"),
        ({"dropout_p": 1.0}, ValueError, "Attention: `dropout_p` is 1.0"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "attn_fwd: `alibi_slopes`"),
        ({"q_start": 1.5}, TypeError, "attention: `q_start` is 1.5; an int that fits int32"),
        ({"q_start": np.array([0])}, TypeError, "attention: `q_start` is array([0])"),
        ({"k_start": True}, TypeError, "attention: `k_start` is True"),
        ({"scale": torch.tensor(0.5)}, TypeError, "Attention: `scale` is tensor(0.5000)"),
        ({"q_start": -(2**31) - 1}, ValueError, "attention: `q_start` is -2147483649"),
        ({"dropout_p": 0.5, "seed": 1.5}, TypeError, "attention: `seed` is 1.5"),
        ({"dropout_p": 0.5, "seed": 2**63}, ValueError, "attention: `seed` is 9223372036854775808"),
        ({"dropout_p": 0.5, "seed": 1, "offset": -1}, ValueError, "attention: `offset` is -1"),
        ({"out_dtype": "int8"}, TypeError, "Attention: `out_dtype` is 'int8'"),
        ({"k": None}, TypeError, "attention: `k` is None; torch tensors are accepted"),
        ({"q": [[1.0]]}, TypeError, "attention: `q` is of type list"),
        ({"q": torch.ones(())}, ValueError, "attn_fwd: `q` has 0 axes"),
        ({"cu_seqlens_q": torch.tensor(3)}, ValueError, "attn_fwd: `cu_seqlens_q` is given"),
    ],
    ids=str,
)
def test_a_wrong_call_says_what_is_wrong(wrong: Any, error: type[Exception], message: str) -> None:
    x = torch.ones(1, 3, 2, 4, requires_grad=True)
    arguments = dict.fromkeys("qkv", x) | wrong
    with pytest.raises(error, match=re.escape(message)):
        call(arguments)
    with pytest.raises(error, match=re.escape(message)), torch.autocast("cpu", torch.bfloat16):
        call(arguments)


def test_lengths_may_be_tensors_of_one_element(torch_device: str) -> None:
    tensors = problem(torch_device, layout="thd")
    hints = {"max_seqlen_q": torch.tensor(6), "max_seqlen_k": tensors["cu_seqlens_k"].diff().max()}
    expected = call(tensors, layout="thd")
    torch.testing.assert_close(call(tensors, layout="thd", **hints), expected, rtol=0, atol=0)


def test_a_tensor_that_has_outlived_its_transform_is_the_one_that_it_was(torch_device: str) -> None:
    tensors = problem(torch_device)
    kept: list[Any] = []
    torch.func.grad(lambda q: (kept.append(q), q.sum())[1])(tensors["q"])
    found, expected = ({**tensors, "q": q, "v": tensors["v"].clone().requires_grad_()} for q in (kept[0], tensors["q"]))
    for one, other in zip(call(found), call(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for given in (found, expected):
        call(given).out.sum().backward()
    torch.testing.assert_close(found["v"].grad, expected["v"].grad, rtol=0, atol=0)


def test_data_parallel_training_averages_gradients(torch_device: str) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        x = torch.randn(2, 5, 24, device=torch_device)
        linear = torch.nn.Linear(24, 24).to(torch_device)

        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = linear

            def forward(self, x: Any) -> Any:
                q = self.linear(x).unflatten(-1, (3, 8))
                return attention(q, q, q, deterministic=True).out

        [want] = torch.autograd.grad(Block()(x).square().sum(), [linear.weight])
        torch.nn.parallel.DistributedDataParallel(Block())(x).square().sum().backward()
        torch.testing.assert_close(linear.weight.grad, want)
    finally:
        distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("torch_device", ["cuda"], indirect=True)
def test_a_cuda_graph_holds_a_step_and_draws_other_dropout_at_each_replay(torch_device: str) -> None:
    tensors = with_gradients(problem(torch_device, torch.bfloat16))
    options = {"causal": True, "deterministic": True}

    def step(**more: Any) -> tuple[Any, ...]:
        results = tuple(call(tensors, **options, **more))
        return results + gradients(tensors, results, tuple(map(torch.ones_like, results)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles
        step()
        step(dropout_p=0.5)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, dropped = step(), step(dropout_p=0.5)[0]
    with torch.no_grad():
        for name in NAMES:
            tensors[name].copy_(torch.randn_like(tensors[name]))
    graph.replay()
    first = dropped.clone()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)
    graph.replay()
    assert not torch.equal(first, dropped)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_calls_have_the_bits_of_eager_ones(torch_device: str, compiler: str) -> None:
    def step(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return tuple(attention(q, k, v, causal=True, softcap=9.0, deterministic=True))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    shapes = [(2, 131, 6, 64), (2, 131, 2, 64), (2, 131, 2, 64)]
    inputs = [torch.randn(shape, device=torch_device).bfloat16().requires_grad_() for shape in shapes]
    found, wanted = (
        (*results, *torch.autograd.grad(results, inputs, tuple(map(torch.ones_like, results))))
        for results in (compiled(*inputs), step(*inputs))
    )
    for a, b in zip(found, wanted, strict=True):
        assert b.any() and torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("torch_device", ["cuda"], indirect=True)
def test_a_thousand_steps_on_three_streams_where_memory_is_short(torch_device: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.soak_torch"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.gpu
@pytest.mark.parametrize("torch_device", ["cuda"], indirect=True)
def test_inputs_may_go_out_of_scope_on_any_stream(torch_device: str) -> None:
    big = {name: torch.randn(2, 1024, 4, 64, device=torch_device, dtype=torch.bfloat16) for name in "qkv"}
    want = call(big, causal=True, deterministic=True).out
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            out = call({name: x.clone() for name, x in big.items()}, causal=True, deterministic=True).out
            torch.full_like(out, torch.nan)  # into memory that the clones gave back
            assert torch.equal(out, want)


def test_importing_the_package_registers_nothing() -> None:
    code = "import sys, cupyflash; assert 'torch' not in sys.modules and 'cupyflash.torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
