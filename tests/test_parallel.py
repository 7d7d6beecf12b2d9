"""Shards: the whole problem is the merge of its parts, and the global out and lse give each part's exact gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cupyflash as cf
from cupyflash.testing import check_backward, check_forward
from tests.backends import Backend

Random = np.random.Generator
LEN_Q, LEN_K, HEADS, WIDTH = 90, 130, 4, 32
CUTS = (0, 7, 70, 71, 130)  # unequal shards, one of a single key
Q_START = LEN_K - LEN_Q

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (30, 5)},
    "alibi": {"causal": True, "alibi_slopes": True},
    "sink": {"causal": True, "sink": True},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.2, "window": (40, 0)},
    "bias": {"bias": True, "causal": True},
    "dropout": {"dropout_p": 0.3, "seed": 5, "offset": 2},
    "dropout, everything": {
        "dropout_p": 0.3,
        "seed": 5,
        "causal": True,
        "softcap": 2.0,
        "alibi_slopes": True,
        "sink": True,
    },
}


def _options(name: str, rng: Random) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = rng.random(HEADS).astype(np.float32)
    if "sink" in options:
        options["sink"] = rng.standard_normal(HEADS).astype(np.float32)
    if "bias" in options:
        options["bias"] = rng.standard_normal((HEADS, LEN_Q, LEN_K)).astype(np.float32)
    return options


def _shard(options: dict[str, Any], keys: slice, *, with_sink: bool) -> dict[str, Any]:
    """The options of a call on these keys alone; the positions of `options` stand."""
    own = {"q_start": Q_START, **options, "k_start": keys.start}
    if "bias" in own:
        own["bias"] = own["bias"][..., keys]
    if not with_sink:
        own.pop("sink", None)
    return own


def _put(backend: Backend, options: dict[str, Any]) -> dict[str, Any]:
    return {name: backend.put(value) for name, value in options.items()}


@pytest.fixture(params=OPTIONS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def _problem(rng: Random) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    shapes = (LEN_Q, HEADS), (LEN_K, HEADS // 2), (LEN_K, HEADS // 2), (LEN_Q, HEADS)
    q, k, v, dout = (rng.standard_normal((2, *shape, WIDTH)).astype(np.float32) for shape in shapes)
    k += np.linspace(-1, 1, LEN_K, dtype=np.float32)[:, None, None]  # shards of unequal weight
    v += np.linspace(-3, 3, LEN_K, dtype=np.float32)[:, None, None]  # and unequal means
    return q, k, v, dout


SHARDS = [slice(a, b) for a, b in itertools.pairwise(CUTS)]


def test_the_merge_of_shards_is_the_whole(backend: Backend, name: str, rng: Random) -> None:
    q, k, v, _ = _problem(rng)
    options = _options(name, rng)
    states = [
        cf.attn_fwd(
            *map(backend.put, (q, k[:, keys], v[:, keys])), **_put(backend, _shard(options, keys, with_sink=i == 2))
        )
        for i, keys in enumerate(SHARDS)
    ]
    out, lse = cf.merge_states([state.out for state in states], [state.lse for state in states])
    check_forward(backend.get(out), backend.get(lse), q, k, v, name=name, **options)


def test_global_out_and_lse_give_each_shards_exact_gradients(backend: Backend, name: str, rng: Random) -> None:
    q, k, v, dout = _problem(rng)
    options = _options(name, rng)
    saved = cf.attn_fwd(*map(backend.put, (q, k, v)), **_put(backend, options))
    dlse = rng.standard_normal(saved.lse.shape).astype(np.float32)
    parts = []
    for i, keys in enumerate(SHARDS):
        grads = cf.attn_bwd(
            *map(backend.put, (q, k[:, keys], v[:, keys])),
            *saved,
            backend.put(dout),
            dlse=backend.put(dlse),
            **_put(backend, _shard(options, keys, with_sink=i == 2)),
        )
        parts.append({field: backend.get(grad) for field, grad in grads._asdict().items()})
    whole = [
        sum(part["dq"] for part in parts),
        np.concatenate([part["dk"] for part in parts], axis=1),
        np.concatenate([part["dv"] for part in parts], axis=1),
    ]
    if "bias" in options:
        whole.append(np.concatenate([part["dbias"] for part in parts], axis=-1))
    if "sink" in options:
        assert ["dsink" in part for part in parts] == [False, False, True, False]
        whole.append(parts[2]["dsink"])
    check_backward(
        tuple(whole),
        q,
        k,
        v,
        dout,
        out=backend.get(saved.out),
        lse=backend.get(saved.lse),
        dlse=dlse,
        name=name,
        **options,
    )


def test_a_shard_that_ignored_the_global_lse_would_be_seen(rng: Random) -> None:
    q, k, v, dout = _problem(rng)
    keys = SHARDS[1]
    local = cf.attn_fwd(q, k[:, keys], v[:, keys])
    out, lse = cf.attn_fwd(q, k, v)
    right = cf.attn_bwd(q, k[:, keys], v[:, keys], out, lse, dout)
    wrong = cf.attn_bwd(q, k[:, keys], v[:, keys], *local, dout)
    full = cf.attn_bwd(q, k, v, out, lse, dout)
    scale = np.abs(full.dk).max()
    assert np.abs(right.dk - full.dk[:, keys]).max() < scale / 1e4
    assert np.abs(wrong.dk - full.dk[:, keys]).max() > scale / 10


def test_chunks_of_queries_are_rows_of_the_whole(backend: Backend, name: str, rng: Random) -> None:
    q, k, v, dout = _problem(rng)
    options = _options(name, rng)
    outs, lses, grads = [], [], []
    for rows in (slice(0, 33), slice(33, 34), slice(34, LEN_Q)):
        own = {**options, "q_start": Q_START + rows.start}
        if "bias" in own:
            own["bias"] = own["bias"][:, rows]
        arrays = [backend.put(x) for x in (q[:, rows], k, v)]
        out, lse = cf.attn_fwd(*arrays, **_put(backend, own))
        part = cf.attn_bwd(*arrays, out, lse, backend.put(dout[:, rows]), **_put(backend, own))
        outs.append(backend.get(out))
        lses.append(backend.get(lse))
        grads.append({field: backend.get(grad) for field, grad in part._asdict().items()})
    out, lse = np.concatenate(outs, axis=1), np.concatenate(lses, axis=2)
    check_forward(out, lse, q, k, v, name=name, **options)
    whole = [np.concatenate([part["dq"] for part in grads], axis=1)]
    whole += [sum(part[field] for part in grads) for field in ("dk", "dv")]
    if "bias" in options:
        whole.append(np.concatenate([part["dbias"] for part in grads], axis=1))
    if "sink" in options:
        whole.append(sum(part["dsink"] for part in grads))
    check_backward(tuple(whole), q, k, v, dout, out=out, lse=lse, name=name, **options)
