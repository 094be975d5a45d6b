# Sphinx's configuration for `make site`. The site has the documents and a page for each public header.
# index.md is the first page and defines the navigation. Documents that index.md does not name are listed
# under "Understand"; the pages of docs/measured are not in the navigation.
import os
import re
from pathlib import Path

project = "onebit"
release = version = os.environ["VERSION"]
html_title = f"onebit {release}"
extensions = ["myst_parser"]
root_doc = "index"
include_patterns = ["*.md", "docs/*.md", "docs/measured/*.md", "bindings/python/README.md", "reference/*.md"]
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False  # smart quotes would change the "--" of options
pygments_style = "default"
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = html_copy_source = False

top = Path(os.environ["SOURCES"])
contents = (top / "index.md").read_text(encoding="utf-8")
others = [f"docs/{page.stem}" for page in sorted(top.glob("docs/*.md")) if f"docs/{page.stem}>" not in contents]


def below(entries):
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(entries) + "\n```\n"


def adapt_page(app, name, source):
    """Makes links to headers lead to the headers' pages. A link whose text is its path gets the page's title."""
    text = re.sub(r"\]\(((?:\.\./)*)include/onebit/(\w+\.h(?:pp)?)\)", r"](\1reference/\2.md)", source[0])
    text = re.sub(r"\[([^][]+)\]\([\w./-]+/\)", r"\1", text)  # a link to a directory becomes its text
    text = re.sub(r"\[[\w./-]+\.md\]\(([\w./-]+\.md)\)", r"[](\1)", text)
    if name == root_doc:
        text = text.replace("](../../", "](").replace("](../", "](docs/").replace("docs/*", "\n".join(others))
    elif name.startswith("docs/measured/"):
        text = "---\norphan: true\n---\n" + text
    elif name == "docs/reference":
        text += below(f"../reference/{page.stem}" for page in sorted(top.glob("reference/*.md")))
    source[0] = text


def setup(app):
    app.connect("source-read", adapt_page)
