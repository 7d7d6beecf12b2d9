"""Context parallelism: attention over sequences that are cut over the ranks of a group, as plain functions.

Each rank calls the same function with its part of q, k and v, and gets its part of the result. What the parts are is
said by `Shards`, what attention is by `cupyflash.Attention`, and what moves arrays between the ranks is a `Transport`.
`docs/parallel.md` says which scheme to take. Importing this module imports no framework.
"""

from cupyflash.parallel._cupy import NcclTransport, StagedTransport
from cupyflash.parallel._gather import gather_bwd, gather_fwd
from cupyflash.parallel._mpi import MpiTransport
from cupyflash.parallel._ring import ring_bwd, ring_fwd
from cupyflash.parallel._shards import Shards, shard, unshard
from cupyflash.parallel._torch import TorchTransport
from cupyflash.parallel._transport import Transfer, Transport
from cupyflash.parallel._ulysses import ulysses_bwd, ulysses_fwd

__all__ = [
    "MpiTransport",
    "NcclTransport",
    "Shards",
    "StagedTransport",
    "TorchTransport",
    "Transfer",
    "Transport",
    "gather_bwd",
    "gather_fwd",
    "ring_bwd",
    "ring_fwd",
    "shard",
    "ulysses_bwd",
    "ulysses_fwd",
    "unshard",
]
