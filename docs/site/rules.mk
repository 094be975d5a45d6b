# `make site`: the documents, the headers and what was measured as web pages, by Sphinx; they need no
# network, also not to be searched. SPHINX, Sphinx with furo, myst-parser and breathe, is installed
# from PyPI under $(BUILD) unless another is named: Debian's are sphinx-common python3-sphinx furo
# python3-myst-parser python3-breathe, and SPHINX=sphinx-build.

SPHINX_VENV  := $(BUILD)/site-venv
SPHINX       ?= $(SPHINX_VENV)/bin/sphinx-build
# An older one (Debian 12 has 5.3) warns of C++ namespaces that are in several headers.
SPHINX_STRICT := $(if $(filter $(SPHINX_VENV)/%,$(SPHINX)),-W --keep-going)
SITE_SOURCES := $(BUILD)/site-sources
SITE_XML     := $(BUILD)/site-xml
.PHONY: site site-tools
# All that is missing is said before anything is installed.
site-tools:
	@missing=; command -v $(DOXYGEN) >/dev/null || missing=doxygen; \
	$(if $(filter $(SPHINX_VENV)/%,$(SPHINX)),python3 -c 'import ensurepip' 2>/dev/null || \
	  missing="$$missing python3-venv",command -v $(SPHINX) >/dev/null || missing="$$missing $(SPHINX)"); \
	[ -z "$$missing" ] || { echo "site: missing: $$missing (Debian's names)" >&2; exit 1; }
$(SPHINX_VENV)/bin/sphinx-build: | site-tools
	@echo "site: installs Sphinx, furo, myst-parser and breathe from PyPI into $(SPHINX_VENV)"
	$(Q)python3 -m venv $(SPHINX_VENV)
	$(Q)$(SPHINX_VENV)/bin/pip install -q sphinx furo myst-parser breathe
site: site-tools $(filter $(SPHINX_VENV)/%,$(SPHINX))
	$(Q)rm -rf $(SITE_SOURCES) $(SITE_XML) $(BUILD)/site
	$(Q)mkdir -p $(SITE_SOURCES)/reference $(SITE_XML)
	$(Q)tar -c --exclude=./.git --exclude='./build*' --exclude=./shared . | tar -x -C $(SITE_SOURCES)
	$(Q)(cat docs/Doxyfile; printf '%s\n' GENERATE_XML=YES GENERATE_HTML=NO JAVADOC_AUTOBRIEF=NO) | \
	  REFERENCE=$(SITE_XML) VERSION=$(VERSION) $(DOXYGEN) -
# Parameters that share a description are one to Sphinx: "sendbuf, recvbuf" would be a type and a name.
	$(Q)sed -i ':a; /<\/parametername>$$/ { N; s|</parametername>\n *<parametername[^>]*>|,|; ta }' \
	  $(SITE_XML)/xml/*.xml
	$(Q)for header in $(notdir $(wildcard include/onebit/*.h include/onebit/*.hpp)); do \
	  printf '# %s\n\n```{doxygenfile} %s\n```\n' $$header $$header >$(SITE_SOURCES)/reference/$$header.md; done
	$(Q)top=$$(cd $(BUILD) && pwd) && SOURCES="$$top/site-sources" XML="$$top/site-xml/xml" VERSION=$(VERSION) $(SPHINX) -q $(SPHINX_STRICT) \
	  -c docs/site -d $(SITE_XML)/trees $(SITE_SOURCES) $(BUILD)/site
	$(Q)cp $(BUILD)/site/README.html $(BUILD)/site/index.html
	@python3 docs/site/check.py $(BUILD)/site
	@echo "$(BUILD)/site/index.html"
