"""flash-attn's functions, called as its scripts call them, against the formula in plain torch operations."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

import cupyflash as cf

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from cupyflash.torch import (  # noqa: E402
    _operators,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


def formula(
    q: Any, k: Any, v: Any, causal: bool = False, window_size: Any = (-1, -1), softmax_scale: Any = None,
    softcap: float = 0.0, alibi_slopes: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """out [B, Nq, Hq, Dv] and lse, in torch's own operations; a row without a key is not asked for."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    distance = torch.arange(k.shape[1], device=q.device) - rows
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(-1, q.shape[2], 1, 1) * distance.abs()
    left, right = (math.inf if side == -1 else side for side in window_size)
    hidden = (distance < -left) | (distance > (min(right, 0) if causal else right))
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def randn(device: str, *shape: int) -> Any:
    return torch.randn(shape, device=device, dtype=torch.float64)


def assert_same_gradients(got: Any, want: Any, inputs: list[Any]) -> None:
    """And the same results, each used in a loss."""
    weights = [torch.randn_like(x) for x in got]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    of_got, of_want = (torch.autograd.grad(results, inputs, weights) for results in (got, want))
    torch.testing.assert_close(of_got, of_want)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (3, 0)},
    {"window_size": (2, 3), "softmax_scale": 0.4},
    {"causal": True, "softcap": 1.5},
    {"causal": True, "alibi_slopes": (4,)},
    {"alibi_slopes": (2, 4)},
]


def made(options: dict[str, Any], device: str) -> dict[str, Any]:
    """The options, with slopes of the shape that stands there."""
    shape = options.get("alibi_slopes")
    return options if shape is None else {**options, "alibi_slopes": randn(device, *shape).abs()}


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(torch_device: str, options: dict[str, Any], heads_kv: int) -> None:
    options = made(options, torch_device)
    q = randn(torch_device, 2, 5, 4, 8).requires_grad_()
    k, v = (randn(torch_device, 2, 9, heads_kv, 8).requires_grad_() for _ in range(2))
    out, lse, probabilities = flash_attn_func(q, k, v, **options, deterministic=True, return_attn_probs=True)
    assert probabilities is None
    assert_same_gradients((out, lse), formula(q, k, v, **options), [q, k, v])
    torch.testing.assert_close(flash_attn_func(q, k, v, 0.0, **options), out)


def test_packed_in_one_tensor(torch_device: str) -> None:
    qkv = randn(torch_device, 2, 6, 3, 4, 8).requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    assert_same_gradients([out], formula(*qkv.unbind(2), causal=True)[:1], [qkv])
    q, kv = randn(torch_device, 2, 6, 4, 8).requires_grad_(), randn(torch_device, 2, 9, 2, 2, 8).requires_grad_()
    out, lse, _ = flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)
    assert_same_gradients([out, lse], formula(q, *kv.unbind(2), causal=True), [q, kv])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sequences_of_several_lengths(torch_device: str, options: dict[str, Any]) -> None:
    options = made(options, torch_device)
    lengths_q, lengths_k = [3, 1, 6], [5, 4, 6]
    offsets_q, offsets_k = (
        torch.tensor([0, *lengths], device=torch_device).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)
    )
    q = randn(torch_device, 10, 4, 8).requires_grad_()
    k, v = (randn(torch_device, 15, 2, 8).requires_grad_() for _ in range(2))
    if options.get("alibi_slopes") is not None and options["alibi_slopes"].dim() == 2:
        options = {"alibi_slopes": randn(torch_device, 3, 4).abs()}
    out, lse, _ = flash_attn_varlen_func(q, k, v, offsets_q, offsets_k, 6, 6, return_attn_probs=True, **options)
    parts = []
    split = (q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    for number, (one_q, one_k, one_v) in enumerate(zip(*split, strict=True)):
        own = dict(options)
        if own.get("alibi_slopes") is not None and own["alibi_slopes"].dim() == 2:
            own["alibi_slopes"] = own["alibi_slopes"][number]
        parts.append(formula(one_q[None], one_k[None], one_v[None], **own))
    want = torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], dim=-1)
    assert_same_gradients((out, lse), want, [q, k, v])


def test_sequences_of_several_lengths_in_pages(torch_device: str) -> None:
    pools = [randn(torch_device, 4, 4, 2, 8) for _ in range(2)]
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32, device=torch_device)
    q = randn(torch_device, 5, 4, 8)
    offsets_q, offsets_k = (torch.tensor(x, dtype=torch.int32, device=torch_device) for x in ([0, 2, 5], [0, 7, 11]))
    out = flash_attn_varlen_func(q, *pools, offsets_q, offsets_k, 3, 7, causal=True, block_table=table)
    k, v = (torch.cat([pool[[3, 0]].flatten(0, 1)[:7], pool[[2, 1]].flatten(0, 1)[:4]]) for pool in pools)
    torch.testing.assert_close(out, flash_attn_varlen_func(q, k, v, offsets_q, offsets_k, 3, 7, causal=True))


def test_dropout_follows_torchs_generator(torch_device: str) -> None:
    q = randn(torch_device, 2, 32, 4, 8).requires_grad_()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(flash_attn_func(q, q, q, dropout_p=0.3, causal=True))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    outs[0].sum().backward()
    with pytest.raises(cf.UnsupportedError, match=r"`return_attn_probs` is True while `dropout_p` is 0\.3"):
        flash_attn_func(q, q, q, dropout_p=0.3, return_attn_probs=True)


def test_a_row_that_sees_no_key(torch_device: str) -> None:
    q, k = randn(torch_device, 1, 4, 2, 8), randn(torch_device, 1, 2, 2, 8)
    out, lse, _ = flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert not out[:, :2].any() and (lse[..., :2] == -math.inf).all()


# Decoding.


def caches(device: str, kind: str) -> tuple[list[Any], dict[str, Any], Any]:
    """Two caches, what says where the keys of two sequences are, and a function that reads a cache of one sequence."""
    if kind == "pages":
        rows = torch.tensor([[4, 0, 3], [1, 5, 2]], dtype=torch.int32, device=device)
        named = {"block_table": rows}
        made = [randn(device, 6, 4, 2, 8) for _ in range(2)]
        return made, named, lambda cache, b: cache[rows[b].long()].flatten(0, 1)
    if kind == "chosen":
        rows = torch.tensor([2, 0], device=device)
        made = [randn(device, 3, 12, 2, 8) for _ in range(2)]
        return made, {"cache_batch_idx": rows}, lambda cache, b: cache[rows[b]]
    return [randn(device, 2, 12, 2, 8) for _ in range(2)], {}, lambda cache, b: cache[b]


@pytest.mark.parametrize("kind", ["plain", "chosen", "pages"])
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("lengths", [[5, 8], 6])
def test_decoding(torch_device: str, kind: str, new: int, lengths: Any) -> None:
    given, where, read = caches(torch_device, kind)
    before = [cache.clone() for cache in given]
    q = randn(torch_device, 2, 3, 4, 8)
    k, v = (randn(torch_device, 2, new, 2, 8) for _ in range(2)) if new else (None, None)
    live = torch.tensor(lengths, dtype=torch.int32, device=torch_device) if isinstance(lengths, list) else lengths
    options = {"causal": True, "window_size": (6, 0)}
    out, lse = flash_attn_with_kvcache(q, *given, k, v, cache_seqlens=live, **where, **options, return_softmax_lse=True)
    for b in range(2):
        length = lengths[b] if isinstance(lengths, list) else lengths
        own = []
        for cache, old, rows in zip(given, before, (k, v), strict=True):
            want = read(old, b).clone()
            if rows is not None:
                want[length : length + new] = rows[b]
            assert torch.equal(read(cache, b), want)
            own.append(want[None, : length + new])
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), formula(q[b : b + 1], *own, **options))


@pytest.mark.parametrize("kind", ["plain", "chosen", "pages"])
def test_decoding_from_a_full_cache(torch_device: str, kind: str) -> None:
    given, where, read = caches(torch_device, kind)
    q = randn(torch_device, 2, 1, 4, 8)
    out = flash_attn_with_kvcache(q, *given, **where)
    k, v = (torch.stack([read(cache, b) for b in range(2)]) for cache in given)
    torch.testing.assert_close(out, formula(q, k, v)[0])


def test_decoding_compiles_as_one_graph(torch_device: str) -> None:
    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, live: Any) -> Any:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=live, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given, _, _ = caches(torch_device, "plain")
    q, k = randn(torch_device, 2, 1, 4, 8), randn(torch_device, 2, 1, 2, 8)
    live = torch.tensor([4, 9], dtype=torch.int32, device=torch_device)
    copies = [cache.clone() for cache in given]
    torch.testing.assert_close(compiled(q, *given, k, live), step(q, *copies, k, live))
    torch.testing.assert_close(given, copies)


def test_opcheck_of_the_append_and_its_version_counter(torch_device: str) -> None:
    given, _, _ = caches(torch_device, "plain")
    new = randn(torch_device, 2, 1, 2, 8)
    table, live = (torch.tensor(x, dtype=torch.int32, device=torch_device) for x in ([[0], [1]], [4, 9]))
    torch.library.opcheck(_operators.kv_append, (*given, new, new, table, live))
    weight = torch.ones((), device=torch_device, dtype=torch.float64, requires_grad=True)
    loss = (weight * given[0]).sum()
    _operators.kv_append(*given, new, new, table, live)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rotary_cos": 1}, cf.UnsupportedError, "`rotary_cos` is given; None is accepted. Rotate q and k"),
        ({"cache_leftpad": 1}, cf.UnsupportedError, "`cache_leftpad` is given; None is accepted"),
        ({"k": 1}, ValueError, "`v` is given without `k`, or `k` without it"),
        ({"k": 1, "v": 1}, ValueError, "`cache_seqlens` is None"),
        ({"cache_batch_idx": 1, "block_table": 1}, ValueError, "`cache_batch_idx` is given beside `block_table`"),
    ],
    ids=str,
)
def test_a_wrong_decoding_call_says_what_is_wrong(change: Any, error: type[Exception], message: str) -> None:
    x = torch.ones(1, 4, 2, 8)
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(x, x, x, **change)


def test_packed_shapes_are_judged() -> None:
    with pytest.raises(
        ValueError, match=r"flash_attn_qkvpacked_func: `qkv` has shape \[1, 4, 2, 8\]; \[B, N, 3, H, D\]"
    ):
        flash_attn_qkvpacked_func(torch.ones(1, 4, 2, 8))


def test_the_signatures_take_what_scripts_pass_by_position() -> None:
    """The names and their order, as flash-attn documents them."""
    common = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic")
    tail = (*common, "return_attn_probs")
    offsets = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    expected: dict[Any, tuple[str, ...]] = {
        flash_attn_func: ("q", "k", "v", *tail),
        flash_attn_qkvpacked_func: ("qkv", *tail),
        flash_attn_kvpacked_func: ("q", "kv", *tail),
        flash_attn_varlen_func: ("q", "k", "v", *offsets, *tail, "block_table"),
    }
    for function, names in expected.items():
        assert tuple(inspect.signature(function).parameters) == names
