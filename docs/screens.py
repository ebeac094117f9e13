"""Check pages of the site on a telephone, a tablet and a screen: `python docs/screens.py SITE`.

None scrolls sideways, cuts code off, or has text below 11 pixels. It needs Chromium, and says so where there is none.
Ends with 1 if a page does.
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

AT_ONCE = 20
"""Pages of one run of the browser, which has two minutes."""
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
  const style = part => frame.contentWindow.getComputedStyle(part);
  const wrong = [];
  if (root.scrollWidth > root.clientWidth) wrong.push(`${root.scrollWidth} pixels wide`);
  const texts = frame.contentDocument.createTreeWalker(frame.contentDocument.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), around = texts.currentNode.parentElement;
    const size = parseFloat(style(around).fontSize);
    if (text && size < 11 && around.getClientRects().length) wrong.push(`"${text.slice(0, 30)}" has ${size} pixels`);
  }
  for (const code of frame.contentDocument.querySelectorAll("pre, code")) {
    const right = code.getBoundingClientRect().right;
    for (let around = code; around && !/auto|scroll/.test(style(around).overflowX); around = around.parentElement) {
      const cuts = /hidden|clip/.test(style(around).overflowX);
      const end = around.getBoundingClientRect().right;
      const beyond = around === code ? code.scrollWidth - code.clientWidth : right - end;
      if (cuts && beyond > 1) { wrong.push(`"${code.textContent.slice(0, 30)}" is cut off`); break; }
    }
  }
  const found = [page, width, wrong];
  frame.remove();
  return found;
};
(async () => {
  const found = [];
  for (const page of PAGES) for (const width of [1280, 768, 390]) found.push(await one(page, width));
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
})();
</script></body>"""


def main(site: Path) -> int:
    """Print what is wrong, by page and width."""
    if BROWSER is None:
        print(f"pages were not checked on screens: {MISSING}")
        return 0
    pages = [page.resolve().as_uri() for page in sorted(site.rglob("*.html"))]
    found: list[tuple[str, int, list[str]]] = []
    for start in range(0, len(pages), AT_ONCE):
        with TemporaryDirectory() as folder:
            around = Path(folder) / "around.html"
            around.write_text(AROUND.replace("PAGES", json.dumps(pages[start : start + AT_ONCE])), "utf-8")
            shown = browse(
                around.as_uri(), "--allow-file-access-from-files", "--virtual-time-budget=900000", "--dump-dom"
            )
        found += json.loads(unescape(re.findall("FOUND(.*)END", shown, re.DOTALL)[-1]))
    bad = [(page, width, wrong) for page, width, wrong in found if wrong]
    for page, width, wrong in bad:
        print(f"{page} at {width} pixels: {'; '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}")
    print(f"{len(bad)} of {len(found)} loads of {len(pages)} pages have a fault")
    return 1 if bad or not pages else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
