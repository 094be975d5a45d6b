# The Fortran module, and what it calls: a library beside libonebit, of the compiler that $(MPIFC)
# is. Included by the Makefile at FORTRAN=1. MPICH's wrapper gives C flags that are Fortran's, so
# warnings are no errors there.

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
