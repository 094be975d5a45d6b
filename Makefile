# Builds, tests and installs onebit: the library (static and shared), the programs, the examples.
#
#   make                everything, in build/
#   make deps           installs what building and testing need (Debian, Ubuntu)
#   make check          the tests; TESTS="codec mpi_plan" for a part
#   make installed-check TESTS="..."   those of them that are built, and that look at an installation
#   make gpu-check      the tests that want a GPU, and benchmarks (tests/gpu/run says more)
#   make demo           four ranks train on a text, dense and with one bit, side by side
#   make bench          the benchmarks, about five minutes: tables and figures in docs/measured
#   make install        under PREFIX, staged under DESTDIR; make uninstall
#   make reference      the headers as web pages, by Doxygen: build/reference/html/index.html
#   make neon           the codecs of 64-bit ARM under qemu, compared with this machine's
#   make fuzz           the message decoder, for FUZZ_SECONDS
#   make format, clean
#
# A variant (another compiler or MPI, a sanitizer) goes into a directory of its own:
#   make check SAN=address,undefined BUILD=build-asan

# MPI=0: without MPI, the programs run their ranks as threads. MPICC is only asked for MPI's flags.
MPI      ?= 1
MPICC    ?= mpicc
MPIRUN   ?= $(subst mpicc,mpirun,$(MPICC))
# CUDA=1: with the GPU code, for these architectures and the PTX of the last; where nvcc is found
# that is the default. CUDA=0: without. CUDA=emulated: the GPU code too is compiled for this
# processor, where tests/emulation runs it thread by thread. NCCL=0: without NCCL.
OBJCOPY  ?= objcopy
NVCC     ?= nvcc
CUDA     ?= $(if $(shell command -v $(NVCC)),1,0)
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
CUDA_ARCHS ?= 80 90
# ZLIB=0: train_images reads plain files only; that is also what it does where zlib.h is missing.
ZLIB     ?= $(shell echo '\#include <zlib.h>' | $(CC) -E - >/dev/null 2>&1 && echo 1 || echo 0)
NCCL     ?= $(if $(filter emulated,$(CUDA)),1,$(if $(wildcard $(CUDA_HOME)/include/nccl.h \
              /usr/include/nccl.h),$(filter-out 0,$(CUDA)),0))
# FORTRAN=0: without the Fortran module; that is also what happens where $(MPIFC) is not found.
MPIFC    ?= $(subst mpicc,mpifort,$(MPICC))
FORTRAN  ?= $(if $(filter 1,$(MPI)),$(shell $(MPIFC) --version >/dev/null 2>&1 && echo 1 || echo 0),0)
# Sanitizers: address,undefined or thread, which does not understand OpenMP's barriers.
SAN      ?=
OPENMP   ?= $(if $(findstring thread,$(SAN)),0,1)
WERROR   ?= 0
V        ?= 0
CFLAGS   ?= -O3 -g
CROSS    ?= aarch64-linux-gnu-
BUILD    ?= build
PREFIX   ?= /usr/local
LIBDIR   ?= $(PREFIX)/lib
DATA     ?= /usr/share/common-licenses
FUZZ_SECONDS ?= 600
BENCH    ?=

VERSION  := $(shell awk '/define ONEBIT_VERSION_/ { printf "%s%s", dot, $$3; dot = "." }' \
              include/onebit/status.h)
SONAME   := libonebit.so.$(firstword $(subst ., ,$(VERSION)))
Q        := $(if $(filter 1,$(V)),,@)
say       = $(if $(filter 1,$(V)),,@printf '  %-8s%s\n' $(1) $@)
comma    := ,

# --- Flags. What asks an installed tool is expanded late, in the recipes: `make deps demo` must be
# --- able to start on a machine that has none of the tools yet.

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wmissing-prototypes -Wstrict-prototypes
ifeq ($(MPI),1)
MPI_SHOW   = $(shell $(MPICC) -show)
MPI_CFLAGS = -DONEBIT_HAVE_MPI=1 $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_SHOW)))
MPI_LIBS   = $(filter -L% -l% -Wl$(comma)%,$(MPI_SHOW))
endif
ifneq ($(CUDA),0)
CUDA_CFLAGS = -DONEBIT_HAVE_CUDA=1 $(if $(filter 1,$(NCCL)),-DONEBIT_HAVE_NCCL=1) \
  -isystem $(if $(filter 1,$(CUDA)),$(CUDA_HOME)/include,tests/emulation/include)
endif
# Device code has no contraction either. A program needs only those of the libraries that it uses.
ifeq ($(CUDA),1)
CUDA_LAST = $(lastword $(CUDA_ARCHS))
CUDA_CODE = $(foreach arch,$(CUDA_ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) \
  -gencode arch=compute_$(CUDA_LAST),code=compute_$(CUDA_LAST)
COMPILE_CU = $(NVCC) -std=c++17 -O3 -fmad=false $(CUDA_CODE) -I. -Iinclude $(CPPFLAGS) \
  -Xcompiler=-Wall,-Wextra,-fPIC,-fno-exceptions,-ffp-contract=off $(if $(filter 1,$(WERROR)),-Werror=all-warnings)
CUDA_LIBS = -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -Wl,--as-needed -lcudart -lcublas \
  $(if $(filter 1,$(NCCL)),-lnccl) -lstdc++ -ldl -Wl,--no-as-needed
endif
SAN_FLAGS  = $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer)

# Clang tells of a loop that was to become vectors and did not, as all are in a build with a
# sanitizer or with little optimisation; gcc passes over a -Wno- that it does not know.
NO_VECTORS = $(if $(SAN)$(filter -O0 -O1 -Og,$(CFLAGS)),-Wno-pass-failed)

# Equal bits on every machine are part of what the library means: no contraction and no fast-math,
# whatever CFLAGS says. Nobody here asks for errno or for floating-point traps, which would keep
# loops with a square root or a choice from becoming vectors.
ALL_CFLAGS = -std=c11 -I. -Iinclude $(MPI_CFLAGS) $(CUDA_CFLAGS) $(CPPFLAGS) $(WARNINGS) \
  $(if $(filter 1,$(WERROR)),-Werror) $(CFLAGS) -fno-fast-math -ffp-contract=off \
  -fno-math-errno -fno-trapping-math -fPIC \
  -fno-semantic-interposition -pthread $(if $(filter 1,$(OPENMP)),-fopenmp,-Wno-unknown-pragmas) \
  $(NO_VECTORS) $(SAN_FLAGS)
ifeq ($(CUDA),emulated)
include tests/emulation/rules.mk
COMPILE_CU = $(CXX) $(EMULATION_CUFLAGS) $(CUDA_CFLAGS) $(CPPFLAGS) $(SAN_FLAGS)
CUDA_LIBS = $(EMULATION_ARCHIVE) $(EMULATION_LIBS)
endif
ALL_LDFLAGS = $(LDFLAGS) -pthread $(if $(filter 1,$(OPENMP)),-fopenmp) $(SAN_FLAGS)
# Before glibc 2.34 shared memory is in a library of its own.
LIBS        = $(CUDA_LIBS) $(MPI_LIBS) -lm -lrt

# --- What is built

objects   = $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard $(1))))
objects_cu = $(patsubst %.cu,$(BUILD)/%.cu.o,$(sort $(wildcard $(1))))
main_of   = $(notdir $(basename $(wildcard $(1))))
only_mpi := $(if $(filter 1,$(MPI)),,%_mpi.o)

only_cuda := $(if $(filter 0,$(CUDA)),%_cuda.o)
only_nccl := $(if $(filter 1,$(NCCL)),,%_nccl.o)

# What only an unmodified program that is preloaded needs, before MPI and before NCCL.
RULES    := $(call objects,dropin/rules*.c)
PRELOADED := $(call objects,dropin/preload.c dropin/report*.c) $(RULES)
PRELOADED_MPI := $(call objects,dropin/mpi/preload*.c)
PRELOADED_NCCL := $(call objects,dropin/nccl/*.c)
PRELOAD  := $(if $(filter 1,$(MPI)),$(BUILD)/libonebit-mpi.so) \
              $(if $(filter 1,$(NCCL)),$(BUILD)/libonebit-nccl.so)
LIBRARY  := $(filter-out $(only_mpi) $(only_nccl) $(PRELOADED) $(PRELOADED_MPI),\
              $(call objects,base/*.c compression/*.c collectives/*.c collectives/*/*.c \
                optimizers/*.c optimizers/*/*.c dropin/*.c) \
              $(if $(filter 1,$(MPI)),$(call objects,dropin/mpi/*.c)) \
              $(if $(filter-out 0,$(CUDA)),$(call objects,cuda/*.c) $(call objects_cu,cuda/*.cu)))
STATIC   := $(BUILD)/libonebit.a
SHARED   := $(BUILD)/libonebit.so.$(VERSION)
PROGRAMS := $(addprefix $(BUILD)/onebit-,$(call main_of,bench/bench.c bench/info.c bench/replay.c \
              bench/tune.c))
SCRIPTS  := bench/netlab bench/onebit
EXAMPLES := $(addprefix $(BUILD)/examples/,$(call main_of,examples/train_text.c \
              examples/train_images.c examples/train_words.c \
              $(if $(filter 1,$(MPI)),examples/adam.c examples/allreduce.c examples/mpi_calls.c)) \
              $(if $(filter 1,$(MPI)),train_plain))
FORTRANS := $(if $(filter 1,$(FORTRAN)),$(addprefix $(BUILD)/fortran/,libonebit_fortran.a onebit_mpi.mod))
UNIT     := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/test_*.c))
RANKED   := $(if $(filter 1,$(MPI)),$(patsubst %.c,$(BUILD)/%,$(wildcard tests/mpi_*.c)))
# MPI and NCCL programs that know nothing of onebit.
UNLINKED := $(if $(filter 1,$(MPI)),$(addprefix $(BUILD)/tests/preload/,program variables))
UNLINKED_NCCL := $(if $(filter 1,$(NCCL)),$(BUILD)/tests/preload/nccl_program)
DIGEST   := $(BUILD)/tests/codec_digest
BEHAVIOUR := $(BUILD)/tests/behaviour_digest
FUZZER   := $(BUILD)/tests/fuzz_message
HARNESS  := $(filter-out $(UNIT:=.o) $(BUILD)/tests/mpi_% $(BUILD)/tests/behaviour_% $(DIGEST).o $(FUZZER).o $(only_mpi),\
              $(call objects,tests/*.c))
# A header that a library without MPI lacks includes mpi.h, or says "with MPI=0".
FOR_MPI  := include [<"](onebit/)?mpi\.h|with MPI=0
HEADERS  := $(filter-out $(if $(filter 1,$(MPI)),,$(shell grep -lE '$(FOR_MPI)' include/onebit/*)) \
              $(if $(filter 0,$(CUDA)),%/cuda.h) $(if $(filter 1,$(NCCL)),,%/nccl.h),\
              $(wildcard include/onebit/*.h include/onebit/*.hpp))
MODULES  := include/onebit base compression collectives collectives/cost collectives/schedules \
  collectives/transports optimizers optimizers/checkpoint dropin dropin/mpi dropin/nccl cuda bench \
  examples  tests tests/abi tests/cpp tests/preload tests/gpu tests/emulation tests/emulation/include

.PHONY: all tests deps demo check installed-check gpu-check bench reference install uninstall clean \
  format fuzz neon FORCE
.SECONDARY:
all: $(STATIC) $(SHARED) $(PRELOAD) $(PROGRAMS) $(EXAMPLES) $(FORTRANS)
tests: $(UNIT) $(RANKED) $(UNLINKED) $(UNLINKED_NCCL)

# The flags of the last build: when they change, everything is built again. A missing compiler or
# MPI is met here first. `deps` comes before everything else when both are asked for.
WITH_MPI  = $(if $(filter 1,$(MPI)),MPI,no MPI)
WITH_NCCL = $(if $(filter 1,$(NCCL)),$(comma) NCCL)
WITH_CUDA = $(if $(filter 0,$(CUDA)),no CUDA: for processors only,$(if $(filter 1,$(CUDA)),CUDA for \
              $(addprefix sm_,$(CUDA_ARCHS)),an emulated CUDA device)$(WITH_NCCL))
WITH_ZLIB = $(if $(filter 0,$(ZLIB)),; no zlib: train_images reads plain files only)
$(BUILD)/flags: FORCE | $(filter deps,$(MAKECMDGOALS))
	@command -v $(CC) >/dev/null || \
	  { echo "$(CC): not found; 'make deps' installs a compiler" >&2; exit 1; }
	@[ "$(MPI)" = 0 ] || command -v $(MPICC) >/dev/null || \
	  { echo "$(MPICC): not found; 'make deps' installs MPI, MPI=0 goes without" >&2; exit 1; }
	@mkdir -p $(@D); echo '$(CC) $(ALL_CFLAGS) : $(COMPILE_CU) : $(ALL_LDFLAGS) $(LIBS) : $(ZLIB_LIBS)' >$@.new; \
	  if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; echo 'onebit $(VERSION) with $(WITH_MPI), $(WITH_CUDA)$(WITH_ZLIB)'; fi

# A codec a file, each with the instructions it is written for; compression/codec.c chooses one.
X86 = $(findstring x86_64,$(shell $(CC) -dumpmachine))
$(BUILD)/compression/codec_avx2.o: ISA = $(if $(X86),-mavx2 -mf16c)
$(BUILD)/compression/codec_avx512.o: ISA = $(if $(X86),\
  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c)

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

# What leaves the shared library is decided in onebit.map; all else is hidden, and what is not is
# bound inside, too.
$(SHARED): $(LIBRARY) onebit.map
	$(call say,LD)
	$(Q)$(CC) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=onebit.map -Wl,-Bsymbolic-functions \
	  $(if $(SAN),,-Wl$(comma)-z$(comma)defs) $(ALL_LDFLAGS) -o $@ $(LIBRARY) $(LIBS)
	$(Q)ln -sf $(@F) $(BUILD)/$(SONAME); ln -sf $(SONAME) $(BUILD)/libonebit.so

# What stands before MPI, and calls libonebit.so, beside which it is installed: by the name of this
# release, and as a filter, which the loader searches before the program's own libraries. So one that
# is linked to onebit shares this library, also where its own is another release. The library itself
# calls PMPI_ where a wrapper would catch its call.
$(BUILD)/release/libonebit.so: $(SHARED)
	$(call say,LD)
	$(Q)mkdir -p $(@D); $(CC) -shared -Wl,-soname,$(notdir $(SHARED)) -Wl,--version-script=onebit.map \
	  $(ALL_LDFLAGS) -o $@ $(LIBRARY)
$(BUILD)/libonebit-mpi.so: $(PRELOADED) $(PRELOADED_MPI) dropin/mpi/preload.map \
  $(BUILD)/release/libonebit.so
	$(call say,LD)
	$(Q)$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=dropin/mpi/preload.map -Wl,-rpath,'$$ORIGIN' \
	  $(if $(SAN),,-Wl$(comma)-z$(comma)defs) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) \
	  -Wl,--filter=$(notdir $(SHARED)) -L$(BUILD)/release -lonebit $(MPI_LIBS) -lm -ldl

# The library once more, without MPI, with what stands before NCCL. It is preloaded into processes
# that have no MPI, no CUDA and no NCCL, or load them later, as Python's modules do. libonebit.so
# would bring all three there, and its calls of NCCL would end in the wrappers: here they are renamed
# to functions that look NCCL up.
NCCL_WRAPPED = $(addprefix nccl,CommInitRank CommInitRankConfig CommInitRankScalable CommInitAll \
  CommSplit CommFinalize CommDestroy CommAbort CommGetAsyncError CommCount CommCuDevice \
  CommUserRank GetVersion GroupStart GroupEnd Send Recv AllReduce ReduceScatter AllGather \
  GetErrorString GetLastError)
EMULATED_LIBS = $(EMULATION_SHARED) -Wl,-rpath,$(abspath $(dir $(EMULATION_SHARED)))
NCCL_PRELOAD_LIBS = $(if $(filter emulated,$(CUDA)),$(EMULATED_LIBS),-L$(CUDA_HOME)/lib64 \
  -lcudart_static) -lstdc++ -lm -ldl -lrt
$(BUILD)/onebit-inside-nccl.o: $(filter-out %_mpi.o $(BUILD)/dropin/mpi/%,$(LIBRARY))
	$(call say,LD)
	$(Q)$(CC) -r -nostdlib -o $@ $^
	$(Q)$(OBJCOPY) $(foreach call,$(NCCL_WRAPPED),--redefine-sym $(call)=ob_next_$(call)) $@
$(BUILD)/libonebit-nccl.so: $(BUILD)/onebit-inside-nccl.o $(PRELOADED) $(PRELOADED_NCCL) \
  dropin/nccl/preload.map $(EMULATION_SHARED)
	$(call say,LD)
	$(Q)$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=dropin/nccl/preload.map \
	  $(if $(SAN),,-Wl$(comma)-z$(comma)defs) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(NCCL_PRELOAD_LIBS)

# The Fortran module, and what it calls: a library beside libonebit, of the compiler that $(MPIFC) is.
FORTRAN_FLAGS = -O2 -g -fPIC -Wall
$(BUILD)/fortran/libonebit_fortran.a: bindings/fortran/onebit_mpi.f90 bindings/fortran/onebit_mpi.c \
  include/onebit/mpi_calls.h $(BUILD)/flags
	$(call say,FC)
	$(Q)mkdir -p $(@D); $(MPIFC) $(FORTRAN_FLAGS) $(if $(filter 1,$(WERROR)),-Werror) -J$(@D) -c $(filter %.f90,$^) -o $(@D)/module.o
	$(Q)$(MPIFC) $(FORTRAN_FLAGS) -Iinclude -c $(filter %.c,$^) -o $(@D)/shims.o
	$(Q)rm -f $@; $(AR) rcs $@ $(@D)/module.o $(@D)/shims.o
$(BUILD)/fortran/onebit_mpi.mod: $(BUILD)/fortran/libonebit_fortran.a

# A program: its own objects and the static library.
$(SHARED) $(PRELOAD) $(PROGRAMS) $(EXAMPLES) $(UNIT) $(RANKED): $(EMULATION_ARCHIVE)
link = $(Q)mkdir -p $(@D); $(CC) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(STATIC)
$(BUILD)/onebit-%: $(STATIC)
	$(call say,LD)
	$(link) $(LIBS)
BENCHED := $(filter-out $(only_cuda) $(only_nccl),$(call objects,bench/bench_*.c)) \
             $(if $(filter-out 0,$(CUDA)),$(call objects_cu,bench/*.cu))
$(BUILD)/onebit-bench: $(BUILD)/bench/bench.o $(BENCHED)
$(BUILD)/onebit-info: $(filter-out $(only_cuda),$(call objects,bench/info*.c)) $(RULES)
# Its codec's speeds are those of onebit-bench's passes.
TUNED := $(filter-out $(if $(filter 1,$(MPI)),,%_mpi.o %/tune_doctor.o),\
           $(call objects,bench/tune_*.c bench/common*.c bench/bench_measure.c \
             bench/bench_passes.c bench/bench_triad.c))
$(BUILD)/onebit-tune: $(BUILD)/bench/tune.o $(TUNED)
$(BUILD)/onebit-replay: $(call objects,bench/replay*.c bench/common*.c)

$(filter-out %/train_plain,$(EXAMPLES)) $(DIGEST) $(BEHAVIOUR): $(STATIC)
	$(call say,LD)
	$(link) $(OWN_LIBS) $(LIBS)
$(BUILD)/examples/train_plain $(UNLINKED): %: %.o
	$(call say,LD)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $< $(MPI_LIBS) -lm
$(UNLINKED_NCCL): $(call objects,tests/preload/nccl_*.c) $(EMULATION_SHARED)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(if $(filter emulated,$(CUDA)),$(EMULATED_LIBS),$(CUDA_LIBS)) -lm
# What trainings share, and what each has of its own.
TRAINING := $(filter-out $(only_nccl) %/train_text.o %/train_images.o %/train_words.o \
              %/train_plain.o,$(call objects,examples/options.c examples/train_*.c))
TEXT     := $(filter-out $(only_cuda),$(call objects,examples/text*.c examples/transformer*.c)) \
              $(if $(filter-out 0,$(CUDA)),$(call objects_cu,examples/*.cu))
IMAGES   := $(call objects,examples/image*.c examples/idx.c examples/digits.c examples/network.c \
              examples/transformer_math.c)
WORDS    := $(call objects,examples/word*.c examples/text.c examples/log_bilinear.c \
              examples/transformer_math.c)
ZLIB_LIBS = $(if $(filter 0,$(ZLIB)),,-lz)
ZLIB_CFLAGS = $(if $(filter 0,$(ZLIB)),,-DEXAMPLES_HAVE_ZLIB=1)
$(BUILD)/examples/idx.o: OWN_CFLAGS = $(ZLIB_CFLAGS)
$(BUILD)/examples/train_text: $(BUILD)/examples/train_text.o $(TRAINING) $(TEXT)
$(BUILD)/examples/train_images: OWN_LIBS = $(ZLIB_LIBS)
$(BUILD)/examples/train_images: $(BUILD)/examples/train_images.o $(TRAINING) $(IMAGES)
$(BUILD)/examples/train_words: $(BUILD)/examples/train_words.o $(TRAINING) $(WORDS)
$(BUILD)/examples/adam: $(call objects,examples/adam.c)
$(BUILD)/examples/allreduce: $(call objects,examples/allreduce.c)
$(BUILD)/examples/mpi_calls: $(call objects,examples/mpi_calls.c)
$(DIGEST): $(DIGEST).o $(BUILD)/tests/codec_cases.o
$(BEHAVIOUR): $(BEHAVIOUR).o $(BUILD)/tests/behaviour_wire.o

$(UNIT) $(RANKED): %: %.o $(HARNESS) $(STATIC)
	$(call say,LD)
	$(link) -lcriterion $(OWN_LIBS) $(LIBS)
$(BUILD)/tests/test_bench $(BUILD)/tests/test_bench_rows: $(BENCHED)
$(BUILD)/tests/test_rules: $(RULES)
$(BUILD)/tests/test_bench_fused: $(BUILD)/bench/bench_fused.o
$(BUILD)/tests/test_tune: $(TUNED)
$(addprefix $(BUILD)/tests/,test_replay test_replay_damage mpi_replay): \
  $(call objects,bench/replay_*.c bench/common*.c)
$(BUILD)/tests/test_doctor: $(filter-out %_mpi.o,$(call objects,bench/tune_doctor_*.c))
$(BUILD)/tests/test_transformer: $(call objects,examples/transformer*.c)
$(BUILD)/tests/test_words: $(addprefix $(BUILD)/examples/,words.o log_bilinear.o transformer_math.o)
$(BUILD)/tests/test_images $(BUILD)/tests/test_training $(BUILD)/tests/test_training_parts: \
  OWN_LIBS = $(ZLIB_LIBS)
$(BUILD)/tests/test_images.o: OWN_CFLAGS = $(ZLIB_CFLAGS)
$(BUILD)/tests/test_images $(BUILD)/tests/test_training $(BUILD)/tests/test_training_parts: \
  $(TRAINING) $(IMAGES)
$(BUILD)/tests/test_training_parts: $(addprefix $(BUILD)/examples/,text_options.o word_options.o) \
  $(EXAMPLES)

ifneq ($(CUDA),0)
include tests/gpu/rules.mk
endif

$(FUZZER): $(FUZZER).o $(STATIC)
	$(call say,LD)
	$(link) -fsanitize=fuzzer $(LIBS)

# --- What can be done with it

gpu-check:
	tests/gpu/run $(if $(filter emulated,$(CUDA)),--emulated --quick)

export BUILD CC CXX FOR_MPI FORTRAN MPI MPICC MPIFC MPIRUN NVCC CUDA NCCL CUDA_CFLAGS SAN VERSION
# Of the tests only what is asked for is built; scripts that run programs say so by their names.
TESTED = $(if $(strip $(TESTS)),$(foreach name,$(TESTS),$(filter %/$(name) %/test_$(name),$(UNIT) \
  $(RANKED))) $(if $(filter check-preload%,$(TESTS)),$(UNLINKED) $(UNLINKED_NCCL)),tests)
check: all $(TESTED)
	@$(MAKE) -s installed-check
# Of the tests that are built, and of what is installed.
installed-check: all
	@$(MAKE) -s install DESTDIR=$(abspath $(BUILD))/stage >/dev/null
	@MPI_CFLAGS='$(MPI_CFLAGS)' tests/run $(TESTS)

demo: $(BUILD)/examples/train_text
ifeq ($(MPI),1)
	tests/scripts/ranks 4 $< --data $(DATA) --compare
else
	$< --ranks 4 --data $(DATA) --compare
endif

# The standard set, and a page about it in docs/measured; BENCH="sizes rates" for a part.
bench: $(BUILD)/onebit-bench
	bench/report $(BENCH)

MODULES += tests/guides

# The reference of the public headers, as web pages.
.PHONY: reference
DOXYGEN ?= doxygen
reference:
	@command -v $(DOXYGEN) >/dev/null || \
	  { echo "$(DOXYGEN): not found; it makes the reference, and is a package of that name" >&2; exit 1; }
	$(Q)mkdir -p $(BUILD)/reference; REFERENCE=$(BUILD)/reference VERSION=$(VERSION) $(DOXYGEN) docs/Doxyfile
	@echo "$(BUILD)/reference/html/index.html"

# Debian's and Ubuntu's names.
PACKAGES = gcc libc6-dev make pkgconf libcriterion-dev iproute2 zlib1g-dev \
  $(if $(filter 1,$(MPI)),libopenmpi-dev openmpi-bin) $(EXTRA_PACKAGES)
deps:
	@command -v dpkg-query >/dev/null || \
	  { echo "deps: no dpkg here; please install what Debian calls $(PACKAGES)"; exit 0; }; \
	for package in $(PACKAGES); do \
	  case "$$(dpkg-query -W -f '$${db:Status-Status} ' $$package 2>/dev/null)" in \
	    "installed "*) ;; *) missing="$$missing $$package" ;; esac; done; \
	[ -n "$$missing" ] || { echo "deps: nothing is missing"; exit 0; }; \
	echo "deps: installs with apt-get:$$missing"; \
	apt="env DEBIAN_FRONTEND=noninteractive apt-get"; \
	[ "$$(id -u)" = 0 ] || apt="sudo $$apt"; \
	$$apt update -qq && $$apt install -y -qq --no-install-recommends $$missing </dev/null

include packaging/install.mk

clean:
	rm -rf $(BUILD) $(BUILD)-neon $(BUILD)-fuzz

format:
	clang-format -i $(wildcard $(foreach kind,[ch] cu cuh cpp hpp,$(addsuffix /*.$(kind),$(MODULES))))

# Cross-compiles the codecs for 64-bit ARM, runs them under qemu, and compares every bit.
neon: $(DIGEST)
	$(MAKE) BUILD=$(BUILD)-neon CC=$(CROSS)gcc AR=$(CROSS)ar MPI=0 CUDA=0 LDFLAGS=-static \
	  $(BUILD)-neon/tests/codec_digest
	tests/scripts/check-codecs $(DIGEST) "qemu-aarch64 $(BUILD)-neon/tests/codec_digest"

# Stops at the first finding. FUZZ_RUNS=n: the same n inputs each time, instead of FUZZ_SECONDS.
fuzz:
	$(MAKE) BUILD=$(BUILD)-fuzz CC=clang MPI=0 CUDA=0 OPENMP=0 CFLAGS='-O1 -g' \
	  SAN=address,undefined,fuzzer-no-link $(BUILD)-fuzz/tests/fuzz_message
	$(BUILD)-fuzz/tests/fuzz_message -max_len=65536 -print_final_stats=1 \
	  $(if $(FUZZ_RUNS),-seed=1 -runs=$(FUZZ_RUNS),-max_total_time=$(FUZZ_SECONDS))
