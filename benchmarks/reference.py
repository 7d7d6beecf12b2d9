"""Attention and its gradients in plain torch operations, fast enough on a GPU to judge every timed cell.

The repository's reference is `cupyflash.testing.reference`; it is NumPy and materialised, which the long cells do not
allow. A test holds this one equal to it.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Case

SCORES_AT_ONCE = 2**27  # of the float64 scores held at a time: 1 GiB, and about six such arrays live together


def attention(case: Case, q: Any, k: Any, v: Any, dout: Any, *, rounded: bool = False) -> dict[str, Any]:
    """`out`, `lse`, `dq`, `dk`, `dv` in float64; every query must see a key.

    `terms` is what `testing.rounding_terms` is, but for the factor of the scores: the largest sum of absolute terms
    behind a value of each result.

    With `rounded`, the same formula as a kernel computes it, and no terms: float32, with P, dS and the results rounded
    to q's dtype. Its error is what a kernel's error is compared with.
    """
    work = torch.float32 if rounded else torch.float64
    group = case.heads_q // case.heads_kv
    visible = visible_pairs(case, q.device)
    results = {
        "out": torch.empty(dout.shape, dtype=torch.float64, device=q.device),
        "lse": torch.empty((case.batch, case.heads_q, case.length), dtype=torch.float64, device=q.device),
        "dq": torch.empty(q.shape, dtype=torch.float64, device=q.device),
        "dk": torch.empty(k.shape, dtype=torch.float64, device=q.device),
        "dv": torch.empty(v.shape, dtype=torch.float64, device=q.device),
    }
    terms = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)

    def stored(x: Any) -> Any:
        return x.to(q.dtype).to(work) if rounded else x

    step = max(1, SCORES_AT_ONCE // (group * case.length**2))
    for row in range(case.batch):
        for begin in range(0, case.heads_kv, step):
            heads_kv = slice(begin, min(begin + step, case.heads_kv))
            heads_q = slice(heads_kv.start * group, heads_kv.stop * group)
            # [heads, N, D], the keys and values repeated for each query head of their group
            q_, dout_ = (x[row, :, heads_q].transpose(0, 1).to(work) for x in (q, dout))
            k_, v_ = (x[row, :, heads_kv].transpose(0, 1).to(work).repeat_interleave(group, 0) for x in (k, v))
            x = (q_ @ k_.mT).mul_(case.scale)
            if visible is not None:
                x.masked_fill_(~visible, -torch.inf)
            lse = x.logsumexp(-1)
            p = x.sub_(lse[..., None]).exp_()
            out = stored(stored(p) @ v_)
            ds = (dout_ @ v_.mT).sub_((dout_ * out).sum(-1, keepdim=True)).mul_(p)
            dq, dk, dv = _gradients(case, q_, k_, dout_, stored(p), stored(ds))
            results["lse"][row, heads_q] = lse.double()
            for name, heads, value in (
                ("out", heads_q, out),
                ("dq", heads_q, dq),
                ("dk", heads_kv, dk),
                ("dv", heads_kv, dv),
            ):
                results[name][row, :, heads] = stored(value).double().transpose(0, 1)
            if rounded:
                continue
            q_, k_, v_, dout_ = (x.abs() for x in (q_, k_, v_, dout_))
            ds = (dout_ @ v_.mT).add_((dout_ * out.abs()).sum(-1, keepdim=True)).mul_(p)
            for name, sums in zip(terms, (p @ v_, *_gradients(case, q_, k_, dout_, p, ds)), strict=True):
                terms[name] = max(terms[name], sums.max().item())
    return {**results, "terms": terms}


def _gradients(case: Case, q: Any, k: Any, dout: Any, p: Any, ds: Any) -> tuple[Any, Any, Any]:
    """dq, and dk and dv summed over the query heads of a group."""
    group = case.heads_q // case.heads_kv
    dk, dv = ((x.mT @ y).unflatten(0, (-1, group)).sum(1) for x, y in ((ds, q), (p, dout)))
    return case.scale * (ds @ k), case.scale * dk, dv


def visible_pairs(case: Case, device: Any) -> Any:
    """Boolean [N, N], or None when every pair is visible."""
    if not case.is_causal and case.window is None:
        return None
    position = torch.arange(case.length, device=device)
    distance = position[None, :] - position[:, None]  # r_j − p_i
    visible = distance <= 0 if case.is_causal else torch.ones_like(distance, dtype=torch.bool)
    if case.window is not None:
        left, right = case.window
        visible &= (distance >= -left) & (distance <= right)
    return visible
