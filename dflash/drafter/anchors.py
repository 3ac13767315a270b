"""Which positions a step drafts from: a fixed-shape random top N without any generator state.

The score of a position is a pure function of (seed, batch number, position), so anchors are the
same on every device, in every execution mode, inside a captured graph and after a resume.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

# splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_INVERSE = 0xF1DE83E19937733D  # modulo 2**64
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ALL_BITS = (1 << 64) - 1
_SCORE_BITS = 24  # what a float32 in [0, 1) holds exactly


class Anchors(NamedTuple):
    """The anchors of one packed batch.

    Attributes:
        anchors_N: int64, positions in the packed batch, ascending. Unused ones are at the end and
            repeat the last used position (0 where none is used).
        used_N: bool, False means the block exists only to keep the shape fixed.
    """

    anchors_N: Tensor
    used_N: Tensor


def anchor_scores(
    seed: int, batch_number: int | Tensor, *, num_positions: int, device: torch.device | str
) -> Tensor:
    """Return float32 scores_T in [0, 1), multiples of 2**-24.

    Args:
        seed: any integer; only its low 64 bits count.
        batch_number: an integer, or a 0-d int64 tensor on ``device`` (read by no host).
    """
    if not isinstance(batch_number, Tensor):
        batch_number = torch.full((), _signed(batch_number), dtype=torch.int64, device=device)
    golden = _signed(_GOLDEN)
    key = _mix(_mix_host((seed + _GOLDEN) & _ALL_BITS) + golden * (batch_number + 1))
    counter_T = torch.arange(1, num_positions + 1, dtype=torch.int64, device=device)
    # key + golden * counter, with golden taken out: Inductor (torch 2.11) writes a 64-bit constant
    # times a bare row index as an int32 expression, which Triton refuses to compile.
    bits_T = _shift(_mix(golden * (key * _signed(_GOLDEN_INVERSE) + counter_T)), 64 - _SCORE_BITS)
    return bits_T.to(torch.float32) * 2.0**-_SCORE_BITS


def draw_anchors(
    loss_mask_T: Tensor,
    documents_T: Tensor,
    positions_T: Tensor,
    *,
    scores_T: Tensor,
    num_anchors: int,
) -> Anchors:
    """Take the ``num_anchors`` best-scored valid positions, ascending.

    A position is valid if it and its successor are supervised, both belong to one document, and
    it is not the first of its document (its block would have no context).

    Args:
        loss_mask_T: bool, True means supervised.
        documents_T: int64, document of each position.
        positions_T: int64, position inside the document.
        scores_T: float32 in [0, 1), multiples of 2**-24, from ``anchor_scores``.
        num_anchors: N, static.
    """
    num_positions = scores_T.numel()
    valid_T = F.pad(
        loss_mask_T[:-1]
        & loss_mask_T[1:]
        & (documents_T[:-1] == documents_T[1:])
        & (positions_T[:-1] >= 1),
        (0, 1),
    )
    row_T = torch.arange(num_positions, dtype=torch.int64, device=scores_T.device)
    # Score first, row second: no two keys are equal, so no device decides a tie its own way.
    key_T = (scores_T * 2.0**_SCORE_BITS).to(torch.int64) * num_positions + row_T
    key_T = torch.where(valid_T, key_T, -1)
    key_T = F.pad(key_T, (0, max(0, num_anchors - num_positions)), value=-1)
    key_N = key_T.topk(num_anchors, sorted=False).values
    row_N = torch.where(key_N >= 0, key_N % num_positions, num_positions).sort().values
    used_N = row_N < num_positions
    last = torch.where(used_N, row_N, 0).amax()
    return Anchors(torch.where(used_N, row_N, last), used_N)


def _mix(state: Tensor) -> Tensor:
    """Scramble int64 tensors as splitmix64 does; overflow wraps, as it must."""
    state = (state ^ _shift(state, 30)) * _signed(_FIRST)
    state = (state ^ _shift(state, 27)) * _signed(_SECOND)
    return state ^ _shift(state, 31)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros; ``>>`` on int64 would copy the sign bit."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _mix_host(state: int) -> int:
    state = (state ^ (state >> 30)) * _FIRST & _ALL_BITS
    state = (state ^ (state >> 27)) * _SECOND & _ALL_BITS
    return _signed(state ^ (state >> 31))


def _signed(bits: int) -> int:
    """Read the low 64 bits as two's complement."""
    low = bits & _ALL_BITS
    return low - (1 << 64) if low >> 63 else low
