"""The CUDA backend's face: plan, workspace, forward, backward, preprocess, merge, append.

Spec → Plan → binary → launch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .._errors import UnsupportedError, refusal
from .._spec import AppendCall, Blank, Call, FilledIn, Spec, View, Work
from . import device as _device
from . import plan as _plan
from .arguments import NO_TENSOR, TYPE_CODES, is_64, per_row, pointer, problem, rows, scores, tiles_of
from .constants import (
    ITEM_BYTES,
    ROW_GROUP,
    SM90_WARP_ROWS,
    BwdDbiasGeneric,
    BwdPreprocess,
    FwdGeneric,
    FwdSm90,
    KvAppend,
    MergeStates,
    MergeStatesBwd,
    accum_of,
)
from .launch import Schedule, refuse_blocks
from .params import MERGE_STATES
from .plan import ROW_PAD, TURN_ROWS, BackwardPlan, Plan
from .tensor_map import NO_MAP, tensor_map

if TYPE_CHECKING:
    from .._merge import MergeCall

_L2_BYTES = 8 * 2**20  # of keys and values at a time: what L2 keeps of those before and after as well
_ALIGN = 256  # bytes, of each part of a workspace
# Where keys are split: how often blocks may fill the GPU, how well they do at the least.
_MOST_ROUNDS, _ENOUGH_USE = 4, 0.95
# Key tiles of a block at the least, and for how many more a merge counts; of blocks without groups of warps, and with.
_LEAST_TILES, _MERGE_TILES = (2, 1), (0, 2)
_BYTES_COMING = 128 * 2**10  # of keys and values, on their way to a multiprocessor: more wait for each other


def plan(spec: Spec, call: Call, *, backward: bool, override: object | None = None) -> Any:
    """Which kernels serve the call, and why. Raises UnsupportedError.

    An override is a kernel's name, or a plan, which is validated and never adjusted.
    """
    _plan.refuse_values(call)
    choose = _plan.backward if backward else _plan.forward
    device = _device.of(call.device)
    try:
        chosen = choose(spec, device)
    except UnsupportedError as error:
        raise UnsupportedError(f"{call.function}: {error}") from None
    if isinstance(override, str):
        return _plan.named(override, spec, device, is_backward=backward)
    main = getattr(override, "main", None) if backward else override
    if isinstance(main, Plan):
        chosen = _plan.named(main.kernel, spec, device, is_backward=backward)
    return chosen if override is None else _plan.validate(override, chosen, device)


def forward(spec: Spec, call: Call, plan: Plan[FwdGeneric | FwdSm90]) -> Work:
    """To write out and lse."""
    schedule, launch = Schedule(call.device), _fwd_sm90 if isinstance(plan.constants, FwdSm90) else _fwd_generic
    num_splits, split_len = _splits(spec, call, plan)
    results = (*rows(call.out), *per_row(call.lse))
    if not _is_merged(plan, num_splits):
        assert call.beside_out is None, "a state beside is for a call that leaves parts"
        launch(schedule, spec, call, plan, results, (0, 0, num_splits, split_len))
        return schedule
    # Of each split out [B, rows, H, Dv] and lse [B, H, rows], a head's rows side by side.
    group, dim = _rows_of_query(spec, plan.constants), _partial_dim(spec)
    heads, num_rows = spec.heads_q // group, call.len_q * group
    all_rows = _sequences(call) * heads * num_rows
    at, (out_bytes, _) = Blank("workspace"), _partial_bytes(spec, call, num_splits)
    written = (at, heads * num_rows * dim, dim, num_rows * dim, at + _aligned(out_bytes), heads * num_rows, 1, num_rows)
    strides = all_rows * dim, all_rows
    launch(schedule, spec, call, plan, written, (*strides, num_splits, split_len))
    combine = plan.combine
    assert combine is not None
    refuse_blocks(combine, all_rows)
    warps = combine.constants.warps
    blocks = all_rows if num_splits > warps else -(-all_rows // warps)  # a warp a row, where splits are few
    sizes = num_splits, group, num_rows, heads, spec.head_dim_v, all_rows
    beside = NO_TENSOR if call.beside_out is None else rows(call.beside_out), per_row(call.beside_lse)
    schedule.launch(combine, blocks, (*written, *results, *beside[0], *beside[1], *strides, *sizes))
    return schedule


def _fwd_sm90(
    schedule: Schedule, spec: Spec, call: Call, plan: Plan[Any], written: tuple[Any, ...], split: tuple[Any, ...]
) -> None:
    c, (out_stride, lse_stride, num_splits, _) = plan.constants, split
    blocks, group = _row_blocks(spec, call, c) * num_splits, _rows_of_query(spec, c)
    shared = (*problem(spec, call, c.query_tile, c.key_tile, group), *scores(spec, call))
    refuse_blocks(plan, blocks)
    boxes: list[int] = []
    for view, box_rows, box_group in (
        (call.q, c.query_tile, group),
        (call.k, c.key_tile, 1),
        (call.v, c.key_tile, 1),
        (call.out, SM90_WARP_ROWS, 1),
    ):
        has_boxes = view is not call.out or c.passes_out
        boxes += tensor_map(_given(view), box_rows, call.device, box_group) if has_boxes else NO_MAP
    tiles = tiles_of(call.len_q * group, c.query_tile, call)
    staying, singles = _grid(spec, c, blocks, _device.of(call.device).sm_count)
    order = num_splits, blocks, *_order(spec, call, tiles, blocks, staying), staying, 0
    schedule.launch(plan, staying + singles, (*boxes, *shared, *written, out_stride, lse_stride, *order))


def _fwd_generic(
    schedule: Schedule, spec: Spec, call: Call, plan: Plan[Any], written: tuple[Any, ...], split: tuple[Any, ...]
) -> None:
    c, (out_stride, lse_stride, num_splits, split_len) = plan.constants, split
    table, pool = call.block_table, _given(call.k).shape
    pages = (0, 0) if table is None else (table.ptr, table.strides[0])
    page_sizes = (0, 0) if table is None else (pool[1], pool[0])
    where = problem(spec, call, c.query_tile, c.key_tile, _rows_of_query(spec, c))
    arrays = (*rows(call.q), *rows(call.k), *rows(call.v), *written)
    of_split = (*pages, out_stride, lse_stride, *page_sizes, num_splits, split_len)
    schedule.launch(plan, _row_blocks(spec, call, c) * num_splits, (*where, *scores(spec, call), *arrays, *of_split))


def _rows_of_query(spec: Spec, c: FwdGeneric | FwdSm90) -> int:
    """Rows that a query has in a tile: the heads of a KV head, or one."""
    return spec.heads_q // spec.heads_kv if c.packs_heads else 1


def _row_blocks(spec: Spec, call: Call, c: FwdGeneric | FwdSm90) -> int:
    """Blocks of one split."""
    group = _rows_of_query(spec, c)
    return _blocks(call, call.len_q * group, c.query_tile, spec.heads_q // group)


def _is_merged(plan: Plan[Any], num_splits: int) -> bool:
    """Whether partial results are left: one split is all, of fwd_generic's."""
    return plan.combine is not None and (num_splits > 1 or isinstance(plan.constants, FwdSm90))


def _partial_dim(spec: Spec) -> int:
    """Numbers from row to row of partial results: whole 16 bytes, as all rows are aligned."""
    return -(-spec.head_dim_v // 4) * 4


def _partial_bytes(spec: Spec, call: Call, num_splits: int) -> tuple[int, int]:
    """Of partial out, and of partial lse."""
    numbers = num_splits * _sequences(call) * spec.heads_q * call.len_q
    size = ITEM_BYTES[accum_of(spec.dtype)]
    return numbers * _partial_dim(spec) * size, numbers * size


def _splits(spec: Spec, call: Call, plan: Plan[Any]) -> tuple[int, int]:
    """How many parts the keys have, and the length of each if it is given."""
    c = plan.constants
    if not c.is_split:
        return 1, 0
    if call.split_len is not None:
        return max(-(-call.len_k // call.split_len), 1), min(call.split_len, _plan.MAX_LENGTH)
    if call.num_splits:
        return call.num_splits, 0
    device, row_blocks, len_k = _device.of(call.device), _row_blocks(spec, call, c), call.len_k
    if spec.packed:  # as if all sequences were of the lengths that are given
        group, len_q = _rows_of_query(spec, c), call.max_seqlen_q or call.len_q
        if call.batch * len_q >= call.len_q:  # which they are not where rows lie behind them, of partial results too
            row_blocks = min(row_blocks, -(-len_q * group // c.query_tile) * call.batch * spec.heads_q // group)
        len_k = min(len_k, call.max_seqlen_k or len_k)
    keys = c.key_tile * plan.block[1]  # that a block's groups of warps multiply at a time
    tiles = max(-(-len_k // keys), 1)
    of_one = max(min(c.blocks_per_sm, device.smem_bytes // c.smem_bytes), 1)  # multiprocessor
    enough = min(of_one, -(-_BYTES_COMING // (keys * (c.head_dim + c.head_dim_v) * ITEM_BYTES[spec.dtype])))
    return _best_count(tiles, row_blocks, device.sm_count, of_one, enough, has_groups=plan.block[1] > 1), 0


@lru_cache(maxsize=1024)
def _best_count(tiles: int, row_blocks: int, sm_count: int, of_one: int, enough: int, *, has_groups: bool) -> int:
    """The fewest splits that use a GPU well. `of_one`: places of a multiprocessor, of which `enough` keep it busy."""
    best, best_use = 1, 0.0
    least, of_merge = _LEAST_TILES[has_groups], _MERGE_TILES[has_groups]
    for count in range(1, min(tiles // least, -(-_MOST_ROUNDS * sm_count * of_one // max(row_blocks, 1))) + 1):
        # The share of the places that the splits fill, were blocks to come and go in rounds.
        rounds = -(-row_blocks * count // (sm_count * of_one))
        # As if by one tile more behind others, where a block begins with nothing loaded.
        of_block = -(-tiles // count) + (rounds > 1) + (count > 1) * of_merge
        places = sm_count * (enough if rounds <= 1 else rounds * of_one)
        use = row_blocks * tiles / (places * of_block)
        if use > best_use:
            best, best_use = count, use
        if use >= _ENOUGH_USE:
            break
    return best


def _grid(spec: Spec, c: FwdSm90, tiles: int, sm_count: int) -> tuple[int, int]:
    """How many blocks take tile after tile, loading ahead, and how many behind them one each.

    Nobody knows the lengths of packed sequences. So a quarter of their tiles is handed out by the hardware, one by one
    as multiprocessors become free, which evens out what the blocks that stay have got; of split keys all of them, as
    there is hardly one for each multiprocessor, and places without a tile lie between.
    """
    if not spec.packed:
        return min(tiles, sm_count), 0
    if c.is_split:
        return 0, tiles
    rounds = tiles * 3 // 4 // sm_count
    return sm_count if rounds else 0, tiles - rounds * sm_count


def _order(spec: Spec, call: Call, tiles: int, blocks: int, grid: int) -> tuple[int, int]:
    """How many of the heads go in pairs, and how many at a time (tile_of of fwd_sm90.cu).

    All but the last two rounds of tiles are paired, for these even out what is left; L2 keeps what goes at a time.
    """
    heads = blocks // tiles
    alone = heads if spec.packed else -(-2 * grid // tiles)
    key_bytes = ITEM_BYTES[spec.dtype] * call.len_k * (spec.head_dim + spec.head_dim_v)
    at_a_time = _L2_BYTES // key_bytes * (spec.heads_q // spec.heads_kv)
    return max(heads - alone, 0) // 2 * 2, max(min(at_a_time, heads + 1) // 2 * 2, 2)


def workspace_bytes(spec: Spec, call: Call, *, backward: bool) -> int:
    """Bytes beyond the results: of a backward what `_workspace_parts` names, of a forward partial results."""
    # Where arrays lie changes no size: it is for the best plan, and for arrays that the copy engine cannot walk.
    device, choose = _device.of(call.device), _plan.backward if backward else _plan.forward
    plans = [choose(replace(spec, align=16, has_boxes=boxes), device) for boxes in (True, False)]
    return max(plan_bytes(spec, call, plan) for plan in plans)


def plan_bytes(spec: Spec, call: Call, plan: Plan[Any] | BackwardPlan) -> int:
    """What a call by this plan uses of its workspace."""
    if not isinstance(plan, BackwardPlan):
        num_splits, _ = _splits(spec, call, plan)
        return sum(map(_aligned, _partial_bytes(spec, call, num_splits))) if _is_merged(plan, num_splits) else 0
    return sum(_aligned(size) for size in _workspace_parts(spec, call, plan))


def sums_bytes(spec: Spec, call: Call, plan: BackwardPlan) -> int:
    """Of those, what dq is summed in."""
    return _aligned(_workspace_parts(spec, call, plan)[1])


def backward(spec: Spec, call: Call, plan: BackwardPlan) -> Work:
    """To write dq, dk and dv (dbias and dsink too where there is a bias or a sink), or to add to them."""
    schedule = Schedule(call.device)
    main, finish = plan.main.constants, plan.finish.constants
    addresses = _addresses(Blank("workspace"), _workspace_parts(spec, call, plan))
    stats, dq_accum, turns, parts, rounded = addresses
    where = problem(spec, call, plan.preprocess.constants.query_tile, main.key_tile)
    query_blocks = _blocks(call, call.len_q, plan.preprocess.constants.query_tile, spec.heads_q)
    cols = main.head_dim, _rounded_cols(spec)
    # Where sums need no zeros, dq of rows that no block sees does.
    unseen = None if plan.dq is not None or plan.has_sums or spec.accumulate else call.dq
    zeroed = (stats, dq_accum if plan.has_sums else 0, turns, parts, rounded)
    grad_bytes = ITEM_BYTES[spec.grad_dtype or spec.dtype]
    per_row_values = _preprocess_values(call, where, None, unseen, zeroed, (*cols, grad_bytes))
    schedule.launch(plan.preprocess, query_blocks, per_row_values)

    dout = _rounded(spec, _given(call.dout), rounded) if rounded else call.dout
    changes = scores(spec, call)
    inputs = (*changes, *rows(call.q), *rows(call.k), *rows(call.v), *rows(dout))
    written = (*rows(call.dq), *rows(call.dk), *rows(call.dv), stats, dq_accum)

    def launch(one: Plan[Any], blocks: int, where: tuple[Any, ...]) -> None:
        c = one.constants
        if one.target == "sm_90a":
            heights = (call.q, c.query_tile), (call.k, c.key_tile), (call.v, c.key_tile), (dout, c.query_tile)
            boxes = [word for view, height in heights for word in tensor_map(_given(view), height, call.device)]
            schedule.launch(one, blocks, (*boxes, *where, *changes, *written, turns))
        else:
            schedule.launch(one, blocks, (*where, *inputs, *written))

    launch(plan.main, _blocks(call, call.len_k, main.key_tile, spec.heads_kv), where)
    if plan.dq is not None:
        tile = plan.dq.constants.query_tile
        of_dq = problem(spec, call, tile, plan.dq.constants.key_tile)
        launch(plan.dq, _blocks(call, call.len_q, tile, spec.heads_q), of_dq)
    if plan.dbias is not None:
        _add_dbias(schedule, plan.dbias, call, (*where, *inputs, stats))
    if plan.has_sums or call.dsink is not None:
        dq = rows(call.dq) if plan.has_sums else NO_TENSOR
        sums = (dq_accum, parts, pointer(call.dsink), call.scale, main.head_dim, query_blocks // max(spec.heads_q, 1))
        blocks = _blocks(call, call.len_q, finish.query_tile, spec.heads_q)
        values = (*problem(spec, call, finish.query_tile, main.key_tile), *dq, *sums)
        schedule.launch(plan.finish, blocks, values)
        if blocks == 0 and call.dsink is not None and not spec.accumulate:
            schedule.steps.append(_zero_dsink)
    return schedule


def _add_dbias(schedule: Schedule, plan: Plan[BwdDbiasGeneric], call: Call, values: tuple[Any, ...]) -> None:
    dbias, c = _given(call.dbias), plan.constants
    batch, heads, len_q, len_k = dbias.shape
    tiles = (-(-len_q // c.query_tile), -(-len_k // c.key_tile))
    blocks = batch * heads * tiles[0] * tiles[1]
    schedule.launch(plan, blocks, (*values, dbias.ptr, *dbias.strides, *dbias.shape))


def preprocess(call: Call) -> Work:
    """To write delta = rowsum(dout * out) - dlse."""
    out, dout = _given(call.out), _given(call.dout)
    _plan.refuse_values(call)
    heads, dim = out.shape[2], out.shape[3]
    element = "float64" if _given(call.delta).dtype == "float64" else "float32"
    constants = BwdPreprocess(element, out.dtype, dout.dtype, copy_bytes=1)
    plan = Plan(constants, _device.of(call.device).arch, "delta alone")
    tiles = tiles_of(call.len_q, constants.query_tile, call)
    where = (*(0,) * 11, call.batch, call.len_q, 0, heads, heads, dim, dim, tiles, 0, 0, 0, 0)
    blocks = _blocks(call, call.len_q, constants.query_tile, heads)
    schedule = Schedule(call.device)
    schedule.launch(plan, blocks, _preprocess_values(call, where, call.delta, None, (0, 0, 0, 0, 0), (0, 0, 0)))
    return schedule


def merge_bytes(call: MergeCall) -> int:
    """What a running result takes, where one launch does not take all states."""
    return sum(_running_bytes(call)) if len(call.outs) > MERGE_STATES else 0


def merge(call: MergeCall) -> Work:
    """To write out and lse of any number of states: MERGE_STATES a launch, the running result the first of the next."""
    out, lse, accum, at = _given(call.out), _given(call.lse), _accum_of_merge(call), Blank("workspace")
    _, length, heads, dim = out.shape
    running = (
        View(at, out.shape, (length * heads * dim, heads * dim, dim, 1), accum, None),
        View(at + _running_bytes(call)[0], lse.shape, (heads * length, length, 1), accum, None),
    )
    schedule = Schedule(call.device)
    states = list(zip(call.outs, call.lses, strict=True))
    while states:
        now, states = states[:MERGE_STATES], states[MERGE_STATES:]
        merged = running if states else (out, lse)
        constants = MergeStates(accum, *_merged_columns([view for view, _ in now], [merged[0]]))
        _launch_merge(schedule, constants, out.shape, (*_states(now), *_state(*merged)), len(now))
        states = [running, *states] if states else []
    return schedule


def merge_bwd(call: MergeCall) -> Work:
    """To write douts and dlses, MERGE_STATES a launch."""
    out, lse, dout = _given(call.out), _given(call.lse), _given(call.dout)
    merged = (*_state(out, lse), *_state(dout, call.dlse))
    schedule = Schedule(call.device)
    constants = MergeStatesBwd(_accum_of_merge(call), *_merged_columns([*call.outs, *call.douts], [out, dout]))
    for begin in range(0, len(call.outs), MERGE_STATES):
        now = slice(begin, begin + MERGE_STATES)
        states = list(zip(call.outs[now], call.lses[now], strict=True))
        grads = list(zip(call.douts[now], call.dlses[now], strict=True))
        _launch_merge(schedule, constants, out.shape, (*_states(states), *_states(grads), *merged), len(states))
    return schedule


def _accum_of_merge(call: MergeCall) -> str:
    views = *call.outs, *call.lses, _given(call.out), _given(call.lse)
    return "float64" if any(view.dtype == "float64" for view in views) else "float32"


def _running_bytes(call: MergeCall) -> tuple[int, int]:
    """Of a running out, and of a running lse."""
    size = ITEM_BYTES[_accum_of_merge(call)]
    out_bytes, lse_bytes = (_aligned(math.prod(_given(view).shape) * size) for view in (call.out, call.lse))
    return out_bytes, lse_bytes


def _merged_columns(states: list[View], results: list[View]) -> tuple[str, str, int, bool]:
    """The dtypes of states and results, the columns that a lane takes of them, and whether the dtypes are uniform."""
    state, result = states[0].dtype, results[0].dtype
    if any(view.dtype != state for view in states) or any(view.dtype != result for view in results):
        return state, result, 1, False
    whole, dim = 16 // ITEM_BYTES[state], states[0].shape[-1]
    for view in (*states, *results):
        item = ITEM_BYTES[view.dtype]
        together = min(16, whole * item)  # bytes that are read at once
        if any(number % together for number in (view.ptr, *(stride * item for stride in view.strides[:3]))):
            return state, result, 1, True
    columns = next(n for n in (2 * whole, whole, 1) if dim % n == 0 and (n <= whole or dim >= n * ROW_GROUP))
    return state, result, columns, True


def _state(out: View, lse: View | None) -> tuple[int, ...]:
    """A partial result as State."""
    lse_values = (0, 0, 0, 0) if lse is None else (lse.ptr, lse.strides[0], lse.strides[2], lse.strides[1])
    types = (TYPE_CODES[out.dtype], TYPE_CODES["float32" if lse is None else lse.dtype])
    return out.ptr, lse_values[0], *out.strides[:3], *lse_values[1:], *types


def _states(states: list[tuple[View, View]]) -> tuple[int, ...]:
    """MERGE_STATES of them, the missing ones as zeros."""
    return (*(value for out, lse in states for value in _state(out, lse)), *(0,) * 10 * (MERGE_STATES - len(states)))


def _launch_merge(
    schedule: Schedule, constants: MergeStates | MergeStatesBwd, shape: tuple[int, ...], states: tuple[int, ...],
    num: int,
) -> None:  # fmt: skip
    batch, length, heads, dim = shape
    plan = Plan(constants, _device.of(schedule.device).arch, "the only kernel that does this")
    schedule.launch(plan, -(-batch * length * heads // constants.rows), (*states, num, batch, length, heads, dim, 0))


def _given(view: View | None) -> View:
    if view is None:
        raise AssertionError("an array that the front always gives is missing")
    return view


def _preprocess_values(
    call: Call,
    where: tuple[Any, ...],
    delta_out: View | None,
    dq: View | None,
    workspace: Parts,
    sizes: tuple[int, int, int],
) -> tuple[Any, ...]:
    is_computed = call.delta is None or delta_out is not None
    stats, dq_accum, turns, dsink_parts, rounded = workspace
    return (
        *where,
        *(rows(call.out) if is_computed else NO_TENSOR),
        *rows(call.dout),
        *per_row(call.lse),
        *per_row(call.dlse),
        *(NO_TENSOR if is_computed else per_row(call.delta)),
        *per_row(delta_out),
        *rows(dq),
        stats,
        dq_accum,
        turns,
        rounded,
        pointer(call.sink),
        dsink_parts,
        *sizes,
        0,
    )


def _blocks(call: Call, length: int, tile: int, heads: int) -> int:
    return tiles_of(length, tile, call) * heads * _sequences(call) if length else 0


def _sequences(call: Call) -> int:
    """Along the batch axis: packed ones share one place there."""
    return call.batch if call.cu_seqlens_q is None else 1


Parts = tuple[int, int, int, int, int]  # of a workspace


def _workspace_parts(spec: Spec, call: Call, plan: BackwardPlan) -> Parts:
    """Bytes of the (lse, delta) pairs, of the dq sums, of their turns, of dsink's parts, and of dout rounded."""
    accum = ITEM_BYTES[accum_of(spec.dtype)]
    padded = -(-call.len_q // ROW_PAD) * ROW_PAD
    padded_rows = padded * call.batch if call.cu_seqlens_q is None else padded + call.batch * ROW_PAD
    per_head = spec.heads_q * padded_rows
    rounded = _sequences(call) * call.len_q * spec.heads_q * _rounded_cols(spec) * ITEM_BYTES[spec.dtype]
    return (
        2 * accum * per_head,
        accum * per_head * plan.main.constants.head_dim if plan.sums_dq else 0,
        4 * per_head // TURN_ROWS if plan.takes_turns else 0,
        0 if call.sink is None else accum * _blocks(call, call.len_q, ROW_PAD, spec.heads_q),
        0 if spec.dout_dtype == spec.dtype else rounded,
    )


def _rounded(spec: Spec, dout: View, address: int) -> View:
    """dout in q's type, as the preprocess writes it."""
    _, length, heads, _ = dout.shape
    cols = _rounded_cols(spec)
    return View(address, dout.shape, (length * heads * cols, heads * cols, cols, 1), spec.dtype, None)


def _rounded_cols(spec: Spec) -> int:
    """Columns of a row of rounded dout: whole 16 bytes, so that rows are copied as wide as any."""
    whole = 16 // ITEM_BYTES[spec.dtype]
    return -(-spec.head_dim_v // whole) * whole


def _addresses(at: int, sizes: Parts) -> Parts:
    """Where each part of a workspace begins; 0 for an empty one."""
    addresses = []
    for size in sizes:
        addresses.append(at if size else 0)
        at += _aligned(size)
    stats, dq_accum, turns, dsink_parts, rounded = addresses
    return stats, dq_accum, turns, dsink_parts, rounded


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _zero_dsink(given: FilledIn, stream: Any) -> None:
    import cupy

    dsink = given["dsink"]
    assert isinstance(dsink, View)
    cupy.cuda.runtime.memsetAsync(dsink.ptr, 0, dsink.shape[0] * ITEM_BYTES[dsink.dtype], stream.ptr)


def append(call: AppendCall) -> Work:
    """To write the new rows into their pages."""
    for name, view in (("k", call.k), ("k_pages", call.k_pages), ("block_table", call.block_table)):
        if max(view.shape) > _plan.MAX_LENGTH:
            accepted = f"axes of at most {_plan.MAX_LENGTH} are accepted on CUDA"
            raise UnsupportedError(refusal(call.function, name, f"has shape {list(view.shape)}", accepted))
    constants = KvAppend(call.align)
    unit = call.align // ITEM_BYTES[call.k.dtype]
    _, length, heads, dim = call.k.shape
    batch, max_pages = call.block_table.shape
    pages, page_size, _, dim_v = call.v_pages.shape

    def rows_in_units(view: View) -> tuple[int, ...]:
        return view.ptr, *(stride // unit for stride in view.strides[:3])

    values = (
        *(number for view in (call.k, call.v, call.k_pages, call.v_pages) for number in rows_in_units(view)),
        call.block_table.ptr,
        call.seqused_k.ptr,
        pointer(call.cu_seqlens_k),
        call.block_table.strides[0],
        *(batch, length, heads, dim // unit, dim_v // unit, pages, page_size, max_pages),
        is_64(call.cu_seqlens_k),
        0,
    )
    new_rows = call.k.shape[0] * length * heads
    schedule = Schedule(call.device)
    plan = Plan(constants, _device.of(call.device).arch, "the only kernel that does this")
    schedule.launch(plan, -(-new_rows // constants.rows), values)
    return schedule
