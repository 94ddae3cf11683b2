"""Node lists and time limits in the answers of Slurm's commands."""

from __future__ import annotations

import pytest

from dl2d_slurm.commands.values_in_command_output import has_unread_list, hosts, limit_seconds


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1,3-4]", ["n1", "n3", "n4"]),
        ("gpu[08-11]x,login", ["gpu08x", "gpu09x", "gpu10x", "gpu11x", "login"]),
        ("n[1-2,07],gpu1", ["n1", "n2", "n07", "gpu1"]),
        ("n2,n1,n2,n[1-3]", ["n2", "n1", "n3"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("", []),
        ("n[x]", ["n[x]"]),
        ("n[3-1", ["n[3-1"]),
        ("n[3-1]", ["n[3-1]"]),
        ("n1,", ["n1"]),
        ("n1, n[2-3]\t,,n4", ["n1", "n2", "n3", "n4"]),
        (",", [","]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert list(hosts(text)) == names


@pytest.mark.parametrize(
    ("text", "is_unread"),
    [
        ("", False),
        ("n1", False),
        ("n[1-20000]", False),
        ("n[1-20001]", True),
        ("n[1-999999999]", True),
        ("r[1-999]n[1-999]s[1-999]", True),
        (",".join(["n1", "n2"] * 2_000), False),
        (",".join(["n1", "n2"] * 20_000), True),
        (",".join(f"n[1-{number}]" for number in range(1, 400)), True),
        ("/etc/excluded", False),
    ],
    ids=lambda text: text if isinstance(text, bool) else text[:20],
)
def test_a_node_list_that_is_too_long_is_one_name(text: str, is_unread: bool) -> None:
    """Slurm keeps what ``scontrol update`` is given, whatever it repeats, and each listing shows it."""
    assert has_unread_list(text) is is_unread
    if is_unread:
        assert hosts(text) == (text,)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800.0),
        ("30:00", 1800.0),
        ("2:00:00", 7200.0),
        ("1-12", 129_600.0),
        ("1-12:00", 129_600.0),
        ("1-12:30:05", 131_405.0),
        ("UNLIMITED", None),
        ("365-00:00:00", None),  # what 22.05 shows of a job without one
        ("Partition_Limit", None),
        ("", None),
    ],
)
def test_time_limits(text: str, seconds: float | None) -> None:
    assert limit_seconds(text) == seconds
