# The tests. The Makefile includes this file. It needs `objects`, `link`, LINKED, the settings of what
# is built, and the objects of the programs and examples that tests link. tests/gpu/rules.mk has the
# tests that need a GPU.

UNIT     := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/test_*.c))
RANKED   := $(if $(has_mpi),$(patsubst %.c,$(BUILD)/%,$(wildcard tests/mpi_*.c)))
# MPI and NCCL programs that do not use onebit themselves.
UNLINKED := $(if $(has_mpi),$(addprefix $(BUILD)/tests/preload/,program streams))
UNLINKED_NCCL := $(if $(has_nccl),$(BUILD)/tests/preload/nccl_program)
# Programs that are not tests: those that tests/scripts/check-codecs and compare-builds compare, and
# fuzzers.
FAULTS    := $(BUILD)/tests/faults/faults
DIGEST    := $(BUILD)/tests/codec_digest
REPLAY    := $(BUILD)/tests/onebit-replay
FUZZERS   := $(patsubst %.c,$(BUILD)/%,$(shell grep -l '^int LLVMFuzzerTestOneInput' tests/fuzz/*.c))
SEEDS     := $(BUILD)/tests/fuzz/seeds
HARNESS   := $(filter-out $(UNIT:=.o) $(BUILD)/tests/mpi_% $(DIGEST).o $(only_mpi), \
               $(call objects,tests/*.c))

$(call objects,tests/*.c): OWN_CFLAGS = -D_GNU_SOURCE
tests: $(UNIT) $(RANKED) $(UNLINKED) $(UNLINKED_NCCL) $(FAULTS) $(DIGEST) $(REPLAY)

# Public calls are made in many floating-point environments, and in a locale with a decimal comma
# (tests/support_floats.h). This needs a linker that can call a wrapper before a function.
WRAPPED := $(if $(is_darwin),,$(BUILD)/tests/wrapped_calls)
$(BUILD)/tests/wrapped_calls.c: tests/wrap_calls.awk $(lastword $(sort $(wildcard tests/abi/*.txt))) \
  $(STATIC)
	$(Q)mkdir -p $(@D); nm $(STATIC) 2>/dev/null >$@.names
	$(Q)awk -v list=1 -f $< $@.names $(word 2,$^) >$(@:.c=.options)
	$(Q)awk -f $< $@.names $(word 2,$^) >$@
$(BUILD)/tests/wrapped_calls.o: $(BUILD)/tests/wrapped_calls.c
	$(call say,CC)
	$(Q)$(CC) $(ALL_CFLAGS) -c -o $@ $<
COMMA := $(BUILD)/tests/locales/comma
$(COMMA): tests/locale_comma
	$(Q)mkdir -p $(@D); localedef -c -i $< $@ >/dev/null 2>&1 || touch $@
$(UNIT) $(RANKED): | $(COMMA)
$(UNIT) $(RANKED): %: %.o $(HARNESS) $(WRAPPED:=.o) $(LINKED) $(EMULATION_ARCHIVE)
	$(call say,LD)
	$(link) $(WRAPPED:%=@%.options) -lcriterion $(OWN_LIBS) $(LIBS)
$(DIGEST): $(addprefix $(BUILD)/tests/,codec_cases.o codec_arrays.o golden_cases.o support_sample.o)
$(DIGEST): %: %.o $(STATIC) $(EMULATION_ARCHIVE)
	$(call say,LD)
	$(link) $(LIBS)
REPLAYED  := $(BUILD)/tests/replay/run.o
$(BUILD)/tests/test_replay: $(REPLAYED) | $(REPLAY)
$(REPLAY): $(BUILD)/tests/replay/main.o $(REPLAYED) $(STATIC) $(EMULATION_ARCHIVE)
	$(call say,LD)
	$(link) $(LIBS)
$(FUZZERS): %: %.o $(STATIC)
	$(call say,LD)
	$(link) -fsanitize=fuzzer $(LIBS)
$(BUILD)/tests/fuzz/parts $(SEEDS): $(BUILD)/tests/fuzz/optimizers.o
$(BUILD)/tests/fuzz/rules: $(RULES)
$(SEEDS): %: %.o $(STATIC)
	$(call say,LD)
	$(link) $(LIBS)
fuzzers: $(FUZZERS) $(SEEDS)
$(BUILD)/tests/preload/program: $(BUILD)/tests/preload/program_cases.o
$(BUILD)/tests/preload/streams: $(BUILD)/tests/preload/trainers.o
$(UNLINKED): %: %.o
	$(call say,LD)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(MPI_LIBS) -lm -ldl
NCCL_PROGRAM_LIBS = $(if $(is_emulated),$(EMULATED_LIBS),$(CUDA_LIBS))
$(UNLINKED_NCCL): $(call objects,tests/preload/nccl_*.c) $(EMULATION_SHARED)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) $(NCCL_PROGRAM_LIBS) -lm

# The objects of examples that tests link.
$(addprefix $(BUILD)/tests/,test_training test_training_parts): $(BUILD)/examples/train_images.o \
  $(TRAINING) $(IMAGES)
$(BUILD)/tests/test_training_parts: $(BUILD)/examples/text.o $(EXAMPLES)
$(BUILD)/tests/test_models: $(addprefix $(BUILD)/examples/,transformer.o network.o log_bilinear.o) $(MODEL)

# The codecs take a minute to compile; tests/mutation/run sets CODEC_CFLAGS to compile them faster.
$(call objects,compression/codec_*.c): OWN_CFLAGS = $(CODEC_CFLAGS)

# The fault harness (tests/faults/faults.h). It does not use Criterion, since its ranks must be
# killable.
$(FAULTS): $(call objects,tests/faults/*.c tests/support_ports.c) $(STATIC) $(EMULATION_ARCHIVE)
	$(call say,LD)
	$(link) $(LIBS)
