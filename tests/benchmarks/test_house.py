from collections import Counter

from benchmarks.house import sizes, table


def test_rooms_add_up_to_their_part():
    found = sizes(None)
    for part in ("rlx", "tests", "docs"):
        assert (
            found[part]
            == sum(size for room, size in found.items() if room.startswith(f"{part}/") and room.count("/") == 1)
            > 0
        )
    row = table(Counter({"rlx": 1500}), Counter({"rlx": 1200})).splitlines()[1]
    assert row.split() == ["rlx", "1,500", "1,200", "-300"]
