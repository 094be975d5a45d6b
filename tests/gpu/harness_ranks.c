/*
 * Ranks, as processes or as threads, and what they share.
 *
 * NCCL refuses two ranks of one host on one GPU, but lets a process say which host it is on. So each
 * rank is a process that says it is alone on its host, and they talk over sockets. The processes
 * execute the program anew: a process that was only forked could not use CUDA where its parent has.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/gpu/harness.h"

#define MOST_RANKS 64
#define MOST_AREAS 16

/* The exit status of a rank that was skipped. */
#define SKIPPED 77

extern char **environ;

static const char *program_path, *test_name;
static unsigned calls; /* of gpu_ranks, in this test */

static struct {
  int file;
  void *memory;
  size_t bytes;
} areas[MOST_AREAS];
static size_t area_count;

/* Where this process is one rank: of which call, and with which files. */
static struct {
  bool taken;
  int rank, size;
  unsigned call;
  int pipes[MOST_RANKS];
  int areas[MOST_AREAS];
  size_t area_count;
} seat;

/* Ranks that wait for each other for ever must not keep the tests from ending: so long they may
 * take, in seconds. */
static int limit(void) {
  const char *text = getenv("ONEBIT_TEST_LIMIT");
  long seconds = text ? strtol(text, NULL, 10) : 0;
  return seconds > 0 ? (int)seconds : 120;
}

bool gpu_seated(void) { return seat.taken; }

void gpu_ranks_begin(const char *program, const char *test) {
  program_path = program;
  test_name = test;
  calls = 0;
}

void gpu_ranks_end(void) {
  for (size_t i = 0; i < area_count; i++) {
    munmap(areas[i].memory, areas[i].bytes);
    close(areas[i].file);
  }
  area_count = 0;
}

/* --- What they share */

static void give_up(const char *what) {
  perror(what);
  exit(2);
}

void *gpu_area(size_t bytes) {
  if (area_count == MOST_AREAS || (seat.taken && area_count == seat.area_count)) {
    fprintf(stderr, "%s: an area more than there can be\n", test_name);
    exit(2);
  }
  int file = seat.taken ? seat.areas[area_count] : memfd_create("ranks", MFD_CLOEXEC);
  bytes = bytes ? bytes : 1;
  if (file < 0 || (!seat.taken && ftruncate(file, (off_t)bytes)))
    give_up("shared memory");
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED)
    give_up("shared memory");
  areas[area_count].file = file;
  areas[area_count].bytes = bytes;
  areas[area_count++].memory = memory;
  return memory;
}

static bool move_bytes(int file, char *data, size_t size, bool out) {
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
    CHECK(move_bytes(self->from_first, data, size, false), "rank %d hears nothing from rank 0",
          self->rank);
  for (int r = 1; self->rank == 0 && r < self->size; r++)
    CHECK(move_bytes(self->to_others[r], data, size, true), "rank 0 cannot reach rank %d", r);
}

/* --- Threads */

struct rank_thread {
  struct gpu_rank self;
  gpu_rank_body *body;
  void *context;
  pthread_t thread;
};

static void *thread_main(void *argument) {
  struct rank_thread *thread = argument;
  check_case("rank %d of %d", thread->self.rank, thread->self.size);
  thread->body(&thread->self, thread->context);
  onebit_comm_destroy(thread->self.comm);
  return NULL;
}

static void open_pipes(int size, int read_ends[], int write_ends[]) {
  for (int r = 1; r < size; r++) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
      give_up("pipe");
    read_ends[r] = ends[0];
    write_ends[r] = ends[1];
  }
}

static void close_pipes(int size, const int read_ends[], const int write_ends[]) {
  for (int r = 1; r < size; r++) {
    close(read_ends[r]);
    close(write_ends[r]);
  }
}

/* A thread that does not end can only be left behind with the whole program. */
static void join(const struct rank_thread *thread, const struct timespec *until) {
  if (pthread_timedjoin_np(thread->thread, NULL, until) == 0)
    return;
  printf("FAILED   %s: rank %d of %d has not ended after %d s\n\n0 passed, 1 failed\n", test_name,
         thread->self.rank, thread->self.size, limit());
  fflush(stdout);
  _exit(1);
}

static bool run_threads(int size, const onebit_comm_t *comms, gpu_rank_body *body, void *context) {
  struct rank_thread threads[MOST_RANKS];
  int read_ends[MOST_RANKS] = {0}, write_ends[MOST_RANKS] = {0};
  struct timespec until;
  size_t failed = checks_failed();
  open_pipes(size, read_ends, write_ends);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += limit();
  for (int r = 0; r < size; r++) {
    threads[r] = (struct rank_thread){
        {r, size, comms ? comms[r] : NULL, read_ends[r], write_ends}, body, context, 0};
    if (pthread_create(&threads[r].thread, NULL, thread_main, &threads[r]))
      give_up("thread");
  }
  for (int r = 0; r < size; r++)
    join(&threads[r], &until);
  close_pipes(size, read_ends, write_ends);
  return checks_failed() == failed && !checks_skipped();
}

static bool size_is_usable(int size) {
  return CHECK(size > 0 && size <= MOST_RANKS, "a group of %d ranks", size);
}

bool gpu_threads(int size, gpu_rank_body *body, void *context) {
  onebit_comm_t comms[MOST_RANKS];
  if (seat.taken)
    return true; /* this process is wanted further on */
  if (!size_is_usable(size) || !CHECK_STATUS(onebit_comm_create_loopback(size, comms), ONEBIT_OK))
    return false;
  return run_threads(size, comms, body, context);
}

#ifdef ONEBIT_EMULATED_CUDA

bool gpu_seat_take(const char *rank, const char *size, const char *group) {
  fprintf(stderr, "rank %s of %s (%s): on the emulated device ranks are threads\n", rank, size,
          group);
  return false;
}

bool gpu_ranks(int size, gpu_rank_body *body, void *context) {
  return size_is_usable(size) && run_threads(size, NULL, body, context);
}

#else

/* --- Processes */

struct rank_process {
  pid_t pid;
  FILE *words; /* its output, shown when it fails */
  bool ended;
  int status;
};

/* CALL:PIPE,PIPE,...:AREA,AREA,... Numbers of files, which are inherited. */
static void tell_group(char *text, size_t room, int rank, int size, const int *read_ends,
                       const int *write_ends) {
  size_t at = (size_t)snprintf(text, room, "%u:", calls);
  for (int r = 1; r < size; r++)
    if (rank == 0 || r == rank)
      at += (size_t)snprintf(text + at, room - at, "%d,", rank == 0 ? write_ends[r] : read_ends[r]);
  at += (size_t)snprintf(text + at, room - at, ":");
  for (size_t i = 0; i < area_count; i++)
    at += (size_t)snprintf(text + at, room - at, "%d,", areas[i].file);
}

static size_t read_numbers(const char **text, int *numbers, size_t most) {
  size_t count = 0;
  while (count < most && **text >= '0' && **text <= '9') {
    char *end;
    numbers[count++] = (int)strtol(*text, &end, 10);
    *text = *end == ',' ? end + 1 : end;
  }
  return count;
}

/* A rank must not outlive the test that waits for it. */
bool gpu_seat_take(const char *rank, const char *size, const char *group) {
  char *rest;
  if (!size || !group)
    return false;
  seat.taken = true;
  seat.rank = (int)strtol(rank, NULL, 10);
  seat.size = (int)strtol(size, NULL, 10);
  seat.call = (unsigned)strtoul(group, &rest, 10);
  const char *at = rest + (*rest == ':');
  int first = seat.rank == 0 ? 1 : 0; /* rank r's pipe of rank 0 is pipes[r], of itself pipes[0] */
  read_numbers(&at, seat.pipes + first, MOST_RANKS - 1);
  at += *at == ':';
  seat.area_count = read_numbers(&at, seat.areas, MOST_AREAS);
  signal(SIGPIPE, SIG_IGN);
  return size_is_usable(seat.size) && prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;
}

/* In the process that is this rank: does what it is for. */
static void sit(gpu_rank_body *body, void *context) {
  struct gpu_rank self = {seat.rank, seat.size, NULL, seat.pipes[0], seat.pipes};
  check_case("rank %d of %d", self.rank, self.size);
  body(&self, context);
  if (checks_skipped())
    puts(checks_skipped());
  exit(checks_failed() ? 1 : checks_skipped() ? SKIPPED : 0);
}

/* The environment of one rank: alone on its host, over sockets. */
static char **rank_environment(int rank) {
  static char host[32];
  static char *given[] = {host, "NCCL_SOCKET_IFNAME=lo", "NCCL_IB_DISABLE=1", "NCCL_NET=Socket"};
  size_t count = sizeof given / sizeof given[0];
  snprintf(host, sizeof host, "NCCL_HOSTID=rank%d", rank);
  for (char **variable = environ; *variable; variable++)
    count++;
  char **environment = gpu_allocate(count + 1, sizeof *environment), **at = environment;
  for (size_t i = 0; i < sizeof given / sizeof given[0]; i++)
    *at++ = given[i];
  for (char **variable = environ; *variable; variable++)
    if (strncmp(*variable, "NCCL_HOSTID=", 12) && strncmp(*variable, "NCCL_SOCKET_IFNAME=", 19) &&
        strncmp(*variable, "NCCL_IB_DISABLE=", 16) && strncmp(*variable, "NCCL_NET=", 9))
      *at++ = *variable;
  return environment;
}

/* To duplicate a file onto itself lets the new process inherit it. */
static void inherit(posix_spawn_file_actions_t *actions, int rank, int size, const int *read_ends,
                    const int *write_ends, int words) {
  posix_spawn_file_actions_adddup2(actions, words, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(actions, words, STDERR_FILENO);
  for (int r = 1; r < size; r++)
    if (rank == 0 || r == rank) {
      int end = rank == 0 ? write_ends[r] : read_ends[r];
      posix_spawn_file_actions_adddup2(actions, end, end);
    }
  for (size_t i = 0; i < area_count; i++)
    posix_spawn_file_actions_adddup2(actions, areas[i].file, areas[i].file);
}

static void start_process(struct rank_process *process, int rank, int size, const int *read_ends,
                          const int *write_ends) {
  char group[1024], rank_text[16], size_text[16];
  posix_spawn_file_actions_t actions;
  *process = (struct rank_process){.words = tmpfile()};
  if (!process->words || posix_spawn_file_actions_init(&actions))
    give_up("process");
  fcntl(fileno(process->words), F_SETFD, FD_CLOEXEC);
  inherit(&actions, rank, size, read_ends, write_ends, fileno(process->words));
  tell_group(group, sizeof group, rank, size, read_ends, write_ends);
  snprintf(rank_text, sizeof rank_text, "%d", rank);
  snprintf(size_text, sizeof size_text, "%d", size);
  char *arguments[] = {
      (char *)program_path, "--rank", rank_text, "--size", size_text, "--group", group, "--test",
      (char *)test_name,    NULL};
  char **environment = rank_environment(rank);
  errno = posix_spawn(&process->pid, "/proc/self/exe", &actions, NULL, arguments, environment);
  if (errno)
    give_up("process");
  free(environment);
  posix_spawn_file_actions_destroy(&actions);
}

static void end_process(struct rank_process *process) {
  if (!process->ended)
    kill(process->pid, SIGKILL);
  while (!process->ended && waitpid(process->pid, &process->status, 0) < 0 && errno == EINTR)
    continue;
  process->ended = true;
}

static bool went_well(const struct rank_process *process) {
  return WIFEXITED(process->status) &&
         (WEXITSTATUS(process->status) == 0 || WEXITSTATUS(process->status) == SKIPPED);
}

/* Until all have ended; when one has failed, the others get a few seconds to notice. */
static void await(struct rank_process *processes, int size) {
  long left = limit() * 100L;
  for (int running = size; running > 0 && left > 0; left--) {
    running = 0;
    for (int r = 0; r < size; r++) {
      struct rank_process *process = &processes[r];
      if (!process->ended && waitpid(process->pid, &process->status, WNOHANG) == process->pid) {
        process->ended = true;
        if (!went_well(process) && left > 500)
          left = 500;
      }
      running += !process->ended;
    }
    nanosleep(&(struct timespec){0, 10000000}, NULL);
  }
}

static void show_words(const struct rank_process *process, int rank) {
  char line[1024];
  rewind(process->words);
  while (fgets(line, sizeof line, process->words))
    printf("  [rank %d] %s%s", rank, line, strchr(line, '\n') ? "" : "\n");
}

static bool judge(struct rank_process *process, int rank, int size) {
  bool in_time = process->ended;
  end_process(process);
  bool well = in_time && went_well(process);
  if (!well)
    show_words(process, rank);
  if (!in_time)
    CHECK(false, "rank %d of %d had to be ended", rank, size);
  else if (WIFSIGNALED(process->status))
    CHECK(false, "rank %d of %d: %s", rank, size, strsignal(WTERMSIG(process->status)));
  else if (!well)
    CHECK(false, "rank %d of %d exited with %d", rank, size, WEXITSTATUS(process->status));
  else if (WEXITSTATUS(process->status) == SKIPPED) {
    char words[256] = "";
    rewind(process->words);
    while (fgets(words, sizeof words, process->words))
      words[strcspn(words, "\n")] = 0;
    check_skip("%s", words);
    well = false;
  }
  fclose(process->words);
  return well;
}

bool gpu_ranks(int size, gpu_rank_body *body, void *context) {
  struct rank_process processes[MOST_RANKS];
  int read_ends[MOST_RANKS] = {0}, write_ends[MOST_RANKS] = {0};
  calls++;
  if (seat.taken && calls == seat.call)
    sit(body, context);
  if (seat.taken)
    return true; /* it is wanted further on */
  if (!size_is_usable(size))
    return false;
  open_pipes(size, read_ends, write_ends);
  for (int r = 0; r < size; r++)
    start_process(&processes[r], r, size, read_ends, write_ends);
  close_pipes(size, read_ends, write_ends);
  await(processes, size);
  bool well = true;
  for (int r = 0; r < size; r++)
    well &= judge(&processes[r], r, size);
  return well;
}

#endif
