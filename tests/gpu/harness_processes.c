/*
 * Ranks that are processes.
 *
 * NCCL refuses two ranks of one host on one GPU, but lets a process set its host's name
 * (NCCL_HOSTID). Each rank is therefore a process with a host name of its own, and the ranks
 * communicate over sockets. The processes execute the program anew, because a process that was only
 * forked cannot use CUDA if its parent has used CUDA. On the emulated device the ranks are threads
 * of one process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/gpu/harness_inside.h"

#ifdef ONEBIT_EMULATED_CUDA

bool gpu_parse_rank(const char *rank, const char *size, const char *group) {
  fprintf(stderr, "rank %s of %s (%s): on the emulated device ranks are threads\n", rank, size,
          group);
  return false;
}

bool gpu_run_ranks(int size, gpu_rank_body *body, void *context) {
  return gpu_size_is_usable(size) && gpu_run_threads(size, NULL, body, context);
}

#else

/* The exit status of a rank that was skipped. */
#define SKIPPED 77

extern char **environ;

struct rank_process {
  pid_t pid;
  FILE *output; /* the output of the rank, printed if the rank fails */
  bool ended;
  int status;
};

/* Writes the value of --group, CALL:AREA:AREA:... CALL is the number of the gpu_run_ranks call.
 * Each AREA is an inherited file descriptor. */
static void write_group(char *text, size_t capacity) {
  size_t at = (size_t)snprintf(text, capacity, "%u", gpu_running.calls);
  int areas[MOST_AREAS];
  size_t count = gpu_list_area_files(areas);
  for (size_t i = 0; i < count; i++)
    at += (size_t)snprintf(text + at, capacity - at, ":%d", areas[i]);
}

/* Parses a rank's arguments, and makes the rank's process end when its parent process, the test,
 * ends. */
bool gpu_parse_rank(const char *rank, const char *size, const char *group) {
  char *rest;
  if (!size || !group)
    return false;
  gpu_rank_process.taken = true;
  gpu_rank_process.rank = (int)strtol(rank, NULL, 10);
  gpu_rank_process.size = (int)strtol(size, NULL, 10);
  gpu_rank_process.call = (unsigned)strtoul(group, &rest, 10);
  while (*rest == ':' && gpu_rank_process.area_count < MOST_AREAS)
    gpu_rank_process.areas[gpu_rank_process.area_count++] = (int)strtol(rest + 1, &rest, 10);
  return gpu_size_is_usable(gpu_rank_process.size) && prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;
}

/* Runs the body in this process, which is one of the ranks. */
static void run_as_rank(gpu_rank_body *body, void *context) {
  struct gpu_rank self = {gpu_rank_process.rank, gpu_rank_process.size, NULL};
  check_case("rank %d of %d", self.rank, self.size);
  body(&self, context);
  if (skip_reason())
    puts(skip_reason());
  exit(failure_count() ? 1 : skip_reason() ? SKIPPED : 0);
}

/* Sets a rank's environment such that NCCL treats the rank as alone on its host and uses
 * sockets. */
static void set_rank_environment(int rank) {
  char host[32];
  snprintf(host, sizeof host, "rank%d", rank);
  setenv("NCCL_HOSTID", host, 1);
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  setenv("NCCL_IB_DISABLE", "1", 1);
  setenv("NCCL_NET", "Socket", 1);
}

/* Adds the file descriptors that the new process inherits. Duplicating a descriptor onto itself
 * clears its close-on-exec flag. */
static void add_inherited_files(posix_spawn_file_actions_t *actions, int output) {
  posix_spawn_file_actions_adddup2(actions, output, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(actions, output, STDERR_FILENO);
  int areas[MOST_AREAS];
  size_t count = gpu_list_area_files(areas);
  for (size_t i = 0; i < count; i++)
    posix_spawn_file_actions_adddup2(actions, areas[i], areas[i]);
}

static void start_process(struct rank_process *process, int rank, int size) {
  char group[12 + 6 * MOST_AREAS], rank_text[16], size_text[16];
  posix_spawn_file_actions_t actions;
  *process = (struct rank_process){.output = tmpfile()};
  if (!process->output || posix_spawn_file_actions_init(&actions))
    gpu_give_up("process");
  fcntl(fileno(process->output), F_SETFD, FD_CLOEXEC);
  add_inherited_files(&actions, fileno(process->output));
  write_group(group, sizeof group);
  snprintf(rank_text, sizeof rank_text, "%d", rank);
  snprintf(size_text, sizeof size_text, "%d", size);
  char *arguments[] = {(char *)gpu_running.program,
                       "--rank",
                       rank_text,
                       "--size",
                       size_text,
                       "--group",
                       group,
                       "--test",
                       (char *)gpu_running.test,
                       NULL};
  set_rank_environment(rank);
  errno = posix_spawn(&process->pid, "/proc/self/exe", &actions, NULL, arguments, environ);
  if (errno)
    gpu_give_up("process");
  posix_spawn_file_actions_destroy(&actions);
}

static void end_process(struct rank_process *process) {
  if (!process->ended)
    kill(process->pid, SIGKILL);
  while (!process->ended && waitpid(process->pid, &process->status, 0) < 0 && errno == EINTR)
    continue;
  process->ended = true;
}

static bool has_succeeded(const struct rank_process *process) {
  return WIFEXITED(process->status) &&
         (WEXITSTATUS(process->status) == 0 || WEXITSTATUS(process->status) == SKIPPED);
}

/* Waits until all ranks have ended. When one rank has failed, the others get a few seconds to
 * notice the failure. */
static void await_processes(struct rank_process *processes, int size) {
  long left = gpu_time_limit() * 100L;
  for (int running = size; running > 0 && left > 0; left--) {
    running = 0;
    for (int r = 0; r < size; r++) {
      struct rank_process *process = &processes[r];
      if (!process->ended && waitpid(process->pid, &process->status, WNOHANG) == process->pid) {
        process->ended = true;
        if (!has_succeeded(process) && left > 500)
          left = 500;
      }
      running += !process->ended;
    }
    nanosleep(&(struct timespec){0, 10000000}, NULL);
  }
}

static void print_output(const struct rank_process *process, int rank) {
  char line[1024];
  rewind(process->output);
  while (fgets(line, sizeof line, process->output))
    printf("  [rank %d] %s%s", rank, line, strchr(line, '\n') ? "" : "\n");
}

static bool check_process(struct rank_process *process, int rank, int size) {
  bool in_time = process->ended;
  end_process(process);
  bool well = in_time && has_succeeded(process);
  if (!well)
    print_output(process, rank);
  if (!in_time)
    CHECK(false, "rank %d of %d had to be ended", rank, size);
  else if (WIFSIGNALED(process->status))
    CHECK(false, "rank %d of %d: %s", rank, size, strsignal(WTERMSIG(process->status)));
  else if (!well)
    CHECK(false, "rank %d of %d exited with %d", rank, size, WEXITSTATUS(process->status));
  else if (WEXITSTATUS(process->status) == SKIPPED) {
    char reason[256] = "";
    rewind(process->output);
    while (fgets(reason, sizeof reason, process->output))
      reason[strcspn(reason, "\n")] = 0;
    check_skip("%s", reason);
    well = false;
  }
  fclose(process->output);
  return well;
}

bool gpu_run_ranks(int size, gpu_rank_body *body, void *context) {
  struct rank_process processes[MOST_RANKS];
  gpu_running.calls++;
  if (gpu_rank_process.taken && gpu_running.calls == gpu_rank_process.call)
    run_as_rank(body, context);
  if (gpu_rank_process.taken)
    return true; /* this process is a rank of a later gpu_run_ranks call */
  if (!gpu_size_is_usable(size))
    return false;
  for (int r = 0; r < size; r++)
    start_process(&processes[r], r, size);
  await_processes(processes, size);
  bool well = true;
  for (int r = 0; r < size; r++)
    well &= check_process(&processes[r], r, size);
  return well;
}

#endif
