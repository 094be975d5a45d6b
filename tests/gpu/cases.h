/* The table of cases that every kernel is held to: the product of layouts, blocks and sizes of
 * group, the other options spread over it. */
#ifndef ONEBIT_TESTS_GPU_CASES_H
#define ONEBIT_TESTS_GPU_CASES_H

#include "tests/gpu/scene.h"
#include "tests/support_sample.h"

/* The properties of a kernel's cases. */
struct kernel_cases {
  unsigned modes; /* a bit a scene_mode */
  bool dense, one_scale, only_one_scale, momentum, stop, from_values, weighed, served;
};

#define MODE(mode) (1u << (mode))

/* The cases to walk. The caller frees the rows. */
struct sample kernel_cases_sample(const struct kernel_cases *of);

/* Case number `index`; false where the kernel has no such case. */
bool kernel_case(const struct kernel_cases *of, size_t index, struct scene_case *what);

#endif
