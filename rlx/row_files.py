"""The kinds of files of rows, and the files that a name in `data.train_files` means."""

from glob import glob, has_magic
from pathlib import Path
from urllib.parse import urlparse

COMPRESSED = (".gz", ".zst", ".bz2")
SAVED = ".arrow folder"
"""The kind of a folder that `save_to_disk` of datasets wrote."""
SPLITS = "dataset_dict.json"
"""A file in a folder with several of them, which holds no rows."""
DATA_KINDS = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
"""Files of rows; all but Parquet may be compressed."""


def data_kind(file: str) -> str:
    """Return the kind of a file or URL of rows: one of DATA_KINDS, SAVED, or another suffix."""
    path = Path(urlparse(file).path if "://" in file else file)
    if (path / "state.json").is_file():
        return SAVED
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def data_parts(file: str) -> list[str]:
    """Return the files that a name of rows means: itself, those of a folder, or those that a pattern matches; none if missing.

    A URL is returned unchanged.
    """
    path = Path(file).expanduser()
    if "://" in file:
        return [file]
    if path.is_dir() and data_kind(str(path)) != SAVED:
        return sorted(
            str(each) for each in path.iterdir() if data_kind(str(each)) in DATA_KINDS and each.name != SPLITS
        )
    if not path.exists() and has_magic(str(path)):
        return sorted(each for each in glob(str(path), recursive=True) if Path(each).is_file())
    return [str(path)] if path.exists() else []
