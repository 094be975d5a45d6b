/*
 * Fibers. The switch between fibers is written in assembly for x86-64. Other processors use
 * swapcontext(), which makes a system call for the signal mask, and that call costs more than the
 * rest of the emulation.
 */
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulation_device.h"
#include "inside.h"

#if EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {

namespace {

/* AddressSanitizer makes frames several times larger. */
#if EMULATION_ASAN
constexpr size_t STACK = 512 << 10;
#else
constexpr size_t STACK = 128 << 10;
#endif

} // namespace

#ifdef __x86_64__

/* Saves the stack pointer and the registers that a call must preserve. Loads those of the other
 * context. */
extern "C" void emulation_switch(void **save, void *load);
asm(R"(
.text
.globl emulation_switch
.hidden emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
.globl emulation_enter
.hidden emulation_enter
.type emulation_enter, @function
emulation_enter:
  movq %r12, %rdi
  xorl %ebp, %ebp
  call *%rbx
  ud2
.size emulation_enter, .-emulation_enter
)");
extern "C" void emulation_enter();

/* Fills a stack as emulation_switch leaves it: r15, r14, r13, r12, rbx, rbp, the return address. */
static void prepare(context &fresh, void *top, void (*entry)(void *), void *argument) {
  void **frame = static_cast<void **>(top) - 9; /* a call finds the stack aligned to 16 */
  frame[3] = argument;
  frame[4] = reinterpret_cast<void *>(entry);
  frame[6] = reinterpret_cast<void *>(emulation_enter);
  fresh.stack_pointer = frame;
}

static void swap(context &from, context &to) {
  emulation_switch(&from.stack_pointer, to.stack_pointer);
}

#else

/* makecontext() passes arguments as ints, so an address takes two of them. */
static void enter(unsigned entry_high, unsigned entry_low, unsigned high, unsigned low) {
  auto address = [](unsigned upper, unsigned lower) {
    return static_cast<uintptr_t>(static_cast<uint64_t>(upper) << 32 | lower);
  };
  reinterpret_cast<void (*)(void *)>(address(entry_high, entry_low))(
      reinterpret_cast<void *>(address(high, low)));
}

static void prepare(context &fresh, void *, void (*entry)(void *), void *argument) {
  uint64_t code = reinterpret_cast<uintptr_t>(entry);
  uint64_t data = reinterpret_cast<uintptr_t>(argument);
  getcontext(&fresh.registers);
  fresh.registers.uc_stack.ss_sp = const_cast<void *>(fresh.bottom);
  fresh.registers.uc_stack.ss_size = fresh.size;
  fresh.registers.uc_link = nullptr;
  makecontext(&fresh.registers, reinterpret_cast<void (*)()>(enter), 4,
              static_cast<unsigned>(code >> 32), static_cast<unsigned>(code),
              static_cast<unsigned>(data >> 32), static_cast<unsigned>(data));
}

static void swap(context &from, context &to) { swapcontext(&from.registers, &to.registers); }

#endif

/* An inaccessible page below the stack turns an overflow into a fault instead of a wrong result. */
fiber::fiber(void (*entry)(void *), void *argument) {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  mapping_ = mmap(nullptr, STACK + page, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED || mprotect(mapping_, page, PROT_NONE))
    fatal("no memory for the stack of a CUDA thread");
  bottom = static_cast<char *>(mapping_) + page;
  size = STACK;
  prepare(*this, static_cast<char *>(mapping_) + page + STACK, entry, argument);
}

fiber::~fiber() {
  const size_t bytes = STACK + static_cast<size_t>(sysconf(_SC_PAGESIZE));
#if EMULATION_ASAN
  __asan_unpoison_memory_region(mapping_, bytes); /* its frames are poisoned; other memory may be
                                                   * mapped here */
#endif
  munmap(mapping_, bytes);
}

void fiber::begin(context &caller) {
#if EMULATION_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &caller.bottom, &caller.size);
#else
  static_cast<void>(caller);
#endif
}

void switch_context(context &from, context &to) {
#if EMULATION_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
#endif
  swap(from, to);
#if EMULATION_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

} // namespace emulation
