# The Makefile includes these rules of the examples. They need its `objects`, `link` and STATIC, and its
# switches.

TRAININGS := $(addprefix $(BUILD)/examples/,train_text train_images train_words)
EXAMPLES  := $(TRAININGS) $(addprefix $(BUILD)/examples/,$(if $(is_darwin),,outer) \
               $(if $(has_mpi),adam allreduce custom method mpi_calls survive train_plain $(if $(has_nccl),stream)))

# The objects that all trainings share, and those of each training.
MODEL    := $(call objects,examples/model.c)
TRAINING := $(MODEL) $(filter-out $(TRAININGS:=.o) %/train_plain.o %/train_main.o,\
              $(call objects,tools/options.c examples/train_*.c))
IMAGES   := $(call objects,examples/images.c examples/network.c)
$(BUILD)/examples/train_text: $(call objects,examples/text.c examples/transformer.c)
$(BUILD)/examples/train_images: $(IMAGES)
$(BUILD)/examples/train_words: $(call objects,examples/text.c examples/log_bilinear.c)
$(TRAININGS): $(BUILD)/examples/train_main.o $(TRAINING)

# All examples use the library, except train_plain.
$(filter-out %/train_plain,$(EXAMPLES)): %: %.o $(STATIC) $(EMULATION_ARCHIVE)
	$(call say,LD)
	$(link) $(OWN_LIBS) $(LIBS)
$(BUILD)/examples/train_plain: %: %.o
	$(call say,LD)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $< $(MPI_LIBS) -lm
