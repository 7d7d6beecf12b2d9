"""One long sequence over several processes: a zigzag ring of NumPy arrays over MPI, beside one call on the whole.

    mpiexec -n 4 python -m mpi4py examples/ring.py

Without mpiexec it is a ring of one. Needs mpi4py and an MPI: `pip install mpi4py mpich`.
"""

from __future__ import annotations

import sys

import numpy as np

import cupyflash
from cupyflash.parallel import MpiTransport, Shards, ring_bwd, ring_fwd, shard

ATTENTION = cupyflash.Attention(causal=True, window=(300, 0))
LENGTH, HEADS_Q, HEADS_KV, WIDTH = 1000, 4, 2, 32

LARGEST_ERROR = 2e-5  # float32: the same sums in another order


def main() -> int:
    transport = MpiTransport()
    shards = Shards(LENGTH, transport.size, zigzag=True)
    rng = np.random.default_rng(0)  # the same numbers everywhere, so that every rank can look at the whole
    heads = {"q": HEADS_Q, "k": HEADS_KV, "v": HEADS_KV, "dout": HEADS_Q}
    whole = {name: rng.standard_normal((1, LENGTH, n, WIDTH), dtype=np.float32) for name, n in heads.items()}
    q, k, v, dout = (shard(array, shards, transport.rank, axis=1) for array in whole.values())

    out, lse = ring_fwd(q, k, v, transport=transport, shards=shards, attention=ATTENTION)
    grads = ring_bwd(q, k, v, out, lse, dout, transport=transport, shards=shards, attention=ATTENTION)

    at_once = ATTENTION.fwd(whole["q"], whole["k"], whole["v"])
    right = [at_once.out, *ATTENTION.bwd(whole["q"], whole["k"], whole["v"], *at_once, whole["dout"])]
    errors = [
        float(np.abs(ours - shard(theirs, shards, transport.rank, axis=1)).max())
        for ours, theirs in zip([out, *grads], right, strict=True)
    ]
    is_close = all(error <= LARGEST_ERROR for error in errors)
    listed = ", ".join(f"{name} {error:.1e}" for name, error in zip(["out", "dq", "dk", "dv"], errors, strict=True))
    print(
        f"rank {transport.rank} of {transport.size}, {len(q[0])} positions: largest differences from one call "
        f"{listed}: {'good' if is_close else 'TOO FAR APART'}"
    )
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
