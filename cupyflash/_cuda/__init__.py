"""The CUDA backend's face: plan, workspace, forward, backward, preprocess, merge. Spec → Plan → binary → launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._errors import UnsupportedError
from .._spec import Call, Spec, View
from . import device as _device
from . import plan as _plan
from .arguments import NO_TENSOR, TYPE_CODES, per_row, pointer, problem, rows, scores, tiles_of
from .constants import ITEM_BYTES, BwdPreprocess, FwdGeneric, MergeStates, MergeStatesBwd
from .launch import run
from .params import MERGE_STATES
from .plan import BackwardPlan, Plan

if TYPE_CHECKING:
    from .._merge import MergeCall

ROW_PAD = 128  # kRowPad of attn/sequence.cuh: rows of per-row workspaces, a sequence
_ALIGN = 256  # bytes, of each part of a workspace


def plan(spec: Spec, call: Call, *, backward: bool, override: object | None = None) -> Any:
    """Which kernels serve the call, and why. Raises UnsupportedError; an override is validated, never adjusted."""
    _plan.refuse_sizes(call)
    choose = _plan.backward if backward else _plan.forward
    chosen = choose(spec, _device.of(call.device))
    return chosen if override is None else _plan.validate(override, chosen)


def forward(spec: Spec, call: Call, plan: Plan[FwdGeneric]) -> None:
    """Write out and lse."""
    c = plan.constants
    values = (
        *problem(spec, call, c.query_tile, c.key_tile),
        *scores(spec, call),
        *rows(call.q),
        *rows(call.k),
        *rows(call.v),
        *rows(call.out),
        *per_row(call.lse),
    )
    run(plan, _blocks(call, call.len_q, c.query_tile, spec.heads_q), values, call.device, call.stream)


def workspace_bytes(spec: Spec, call: Call, *, backward: bool) -> int:
    """Bytes beyond the results: a backward's (lse, delta) pairs, its FP32 dq, and dout where it is rounded."""
    return sum(_aligned(size) for size in _workspace_parts(spec, call)) if backward else 0


def backward(spec: Spec, call: Call, plan: BackwardPlan) -> None:
    """Write dq, dk and dv (dsink too with a sink), or add to them."""
    main, finish = plan.main.constants, plan.finish.constants
    sizes = _workspace_parts(spec, call)
    workspace = call.workspace
    if workspace is None:
        assert call.empty is not None
        workspace = call.empty((sum(_aligned(size) for size in sizes),), "uint8")
    stats = workspace.ptr
    dq_accum = stats + _aligned(sizes[0])
    rounded = dq_accum + _aligned(sizes[1]) if sizes[2] else 0
    if call.dsink is not None and not spec.accumulate:
        _zero(call.dsink, call.device, call.stream)

    where = problem(spec, call, plan.preprocess.constants.query_tile, main.key_tile)
    cols = main.head_dim
    _run_preprocess(plan.preprocess, spec.heads_q, call, where, None, (stats, dq_accum, rounded), cols)
    dout = rows(call.dout)
    if rounded:
        dim, heads = spec.head_dim_v, spec.heads_q
        dout = (rounded, call.len_q * heads * dim, heads * dim, dim)
    values = (
        *where,
        *scores(spec, call),
        *rows(call.q),
        *rows(call.k),
        *rows(call.v),
        *dout,
        *rows(call.dk),
        *rows(call.dv),
        stats,
        dq_accum,
    )
    run(plan.main, _blocks(call, call.len_k, main.key_tile, spec.heads_kv), values, call.device, call.stream)
    where = problem(spec, call, finish.query_tile, main.key_tile)
    blocks = _blocks(call, call.len_q, finish.query_tile, spec.heads_q)
    run(plan.finish, blocks, (*where, *rows(call.dq), dq_accum, call.scale, cols), call.device, call.stream)


def preprocess(call: Call) -> None:
    """Write delta = rowsum(dout * out) - dlse."""
    out, dout = _given(call.out), _given(call.dout)
    for name, view in (("out", out), ("dout", dout)):
        if view.dtype not in ITEM_BYTES:
            raise UnsupportedError(
                f"{call.function}: `{name}` is {view.dtype}; {', '.join(ITEM_BYTES)} are accepted on the GPU."
            )
    _plan.refuse_sizes(call)
    heads, dim = out.shape[2], out.shape[3]
    constants = BwdPreprocess("float32", out.dtype, dout.dtype, copy_bytes=1)
    plan = Plan(constants, _device.of(call.device).arch, "delta alone")
    tiles = tiles_of(call.len_q, constants.query_tile, call)
    where = (*(0,) * 9, call.batch, call.len_q, 0, heads, heads, dim, dim, tiles, 0, 0, 0, 0)
    _run_preprocess(plan, heads, call, where, call.delta, (0, 0, 0), 0)


def merge(call: MergeCall) -> None:
    """Write out and lse of any number of states: MERGE_STATES a launch, the running result among the next."""
    out, lse = _given(call.out), _given(call.lse)
    _refuse_states(call, [*call.outs, out], [*call.lses, lse])
    states = list(zip(call.outs, call.lses, strict=True))
    while states:
        now, states = states[:MERGE_STATES], states[MERGE_STATES:]
        merged = out, lse
        if states:  # a partial result, in float32
            assert call.empty is not None
            merged = call.empty(out.shape, "float32"), call.empty(lse.shape, "float32")
            states.insert(0, merged)
        _run_merge(MergeStates(), call, out.shape, (*_states(now), *_state(*merged)), len(now))


def merge_bwd(call: MergeCall) -> None:
    """Write douts and dlses, MERGE_STATES a launch."""
    out, lse, dout = _given(call.out), _given(call.lse), _given(call.dout)
    dlses = [] if call.dlse is None else [call.dlse]
    _refuse_states(call, [*call.outs, out, dout, *call.douts], [*call.lses, lse, *dlses, *call.dlses])
    merged = (*_state(out, lse), *_state(dout, call.dlse))
    for begin in range(0, len(call.outs), MERGE_STATES):
        now = slice(begin, begin + MERGE_STATES)
        states = list(zip(call.outs[now], call.lses[now], strict=True))
        grads = list(zip(call.douts[now], call.dlses[now], strict=True))
        _run_merge(MergeStatesBwd(), call, out.shape, (*_states(states), *_states(grads), *merged), len(states))


def _refuse_states(call: MergeCall, outs: list[View], lses: list[View]) -> None:
    for name, views, accepted in (("outs", outs, tuple(ITEM_BYTES)), ("lses", lses, ("float32",))):
        for view in views:
            if view.dtype not in accepted:
                raise UnsupportedError(
                    f"{call.function}: `{name}` in {view.dtype} is not supported on the GPU; "
                    f"{', '.join(accepted)} are. The NumPy backend merges any."
                )


def _state(out: View, lse: View | None) -> tuple[int, ...]:
    """A partial result as State."""
    lse_values = (0, 0, 0, 0) if lse is None else (lse.ptr, lse.strides[0], lse.strides[2], lse.strides[1])
    return out.ptr, lse_values[0], *out.strides[:3], *lse_values[1:], TYPE_CODES[out.dtype], 0


def _states(states: list[tuple[View, View]]) -> tuple[int, ...]:
    """MERGE_STATES of them, the missing ones as zeros."""
    return (*(value for out, lse in states for value in _state(out, lse)), *(0,) * 10 * (MERGE_STATES - len(states)))


def _run_merge(
    constants: MergeStates | MergeStatesBwd, call: MergeCall, shape: tuple[int, ...], states: tuple[int, ...], num: int
) -> None:
    batch, length, heads, dim = shape
    plan = Plan(constants, _device.of(call.device).arch, "the only kernel that does this")
    values = (*states, num, batch, length, heads, dim, 0)
    run(plan, -(-batch * length * heads // constants.warps), values, call.device, call.stream)


def _given(view: View | None) -> View:
    if view is None:
        raise AssertionError("an array that the front always gives is missing")
    return view


def _run_preprocess(
    plan: Plan[BwdPreprocess],
    heads: int,
    call: Call,
    where: tuple[Any, ...],
    delta_out: View | None,
    workspace: tuple[int, int, int],
    accum_cols: int,
) -> None:
    is_computed = call.delta is None or delta_out is not None
    values = (
        *where,
        *(rows(call.out) if is_computed else NO_TENSOR),
        *rows(call.dout),
        *per_row(call.lse),
        *per_row(call.dlse),
        *(NO_TENSOR if is_computed else per_row(call.delta)),
        *per_row(delta_out),
        *workspace,
        pointer(call.sink),
        pointer(call.dsink),
        accum_cols,
        0,
    )
    run(plan, _blocks(call, call.len_q, plan.constants.query_tile, heads), values, call.device, call.stream)


def _blocks(call: Call, length: int, tile: int, heads: int) -> int:
    sequences = call.batch if call.cu_seqlens_q is None else 1
    return tiles_of(length, tile, call) * heads * sequences if length else 0


def _workspace_parts(spec: Spec, call: Call) -> tuple[int, int, int]:
    """Bytes of (lse, delta) pairs, of the dq accumulator, and of dout rounded to q's type."""
    padded = -(-call.len_q // ROW_PAD) * ROW_PAD
    padded_rows = padded * call.batch if call.cu_seqlens_q is None else padded + call.batch * ROW_PAD
    per_head = spec.heads_q * padded_rows
    sequences = call.batch if call.cu_seqlens_q is None else 1
    is_rounded = spec.dout_dtype != spec.dtype
    rounded = sequences * call.len_q * spec.heads_q * spec.head_dim_v * ITEM_BYTES[spec.dtype] if is_rounded else 0
    return 8 * per_head, 4 * per_head * _plan.head_dim_tile(spec.head_dim), rounded


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _zero(view: View, device: int, stream: int) -> None:
    import cupy

    with cupy.cuda.Device(device):
        cupy.cuda.runtime.memsetAsync(view.ptr, 0, view.shape[0] * ITEM_BYTES[view.dtype], stream)
