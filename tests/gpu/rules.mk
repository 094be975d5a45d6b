# The tests that need a GPU or the emulated device. The Makefile includes this file unless CUDA is 0.
# It needs STATIC with the kernels in it, `objects`, `link`, CUDA_CFLAGS (where cuda_runtime_api.h is)
# and CUDA_LIBS.

GPU_TESTS_PROGRAM := $(BUILD)/tests/gpu/gpu_tests
GPU_TESTS_OBJECTS := $(call objects,tests/gpu/*.c) $(addprefix $(BUILD)/tests/support_,optimizers.o \
                       sample.o wrong_calls.o)

.PHONY: gpu-tests
gpu-tests: $(GPU_TESTS_PROGRAM)

$(GPU_TESTS_OBJECTS): ISA = $(CUDA_CFLAGS)
$(GPU_TESTS_PROGRAM): $(GPU_TESTS_OBJECTS) $(STATIC) $(EMULATION_ARCHIVE)
	$(call say,LD)
	$(link) $(CUDA_LIBS) $(LIBS)
