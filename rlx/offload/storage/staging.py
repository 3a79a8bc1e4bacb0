"""Sizes of the host buffers between the device and the disk. Without torch, so that options can be checked anywhere."""

from __future__ import annotations

from rlx.offload.storage.ranges import PAGE_ALIGN_BYTES

MAX_CHUNK_BYTES = 16 << 20
WRITE_BUFFERS = 16
READER_THREADS = 8  # each has one buffer
MIN_STAGING_BYTES = (WRITE_BUFFERS + READER_THREADS) * PAGE_ALIGN_BYTES


def chunk_bytes(max_staging_bytes: int | None) -> int:
    """Return the size of a staging buffer when all of them together may take so much; 0 if that is too little."""
    if max_staging_bytes is None:
        return MAX_CHUNK_BYTES
    share = max_staging_bytes // (WRITE_BUFFERS + READER_THREADS)
    return min(MAX_CHUNK_BYTES, share - share % PAGE_ALIGN_BYTES)


def staging_bytes(chunk_bytes: int) -> int:
    """Return the bytes that all staging buffers of one size take together."""
    return chunk_bytes * (WRITE_BUFFERS + READER_THREADS)
