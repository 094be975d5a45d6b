# Builds, tests and installs onebit: the library (static and shared), the programs, the examples.
#
#   make                everything, in build/
#   make deps           installs what building and testing need (Debian, Ubuntu)
#   make check          the tests; TESTS="codec mpi_plan" for a part
#   make check-long     what CI has no time for, with sanitizers and without, about half an hour
#   make mutants        breaks one line of the library at a time: which are noticed by no test, about an hour
#   make faults         ranks that are killed, stop or leave, damaged messages: 2,500 jobs, about 20 minutes
#   make installed-check TESTS="..."   those that are built, and that look at an installation
#   make gpu-check      the tests that want a GPU, and benchmarks (tests/gpu/run says more)
#   make kernels        what each GPU kernel costs, counted in its SASS, and whether that is as it was
#   make demo           trains on four hosts at 1 Gbit/s, dense and in one bit, and draws both
#   make install        under PREFIX, staged under DESTDIR; make uninstall
#   make dist           the source archive of the commit, the same bytes from every checkout
#   make wheel          what PyPI gets: a wheel for each machine, built by zig, and the sources
#   make site           the documents, the headers and what was measured as web pages: build/site/index.html
#   make neon           the codecs of 64-bit ARM under qemu, compared with this machine's
#   make fuzz           whatever reads messages and files, FUZZ_SECONDS each
#   make format, clean, help
#
# A variant (another compiler or MPI, a sanitizer) goes into a directory of its own:
#   make check SAN=address,undefined BUILD=build-asan

# MPI=0: without MPI, the programs run their ranks as threads. MPICC is only asked for MPI's flags.
# MPICC_ALSO="mpicc.mpich mpicc_abi": the shared libraries work with their MPIs too, whichever a
# process has (dropin/kinds/rules.mk); programs, examples and tests are for MPICC's.
MPI      ?= $(if $(is_darwin),0,1)
MPICC    ?= mpicc
MPICC_ALSO ?=
MPIRUN   ?= $(subst mpicc,mpirun,$(MPICC))
# CUDA=1: with the GPU code, for CUDA_ARCHS and the PTX of the last of them; where nvcc is found that
# is the default. CUDA=0: without. CUDA=emulated: the GPU code too is compiled for this processor,
# where tests/emulation runs it thread by thread. NCCL=0: without NCCL; NCCL_HOME is the folder with
# its include and lib, as pip's .../nvidia/nccl, where it is neither the toolkit's nor the system's.
OBJCOPY  ?= objcopy
NVCC     ?= nvcc
CUDA     ?= $(if $(shell command -v $(NVCC)),1,0)
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
# One of each generation that this nvcc knows: the others of a generation run the same code.
CUDA_ARCHS ?= $(or $(filter $(patsubst sm_%,%,\
  $(shell $(NVCC) --list-gpu-code 2>/dev/null)),80 90 100 120),80 90)
NCCL_HOME ?=
NCCL     ?= $(if $(filter emulated,$(CUDA)),1,$(if $(wildcard $(addsuffix /include/nccl.h,\
              $(NCCL_HOME) $(CUDA_HOME) /usr)),$(filter-out 0,$(CUDA)),0))
# SYSTEM=Darwin, which is uname's on a Mac: the library for processors, onebit-info and the trainings of
# examples/, with GNU make 4 and clang, without MPI (docs/packages.md).
SYSTEM   ?= $(shell uname -s)
# FORTRAN=0: without the Fortran module; that is also what happens where $(MPIFC) is not found.
MPIFC    ?= $(subst mpicc,mpifort,$(MPICC))
FORTRAN  ?= $(strip $(if $(filter 1,$(MPI)),\
              $(shell $(MPIFC) --version >/dev/null 2>&1 && echo 1 || echo 0),0))
# Sanitizers: address,undefined or thread, which does not understand OpenMP's barriers.
SAN      ?=
OPENMP   ?= $(if $(is_darwin)$(findstring thread,$(SAN)),0,1)
WERROR   ?= 0
V        ?= 0
CFLAGS   ?= -O3 -g
CROSS    ?= aarch64-linux-gnu-
BUILD    ?= build
PREFIX   ?= /usr/local
LIBDIR   ?= $(PREFIX)/lib
DATA     ?= /usr/share/common-licenses
FUZZ_SECONDS ?= 600
JOBS     ?= 1
BENCH    ?=

# Paths with characters that make or the shell would change are refused before anything is written.
# Paths of installed files may have blanks; $(BUILD) may not, since it begins the names of targets.
hash     := \#
opening  := (
odd_characters = $(strip $(foreach odd,' " ` \ | & ; < > * ? [ ] : % $(hash),$(findstring $(odd),$(1))) \
  $(findstring $$,$(subst $$$(opening),,$(2))))
check_path = $(foreach odd,$(firstword $(call odd_characters,$($(1)),$(value $(1)))),$(error \
  $(1)=$(value $(1)): a $(odd) cannot be in it))
$(call check_path,BUILD)
ifneq ($(words $(BUILD)),1)
$(error BUILD=$(BUILD): a blank cannot be in it)
endif

# Which parts are built: each variable is empty if its part is off.
is_darwin   := $(filter Darwin,$(SYSTEM))
has_mpi     := $(filter 1,$(MPI))
has_cuda    := $(filter-out 0,$(CUDA))
has_nccl    := $(filter 1,$(NCCL))
has_openmp  := $(filter 1,$(OPENMP))
has_fortran := $(filter 1,$(FORTRAN))
is_emulated := $(filter emulated,$(CUDA))
warns_are_errors := $(filter 1,$(WERROR))

VERSION  := $(shell awk '/define ONEBIT_VERSION_/ { printf "%s%s", dot, $$3; dot = "." }' \
              include/onebit/status.h)
# libonebit.so.1.2.3, and libonebit.1.2.3.dylib
so_name   = libonebit.$(if $(is_darwin),$(1:%=%.)dylib,so$(1:%=.%))
SONAME   := $(call so_name,$(firstword $(subst ., ,$(VERSION))))
Q        := $(if $(filter 1,$(V)),,@)
say       = $(if $(filter 1,$(V)),,@printf '  %-8s%s\n' $(1) '$@$(if $(filter $(compilers),$(1)),$(progress))')
# The first build prints its progress; a make that only prints its commands counts them. Later builds
# compile changed files alone, and print none.
compilers := CC CU FC
is_unbuilt := $(if $(wildcard $(BUILD)/libonebit.a),,1)
progress  = $(if $(is_unbuilt),$(if $(COUNTING),,$(eval compiled += x) ($(words $(compiled)) of $(total))))
total     = $(eval total := $(shell $(MAKE) -n COUNTING=1 $(MAKEOVERRIDES) $(filter-out deps,$(MAKECMDGOALS)) \
  2>/dev/null | grep -cE "printf .*' ($(subst $(eval) ,|,$(compilers))) '"))$(total)
comma    := ,

# --- Flags. Variables that run an installed tool are expanded late, in the recipes: `make deps demo`
# --- must be able to start on a machine that has none of the tools yet.

# A constant of an enum without a name is a number here, beside floats too: clang warns from 19 on.
WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wmissing-prototypes -Wstrict-prototypes \
  -Wno-enum-float-conversion
MPI_CFLAGS = # in the environment of tests: a make that a test starts may be without MPI
MPI_LIBS   =
ifneq ($(has_mpi),)
MPI_SHOW   = $(shell $(MPICC) -show)
MPI_CFLAGS = -DONEBIT_HAVE_MPI=1 $(call mpi_includes,$(MPI_SHOW))
mpi_includes = $(patsubst -I%,-isystem %,$(filter -I% -DMPI_ABI,$(1)))
MPI_LIBS   = $(filter -L% -l% -Wl$(comma)%,$(MPI_SHOW))
endif
CUDA_CFLAGS = # exported: a make that this one starts may be without CUDA
ifneq ($(has_cuda),)
CUDA_CFLAGS = -DONEBIT_HAVE_CUDA=1 $(if $(has_nccl),-DONEBIT_HAVE_NCCL=1) \
  $(if $(is_emulated),-Itests/emulation/include,$(addprefix -isystem ,$(addsuffix /include,\
    $(if $(has_nccl),$(NCCL_HOME)) $(CUDA_HOME))))
endif
# Device code has no contraction either. A program is linked only to the libraries that it uses.
ifeq ($(CUDA),1)
CUDA_LAST = $(lastword $(CUDA_ARCHS))
CUDA_CODE = $(foreach arch,$(CUDA_ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) \
  -gencode arch=compute_$(CUDA_LAST),code=compute_$(CUDA_LAST)
# CUDA_FLAGS: more options of nvcc's: -lineinfo; -DOB_CUDA_LATE, and no kernel is launched early.
CUDA_FLAGS ?=
COMPILE_CU = $(NVCC) -std=c++17 -O3 -fmad=false $(CUDA_CODE) -I. -Iinclude $(CPPFLAGS) $(CUDA_FLAGS) \
  -Xcompiler=-Wall,-Wextra,-fPIC,-fno-exceptions,-ffp-contract=off \
  $(if $(warns_are_errors),-Werror=all-warnings)
# The toolkit's folder has lib64, pip's lib; pip's libraries have their version's name only.
CUDA_LIBRARY = $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib))
NCCL_LIBRARY = $(if $(has_nccl),$(NCCL_HOME:%=%/lib))
library_in = $(or $(patsubst $(2)/%,-l:%,$(if $(wildcard $(2)/lib$(1).so),,\
  $(lastword $(sort $(wildcard $(2)/lib$(1).so.*))))),-l$(1))
# CUDA_RPATH=0: the program that loads the library finds CUDA's first, as the Python package does.
CUDA_RPATH ?= 1
CUDA_LIBS = $(foreach folder,$(NCCL_LIBRARY) $(CUDA_LIBRARY),-L$(folder) \
  $(if $(filter-out 0,$(CUDA_RPATH)),-Wl$(comma)-rpath$(comma)$(folder))) \
  -Wl,--as-needed $(call library_in,cudart,$(CUDA_LIBRARY)) \
  $(if $(has_nccl),$(call library_in,nccl,$(or $(NCCL_LIBRARY),$(CUDA_LIBRARY)))) \
  -lstdc++ -ldl -Wl,--no-as-needed
endif
SAN_FLAGS  = $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer)

# Clang warns of loops that it could not vectorise, which are all loops in a build with a sanitizer or
# with little optimisation; gcc ignores a -Wno- that it does not know.
NO_VECTORS = $(if $(SAN)$(filter -O0 -O1 -Og,$(CFLAGS)),-Wno-pass-failed)

# Equal bits on every machine are part of what the library means: no contraction and no fast-math,
# whatever CFLAGS says. Nobody here asks for errno or for floating-point traps, which would keep
# loops with a square root or a choice from becoming vectors.
ALL_CFLAGS = -std=c11 -I. -Iinclude $(MPI_CFLAGS) $(CUDA_CFLAGS) $(CPPFLAGS) $(WARNINGS) \
  $(if $(warns_are_errors),-Werror) $(CFLAGS) -fno-fast-math -ffp-contract=off \
  -fno-math-errno -fno-trapping-math -fPIC \
  $(if $(is_darwin),-D_DARWIN_C_SOURCE,-fno-semantic-interposition) \
  -pthread $(if $(has_openmp),-fopenmp,-Wno-unknown-pragmas) \
  $(NO_VECTORS) $(SAN_FLAGS)
ifneq ($(is_emulated),)
include tests/emulation/rules.mk
COMPILE_CU = $(CXX) $(EMULATION_CUFLAGS) $(CUDA_CFLAGS) $(CPPFLAGS) $(SAN_FLAGS)
CUDA_LIBS = $(EMULATION_ARCHIVE) $(EMULATION_LIBS)
endif
ALL_LDFLAGS = $(LDFLAGS) -pthread $(if $(has_openmp),-fopenmp) $(SAN_FLAGS)
# A sanitizer's functions come with the program.
DEFINED = $(if $(SAN),,-Wl$(comma)-z$(comma)defs)
# dlclose must not unmap the library, since functions of it are registered elsewhere: delete functions of
# MPI's attributes, MPI's progress, threads and their ends, handlers of the process's exit.
NODELETE = -Wl,-z,nodelete
# Before glibc 2.34 shared memory and dlsym are in libraries of their own. The library is linked to no
# MPI, and finds that of the process (base/bound_mpi.h); a program that calls MPI is linked to one.
LIBRARY_LIBS = $(CUDA_LIBS) -lm$(if $(is_darwin),, -lrt) -ldl
LIBS         = $(MPI_LIBS) $(LIBRARY_LIBS)

# --- What is built

objects   = $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard $(1))))
objects_cu = $(patsubst %.cu,$(BUILD)/%.cu.o,$(sort $(wildcard $(1))))
main_of   = $(notdir $(basename $(wildcard $(1))))
# Objects that a build without these leaves out.
only_mpi := $(if $(has_mpi),,%_mpi.o)
only_cuda := $(if $(has_cuda),,%_cuda.o)
only_nccl := $(if $(has_nccl),,%_nccl.o)
only_its_system := $(if $(is_darwin),$(call objects,collectives/transports/*sockets*.c),%_darwin.o)

# The preload libraries' objects, which replace calls of MPI or NCCL, are no part of the library.
# The codecs take longest to compile, so they come first.
CODECS   := $(call objects,compression/codec_*.c)
RULES    := $(call objects,dropin/rules*.c)
PRELOADED := $(call objects,dropin/preload.c dropin/report*.c) $(RULES)
PRELOADED_MPI := $(call objects,dropin/mpi/preload*.c)
PRELOADED_NCCL := $(call objects,dropin/nccl/*.c)
LIBRARY  := $(filter-out $(only_its_system) $(only_mpi) $(only_nccl) $(PRELOADED) $(PRELOADED_MPI),\
              $(CODECS) $(filter-out $(CODECS),$(call objects,base/*.c compression/*.c collectives/*.c \
                collectives/*/*.c optimizers/*.c optimizers/*/*.c dropin/*.c \
                $(if $(has_mpi),dropin/mpi/*.c) $(if $(has_cuda),cuda/*.c))) \
              $(if $(has_cuda),$(call objects_cu,cuda/*.cu)))
STATIC   := $(BUILD)/libonebit.a
SHARED   := $(BUILD)/$(call so_name,$(VERSION))
LINKED   := $(STATIC)
PROGRAMS := $(addprefix $(BUILD)/onebit-,info $(if $(is_darwin),,bench relay tune))
SCRIPTS  := $(if $(is_darwin),,tools/netlab tools/onebit)
# A header that a library without MPI lacks includes mpi.h, or says "with MPI=0".
FOR_MPI  := include [<"](onebit/)?mpi\.h|with MPI=0
HEADERS  := $(filter-out $(if $(has_mpi),,$(shell grep -lE '$(FOR_MPI)' include/onebit/*)) \
              $(if $(has_cuda),,%/cuda.h) $(if $(has_nccl),,%/nccl.h),\
              $(wildcard include/onebit/*.h include/onebit/*.hpp))
.PHONY: all tests deps demo help check check-long mutants faults installed-check gpu-check kernels install \
  uninstall clean format fuzz fuzzers neon FORCE
.SECONDARY:
.DEFAULT_GOAL := all

# The flags of the last build: when they change, everything is built again. A missing compiler or
# MPI is met here first. `deps` comes before everything else when both are asked for.
WITH_MPI  := $(if $(has_mpi),MPI,no MPI)
WITH_CUDA := $(if $(is_emulated),an emulated CUDA device,CUDA for $(addprefix sm_,$(CUDA_ARCHS)))
WITH_NCCL := $(if $(has_nccl),$(comma) NCCL)
WITH_CUDA := $(if $(has_cuda),$(WITH_CUDA)$(WITH_NCCL),no CUDA: for processors only)
$(BUILD)/flags: FORCE | $(filter deps,$(MAKECMDGOALS))
	@command -v $(CC) >/dev/null || \
	  { echo "$(CC): not found; 'make deps' installs a compiler" >&2; exit 1; }
	@[ "$(MPI)" = 0 ] || command -v $(MPICC) >/dev/null || \
	  { echo "$(MPICC): not found; 'make deps' installs MPI, MPI=0 goes without" >&2; exit 1; }
	@mkdir -p $(@D)
	@echo '$(CC) $(ALL_CFLAGS) : $(COMPILE_CU) : $(ALL_LDFLAGS) $(LIBS)' >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; \
	  echo 'onebit $(VERSION) with $(WITH_MPI), $(WITH_CUDA)'; fi

# A codec a file, each with the instructions it is written for; compression/codec.c chooses one.
X86 = $(shell $(CC) -E -dM -x c /dev/null | grep -o __x86_64__)
$(BUILD)/compression/codec_avx2.o: ISA = $(if $(X86),-mavx2 -mf16c)
$(BUILD)/compression/codec_avx512.o: ISA = $(if $(X86),\
  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c)

ifneq ($(is_darwin),)
$(addprefix $(BUILD)/collectives/,hosts.o transports/transport_loopback.o): \
  OWN_CFLAGS = -include base/darwin.h
endif

$(BUILD)/%.o: %.c $(BUILD)/flags
	$(call say,CC)
	$(Q)mkdir -p $(@D); $(CC) $(ALL_CFLAGS) $(ISA) $(OWN_CFLAGS) -MMD -MP -c -o $@ $<
$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	$(call say,CU)
	$(Q)mkdir -p $(@D); $(COMPILE_CU) -MMD -MP -MF $(@:.o=.d) -MT $@ -c -o $@ $<
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

$(STATIC): $(LIBRARY)
	$(call say,AR)
	$(Q)rm -f $@; $(AR) rcs $@ $^

# The shared library exports the symbols of onebit.map, and binds its own calls of them inside.
include dropin/kinds/rules.mk
LINK_SHARED = $(if $(is_darwin),-dynamiclib -Wl$(comma)-install_name$(comma)$(LIBDIR)/$(SONAME) \
  -Wl$(comma)-exported_symbol$(comma)'_onebit_*' -Wl$(comma)-exported_symbol$(comma)'_ONEBIT_*',\
  -shared -Wl$(comma)-soname$(comma)$(SONAME) -Wl$(comma)--version-script=$(SHARED_MAP) \
  -Wl$(comma)-Bsymbolic-functions $(DEFINED) $(NODELETE))
$(SHARED): $(SHARED_OBJECTS) $(SHARED_MAP)
	$(call say,LD)
	$(Q)$(CC) $(LINK_SHARED) $(ALL_LDFLAGS) -o $@ $(SHARED_OBJECTS) $(LIBRARY_LIBS)
	$(Q)ln -sf $(@F) $(BUILD)/$(SONAME); ln -sf $(SONAME) $(BUILD)/$(call so_name)

include dropin/rules.mk
$(SHARED) $(PRELOAD) $(PROGRAMS): $(EMULATION_ARCHIVE)

# A program: its own objects, the option table and the static library.
OPTIONS := $(call objects,tools/options.c)
$(PROGRAMS): $(OPTIONS)
link = $(Q)mkdir -p $(@D); $(CC) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(LINKED)
$(BUILD)/onebit-%: $(STATIC)
	$(call say,LD)
	$(link) $(LIBS)
BENCHED := $(filter-out $(only_cuda),$(call objects,bench/bench_*.c))
$(BUILD)/onebit-bench: $(BUILD)/bench/bench.o $(BENCHED)
$(BUILD)/onebit-info: $(BUILD)/tools/info.o $(RULES)
TUNED := $(filter-out %/main.o $(only_mpi),$(call objects,tools/tune/*.c tools/doctor/*.c))
$(BUILD)/onebit-tune: $(BUILD)/tools/tune/main.o $(TUNED)
$(BUILD)/onebit-relay: $(call objects,tools/relay/*.c)

# Tests link objects of programs.
$(BUILD)/tests/test_bench $(BUILD)/tests/test_bench_rows: $(BENCHED)
$(BUILD)/tests/test_dropin: $(RULES)
$(addprefix $(BUILD)/tests/,test_options test_bench test_bench_rows test_tune test_tune_program test_doctor): $(OPTIONS)
$(addprefix $(BUILD)/tests/,test_tune test_tune_program test_doctor): $(TUNED)
$(BUILD)/tests/test_tools: $(BUILD)/tools/relay/network.o

ifneq ($(has_fortran),)
include bindings/fortran/rules.mk
endif
include examples/rules.mk
include tests/rules.mk
ifneq ($(has_cuda),)
include tests/gpu/rules.mk
endif
all: $(STATIC) $(SHARED) $(PRELOAD) $(PROGRAMS) $(EXAMPLES) $(FORTRANS)

# --- What can be done with it

help:
	@sed -n '3,/^$$/s/^#//p' $(firstword $(MAKEFILE_LIST))
gpu-check:
	tests/gpu/run $(if $(is_emulated),--emulated --quick)
kernels: $(call objects_cu,cuda/*.cu)
	@tests/scripts/check-kernels || [ $$? = 77 ] # not here

export BUILD CC CXX FOR_MPI FORTRAN MPI MPICC MPIFC MPIRUN NVCC CUDA NCCL NCCL_HOME CUDA_CFLAGS SAN VERSION
# Only the tests in TESTS are built; the names of some scripts say which programs they need.
named   = $(foreach name,$(TESTS),$(filter %/$(name) %/test_$(name),$(UNIT) $(RANKED)))
preload = $(if $(filter check-preload%,$(TESTS)),$(UNLINKED) $(UNLINKED_NCCL)) \
  $(if $(filter check-faults,$(TESTS)),$(FAULTS))
TESTED  = $(if $(strip $(TESTS)),$(named) $(preload),tests)
check: all $(TESTED)
	@$(MAKE) -s installed-check
mutants:
	tests/mutation/run --complete
check-long: $(BUILD)/tests/test_long_faults
	ONEBIT_TEST_CALLS=20000 $<
	$(MAKE) faults
	$(MAKE) installed-check TESTS="check-commands check-doctor"
	tests/scripts/check-mpis
	.ci/run check-full asan-long tsan-long valgrind-long clang-asan gpu-asan gpu-full gpu-alone
faults: $(FAULTS)
	$< --jobs 12
# Runs the tests that are built, and those of an installation.
installed-check: all
	@$(MAKE) -s install DESTDIR="$$(cd $(BUILD) && pwd)/stage" >/dev/null
	@MPI_CFLAGS='$(MPI_CFLAGS)' tests/run $(TESTS)

# The demo builds in parallel also without -j, since the first build is most of the time. Where nothing
# is built yet, it builds without device code, which the demo does not use and which takes longest.
demo_build = $(BUILD)$(if $(and $(has_cuda),$(is_unbuilt)),/demo/build)
demo: $(BUILD)/flags
	+$(Q)$(MAKE) $(if $(filter -j%,$(MAKEFLAGS)),,-j$$(nproc)) $(demo_build)/examples/train_text \
	  $(if $(is_darwin),,$(demo_build)/onebit-tune) BUILD=$(demo_build) $(if $(filter-out $(BUILD),$(demo_build)),CUDA=0 NCCL=0)
	@DATA='$(DATA)' BUILD=$(demo_build) TO=$(or $(TO),$(BUILD)/demo) examples/demo

include docs/site/rules.mk

# Debian's and Ubuntu's names: what a build needs, and what it, or the demo, can do without. Tests are
# needed where they are asked for.
TEST_PACKAGES = libcriterion-dev pkgconf
PACKAGES = gcc libc6-dev make $(if $(has_mpi),libopenmpi-dev openmpi-bin) \
  $(if $(filter check check-long tests,$(MAKECMDGOALS)),$(TEST_PACKAGES)) $(EXTRA_PACKAGES)
OPTIONAL_PACKAGES = $(filter-out $(PACKAGES),$(TEST_PACKAGES)) iproute2 $(if $(has_mpi),gfortran)
deps:
	@packaging/deps $(PACKAGES) -- $(OPTIONAL_PACKAGES)

include packaging/install.mk
include bindings/python/rules.mk

clean:
	rm -rf $(BUILD) $(BUILD)-neon $(BUILD)-fuzz build-python-*

format:
	tests/scripts/check-format --write

# Cross-compiles the codecs for 64-bit ARM, runs them under qemu, and compares every bit.
neon: $(DIGEST)
	$(MAKE) BUILD=$(BUILD)-neon CC=$(CROSS)gcc AR=$(CROSS)ar MPI=0 CUDA=0 LDFLAGS=-static \
	  $(BUILD)-neon/tests/codec_digest
	tests/scripts/check-codecs $(DIGEST) "qemu-aarch64 $(BUILD)-neon/tests/codec_digest"

# Stops at the first finding. Of each FUZZ_SECONDS, or FUZZ_RUNS inputs, the same ones each time;
# FUZZ="message rules" for some of them.
FUZZED = $(MAKE) BUILD=$(BUILD)-fuzz CC=clang MPI=0 CUDA=0 OPENMP=0 CFLAGS='-O1 -g' \
  SAN=address,undefined,fuzzer-no-link
fuzz:
	+$(FUZZED) fuzzers
	FUZZ_SECONDS='$(FUZZ_SECONDS)' FUZZ_RUNS='$(FUZZ_RUNS)' JOBS='$(JOBS)' \
	  tests/fuzz/run $(BUILD)-fuzz $(FUZZ)
