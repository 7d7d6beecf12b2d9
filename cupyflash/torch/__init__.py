"""Attention for torch's autograd, torch.compile and autocast, and under the names that scripts already call.

Importing this module imports torch and registers `torch.ops.cupyflash`; `import cupyflash` does neither.
"""

from cupyflash.torch._attention import attention
from cupyflash.torch._flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from cupyflash.torch._kvcache import flash_attn_with_kvcache
from cupyflash.torch._registry import register_with_torch
from cupyflash.torch._sdpa import scaled_dot_product_attention
from cupyflash.torch._transformers import register_with_transformers

__all__ = [
    "attention",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "register_with_torch",
    "register_with_transformers",
    "scaled_dot_product_attention",
]
