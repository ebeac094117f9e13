"""A hook of mkdocs: pages of the root join the site, links between both places work, and cells have names."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Files outside docs/, by their path in the repository, and where the site has them.
JOINED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
    **{
        str(path.relative_to(ROOT)): str(path.relative_to(ROOT))
        for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "notebooks").glob("*.ipynb")]
    },
}
_ORIGINAL = {to: source for source, to in JOINED.items()}
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_TAG = re.compile(r"<[^>]*>")


GALLERY = ROOT / "build" / "gallery"
"""Where `python docs/gallery.py build/gallery` writes the reports that docs/gallery.md links to."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/."""
    from mkdocs.structure.files import File

    reports = {f"build/gallery/{path.name}": f"gallery/{path.name}" for path in GALLERY.glob("*.html")}
    for source, to in (JOINED | reports).items():
        files.append(File.generated(config, to, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links that work in the repository into links of the site."""
    here = page.file.src_uri
    return _LINK.sub(lambda found: found[1] + moved(found[2], here), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Give each cell of a table the name of its column, which a telephone shows beside it.

    >>> on_page_content("<table><tr><th>size</th></tr><tr><td>4</td></tr></table>")
    '<table><tr><th>size</th></tr><tr><td data-column="size">4</td></tr></table>'
    """

    def named(table: re.Match[str]) -> str:
        names = [_TAG.sub("", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]

        def row(found: re.Match[str]) -> str:
            columns = iter(names)
            return re.sub(r"<td", lambda _: f'<td data-column="{next(columns, "")}"', found[0])

        return re.sub(r"<tr>.*?</tr>", row, table[0], flags=re.DOTALL)

    return re.sub(r"<table>.*?</table>", named, html, flags=re.DOTALL)


def moved(link: str, here: str) -> str:
    """A link of a page, given by its path in the site, as the site has it.

    >>> moved("docs/guide.md", "index.md"), moved("../README.md", "jobs.md"), moved("onnx.md", "guide.md")
    ('guide.md', 'index.md', 'onnx.md')
    """
    if "://" in link:
        return link
    folder = posixpath.dirname(_ORIGINAL.get(here, f"docs/{here}"))
    target = posixpath.normpath(posixpath.join(folder, link))
    to = JOINED.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(to, posixpath.dirname(here) or ".")
