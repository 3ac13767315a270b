"""Which decoder layers of the target are tapped.

A tap ``l`` is the *output* of decoder layer ``l``, 0-based: transformers' ``hidden_states[l + 1]``.
"""

from collections.abc import Sequence

from dflash.errors import ConfigError


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Spread the taps from the second to the third-to-last layer (z-lab ``dflash/model.py``).

    Raises:
        ConfigError: the target is too shallow for so many different taps.
    """
    if num_taps == 1:
        return check_taps([num_layers // 2], num_layers=num_layers)
    spread = [round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
    if len(set(spread)) < num_taps or min(spread) < 0 or max(spread) >= num_layers - 1:
        raise ConfigError(
            f"target.num_taps = {num_taps} does not fit a target of {num_layers} layers: the even "
            f"spread would be {spread}",
            hint="choose fewer taps, or list them in target.taps",
        )
    return tuple(spread)


def check_taps(taps: Sequence[int], *, num_layers: int) -> tuple[int, ...]:
    """Return the taps in the order given, which is the order of the features.

    Raises:
        ConfigError: a tap is negative, repeated, beyond the target, or its last layer.
    """
    shown = f"target.taps = {list(taps)}"
    if not taps:
        raise ConfigError("target.taps is empty; at least one layer must be tapped")
    if len(set(taps)) < len(taps):
        raise ConfigError(f"{shown} names a layer twice; every tap must be another layer")
    for tap in taps:
        if tap == num_layers - 1:
            raise ConfigError(
                f"{shown} names {tap}, the target's last layer, whose output is taken before the "
                "final norm by some readers and after it by others",
                hint=f"tap {num_layers - 2} instead",
            )
        if not 0 <= tap < num_layers:
            raise ConfigError(
                f"{shown} names {tap}; a target of {num_layers} layers can be tapped at 0 to "
                f"{num_layers - 2}"
            )
    return tuple(taps)
