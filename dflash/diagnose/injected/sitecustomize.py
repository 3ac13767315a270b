"""Python imports this when it starts, where ``dflash diagnose watch`` put this folder in its path.

Takes the folder and the watcher's variables out again, so that neither the program nor what the
program starts has them; begins to observe; hands over to the ``sitecustomize`` that this one hides.
"""

import importlib
import json
import os
import sys

VARIABLE = "DFLASH_WATCH"


def _step_aside() -> None:
    """Leave path and environment as they would be without a watcher, and observe."""
    here = os.path.dirname(__file__)  # noqa: PTH120 - as it is written in sys.path
    told = json.loads(os.environ.pop(VARIABLE, "{}"))
    for name, value in told.get("environment", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if told:
        importlib.import_module("dflash_observer").begin(told["folder"])
    sys.path[:] = [place for place in sys.path if place != here]
    sys.path_importer_cache.pop(here, None)


if __name__ == "sitecustomize":
    try:
        _step_aside()
    finally:
        # What is found next is the one that would have been imported without this one, or nothing:
        # that ends in the very ModuleNotFoundError which Python's start expects then.
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
