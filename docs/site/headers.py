#!/usr/bin/env python3
"""docs/site/headers.py DIRECTORY HEADER...: writes a page of Markdown for each public header. A comment
becomes text, the lines from the comment to the next empty line become a block of code, and the names of
functions and types become headings."""
import re
import sys
from pathlib import Path

GUARDS = re.compile(r'#ifdef __cplusplus\n(?:extern "C" \{|\})\n#endif\n|#(?:ifndef|define) ONEBIT_\w+_(?:H|HPP)\n')
FUNCTION = re.compile(r"\b(onebit_\w+|ONEBIT_\w+)\((?!\*)")
TYPE = re.compile(r"^(?:typedef .*?|\} *)\b(onebit_\w+|ONEBIT_\w+);", re.M)


def text_of(comment):
    """Returns Markdown: prose and lists are escaped, indented lines such as formulas are copied verbatim."""
    lines, shown, in_list = [], False, False
    for line in comment.split("\n"):
        line = re.sub(r"^ ?\*? ?", "", line, count=1).rstrip() if lines else line.strip()
        in_list = line.lstrip().startswith("- ") or (in_list and line.startswith("  "))
        verbatim = line.startswith("  ") and not in_list
        if verbatim != shown:
            lines.append("```text" if verbatim else "```")
        shown = verbatim
        if in_list and line.lstrip().startswith("- "):
            lines.append("")
        lines.append(line if verbatim else re.sub(r"([*_<>\[\]`#|])", r"\\\1", line.strip() if in_list else line))
    return "\n".join([*lines, "```"] if shown else lines).strip()


def page_of(header):
    text = GUARDS.sub("", header.read_text(encoding="utf-8"))
    text = re.sub(r"\n#endif[^\n]*\n*\Z", "\n", text)
    page = [f"# {header.name}", ""]
    for item in re.split(r"\n\n+(?=\S)", text):
        match = re.match(r"\s*(?:/\*(.*?)\*/[ \t]*\n?)?(.*)", item, re.S)
        comment, code = match[1] or "", match[2].strip("\n")
        names = list(dict.fromkeys(FUNCTION.findall(re.sub(r"/\*.*?\*/", "", code, flags=re.S)) if "{" not in code else TYPE.findall(code)))
        if names:
            page += [f"## {', '.join(names[:3])}", ""]
        page += [text_of(comment), ""]
        if code and not re.fullmatch(r"(#include .*\n?|namespace .*\n?|\}.*\n?)+", code):
            page += [f"```{'cpp' if header.suffix == '.hpp' else 'c'}", code, "```", ""]
    return "\n".join(page)


for name in sys.argv[2:]:
    path = Path(name)
    Path(sys.argv[1], f"{path.name}.md").write_text(page_of(path), encoding="utf-8")
