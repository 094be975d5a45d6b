/* A kernel's test: the same work on both sides of a scene, case after case. */
#ifndef ONEBIT_TESTS_GPU_KERNEL_TEST_H
#define ONEBIT_TESTS_GPU_KERNEL_TEST_H

#include "tests/gpu/cases.h"

struct kernel_test {
  struct kernel_cases cases;
  bool once; /* for all chunks, not for each */
  /* Processes a chunk as the library does, in the scene's host memory; and as the device does. */
  void (*host)(struct scene *scene, size_t chunk);
  cudaError_t (*device)(struct scene *scene, size_t chunk);
  /* Makes both alike where they may differ; or NULL. */
  void (*even_out)(struct scene *scene);
};

/* Walks the kernel's cases, and checks that both memories are the same after each. */
void kernel_walk(const struct kernel_test *test);

/* Sets the expected state of the device from the host's work so far. */
void kernel_expect_flags(struct scene *scene, bool server);

#endif
