"""Random seeds as hashes of their purpose, so that no process owns a random stream."""

import hashlib


def seed_for(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that only depends on `parts`: the same in every process, machine and version.

    The parts name the seed's purpose, e.g. (run seed, step, prompt, sample). 5 and "5" differ, and so do ("ab",) and ("a",
    "b"). The seed is the upper 63 bits of a 64-bit BLAKE2b digest.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        kind = "s" if isinstance(part, str) else "i"
        text = part if isinstance(part, str) else str(int(part))
        data = text.encode()
        digest.update(f"{kind}{len(data)}:".encode() + data)
    return int.from_bytes(digest.digest(), "big") >> 1
