# The emulated CUDA device, for machines without a GPU: included by the Makefile at CUDA=emulated.
# Compile .cu files, and C files that call CUDA, with EMULATION_INCLUDES; link EMULATION_ARCHIVE and
# EMULATION_LIBS behind them.

CXX                ?= g++
EMULATION_TESTS    := $(wildcard tests/emulation/self_test*.cpp)
EMULATION_SOURCES  := $(filter-out $(EMULATION_TESTS),$(wildcard tests/emulation/*.cpp))
EMULATION_OBJECTS  := $(patsubst %.cpp,$(BUILD)/%.o,$(EMULATION_SOURCES))
EMULATION_ARCHIVE  := $(BUILD)/tests/emulation/libemulation.a
EMULATION_SELFTEST := $(BUILD)/tests/emulation/self_test
EMULATION_INCLUDES := -Itests/emulation/include
EMULATION_CXXFLAGS  = -std=c++17 $(EMULATION_INCLUDES) -I. -Iinclude -Wall -Wextra -Wshadow -Werror -O2 -g -fPIC \
  -ffp-contract=off -pthread $(SAN_FLAGS)
EMULATION_LIBS     := -lstdc++ -lm -pthread

$(BUILD)/tests/emulation/%.o: tests/emulation/%.cpp
	$(call say,CXX)
	$(Q)mkdir -p $(@D); $(CXX) $(EMULATION_CXXFLAGS) -MMD -MP -c -o $@ $<

$(EMULATION_ARCHIVE): $(EMULATION_OBJECTS)
	$(call say,AR)
	$(Q)rm -f $@; $(AR) rcs $@ $^

$(EMULATION_SELFTEST): $(patsubst %.cpp,$(BUILD)/%.o,$(EMULATION_TESTS)) $(EMULATION_ARCHIVE)
	$(call say,LD)
	$(Q)$(CXX) $(SAN_FLAGS) -o $@ $^ $(EMULATION_LIBS)
