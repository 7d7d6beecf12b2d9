"""Attention for torch's autograd, torch.compile and autocast, and under the names that scripts already call.

Importing this module imports torch and registers `torch.ops.cupyflash`; `import cupyflash` does neither.
"""

from cupyflash.torch._attention import attention

__all__ = ["attention"]
