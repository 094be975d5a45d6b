/* The memory that ranks share, and ranks that are threads. */
#define _GNU_SOURCE
#include <errno.h>
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

static bool transfer_bytes(int file, char *data, size_t size, bool out) {
  while (size) {
    ssize_t moved = out ? write(file, data, size) : read(file, data, size);
    if (moved < 0 && errno == EINTR)
      continue;
    if (moved <= 0)
      return false;
    data += moved;
    size -= (size_t)moved;
  }
  return true;
}

void gpu_broadcast(const struct gpu_rank *self, void *data, size_t size) {
  if (self->rank > 0)
    CHECK(transfer_bytes(self->from_first, data, size, false), "rank %d hears nothing from rank 0",
          self->rank);
  for (int r = 1; self->rank == 0 && r < self->size; r++)
    CHECK(transfer_bytes(self->to_others[r], data, size, true), "rank 0 cannot reach rank %d", r);
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

void gpu_open_pipes(int size, int read_ends[], int write_ends[]) {
  for (int r = 1; r < size; r++) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
      gpu_give_up("pipe");
    read_ends[r] = ends[0];
    write_ends[r] = ends[1];
  }
}

void gpu_close_pipes(int size, const int read_ends[], const int write_ends[]) {
  for (int r = 1; r < size; r++) {
    close(read_ends[r]);
    close(write_ends[r]);
  }
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
  int read_ends[MOST_RANKS] = {0}, write_ends[MOST_RANKS] = {0};
  struct timespec until;
  size_t failed = failure_count();
  gpu_open_pipes(size, read_ends, write_ends);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += gpu_time_limit();
  for (int r = 0; r < size; r++) {
    threads[r] = (struct rank_thread){
        {r, size, comms ? comms[r] : NULL, read_ends[r], write_ends}, body, context, 0};
    if (pthread_create(&threads[r].thread, NULL, run_thread, &threads[r]))
      gpu_give_up("thread");
  }
  for (int r = 0; r < size; r++)
    join_thread(&threads[r], &until);
  gpu_close_pipes(size, read_ends, write_ends);
  return failure_count() == failed && !skip_reason();
}

bool gpu_size_is_usable(int size) {
  return CHECK(size > 0 && size <= MOST_RANKS, "a group of %d ranks", size);
}

bool gpu_run_loopback(int size, gpu_rank_body *body, void *context) {
  onebit_comm_t comms[MOST_RANKS];
  if (gpu_rank_process.taken)
    return true; /* this process runs a later call of the test */
  if (!gpu_size_is_usable(size) ||
      !CHECK_STATUS(onebit_comm_create_loopback(size, comms), ONEBIT_OK))
    return false;
  return gpu_run_threads(size, comms, body, context);
}
