# Builds the Fortran module, and the C functions that it calls, with the compiler of $(MPIFC). They
# form a library beside libonebit. The Makefile includes this file if FORTRAN=1. Warnings of C are
# not errors, since MPICH's wrapper passes flags of Fortran to the C compiler.

FORTRANS := $(addprefix $(BUILD)/fortran/,libonebit_fortran.a onebit_mpi.mod)
FORTRAN_FLAGS := -O2 -g -fPIC -Wall

$(BUILD)/fortran/libonebit_fortran.a: \
  bindings/fortran/onebit_mpi.f90 bindings/fortran/onebit_mpi.c \
  include/onebit/mpi_calls.h $(BUILD)/flags
	$(call say,FC)
	$(Q)mkdir -p $(@D)
	$(Q)$(MPIFC) $(FORTRAN_FLAGS) $(if $(warns_are_errors),-Werror) -J$(@D) -c $(filter %.f90,$^) \
	  -o $(@D)/module.o
	$(Q)$(MPIFC) $(FORTRAN_FLAGS) -Iinclude -c $(filter %.c,$^) -o $(@D)/shims.o
	$(Q)rm -f $@; $(AR) rcs $@ $(@D)/module.o $(@D)/shims.o
$(BUILD)/fortran/onebit_mpi.mod: $(BUILD)/fortran/libonebit_fortran.a
