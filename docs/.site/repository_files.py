"""Give the site the files outside docs/ to which its pages link, such as ../examples/offload_trl.py."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\(\.\./([^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file under the name `files/<its path>`."""
    root, pages = Path(config.docs_dir).parent, [file for file in files if file.is_documentation_page()]
    for name in sorted({name for page in pages for name in LINK.findall(page.content_string)}):
        files.append(File.generated(config, f"files/{name}", abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links to where the site has the files."""
    return LINK.sub(r"](files/\1)", markdown)
