"""One file per failure mode. Read any of them top to bottom; they all have the same shape."""

import importlib
import pkgutil
from functools import cache

from dflash.failures._mode import WITH_GPU, FailureMode
from dflash.failures._page import Page, page_of

__all__ = ["WITH_GPU", "FailureMode", "Page", "all_modes", "all_slugs", "page_of"]


def all_slugs() -> tuple[str, ...]:
    """Every failure mode's slug, sorted: the name of its file; imports none of them."""
    names = (found.name for found in pkgutil.iter_modules(__path__) if found.name[0] != "_")
    return tuple(sorted(name.replace("_", "-") for name in names))


@cache
def all_modes() -> tuple[FailureMode, ...]:
    """Every failure mode, sorted by slug."""
    names = (slug.replace("-", "_") for slug in all_slugs())
    modes = (importlib.import_module(f"{__name__}.{name}").MODE for name in names)
    return tuple(sorted(modes, key=lambda mode: mode.slug))
