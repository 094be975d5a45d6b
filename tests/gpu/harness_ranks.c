/* Manages the memory that ranks share, and runs ranks as threads. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/gpu/harness_inside.h"

struct rank_arguments gpu_rank_process;
struct running gpu_running;

static pthread_barrier_t barrier; /* for the ranks that are threads */

static struct {
  int file;
  void *memory;
  size_t bytes;
} areas[MOST_AREAS];
static size_t area_count;

static struct {
  char root[32]; /* empty until a directory is made */
  unsigned count;
} directories;

int gpu_time_limit(void) {
  const char *text = getenv("ONEBIT_TEST_LIMIT");
  long seconds = text ? strtol(text, NULL, 10) : 0;
  return seconds > 0 ? (int)seconds : 120;
}

void gpu_begin_test(const char *program, const char *test) {
  gpu_running = (struct running){program, test, 0};
}

static int remove_file(const char *path, const struct stat *facts, int type, struct FTW *place) {
  (void)facts, (void)type, (void)place;
  return remove(path);
}

void gpu_end_test(void) {
  if (directories.root[0])
    CHECK(nftw(directories.root, remove_file, 8, FTW_DEPTH | FTW_PHYS) == 0, "%s is left",
          directories.root);
  directories.root[0] = 0;
  for (size_t i = 0; i < area_count; i++) {
    munmap(areas[i].memory, areas[i].bytes);
    close(areas[i].file);
  }
  area_count = 0;
}

/* --- Data that ranks share */

void gpu_give_up(const char *what) {
  perror(what);
  exit(2);
}

void *gpu_allocate_area(size_t bytes) {
  if (area_count == MOST_AREAS ||
      (gpu_rank_process.taken && area_count == gpu_rank_process.area_count)) {
    fprintf(stderr, "%s: an area more than there can be\n", gpu_running.test);
    exit(2);
  }
  int file = gpu_rank_process.taken ? gpu_rank_process.areas[area_count]
                                    : memfd_create("ranks", MFD_CLOEXEC);
  bytes = bytes ? bytes : 1;
  if (file < 0 || (!gpu_rank_process.taken && ftruncate(file, (off_t)bytes)))
    gpu_give_up("shared memory");
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED)
    gpu_give_up("shared memory");
  areas[area_count].file = file;
  areas[area_count].bytes = bytes;
  areas[area_count++].memory = memory;
  return memory;
}

void gpu_make_directory(char path[GPU_PATH]) {
  if (!directories.root[0]) {
    strcpy(directories.root, "/tmp/onebit-gpu-XXXXXX");
    CHECK(mkdtemp(directories.root), "no directory can be made");
  }
  snprintf(path, GPU_PATH, "%s/%u", directories.root, directories.count++);
  CHECK(mkdir(path, 0700) == 0, "%s cannot be made", path);
}

size_t gpu_list_area_files(int files[MOST_AREAS]) {
  for (size_t i = 0; i < area_count; i++)
    files[i] = areas[i].file;
  return area_count;
}

/* --- Threads */

struct rank_thread {
  struct gpu_rank self;
  gpu_rank_body *body;
  void *context;
  pthread_t thread;
};

static void *run_thread(void *argument) {
  struct rank_thread *thread = argument;
  check_case("rank %d of %d", thread->self.rank, thread->self.size);
  thread->body(&thread->self, thread->context);
  onebit_comm_destroy(thread->self.comm);
  return NULL;
}

bool gpu_await_ranks(void) {
  return !gpu_rank_process.taken && pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD;
}

/* Joins a thread. If it does not end in time, the whole program ends. */
static void join_thread(const struct rank_thread *thread, const struct timespec *until) {
  if (pthread_timedjoin_np(thread->thread, NULL, until) == 0)
    return;
  printf("FAILED   %s: rank %d of %d has not ended after %d s\n\n0 passed, 1 failed\n",
         gpu_running.test, thread->self.rank, thread->self.size, gpu_time_limit());
  fflush(stdout);
  _exit(1);
}

bool gpu_run_threads(int size, const onebit_comm_t *comms, gpu_rank_body *body, void *context) {
  struct rank_thread threads[MOST_RANKS];
  struct timespec until;
  size_t failed = failure_count();
  pthread_barrier_init(&barrier, NULL, (unsigned)size);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += gpu_time_limit();
  for (int r = 0; r < size; r++) {
    threads[r] = (struct rank_thread){{r, size, comms ? comms[r] : NULL}, body, context, 0};
    if (pthread_create(&threads[r].thread, NULL, run_thread, &threads[r]))
      gpu_give_up("thread");
  }
  for (int r = 0; r < size; r++)
    join_thread(&threads[r], &until);
  pthread_barrier_destroy(&barrier);
  return failure_count() == failed && !skip_reason();
}

bool gpu_size_is_usable(int size) {
  return CHECK(size > 0 && size <= MOST_RANKS, "a group of %d ranks", size);
}

bool gpu_run_loopback(int size, gpu_rank_body *body, void *context) {
  onebit_comm_t comms[MOST_RANKS];
  if (gpu_rank_process.taken)
    return true; /* this process is a rank of a later gpu_run_ranks call */
  if (!gpu_size_is_usable(size) ||
      !CHECK_STATUS(onebit_comm_create_loopback(size, comms), ONEBIT_OK))
    return false;
  return gpu_run_threads(size, comms, body, context);
}
