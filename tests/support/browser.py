"""Pages in headless Chromium: what a page measures of itself, pictures, and printing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path

BROWSER = os.environ.get("FAKEQUANT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "there is no Chromium; FAKEQUANT_CHROMIUM can name one"
_ALWAYS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
SETTLED = "--virtual-time-budget=4000"
"""The option to wait until the scripts of the page are done."""
_WHOLE = "--run-all-compositor-stages-before-draw"
"""The option without which parts of a picture may be missing; it waits for ever beside `SETTLED`."""
_SCHEMES = {"dark": "0", "light": "1"}
# A window cannot be as narrow as a telephone, but a frame can.
_FRAME = '<body style="margin:0"><iframe src="{page}" {sandbox} style="width:{width}px;height:{height}px;border:0">'


def browse(address: str, *options: str) -> str:
    """Open a page with options of Chromium's command line; return what it prints."""
    if BROWSER is None:
        raise RuntimeError(MISSING)
    with tempfile.TemporaryDirectory() as profile:
        command = [BROWSER, *_ALWAYS, f"--user-data-dir={profile}", *options, address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def in_scheme(scheme: str) -> str:
    return f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}"


def picture(page: Path, path: Path, width: int, height: int, scheme: str = "light", scripts: bool = True) -> Path:
    """Write a picture of the top of a page as PNG."""
    sandbox = "" if scripts else 'sandbox="allow-same-origin"'
    with tempfile.TemporaryDirectory() as folder:
        around = Path(folder) / "around.html"
        around.write_text(
            _FRAME.format(page=page.resolve().as_uri(), sandbox=sandbox, width=width, height=height), "utf-8"
        )
        size = f"--window-size={width},{height}"
        browse(around.as_uri(), size, _WHOLE, in_scheme(scheme), f"--screenshot={path.resolve()}")
    return path


def printed(page: Path, path: Path) -> Path:
    browse(page.resolve().as_uri(), SETTLED, f"--print-to-pdf={path.resolve()}", "--no-pdf-header-footer")
    return path


def printed_words(path: Path) -> tuple[int, int]:
    """The number of pages of a PDF file of Chromium, and of the pieces of text on them."""
    content = path.read_bytes()
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    pieces = 0
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, flags=re.DOTALL):
        try:
            pieces += len(re.findall(rb"\bT[jJ]\b", zlib.decompress(stream)))
        except zlib.error:
            continue  # a font or a picture
    return pages, pieces
