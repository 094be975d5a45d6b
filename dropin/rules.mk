# Builds the libraries that are preloaded before MPI and NCCL into unmodified programs. The Makefile
# includes this file, and defines the objects (PRELOADED and those of MPI and NCCL).

PRELOAD := $(if $(has_mpi),$(BUILD)/libonebit-mpi.so) $(if $(has_nccl),$(BUILD)/libonebit-nccl.so)

# libonebit-mpi.so is preloaded before MPI. It is linked to the libonebit.so of the same release, which
# is installed beside it, as a filter: the loader searches that one before the program's own
# libonebit.so. So a program that is linked to onebit uses this libonebit.so, even if its own is of
# another release. The library itself calls PMPI_ functions, so that no wrapper catches its calls.
$(BUILD)/release/libonebit.so: $(SHARED)
	$(call say,LD)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -shared -Wl,-soname,$(notdir $(SHARED)) -Wl,--version-script=$(SHARED_MAP) \
	  $(ALL_LDFLAGS) -o $@ $(SHARED_OBJECTS)
$(BUILD)/libonebit-mpi.so: $(PRELOADED) $(PRELOAD_OBJECTS) dropin/mpi/preload.map \
  $(BUILD)/release/libonebit.so
	$(call say,LD)
	$(Q)$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=dropin/mpi/preload.map \
	  -Wl,-rpath,'$$ORIGIN' -Wl,--filter=$(notdir $(SHARED)) $(DEFINED) $(NODELETE) \
	  $(ALL_LDFLAGS) -o $@ $(filter %.o %.part,$^) -L$(BUILD)/release -lonebit -lm -ldl

# libonebit-nccl.so is preloaded before NCCL. It contains a second copy of the library, without MPI. It
# is preloaded into processes that have no MPI, no CUDA and no NCCL, or load them later, as Python's
# modules do. libonebit.so would load all three, and its calls of NCCL would reach the wrappers. In the
# copy these calls are renamed to functions that look NCCL up. The library never aborts the program's
# communicators.
NCCL_WRAPPED := $(addprefix nccl,GetErrorString GetLastError $(filter-out CommAbort, \
  $(shell sed -n 's/^  X.\([A-Za-z]*\),.*/\1/p' dropin/nccl/preload.h)))
EMULATED_LIBS := $(EMULATION_SHARED) -Wl,-rpath,$(abspath $(dir $(EMULATION_SHARED)))
RUNTIME_LIBS := $(if $(is_emulated),$(EMULATED_LIBS),-L$(CUDA_LIBRARY) -lcudart_static)
$(BUILD)/onebit-inside-nccl.o: $(filter-out %_mpi.o $(BUILD)/dropin/mpi/%,$(LIBRARY)) \
  dropin/nccl/preload.h dropin/rules.mk
	$(call say,LD)
	$(Q)$(CC) -r -nostdlib -o $@ $(filter %.o,$^)
	$(Q)$(OBJCOPY) $(foreach call,$(NCCL_WRAPPED),--redefine-sym $(call)=ob_next_$(call)) \
	  --redefine-sym ncclCommAbort=ob_nccl_leave_to_program $@
$(BUILD)/libonebit-nccl.so: $(BUILD)/onebit-inside-nccl.o $(PRELOADED) $(PRELOADED_NCCL) \
  dropin/nccl/preload.map $(EMULATION_SHARED)
	$(call say,LD)
	$(Q)$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=dropin/nccl/preload.map \
	  $(DEFINED) $(NODELETE) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(RUNTIME_LIBS) -lstdc++ -lm -ldl -lrt
