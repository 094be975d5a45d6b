# `make site` makes web pages of the documents and the headers with Sphinx. Reading and searching the pages
# needs no network. By default, Sphinx with furo and myst-parser is installed from PyPI under $(BUILD). To use
# Debian's, install sphinx-common python3-sphinx furo python3-myst-parser, and set SPHINX=sphinx-build.

SPHINX_VENV  := $(BUILD)/site-venv
SPHINX       ?= $(SPHINX_VENV)/bin/sphinx-build
SITE_SOURCES := $(BUILD)/site-sources
.PHONY: site site-tools
# Everything that is missing is reported before anything is installed.
site-tools:
	@$(if $(filter $(SPHINX_VENV)/%,$(SPHINX)),python3 -c 'import ensurepip' 2>/dev/null || missing=python3-venv,\
	  command -v $(SPHINX) >/dev/null || missing=$(SPHINX)); \
	[ -z "$$missing" ] || { echo "site: missing: $$missing (Debian's names)" >&2; exit 1; }
$(SPHINX_VENV)/bin/sphinx-build: | site-tools
	@echo "site: installs Sphinx, furo and myst-parser from PyPI into $(SPHINX_VENV)"
	$(Q)python3 -m venv $(SPHINX_VENV)
	$(Q)$(SPHINX_VENV)/bin/pip install -q sphinx furo myst-parser
site: site-tools $(filter $(SPHINX_VENV)/%,$(SPHINX))
	$(Q)rm -rf $(SITE_SOURCES) $(BUILD)/site
	$(Q)mkdir -p $(SITE_SOURCES)/reference
	$(Q)tar -c --exclude=./.git --exclude='./build*' --exclude=./shared . | tar -x -C $(SITE_SOURCES)
	$(Q)cp docs/site/index.md $(SITE_SOURCES)
	$(Q)python3 docs/site/headers.py $(SITE_SOURCES)/reference include/onebit/*.h include/onebit/*.hpp
	$(Q)top=$$(cd $(BUILD) && pwd) && SOURCES="$$top/site-sources" VERSION=$(VERSION) $(SPHINX) -q -W --keep-going \
	  -c docs/site -d $(BUILD)/site-trees $(SITE_SOURCES) $(BUILD)/site
	@python3 docs/site/check.py $(BUILD)/site
	@echo "$(BUILD)/site/index.html"
