"""Check that no page of the site scrolls sideways, on a screen and on a telephone: `python docs/scroll.py SITE`.

It needs Chromium, and says so where there is none. Ends with 1 if a page does.
"""

from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.browser import BROWSER, MISSING, browse

AROUND = """<body><script>
const one = async (page, width) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  await new Promise(done => setTimeout(done, 150));
  const root = frame.contentDocument.documentElement;
  frame.contentDocument.querySelectorAll("details").forEach(part => part.open = true);
  const found = [page, width, root.scrollWidth, root.clientWidth];
  frame.remove();
  return found;
};
(async () => {
  const found = [];
  for (const page of PAGES) for (const width of [1280, 390]) found.push(await one(page, width));
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
})();
</script></body>"""


def main(site: Path) -> int:
    """Print the pages that are wider than their frame."""
    if BROWSER is None:
        print(f"whether pages scroll sideways was not checked: {MISSING}")
        return 0
    pages = [page.resolve().as_uri() for page in sorted(site.rglob("*.html"))]
    with TemporaryDirectory() as folder:
        around = Path(folder) / "around.html"
        around.write_text(AROUND.replace("PAGES", json.dumps(pages)), "utf-8")
        shown = browse(around.as_uri(), "--allow-file-access-from-files", "--virtual-time-budget=900000", "--dump-dom")
    found = json.loads(unescape(re.findall("FOUND(.*)END", shown, re.DOTALL)[-1]))
    wide = [row for row in found if row[2] > row[3]]
    print(*(f"{page} is {wide} pixels wide in {fits}" for page, _, wide, fits in wide), sep="\n", end="\n" * bool(wide))
    print(f"{len(wide)} of {len(found)} loads of {len(pages)} pages scroll sideways")
    return 1 if wide or not pages else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
