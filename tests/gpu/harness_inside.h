/* The declarations that the parts of the harness share. */
#ifndef ONEBIT_TESTS_GPU_HARNESS_INSIDE_H
#define ONEBIT_TESTS_GPU_HARNESS_INSIDE_H

#include "tests/gpu/harness.h"

/* ---- Checks of the test that is running ---- */

size_t failure_count(void);
const char *skip_reason(void); /* the reason for a skip, or NULL */

/* ---- Ranks ---- */

#define MOST_RANKS 64
#define MOST_AREAS 256

/* The arguments of a process that runs one rank. They include the number of the gpu_run_ranks call
 * that started the process, and the files of the shared areas. */
struct rank_arguments {
  bool taken;
  int rank, size;
  unsigned call;
  int areas[MOST_AREAS];
  size_t area_count;
};
extern struct rank_arguments gpu_rank_process;

/* Reads from the command line which rank this process is. Returns false if the arguments are
 * invalid. */
bool gpu_parse_rank(const char *rank, const char *size, const char *group);

/* The program, and the test that is running. */
struct running {
  const char *program, *test;
  unsigned calls; /* the number of calls of gpu_run_ranks so far */
};
extern struct running gpu_running;

void gpu_begin_test(const char *program, const char *test);
void gpu_end_test(void);

/* Lists the files of the areas that the test has allocated so far. */
size_t gpu_list_area_files(int files[MOST_AREAS]);

/* Returns the time limit in seconds after which ranks are ended, so that ranks that wait for each
 * other for ever do not block the tests. */
int gpu_time_limit(void);

bool gpu_size_is_usable(int size);
void gpu_give_up(const char *what) __attribute__((noreturn));

/* Runs ranks as threads. If comms is NULL, they get no communicators. */
bool gpu_run_threads(int size, const onebit_comm_t *comms, gpu_rank_body *body, void *context);

#endif
