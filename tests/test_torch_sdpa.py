"""`scaled_dot_product_attention` says what torch's own says, values and gradients, over a table of its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from cupyflash.torch import scaled_dot_product_attention  # noqa: E402

TORCHS_OWN = torch.nn.functional.scaled_dot_product_attention

# Shapes of query, key and value.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "four axes": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "more queries than keys, narrow values": ((2, 4, 9, 8), (2, 4, 6, 8), (2, 4, 6, 3)),
    "grouped": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    "one key head": ((2, 4, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    "three axes": ((4, 5, 8), (4, 7, 8), (4, 7, 8)),
    "five axes": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
    "keys of one batch": ((3, 4, 5, 8), (1, 4, 7, 8), (4, 7, 8)),
}


def bool_mask(shape: tuple[int, ...], device: str) -> Any:
    return torch.rand(shape, device=device) < 0.6


def with_empty_row(mask: Any) -> Any:
    mask[..., 2, :] = False if mask.dtype == torch.bool else -math.inf
    return mask


def float_mask(shape: tuple[int, ...], device: str) -> Any:
    mask = torch.randn(shape, device=device, dtype=torch.float64)
    return mask.masked_fill(~bool_mask(shape, device), -math.inf)


# From the shape of the scores.
Mask = Callable[[tuple[int, ...], str], Any]
MASKS: dict[str, Mask | None] = {
    "no mask": None,
    "bool [L, S]": lambda scores, device: bool_mask(scores[-2:], device),
    "bool, whole": lambda scores, device: bool_mask(scores, device),
    "bool of keys": lambda scores, device: bool_mask((*scores[:-3], 1, 1, scores[-1]), device),
    "bool, a row without keys": lambda scores, device: with_empty_row(bool_mask(scores[-2:], device)),
    "float [L, S]": lambda scores, device: float_mask(scores[-2:], device),
    "float, whole": lambda scores, device: float_mask(scores, device),
    "float of heads": lambda scores, device: float_mask((scores[-3], 1, scores[-1]), device),
    "float, a row without keys": lambda scores, device: with_empty_row(float_mask(scores, device)),
}
OPTIONS: list[dict[str, Any]] = [{}, {"scale": 0.3}, {"scale": 1.5}]


def run(function: Any, tensors: list[Any], mask: Any, dout: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """out and the gradients, the mask's included when it is of floats."""
    tracked = [tensor.detach().requires_grad_() for tensor in tensors]
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().requires_grad_()
        tracked.append(mask)
    out = function(*tracked[:3], attn_mask=mask, **options)
    return out, *torch.autograd.grad(out, tracked, dout.expand(out.shape))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mask", [*MASKS, "is_causal"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_values_and_gradients_are_torchs(torch_device: str, shapes: str, mask: str, options: dict[str, Any]) -> None:
    tensors = [torch.randn(shape, device=torch_device, dtype=torch.float64) for shape in SHAPES[shapes]]
    query, key, value = tensors
    options = {**options, "enable_gqa": shapes == "grouped", "is_causal": mask == "is_causal"}
    make = MASKS.get(mask)
    scores = (*query.shape[:-1], key.shape[-2])
    made = None if make is None else make(scores, torch_device)
    dout = torch.randn(value.shape[-1], device=torch_device, dtype=torch.float64)
    got = run(scaled_dot_product_attention, tensors, made, dout, options)
    want = run(TORCHS_OWN, tensors, made, dout, options)
    for a, b in zip(got, want, strict=True):
        assert not a.isnan().any()
        torch.testing.assert_close(a, b)


def test_two_axes(torch_device: str) -> None:
    query, key, value = (torch.randn(n, 8, device=torch_device, dtype=torch.float64) for n in (5, 7, 7))
    mask = bool_mask((5, 7), torch_device)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        got = scaled_dot_product_attention(query, key, value, **options)
        torch.testing.assert_close(got, TORCHS_OWN(query, key, value, **options))
    got = scaled_dot_product_attention(query, key.expand(3, 7, 8), value)
    torch.testing.assert_close(got, TORCHS_OWN(query, key.expand(3, 7, 8), value))


@pytest.mark.parametrize("shapes", [((2, 4, 5, 8), (2, 4, 0, 8)), ((2, 4, 0, 8), (2, 4, 7, 8)), ((0, 4, 5, 8),) * 2])
def test_nothing_at_all(torch_device: str, shapes: Any) -> None:
    query, key = (torch.ones(shape, device=torch_device) for shape in shapes)
    assert torch.equal(scaled_dot_product_attention(query, key, key), TORCHS_OWN(query, key, key))


def test_key_and_value_of_different_groups(torch_device: str) -> None:
    query, key, value = (torch.randn(2, heads, 5, 8, device=torch_device, dtype=torch.float64) for heads in (4, 2, 1))
    got = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(got, TORCHS_OWN(query, key, value, enable_gqa=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["float", "bool", "none"])
def test_half_precision_is_as_near_to_the_truth_as_torchs(torch_device: str, dtype: Any, kind: str) -> None:
    query, key, value = (torch.randn(2, 4, 33, 16, device=torch_device, dtype=dtype) for _ in range(3))
    mask = exact_mask = bool_mask((33, 33), torch_device) if kind == "bool" else None
    if kind == "float":
        mask = torch.randn(33, 33, device=torch_device).to(dtype)
        exact_mask = mask.double()
    truth = TORCHS_OWN(query.double(), key.double(), value.double(), attn_mask=exact_mask)
    got = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    own = TORCHS_OWN(query, key, value, attn_mask=mask)
    assert got.dtype == dtype
    rounding = torch.finfo(dtype).eps * truth.abs().max()  # of the result itself
    assert (got - truth).abs().max() <= 2 * (own - truth).abs().max() + rounding


def test_autocast(torch_device: str) -> None:
    x = torch.randn(2, 4, 9, 16, device=torch_device)
    mask = torch.randn(9, 9, device=torch_device)
    with torch.autocast(torch_device, torch.bfloat16):
        got, own = (function(x, x, x, attn_mask=mask) for function in (scaled_dot_product_attention, TORCHS_OWN))
    assert got.dtype == own.dtype == torch.bfloat16
    torch.testing.assert_close(got, own, rtol=0, atol=0.05)


def test_dropout_keeps_the_mean_and_follows_torchs_generator(torch_device: str) -> None:
    query, key = (torch.zeros(8, 8, 64, 4, device=torch_device) for _ in range(2))
    value = torch.ones_like(key)
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(scaled_dot_product_attention(query, key, value, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert abs(outs[0].mean() - 1) < 0.01  # six standard deviations of 64 * 64 rows of 64 keys
    assert outs[0].std() > 0.05


def test_torch_compile_of_the_full_graph(torch_device: str) -> None:
    def step(query: Any, key: Any, mask: Any, **options: Any) -> Any:
        return scaled_dot_product_attention(query, key, key, attn_mask=mask, **options)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    query, key = (torch.randn(2, 4, n, 8, device=torch_device, requires_grad=True) for n in (5, 7))
    for mask in (None, bool_mask((2, 1, 5, 7), torch_device), torch.randn(5, 7, device=torch_device)):
        options = {"is_causal": True, "dropout_p": 0.5} if mask is None else {"scale": 0.5}
        torch.manual_seed(0)
        got = compiled(query, key, mask, **options)
        got.sum().backward()
        if mask is not None:
            torch.testing.assert_close(got, step(query, key, mask, **options))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attn_mask": torch.ones(3, 3, dtype=torch.bool), "is_causal": True}, ValueError, "`attn_mask` is given"),
        ({"attn_mask": torch.ones(4, 3)}, ValueError, r"`attn_mask` has shape \[4, 3\]; what broadcasts to"),
        ({"attn_mask": torch.ones(2, 1, 1, 3, 3)}, ValueError, r"`attn_mask` has shape \[2, 1, 1, 3, 3\]"),
        ({"attn_mask": torch.ones(3, 3, dtype=torch.int64)}, TypeError, r"`attn_mask` is of torch\.int64"),
        ({"key": torch.ones(1, 2, 3, 8)}, ValueError, r"`key` has shape \[1, 2, 3, 8\].*enable_gqa=True"),
        ({"query": torch.ones(8)}, ValueError, r"`query` has shape \[8\]"),
        ({"dropout_p": 1.0}, ValueError, r"`dropout_p` is 1\.0"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(change: Any, error: type[Exception], message: str) -> None:
    x = torch.ones(1, 4, 3, 8)
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**({"query": x, "key": x, "value": x} | change))
