# The Makefile includes this file, which builds one library for MPI libraries of several ABIs.
#
# Sources that include mpi.h are compiled once for each kind of MPI library among MPICC and MPICC_ALSO, by
# a separate make. The symbols of such a part get the kind as a prefix (mpich_onebit_comm_create_mpi).
# kinds.c defines the functions that programs call: they call the part for the process's MPI. Without
# MPICC_ALSO the library has one part, without a prefix.

# Every library but Open MPI has MPICH's ABI (Intel MPI, MVAPICH, Cray MPICH), or that of MPI 5.
mpi_macros = $(shell $(CC) $(call mpi_includes,$(shell $(1) -show)) -E -dM -include mpi.h \
  -x c /dev/null | sed -nE 's/^.define (OPEN_MPI|MPICH_VERSION|MPI_ABI_VERSION) .*/\1/p')
kind_of = $(or $(if $(filter OPEN_MPI,$(1)),openmpi),$(if $(filter MPICH_VERSION,$(1)),mpich),\
  $(if $(filter MPI_ABI_VERSION,$(1)),standard),mpich)
MPI_KIND = $(call kind_of,$(call mpi_macros,$(MPICC)))

# The objects that include mpi.h form two parts: one of the library, one of libonebit-mpi.so.
MPI_PART := $(filter-out %/find_mpi.o,$(filter %_mpi.o $(BUILD)/dropin/mpi/%,$(LIBRARY)))
NAMED    := $(BUILD)/library.names $(BUILD)/preload.names
.PHONY: part
part: $(BUILD)/library.part $(BUILD)/preload.part
$(BUILD)/library.part $(BUILD)/library.names: $(MPI_PART)
$(BUILD)/preload.part $(BUILD)/preload.names: $(PRELOADED_MPI)
$(NAMED):
	$(Q)nm -g --defined-only $^ | awk 'NF == 3 { print $$3, "$(MPI_KIND)_" $$3 }' >$@
$(BUILD)/library.part $(BUILD)/preload.part: $(NAMED)
	$(call say,LD)
	$(Q)$(CC) -r -nostdlib -o $@ $(filter %.o,$^)
	$(Q)$(OBJCOPY) $(NAMED:%=--redefine-syms=%) $@

SHARED_OBJECTS  = $(LIBRARY)
SHARED_MAP      = onebit.map
PRELOAD_OBJECTS = $(PRELOADED_MPI)
ifneq ($(strip $(MPICC_ALSO)),)
$(foreach wrapper,$(MPICC) $(MPICC_ALSO),\
  $(eval WRAPPERS_$(call kind_of,$(call mpi_macros,$(wrapper))) += $(wrapper)))
MPI_KINDS := $(foreach kind,openmpi mpich standard,$(if $(WRAPPERS_$(kind)),$(kind)))
empty     :=
BUILT_FOR := $(subst _, ,$(subst $(empty) $(empty),_or_,$(strip $(MPI_KINDS))))
BUILT_FOR := $(subst standard,the ABI of MPI 5,$(subst openmpi,Open MPI,$(subst mpich,MPICH,$(BUILT_FOR))))
PARTS     := $(MPI_KINDS:%=$(BUILD)/mpi/%)

SHARED_OBJECTS  = $(filter-out $(MPI_PART),$(LIBRARY)) $(PARTS:=/library.part) $(BUILD)/mpi/library.o
SHARED_MAP      = $(BUILD)/mpi/onebit.map
PRELOAD_OBJECTS = $(PARTS:=/preload.part) $(BUILD)/mpi/preload.o
$(PARTS:=/library.part): $(BUILD)/mpi/%/library.part: FORCE
	+$(Q)$(MAKE) --no-print-directory MPICC_ALSO= MPICC=$(firstword $(WRAPPERS_$*)) BUILD=$(BUILD)/mpi/$* \
	  CPPFLAGS='$(CPPFLAGS) -DOB_MPI_BUILT_FOR="\"$(BUILT_FOR)\""' part
$(PARTS:=/preload.part) $(PARTS:=/library.names) $(PARTS:=/preload.names): FORCE | $(PARTS:=/library.part)
	@:

# kinds.c defines these functions: the public ones, those of MPI, and for tests all functions of a part.
$(BUILD)/mpi/library.entries: ENTRIES = /^(onebit|ONEBIT)_/
$(BUILD)/mpi/preload.entries: ENTRIES = /^(MPI|mpi)/
$(BUILD)/mpi/tests.entries:   ENTRIES = !/^ob_transport_mpi/
$(BUILD)/mpi/library.entries $(BUILD)/mpi/tests.entries: $(PARTS:=/library.names)
$(BUILD)/mpi/preload.entries: $(PARTS:=/preload.names)
$(addprefix $(BUILD)/mpi/,library.entries preload.entries tests.entries):
	$(Q){ echo '#define PARTS(X, name)$(foreach kind,$(MPI_KINDS), X($(kind), name))'; \
	  awk '$(ENTRIES) { print "ENTRY(" $$1 ")" }' $^ | sort -u; } >$@
$(addprefix $(BUILD)/mpi/,library.o preload.o tests.o): %.o: dropin/kinds/kinds.c %.entries $(BUILD)/flags
	$(call say,CC)
	$(Q)$(CC) $(ALL_CFLAGS) -DOB_ENTRIES='"$*.entries"' -MMD -MP -c -o $@ $<

# The library for tests of internal functions (LINKED) has the same objects, and hides no symbol.
$(BUILD)/tests/libonebit-open.so: $(filter-out $(BUILD)/mpi/library.o,$(SHARED_OBJECTS)) $(BUILD)/mpi/tests.o
	$(call say,LD)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -shared -Wl,-soname,$(@F) -Wl,-Bsymbolic-functions $(DEFINED) $(NODELETE) \
	  $(ALL_LDFLAGS) -o $@ $^ $(LIBRARY_LIBS)

# The map exports the internal functions that libonebit-mpi.so calls under their prefixed names.
$(BUILD)/mpi/onebit.map: $(PARTS:=/library.names) onebit.map
	$(Q)awk -v kinds='$(MPI_KINDS)' '/^ob_.* / { is[$$1 ";"] = 1 } /^(ob|onebit|ONEBIT)_.* [^{]/ { next } \
	  $$1 == "ob_mpi;" { print "    ob_mpi_find;" } \
	  !($$1 in is) { print; next } \
	  { n = split(kinds, kind); while (n) print "    " kind[n--] "_" $$1 }' $^ >$@
endif
