# The emulated CUDA device, for machines without a GPU. The Makefile includes this file if
# CUDA=emulated. .cu files are compiled with $(CXX) and EMULATION_CUFLAGS, C files that call CUDA with
# EMULATION_INCLUDES. Programs are linked with EMULATION_ARCHIVE followed by EMULATION_LIBS. A program
# and a library that is preloaded into it must share one device, so both link EMULATION_SHARED
# instead.

EMULATION_TESTS    := $(wildcard tests/emulation/self_test*.cpp)
EMULATION_SOURCES  := $(filter-out $(EMULATION_TESTS),$(wildcard tests/emulation/*.cpp))
EMULATION_OBJECTS  := $(patsubst %.cpp,$(BUILD)/%.o,$(EMULATION_SOURCES))
EMULATION_ARCHIVE  := $(BUILD)/tests/emulation/libemulation.a
EMULATION_SHARED   := $(BUILD)/tests/emulation/libemulation.so
EMULATION_SELFTEST := $(BUILD)/tests/emulation/self_test
EMULATION_INCLUDES := -Itests/emulation/include
EMULATION_CXXFLAGS  = -std=c++17 $(EMULATION_INCLUDES) -I. -Iinclude -Wall -Wextra -Wshadow \
  -Werror -O2 -g -fPIC -ffp-contract=off -pthread $(SAN_FLAGS)
# A misaligned vector access ends the process, as on the hardware. The trap needs no sanitizer
# library.
EMULATION_CUFLAGS   = -x c++ $(EMULATION_CXXFLAGS) -Wno-unknown-pragmas -fsanitize=alignment \
  -fsanitize-undefined-trap-on-error
EMULATION_LIBS     := -lstdc++ -lm -pthread

$(BUILD)/tests/emulation/%.o: tests/emulation/%.cpp
	$(call say,CXX)
	$(Q)mkdir -p $(@D); $(CXX) $(EMULATION_CXXFLAGS) -MMD -MP -c -o $@ $<

$(EMULATION_ARCHIVE): $(EMULATION_OBJECTS)
	$(call say,AR)
	$(Q)rm -f $@; $(AR) rcs $@ $^

# Calls inside the library are bound to the library itself, as in CUDA's libraries. A library that is
# preloaded before NCCL must see only the program's calls.
$(EMULATION_SHARED): $(EMULATION_OBJECTS)
	$(call say,LD)
	$(Q)$(CXX) -shared -Wl,-soname,$(@F) -Wl,-Bsymbolic-functions \
	  $(if $(SAN),,-Wl$(comma)-z$(comma)defs) $(SAN_FLAGS) -o $@ $^ $(EMULATION_LIBS)

# The same test is linked once with the archive and once with the shared library.
EMULATION_TEST_OBJECTS := $(patsubst %.cpp,$(BUILD)/%.o,$(EMULATION_TESTS))
$(EMULATION_SELFTEST): $(EMULATION_TEST_OBJECTS) $(EMULATION_ARCHIVE)
	$(call say,LD)
	$(Q)$(CXX) $(SAN_FLAGS) -o $@ $^ $(EMULATION_LIBS)
$(EMULATION_SELFTEST)_shared: $(EMULATION_TEST_OBJECTS) $(EMULATION_SHARED)
	$(call say,LD)
	$(Q)$(CXX) $(SAN_FLAGS) -Wl,-rpath,'$$ORIGIN' -o $@ $^ $(EMULATION_LIBS)
