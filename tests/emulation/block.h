/*
 * Runs a grid at once, on the calling OS thread.
 */
#ifndef EMULATION_BLOCK_H
#define EMULATION_BLOCK_H

#include <functional>

#include "vector_types.h"

namespace emulation {
void run_grid(dim3 grid, dim3 block, const std::function<void()> &thread);
}

#endif
