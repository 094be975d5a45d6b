/*
 * Fibers: stacks that one OS thread switches between.
 */
#ifndef EMULATION_FIBER_H
#define EMULATION_FIBER_H

#include <stddef.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace emulation {

/* An execution context: an OS thread's own stack, or a fiber's. */
struct context {
#if defined(__x86_64__) || defined(__aarch64__)
  void *stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  /* The sanitizers track stacks and need these. */
  const void *bottom = nullptr;
  size_t size = 0;
  void *fake_stack = nullptr;
  void *thread_state = nullptr;
};

/* Calls entry(argument) on its own stack at the first switch to it. entry never returns. */
class fiber : public context {
public:
  fiber(void (*entry)(void *), void *argument);
  ~fiber();
  fiber(const fiber &) = delete;
  fiber &operator=(const fiber &) = delete;

  void begin(context &caller); /* the first thing that entry does */

private:
  void *mapping_;
};

/* Stops `from`, the running context, and continues `to`. */
void switch_context(context &from, context &to);

/* Registers the OS thread's own stack with the sanitizers; called before the first switch away from
 * it. */
void adopt_thread(context &own);

} // namespace emulation

#endif
