#!/usr/bin/env python3
"""docs/site/check.py DIRECTORY: checks that each link within a site leads to an existing page and heading,
and that no page fetches a script, a style, a font or a picture from another site."""
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.parts, self.names = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.names.update(of[key] for key in ("id", "name") if of.get(key))
        target = of.get("src") or of.get("href")
        if target:
            is_part = "src" in of or (tag == "link" and of.get("rel") in ("stylesheet", "icon", "preload"))
            (self.parts if is_part else self.links).append(target)


def main():
    top = Path(sys.argv[1]).resolve()
    pages = {path: Page(path) for path in top.rglob("*.html")}
    wrong, seen = [], 0
    for path, page in pages.items():
        for target in page.links + page.parts:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                if target in page.parts and url.scheme != "data":
                    wrong.append(f"{path.relative_to(top)} fetches {target}")
                continue
            seen += 1
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not file.exists():
                wrong.append(f"{path.relative_to(top)}: there is no {target}")
            elif url.fragment and file in pages and unquote(url.fragment) not in pages[file].names:
                wrong.append(f"{path.relative_to(top)}: {target} has no such heading")
    for style in top.rglob("*.css"):
        for target in re.findall(r"(?:url\(|@import )['\"]?(https?:[^'\")]+|//[^'\")]+)", style.read_text(encoding="utf-8")):
            wrong.append(f"{style.relative_to(top)} fetches {target}")
    print("\n".join(sorted(set(wrong))) if wrong else f"{len(pages)} pages, {seen} links within them: all lead somewhere")
    return bool(wrong) or not seen


sys.exit(main())
