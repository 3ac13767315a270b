"""Keys and values of committed tokens, kept between drafts while decoding."""

import torch
from torch import Tensor

from dflash.drafter.shape import DrafterShape
from dflash.errors import UsageError


class ContextCache:
    """Preallocated keys and values of every layer; ``length`` counts committed tokens.

    A draft writes its block's rows behind ``length`` and does not move it, so that they are
    overwritten by whatever comes next.
    """

    def __init__(
        self,
        shape: DrafterShape,
        *,
        max_tokens: int,
        device: torch.device | str,
        dtype: torch.dtype,
        batch_size: int = 1,
    ) -> None:
        rows = max_tokens + shape.block_size
        size = (shape.num_layers, batch_size, shape.num_kv_heads, rows, shape.head_dim)
        self.length = 0
        self.max_tokens = max_tokens
        self._keys = torch.zeros(size, device=device, dtype=dtype)
        self._values = torch.zeros(size, device=device, dtype=dtype)

    def write(self, layer: int, k_bGTd: Tensor, v_bGTd: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows behind the committed ones; return k and v of both together (views).

        Raises:
            UsageError: the rows do not fit.
        """
        stop = self.length + k_bGTd.shape[2]
        if stop > self._keys.shape[3]:
            raise UsageError(
                f"the drafter's cache holds {self.max_tokens} tokens, {stop} are needed",
                hint="raise the limit of new tokens or shorten the prompt",
            )
        self._keys[layer, :, :, self.length : stop] = k_bGTd
        self._values[layer, :, :, self.length : stop] = v_bGTd
        return self._keys[layer, :, :, :stop], self._values[layer, :, :, :stop]

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` committed tokens."""
        if not 0 <= length <= self.length:
            raise UsageError(f"cannot keep {length} of {self.length} cached tokens")
        self.length = length
