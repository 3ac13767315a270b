"""What launches share: processor cores, and GPUs that each launch has to itself."""

import os
from dataclasses import dataclass, field

MAX_WIDTH = 8

Place = tuple[str, ...]
"""The GPUs that a launch has to itself, as CUDA_VISIBLE_DEVICES calls them."""


@dataclass(slots=True)
class Room:
    """What may run at once, and what of it does.

    Attributes:
        width: launches that need no GPU wait while so many of any kind run.
        gpus: as CUDA_VISIBLE_DEVICES calls them.
    """

    width: int = 1
    gpus: tuple[str, ...] = ()
    _free: list[str] = field(init=False)
    _running: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._free = list(self.gpus)

    def take(self, num_gpus: int) -> Place | None:
        """Give *num_gpus* GPUs, or none of them, to a launch; None where it has to wait.

        One that wants more than there are gets all of them, alone.
        """
        wanted = min(num_gpus, len(self.gpus))
        if len(self._free) < wanted or (wanted == 0 and self._running >= self.width):
            return None
        place, self._free = tuple(self._free[:wanted]), self._free[wanted:]
        self._running += 1
        return place

    def visible(self, place: Place) -> str:
        """CUDA_VISIBLE_DEVICES of a launch there, "" where nothing has to be hidden from it."""
        return ",".join(place) if len(place) < len(self.gpus) else ""

    def give_back(self, place: Place) -> None:
        """Let others have what a launch had that has ended."""
        self._free += place
        self._running -= 1


def room_of(num_gpus: int, num_cores: int) -> Room:
    """The room of a machine: half its cores, and every GPU that this process may use."""
    width = min(num_cores, max(2, num_cores // 2), MAX_WIDTH)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [name.strip() for name in listed if name.strip()]
    gpus = named if len(named) >= num_gpus else [str(number) for number in range(num_gpus)]
    return Room(width, tuple(gpus[:num_gpus]))
