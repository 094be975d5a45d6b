# `make install` and `make uninstall` have one list of files. A file is
# named as "SOURCE:DESTINATION", and goes to $(DESTDIR)DESTINATION. The directories in destinations are
# variables of the shell ("build/onebit-info:$BINDIR/onebit-info"), since a path may have blanks, where
# make would cut it. Files with @NAMES@ to fill in are made in $(BUILD)/install first.
#
#   PREFIX   /usr/local          BINDIR, INCLUDEDIR, LIBDIR, MANDIR, DOCDIR, MODULEDIR, COMPLETIONDIR   under it
#   LIBDIR   $(PREFIX)/lib       Debian's multiarch: LIBDIR=/usr/lib/x86_64-linux-gnu
#   DESTDIR  empty               a directory to stage all of it in, for packages

BINDIR     ?= $(PREFIX)/bin
INCLUDEDIR ?= $(PREFIX)/include
MANDIR     ?= $(PREFIX)/share/man
DOCDIR     ?= $(PREFIX)/share/doc/onebit
MODULEDIR  ?= $(PREFIX)/share/modulefiles
COMPLETIONDIR ?= $(PREFIX)/share/bash-completion/completions
INSTALL    ?= install

PATHS    := DESTDIR PREFIX BINDIR INCLUDEDIR LIBDIR MANDIR DOCDIR MODULEDIR COMPLETIONDIR
$(foreach name,$(PATHS),$(call check_path,$(name)))
set_paths = $(foreach name,$(PATHS),$(name)='$($(name))';)
# For make's functions a path is one word while its blanks are hidden.
empty    :=
space    := $(empty) $(empty)
hide      = $(subst $(space),|,$(1))
show      = $(subst |,$(space),$(1))
under_prefix = $(call show,$(patsubst $(call hide,$(PREFIX))/%,$${prefix}/%,$(call hide,$(1))))

FILLED   := $(BUILD)/install
CMAKEDIR  = $(LIBDIR)/cmake/onebit
EXAMPLE_SOURCES := $(addprefix examples/,minimal.c allreduce.c allreduce.cpp adam.c train_plain.c average.f90)
DOCUMENTS  := README.md CHANGELOG.md SECURITY.md $(wildcard docs/*.md docs/measured/*.md)
BESIDE     := LICENSE $(wildcard packaging/jobs/*) $(wildcard docs/measured/*.svg) $(EXAMPLE_SOURCES)

to = $(foreach file,$(2),"$(file):$(1)/$(notdir $(file))")
INSTALLED_PROGRAMS = $(call to,$$BINDIR,$(PROGRAMS)) $(foreach script,$(SCRIPTS),\
  "$(script):$$BINDIR/$(patsubst onebit-onebit,onebit,onebit-$(notdir $(script)))")
INSTALLED_SHARED   = $(call to,$$LIBDIR,$(SHARED) $(PRELOAD))
INSTALLED_DATA     = $(call to,$$INCLUDEDIR/onebit,$(HEADERS) $(filter %.mod,$(FORTRANS))) \
  $(call to,$$LIBDIR,$(STATIC) $(filter %.a,$(FORTRANS))) \
  $(call to,$$LIBDIR/pkgconfig,$(addprefix $(FILLED)/,onebit.pc $(if $(FORTRANS),onebit-fortran.pc))) \
  $(call to,$$LIBDIR/cmake/onebit,$(FILLED)/onebit-config.cmake $(FILLED)/onebit-config-version.cmake) \
  "$(FILLED)/modulefile:$$MODULEDIR/onebit/$(VERSION)" $(call to,$$COMPLETIONDIR,packaging/completion/onebit) \
  $(foreach file,$(DOCUMENTS),"$(FILLED)/$(file):$$DOCDIR/$(file)") \
  $(foreach file,$(BESIDE),"$(file):$$DOCDIR/$(file)")
# Links: TARGET:NAME, the target beside the name.
INSTALLED_LINKS    = "$(notdir $(SHARED)):$$LIBDIR/$(SONAME)" "$(SONAME):$$LIBDIR/$(call so_name)" \
  $(foreach name,$(patsubst $(BUILD)/onebit-%,%,$(PROGRAMS)) $(if $(is_darwin),,netlab),\
    "onebit:$$COMPLETIONDIR/onebit-$(name)")

# A path relative to a directory, such as ../../include. awk computes it, since not every system has
# realpath; paths outside PREFIX stay as they are.
relative = $(shell awk -v from='$(1)' -v to='$(2)' -v prefix='$(PREFIX)' 'BEGIN { \
  if (index(from, prefix "/") != 1 || index(to "/", prefix "/") != 1) { print to; exit } \
  n = split(substr(from, length(prefix) + 2), part, "/"); for (k = 1; k <= n; k++) up = up "/.."; \
  print "$(3)" up substr(to, length(prefix) + 1) }')
# /usr never moves, and pkg-config leaves out its directories only where they are plainly named.
PC_PREFIX = $(if $(filter /usr,$(call hide,$(PREFIX))),/usr,$(call \
  relative,$(LIBDIR)/pkgconfig,$(PREFIX),$${pcfiledir}))
# --- The manual: sections 1 and 7 are written in man/, but for the options of programs, which are
# --- made of their sources, as section 3 is of the headers. The list has a line for each page of
# --- section 3 and each of its links: the header, and the name.

MAN_DATE   := 2026-11-22
MAN_LIST   := $(BUILD)/man/list
MANUAL     := $(wildcard man/*.[17])
MAN_OPTIONS := $(shell sed -n 's/^\.\\" @OPTIONS@ //p' $(MANUAL))
MAN_FILLED  = sed -e 's|@VERSION@|$(VERSION)|' -e 's|@DATE@|$(MAN_DATE)|'
MAN3        = $(filter-out %/onebit.h,$(wildcard include/onebit/*.h))
# From the shortest on: a page shows the first that calls a function of it.
MAN3_EXAMPLES := $(addprefix examples/,minimal.c allreduce.c adam.c mpi_calls.c counters.c outer.c custom.c \
  stream.c survive.c method.c)
$(MAN_LIST): $(MANUAL) $(MAN3) $(MAN3_EXAMPLES) man/section3.awk man/environment.awk man/options.awk \
  base/knobs.c $(MAN_OPTIONS)
	$(call say,MAN)
	@set -e; rm -rf $(@D); mkdir -p $(@D)/man1 $(@D)/man3 $(@D)/man7; \
	for header in $(MAN3); do page=onebit_$$(basename $$header .h); \
	  awk -v version=$(VERSION) -v date=$(MAN_DATE) -v examples='$(MAN3_EXAMPLES)' -f man/section3.awk $$header \
	    >$(@D)/man3/$$page.3; \
	  for name in $$(awk '/^\\-/ { exit } named; /^.SH NAME/ { named = 1 }' \
	    $(@D)/man3/$$page.3 | tr -d ,); do echo "$${header##*/} $$name" >>$@.new; \
	    [ $$name = $$page ] || echo ".so man3/$$page.3" >$(@D)/man3/$$name.3; done; done; \
	awk -f man/environment.awk base/knobs.c >$(@D)/environment; \
	for header in $(MAN3); do echo ".BR onebit_$$(basename $$header .h) (3),"; done >$(@D)/pages; \
	for page in $(MANUAL); do \
	  awk -f man/options.awk $$(sed -n 's/^\.\\" @OPTIONS@ //p' $$page) </dev/null >$(@D)/options; \
	  $(MAN_FILLED) -e '/@OPTIONS@/r $(@D)/options' -e '/@ENVIRONMENT@/r $(@D)/environment' \
	  -e '/@PAGES@/r $(@D)/pages' $$page | sed '/^\.\\" @[A-Z]*@/d' \
	    >$(@D)/man$${page##*.}/$${page##*/}; done; \
	mv $@.new $@
all: $(MAN_LIST)

# The manual pages about the given headers, and those of sections 1 and 7.
in_section = man$(subst .,,$(suffix $(1)))/$(1)
pages_of = $(foreach page,$(notdir $(MANUAL)) $(shell awk -v of=' $(notdir $(1)) ' \
  'index(of, " " $$1 " ") { print $$2 ".3" }' $(MAN_LIST)),\
  "$(BUILD)/man/$(call in_section,$(page)):$$MANDIR/$(call in_section,$(page))")

# A program that links the static library needs what the library was linked with, but has its own
# ideas of hardening and the like (LDFLAGS).
PRIVATE = $(strip $(filter-out $(filter-out -L%,$(LDFLAGS)),$(ALL_LDFLAGS)) $(LIBRARY_LIBS))
# pkg-config wants a backslash before a blank; sed takes one of the two away.
escape = $(subst $(space),\\ ,$(1))
FILL = sed -e 's|@PREFIX@|$(PREFIX)|g' -e 's|@BINDIR@|$(BINDIR)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' \
  -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|g' -e 's|@MANDIR@|$(MANDIR)|g' -e 's|@VERSION@|$(VERSION)|g' \
  -e 's|@SONAME@|$(SONAME)|g' -e 's|@SHARED@|$(notdir $(SHARED))|g' -e 's|@PRIVATE@|$(PRIVATE)|g' \
  -e 's|@PRIVATE_LIST@|$(subst $(space),;,$(filter-out -Wl$(comma)--%as-needed,$(PRIVATE)))|g' \
  -e 's|@PC_PREFIX@|$(call escape,$(PC_PREFIX))|g' \
  -e 's|@PC_LIBDIR@|$(call escape,$(call under_prefix,$(LIBDIR)))|g' \
  -e 's|@PC_INCLUDEDIR@|$(call escape,$(call under_prefix,$(INCLUDEDIR)))|g' \
  -e 's|@CMAKE_LIBDIR@|$(call relative,$(CMAKEDIR),$(LIBDIR),$${_onebit_here})|g' \
  -e 's|@CMAKE_INCLUDEDIR@|$(call relative,$(CMAKEDIR),$(INCLUDEDIR),$${_onebit_here})|g' \
  -e 's|@WITH_MPI@|$(filter 1,$(MPI))|g' -e 's|@WITH_CUDA@|$(filter-out 0,$(CUDA))|g' \
  -e 's|@WITH_NCCL@|$(filter 1,$(NCCL))|g' -e 's|@MODULEDIR@|$(MODULEDIR)|g' \
  -e 's|@POINTER@|$(shell echo __SIZEOF_POINTER__ | $(CC) -E -P -)|g'

# These files are written anew each time, since PREFIX and the like may differ from those of the last
# call, and removed once they are installed: root may have written them in another user's directory.
all: | $(FILLED)
$(FILLED):
	@mkdir -p $@
$(FILLED)/onebit.pc: onebit.pc.in FORCE | $(BUILD)/flags $(FILLED)
$(FILLED)/onebit-fortran.pc: bindings/fortran/onebit-fortran.pc.in FORCE | $(BUILD)/flags $(FILLED)
$(FILLED)/onebit-config.cmake: packaging/cmake/onebit-config.cmake.in FORCE | $(BUILD)/flags $(FILLED)
$(FILLED)/onebit-config-version.cmake: packaging/cmake/onebit-config-version.cmake.in FORCE \
  | $(BUILD)/flags $(FILLED)
$(FILLED)/modulefile: packaging/modulefile.in FORCE | $(BUILD)/flags $(FILLED)
$(FILLED)/%:
	@$(FILL) $< >$@
$(FILLED)/%.md: %.md packaging/links.awk
	@mkdir -p $(@D); \
	awk -v installed="$(DOCUMENTS) $(BESIDE)" -f packaging/links.awk $< >$@

FILLED_FILES = $(patsubst "%,%,$(foreach pair,$(filter "$(FILLED)/%,$(INSTALLED_DATA)),\
  $(firstword $(subst :, ,$(pair)))))
lay = @set -e; $(set_paths) for pair in $(2); do from=$${pair%%:*}; to=$$DESTDIR$${pair\#*:}; \
  $(INSTALL) -d "$${to%/*}"; $(1) "$$from" "$$to"; done

# The shell and pkg-config know /usr and /usr/local by themselves.
is_elsewhere = $(filter-out /usr /usr/local,$(call hide,$(PREFIX)))
SHELL_NEEDS  = PATH="$(BINDIR):$$PATH" PKG_CONFIG_PATH="$(LIBDIR)/pkgconfig" LD_LIBRARY_PATH="$(LIBDIR)"
install: all $(FILLED_FILES)
	@$(set_paths) [ ! "$$DESTDIR$$PREFIX" -ef . ] || \
	  { echo "install: PREFIX=$$PREFIX is this checkout; take another directory, such as $$HOME/.local" >&2; exit 1; }
	$(call lay,$(INSTALL) -m 755,$(INSTALLED_PROGRAMS) $(INSTALLED_SHARED))
	$(call lay,$(INSTALL) -m 644,$(INSTALLED_DATA) $(call pages_of,$(HEADERS)))
	$(call lay,ln -sf,$(INSTALLED_LINKS))
	@rm -rf $(FILLED)/*
	$(if $(DESTDIR)$(is_elsewhere),,@ldconfig 2>/dev/null || :)
	@echo 'onebit $(VERSION) is installed$(DESTDIR:%= in %): $(BINDIR)/onebit and onebit-*, $(LIBDIR)/libonebit.*, $(INCLUDEDIR)/onebit'
	@echo '$(if $(is_elsewhere),shells need: export $(SHELL_NEEDS)$(comma) or module use "$(MODULEDIR)" && module load onebit,try: onebit-info; $(if $(has_mpi),mpicc,cc) program.c $$(pkg-config --cflags --libs onebit))'
	@echo 'next: $(DOCDIR)/docs/tutorial.md; man onebit$(if $(is_darwin),,; onebit doctor -- mpirun --hostfile HOSTS)'

# Headers and pages of all builds are removed, since another build may have been installed. Directories
# are removed only if they are onebit's own and empty. Nothing is built, which root would then own.
UNINSTALLED = $(INSTALLED_PROGRAMS) $(INSTALLED_SHARED) $(INSTALLED_DATA) $(INSTALLED_LINKS) \
  $(call to,$$INCLUDEDIR/onebit,$(wildcard include/onebit/*)) \
  $(foreach page,$(notdir $(MANUAL)),"$(page):$$MANDIR/$(call in_section,$(page))")
uninstall:
	@set -e; $(set_paths) was=; for pair in $(UNINSTALLED); do file="$$DESTDIR$${pair#*:}"; \
	  if [ -e "$$file" ] || [ -L "$$file" ]; then was=1; rm -f "$$file"; fi; done; \
	rm -f "$$DESTDIR$$MANDIR"/man3/onebit_*.3 "$$DESTDIR$$MANDIR"/man3/ONEBIT_*.3; \
	for directory in "$$INCLUDEDIR/onebit" "$$LIBDIR/cmake/onebit" "$$MODULEDIR/onebit" \
	  "$$DOCDIR/examples" "$$DOCDIR/packaging/jobs" "$$DOCDIR/packaging" "$$DOCDIR/docs/measured" "$$DOCDIR/docs" "$$DOCDIR"; do \
	  rmdir "$$DESTDIR$$directory" 2>/dev/null || :; done; \
	$(if $(DESTDIR)$(is_elsewhere),,ldconfig 2>/dev/null || :;) \
	[ "$$was" ] && echo 'onebit is removed from $(DESTDIR)$(PREFIX)' || echo 'onebit is not in $(DESTDIR)$(PREFIX)'

# The source archive of a release has the same bytes from every checkout of the commit.
.PHONY: dist
DIST = $(BUILD)/onebit-$(VERSION).tar.gz
dist:
	@git diff --quiet HEAD || { echo "dist: the checkout has changes that are in no commit" >&2; exit 1; }
	@mkdir -p $(BUILD)
	@git archive --prefix=onebit-$(VERSION)/ HEAD | gzip -9 -n >$(DIST)
	@sha256sum $(DIST)
