"""FlashAttention for any array library: explicit forward and backward, the log-sum-exp in the caller's hands."""

from cupyflash._api import attn_bwd, attn_bwd_preprocess, attn_fwd, lse_from_fa2, lse_from_log2
from cupyflash._append import kv_append
from cupyflash._attention import Attention, AttnGrads, AttnOutput
from cupyflash._cascade import CascadeGrads, CascadeLevel, attn_cascade, attn_cascade_bwd
from cupyflash._errors import CompileError, UnsupportedError
from cupyflash._memory import MemoryPlan, memory_plan
from cupyflash._merge import merge_states, merge_states_bwd
from cupyflash._warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "AttnGrads",
    "AttnOutput",
    "CascadeGrads",
    "CascadeLevel",
    "CompileError",
    "MemoryPlan",
    "UnsupportedError",
    "__version__",
    "attn_bwd",
    "attn_bwd_preprocess",
    "attn_cascade",
    "attn_cascade_bwd",
    "attn_fwd",
    "kv_append",
    "lse_from_fa2",
    "lse_from_log2",
    "memory_plan",
    "merge_states",
    "merge_states_bwd",
    "warmup",
]
