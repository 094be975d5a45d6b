/*
 * A small harness for the tests that need a GPU, because machines with a GPU often have neither
 * Criterion nor MPI. One program, gpu_tests, contains all of these tests. It also runs on the
 * emulated device (tests/emulation).
 *
 * A file of tests ends with a table of them:
 *
 *   static const struct gpu_test tests[] = {{"adds up", adds_up, ANY_DEVICE}};
 *   GPU_SUITE("sums", tests)
 *
 * A check that fails is reported, and the test continues, as in tests/support.h.
 */
#ifndef ONEBIT_TESTS_GPU_HARNESS_H
#define ONEBIT_TESTS_GPU_HARNESS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

#include "onebit/onebit.h"
#include "tests/support_sample.h"

/* ---- Tests (harness.c) ---- */

/* The device that a test needs: any device; the emulated device, which counts work and makes calls
 * fail on request; or none. */
enum gpu_needs { ANY_DEVICE, EMULATED, NO_DEVICE };

struct gpu_test {
  const char *name;
  void (*run)(void);
  enum gpu_needs needs;
};

struct gpu_suite {
  const char *name;
  const struct gpu_test *tests;
  size_t count;
  struct gpu_suite *next;
};

#define GPU_SUITE(name, tests)                                                                     \
  static struct gpu_suite gpu_suite = {name, tests, sizeof(tests) / sizeof(tests)[0], NULL};       \
  __attribute__((constructor)) static void gpu_suite_enter(void) { gpu_suite_add(&gpu_suite); }
void gpu_suite_add(struct gpu_suite *suite);

/* Like calloc, but ends the program when out of memory. */
void *gpu_allocate(size_t count, size_t size);

/* Copies between host and device, in either direction. At return every stream sees the complete
 * copy. */
bool gpu_copy(void *to, const void *from, size_t bytes);

/* ---- Checks (harness.c), which any thread may call ---- */

/* Reports a failure, with a message in printf's format, if the condition does not hold. Returns the
 * condition. */
#define CHECK(condition, ...) check_note((condition), __FILE__, __LINE__, __VA_ARGS__)
bool check_note(bool holds, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* CHECK_CUDA checks that a CUDA call succeeded. CHECK_STATUS checks that a call of the library
 * returned `wanted`. */
#define CHECK_CUDA(call) check_cuda((call), #call, __FILE__, __LINE__)
bool check_cuda(cudaError_t got, const char *call, const char *file, int line);
#define CHECK_STATUS(call, wanted) check_status((call), (wanted), #call, __FILE__, __LINE__)
bool check_status(onebit_status_t got, onebit_status_t wanted, const char *call, const char *file,
                  int line);

/* Checks that the message of this thread's last error contains `part`. */
#define CHECK_MESSAGE(part) check_message((part), __FILE__, __LINE__)
bool check_message(const char *part, const char *file, int line);

/* Sets the name of the case, which this thread's later failures print. */
void check_case(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Ends a test, or the body of a rank, that cannot run on this machine, and records the reason. */
#define SKIP(...)                                                                                  \
  do {                                                                                             \
    check_skip(__VA_ARGS__);                                                                       \
    return;                                                                                        \
  } while (0)
void check_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- Ranks (harness_ranks.c, harness_processes.c) ---- */

struct gpu_rank {
  int rank, size;
  onebit_comm_t comm; /* this rank's communicator; NULL in gpu_run_ranks */
};

typedef void gpu_rank_body(const struct gpu_rank *self, void *context);

/* Runs the body on `size` ranks, each of which is a process. NCCL sees each process as a host of
 * its own, so many ranks can share one GPU. On the emulated device the ranks are threads. Returns
 * false if a rank failed or was skipped, which the function reports.
 *
 * Each process executes this program again and runs the test from its beginning up to this call, so
 * that it has its own `context`. The part of a test before this call must therefore be quick and
 * deterministic. */
bool gpu_run_ranks(int size, gpu_rank_body *body, void *context);

/* Runs the body on ranks that are threads of this process, with communicators over loopback. */
bool gpu_run_loopback(int size, gpu_rank_body *body, void *context);

/* If ranks are threads, waits for all of them and returns true on one. If they are processes,
 * returns false at once. */
bool gpu_await_ranks(void);

/* Allocates zeroed memory that a test shares with the ranks it starts later. The memory is freed
 * when the test ends. */
void *gpu_allocate_area(size_t bytes);

/* Makes a new directory, which is removed when the test ends. */
enum { GPU_PATH = 64 };
void gpu_make_directory(char path[GPU_PATH]);

#endif
