# Builds the libraries inside the Python package, and its wheels. The Makefile includes this file.
# setup.py builds the first three targets.
#
#   python-library   the library without MPI, stripped: with MPI=0
#   python-tune      onebit-tune without MPI, for --predict: with MPI=0
#   python-mpi       the transport over MPI, for the ABI of MPICC's mpi.h: with MPI=1. The library of
#                    PYTHON_LIBRARY loads it at run time, and it finds MPI in the process: so one
#                    wheel has a part for Open MPI, one for MPICH and one for the ABI of MPI 5
#                    (MPI_KIND in dropin/kinds/rules.mk), and requires none of them.
#   wheel            the wheels as PyPI takes them, and the source distribution, in WHEELS;
#                    wheel CUDA=1: one with kernels, for the CUDA of CUDA_MAJOR (13, 12)

PYTHON_LIBRARY ?= $(BUILD)/python/libonebit_python.so
WHEELS         ?= $(BUILD)/wheels
PYTHON         ?= python3
.PHONY: python-library python-tune python-mpi wheel

# Some linkers do not know -Bsymbolic-functions. -Bsymbolic has the same effect here: no data is
# exported.
LINK_PYTHON = $(CC) -shared -s -Wl,-soname,$(1) -Wl,-Bsymbolic $(DEFINED) $(NODELETE) \
  $(ALL_LDFLAGS)

python-library: $(PYTHON_LIBRARY)
$(BUILD)/python/libonebit_python.so: $(LIBRARY) bindings/python/library.map
	$(call say,LD)
	$(Q)mkdir -p $(@D)
	$(Q)$(call LINK_PYTHON,$(@F)) -Wl,--version-script=bindings/python/library.map -o $@ $(LIBRARY) \
	  $(LIBRARY_LIBS)

python-tune: $(BUILD)/python/onebit-tune
$(BUILD)/python/onebit-tune: $(BUILD)/tools/tune/main.o $(TUNED) $(OPTIONS) $(STATIC)
	$(call say,LD)
	$(link) -s $(LIBS)

python-mpi: $(call objects,base/*_mpi.c collectives/transports/comm_mpi.c \
  collectives/transports/transport_mpi.c) $(PYTHON_LIBRARY) bindings/python/mpi.map
	$(Q)mkdir -p $(BUILD)/python
	$(Q)$(call LINK_PYTHON,libonebit_$(MPI_KIND).so) -Wl,--version-script=bindings/python/mpi.map \
	  -Wl,-rpath,'$$ORIGIN' \
	  -o $(BUILD)/python/libonebit_$(MPI_KIND).so $(filter %.o,$^) $(PYTHON_LIBRARY) -ldl

wheel: # has kernels only if the command line says CUDA=1, even if an nvcc is found
	+PYTHON='$(PYTHON)' WHEELS='$(WHEELS)' CUDA='$(if $(filter command,$(origin CUDA)),$(CUDA),0)' \
	  packaging/wheels
