"""What a CPU has left is the least of what the machine and every control group say."""

from pathlib import Path

import pytest

from dflash_bench import host_memory

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with 16 GiB available, and no control group yet."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {32 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {16 * 2**20} kB\n"
    )
    (tmp_path / "own").write_text("0::/slice/mine\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def group(folder: Path, *, most: str, used_gib: float, files_gib: float = 0.0) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{int(used_gib * GIB)}\n")
    half = int(files_gib * GIB / 2)
    (folder / "memory.stat").write_text(f"anon 1\nactive_file {half}\ninactive_file {half}\n")


def test_without_a_limit_it_is_what_is_available(machine: Path) -> None:
    assert host_memory.free_gib() == pytest.approx(16.0)
    group(machine / "groups", most="max", used_gib=3.0)
    assert host_memory.free_gib() == pytest.approx(16.0)


def test_a_lower_limit_of_a_group_counts_wherever_it_stands(machine: Path) -> None:
    group(machine / "groups" / "slice" / "mine", most=str(10 * GIB), used_gib=1.0)
    assert host_memory.free_gib() == pytest.approx(9.0)
    (machine / "groups" / "slice" / "mine" / "memory.max").write_text("max")
    group(machine / "groups" / "other", most=str(GIB), used_gib=0.5)  # somebody else's
    assert host_memory.free_gib() == pytest.approx(16.0)
    for name, text in (("max", 6 * GIB), ("current", 2 * GIB), ("stat", "anon 1")):
        (machine / "groups" / "slice" / f"memory.{name}").write_text(str(text))
    assert host_memory.free_gib() == pytest.approx(4.0)


def test_pages_of_files_are_not_in_the_way(machine: Path) -> None:
    group(machine / "groups", most=str(10 * GIB), used_gib=9.5, files_gib=8.0)
    assert host_memory.free_gib() == pytest.approx(8.5)


def test_a_full_group_leaves_nothing(machine: Path) -> None:
    group(machine / "groups", most=str(2 * GIB), used_gib=2.5)
    assert host_memory.free_gib() == 0.0


def test_groups_of_version_1_say_it_in_their_own_words(machine: Path) -> None:
    (machine / "own").write_text("5:cpu:/other\n4:memory:/box\n")
    folder = machine / "groups" / "memory" / "box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(8 * GIB))
    (folder / "memory.usage_in_bytes").write_text(str(7 * GIB))
    (folder / "memory.stat").write_text(f"total_inactive_file {4 * GIB}\ncache 9\n")
    assert host_memory.free_gib() == pytest.approx(5.0)


def test_a_system_that_does_not_say_is_not_guessed(machine: Path) -> None:
    (machine / "meminfo").unlink()
    (machine / "own").unlink()
    assert host_memory.free_gib() is None
