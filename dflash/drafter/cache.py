"""Keys and values of committed tokens, kept between drafts while decoding."""

import torch
from torch import Tensor

from dflash.drafter.shape import DrafterShape
from dflash.errors import UsageError


class ContextCache:
    """Preallocated keys and values of every layer; ``length`` counts committed tokens.

    A draft writes its block's rows behind ``length`` and does not move it, so that they are
    overwritten by whatever comes next. For every forward the drafter calls ``begin``, then
    ``write`` once a layer, and ``commit`` where the rows are there to stay.
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

    def begin(self, positions_bT: Tensor) -> Tensor | None:  # noqa: ARG002 (rows follow `length`)
        """Say where the next rows belong; return which rows may be read, None for all of them."""
        return None

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

    def commit(self, num_tokens: int) -> None:
        """Keep the rows just written."""
        self.length += num_tokens

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` committed tokens."""
        if not 0 <= length <= self.length:
            raise UsageError(f"cannot keep {length} of {self.length} cached tokens")
        self.length = length


class StaticContext(ContextCache):
    """The same keys and values for steps that are captured once and replayed at any length.

    No length is kept here: the row of a token is its position, which is a number on the device.
    Rows behind the ones that are read hold whatever a rejected draft or an earlier prompt left,
    and must be finite, since a weight of zero does not hide a NaN: ``clear`` sees to that.
    """

    def clear(self) -> None:
        """Leave nothing of what the rows held."""
        self._keys.zero_()
        self._values.zero_()

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def begin(self, positions_bT: Tensor) -> Tensor:
        """Return bool [1, S]: rows up to the last position may be read, by every slot alike."""
        self._rows_T = positions_bT[0]
        columns_S = torch.arange(self._keys.shape[3], device=self._keys.device)
        return columns_S[None] <= self._rows_T[-1:, None]

    def write(self, layer: int, k_bGTd: Tensor, v_bGTd: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows where ``begin`` said; return k and v of every row there is."""
        self._keys[layer].index_copy_(2, self._rows_T, k_bGTd)
        self._values[layer].index_copy_(2, self._rows_T, v_bGTd)
        return self._keys[layer], self._values[layer]

    def commit(self, num_tokens: int) -> None:
        """Nothing to do: whoever replays the steps counts the tokens."""
