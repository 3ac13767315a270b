"""Whether two benches measured the same thing, and what else differs between them."""

from collections.abc import Collection, Iterator

from dflash.errors import UsageError
from dflash.measurement import Bench

SAME_OPTIONS = ("matmul", "drafters")
"""What must be equal for two benches to have measured the same thing, as must how drafters and
target share devices."""


def refuse_others(before: Bench, after: Bench, *, judged: bool) -> None:
    """Refuse two benches that did not measure the same thing, or not where they can be *judged*.

    Raises:
        UsageError: another shape or another way to measure; another machine where *judged*.
    """
    for name in before.shapes.keys() & after.shapes.keys():
        old, new = before.shapes[name], after.shapes[name]
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                raise UsageError(
                    f"shape {name} is not the same in both:"
                    f" {key} is {old.get(key)} before and {new.get(key)} after",
                    hint="measure both at one shape; --set makes a shape of any size",
                )
    for key in SAME_OPTIONS:
        one, other = before.options.get(key), after.options.get(key)
        if one != other:
            raise UsageError(
                f"the two did not measure the same: {key} is {one} before and {other} after",
                hint="call the later one as the earlier one was: " + before.command,
            )
    if _layout(before) != _layout(after):
        one, other = (", ".join(_places(bench)) for bench in (before, after))
        raise UsageError(
            "the two did not measure the same: devices are shared in another way; the drafters'"
            f" and then the target's: {one} before and {other} after",
            hint="--device says where the drafters are, --target-device where the target is",
        )
    if judged and before.device != after.device:
        raise UsageError(
            f"--fail-if would judge two machines: {before.device} before, {after.device} after",
            hint="--other-machine judges all the same",
        )


def _places(bench: Bench) -> list[str]:
    """The devices of the drafters, and last the target's; [] where nobody noted them."""
    drafters = [str(device) for device in bench.options.get("devices", ())]
    target = str(bench.options.get("target_device", "auto"))
    return [*drafters, drafters[0] if target == "auto" else target] if drafters else []


def _layout(bench: Bench) -> list[tuple[int, bool]]:
    """Which of them are on one device, and on one of the first drafter's kind, whatever the devices
    are called."""
    places = _places(bench)
    kinds = [place.partition(":")[0] for place in places]
    return [
        (places.index(place), kind == kinds[0]) for place, kind in zip(places, kinds, strict=True)
    ]


def differences(before: Bench, after: Bench) -> Iterator[str]:
    """What else could be behind a change: machine, versions, options; a sentence each."""
    old, new = before.environment, after.environment
    facts = [
        ("device", before.device, after.device),
        ("number of GPUs", len(old.gpus), len(new.gpus)),
        ("CPU cores", old.cpu_cores, new.cpu_cores),
        ("platform", old.platform, new.platform),
        ("python", old.python, new.python),
        ("CUDA of torch", old.cuda_build, new.cuda_build),
        ("driver", old.driver, new.driver),
        ("dflash", old.dflash, new.dflash),
    ]
    names = sorted(old.packages.keys() | new.packages.keys())
    facts += [(name, old.packages.get(name), new.packages.get(name)) for name in names]
    looked_at = {*SAME_OPTIONS, "target_device"}
    names = sorted((before.options.keys() | after.options.keys()) - looked_at)
    facts += [
        (f"option {name}", before.options.get(name), after.options.get(name)) for name in names
    ]
    both = {row.name for row in before.rows} & {row.name for row in after.rows}
    held = _held_by_cache(before, both), _held_by_cache(after, both)
    if all(held):
        facts.append(("graphs that torch's compile cache held", *held))
    for name, one, other in facts:
        if one != other:
            yield f"{name}: {one} before, {other} after"


def _held_by_cache(bench: Bench, names: Collection[str]) -> str:
    """``0 of 12``: it decides how long a start takes; "" where nothing was compiled or counted."""
    rows = [row for row in bench.rows if row.name in names]
    counts = [row.graphs for row in rows if row.graphs is not None]
    compiled = sum(each.compiled or 0 for each in counts)
    if not compiled or any(each.cached is None for each in counts):
        return ""
    return f"{sum(each.cached or 0 for each in counts)} of {compiled}"


def notes(before: Bench, after: Bench, *, names: tuple[str, str]) -> Iterator[str]:
    """What is missing on a side, failed, or was spoilt; a sentence each."""
    for bench, other, name in ((before, after, names[0]), (after, before, names[1])):
        if not bench.complete:
            yield f"{name} is incomplete"
        for spoilt in bench.weather.spoiled if bench.weather else ():
            yield f"{name}: {spoilt.what}: {spoilt.text}"
        there = {row.name for row in other.rows}
        for row in bench.rows:
            if row.failed is not None:
                yield f"{name}: {row.name} failed: {row.failed.type}: {row.failed.message}"
            elif row.state == "skipped":
                yield f"{name}: {row.name} was skipped: {row.why}"
            elif row.name not in there:
                yield f"only {name} has {row.name}"
